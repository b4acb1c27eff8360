"""Texts that every CPython has, by name, and the digest that tells token lists apart."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
import torch

from swarm_kv import texts
from swarm_kv.errors import ArgumentError


class ByteTokenizer:
    """One token per byte."""

    def __call__(self, text: str, **_: object) -> Any:
        return types.SimpleNamespace(input_ids=list(text.encode()))


def test_names_stand_for_prose_and_for_code() -> None:
    assert texts.read_text() == texts.read_text("topics") == texts.python_topics()
    code = texts.read_text("stdlib")
    assert code.startswith("# Author: Steven J. Bethard")  # argparse comes first
    places = [
        code.index(f"class {name}") for name in ("ArgumentParser", "NodeVisitor", "Signature")
    ]
    assert places == sorted(places)
    assert len(code) > 300_000


def test_a_path_means_the_file_even_when_a_name_is_meant_otherwise(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "topics").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert texts.read_text("./topics") == texts.read_text(pathlib.Path("topics")) == "mine"
    assert texts.read_text("topics") != "mine"
    with pytest.raises(FileNotFoundError):
        texts.read_text("stdlb")


def test_token_ids_takes_names_and_says_when_a_text_is_too_short() -> None:
    ids = texts.token_ids(ByteTokenizer(), 8, "stdlib", start=2)
    assert bytes(ids[0].tolist()) == b"Author: "
    with pytest.raises(ArgumentError, match=r"`stdlib` has \d+ tokens"):
        texts.token_ids(ByteTokenizer(), 10**8, "stdlib")


def test_digest_depends_on_every_token_and_on_nothing_else() -> None:
    ids = torch.tensor([[3, 1, 2**33]])
    assert texts.digest(ids) == texts.digest(ids[0].clone())
    assert texts.digest(ids[:, :2].int()) == texts.digest(ids[:, :2])
    others = [[3, 1], [1, 3, 2**33], [3, 1, 2**33, 0], [3, 1, 0]]
    assert len({texts.digest(ids), *(texts.digest(torch.tensor(x)) for x in others)}) == 5
