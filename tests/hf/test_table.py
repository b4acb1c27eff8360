"""Every model of the table is called in every way; the table is that of `docs/supported.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv.store import Store, Wanted
from tests.hf import table


@pytest.fixture(scope="module", params=table.MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[table.Pair]:
    paths = [str(tmp_path_factory.mktemp(f"drive{number}")) for number in range(4)]
    with table.pair(kind, paths) as pair:
        yield pair


@pytest.fixture(scope="module")
def cells() -> table.Cells:
    """What the tests of this module found, for the last one."""
    return {}


@pytest.mark.parametrize("call", table.CALLS)
def test_equal_or_refused(kind: str, pair: table.Pair, call: str, cells: table.Cells) -> None:
    cells[kind, call] = found = table.outcome(pair, call)
    assert found == "equal" or found.startswith("refused: ")


def test_drives_are_read_as_drives(pair: table.Pair) -> None:
    table.loop(pair.patched)
    stats = pair.swarm.stats()
    assert stats.engine.startswith("io_uring")
    assert stats.bytes_per_step > 0


def test_a_lost_block_shows(pair: table.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: eight entries fewer, and the logits move."""
    fetch_attend = Store.fetch_attend

    def lose_a_block(self: Store, rows: Iterable[Wanted], *how: Any) -> Any:
        def lost(entries: Tensor) -> Tensor:
            return entries[(entries < 8) | (entries >= 16)]

        return fetch_attend(self, [row._replace(entries=lost(row.entries)) for row in rows], *how)

    expected = table.loop(pair.stock)
    monkeypatch.setattr(Store, "fetch_attend", lose_a_block)
    assert (table.loop(pair.patched) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e-8, dtype=torch.float64)),
        (torch.zeros(2), torch.full((2,), float("nan"))),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)),
        ([torch.zeros(2), "a"], [torch.zeros(2), "b"]),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
    ],
)
def test_a_difference_is_seen(one: Any, other: Any) -> None:
    assert not table.equal(one, other)
    assert table.equal(one, one)


def test_the_table_is_that_of_the_docs(
    cells: table.Cells, record_property: Callable[[str, object], None]
) -> None:
    wanted = {(kind, call) for kind in table.MODELS for call in table.CALLS}
    if cells.keys() != wanted:
        pytest.skip("not all cells were run")
    text = table.markdown(table.for_every_version(cells))
    record_property("print", f"models x calls (transformers and swarm_kv at sparsity 1.0)\n{text}")
    page = table.PAGE.read_text()
    hint = "run `python -m tests.hf.table`, and look at what it changed in docs/supported.md"
    assert table.section(page, "models and calls")[2] == text, hint


def test_refused_models_are_those_of_the_docs(drives: list[str]) -> None:
    reasons = {name: table.reason_of(name, drives) for name in table.REFUSED}
    page = table.PAGE.read_text()
    assert table.section(page, "refused models")[2] == table.refused_markdown(reasons)
