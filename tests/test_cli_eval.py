"""`swarm-kv eval` as a user runs it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from swarm_kv import models
from tests.letters import Letters

typer_testing = pytest.importorskip("typer.testing")

SMALL = ("--context", "1536", "--steps", "8", "--questions", "2")


def command(*arguments: object) -> Any:
    from swarm_kv.cli import app

    wide = typer_testing.CliRunner(env={"COLUMNS": "200"})
    return wide.invoke(app, [*map(str, arguments)])


def run(*arguments: object) -> Any:
    return command("eval", *arguments)


@pytest.fixture
def tiny(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", torch.float32)
    monkeypatch.setattr(models, "load", lambda name: (model, Letters()))


def test_methods_are_compared(tiny: None, tmp_path: pathlib.Path, drives: list[str]) -> None:
    text, figures, picture = (tmp_path / name for name in ("text.txt", "a.json", "a.png"))
    text.write_text("All work and no play makes Jack a dull boy. " * 60)
    where = [option for path in drives for option in ("--path", path)]
    result = run(
        *("tiny", "--text", text, *SMALL, *where, "--sparsity", 0.2),
        *("--method", "default", "--method", "quest", "--tasks", "perplexity,multikey"),
        *("--json", figures, "--plot", picture),
    )
    assert result.exit_code == 0, result.output
    for word in ("full attention", "default", "quest", "multikey", "mean KL"):
        assert word in result.output, word
    assert "tracking" not in result.output
    found = json.loads(figures.read_text())
    assert [method["name"] for method in found["methods"]] == ["default", "quest"]
    assert found["sparsity"] == 0.2
    assert found["source"] == str(text)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(not list(pathlib.Path(path).iterdir()) for path in drives)
    later = tmp_path / "later.png"
    result = command("plot", figures, "--output", later)
    assert result.exit_code == 0, result.output
    assert later.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--method", "none"), "unknown method ('none'); choose one of ['default'"),
        (("--tasks", "multikey,none"), "unknown tasks ['none']; choose from ['perplexity'"),
        (("--sparsity", "1.5"), "`sparsity` (1.5) must be in (0, 1]"),
        (("--context", "5000"), "this model knows 4096 positions"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--plot", "/nowhere/at/all.png"), "the folder of `/nowhere/at/all.png` does not exist"),
    ],
)
def test_bad_input_is_one_line_without_a_traceback(
    tiny: None, arguments: tuple[str, ...], says: str
) -> None:
    result = run("tiny", *SMALL, *arguments)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output
