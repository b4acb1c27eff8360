"""A decoding step of a batch: each sequence gets what it would get alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv import baselines, selectors
from swarm_kv.layer import CacheState, SwarmLayer
from swarm_kv.sequence import Sequence
from swarm_kv.store import Store
from tests.hf.helpers import settings

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 4, 2, 16, 160, 6
PADS = (0, 61, 17)
SPARSE = {"sparsity": 0.2, "initial_fill": "none", "request_cost": 1.5, "prefetch": "off"}


@pytest.fixture
def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def draw(heads: int) -> Tensor:
        shape = (3, heads, PROMPT + 4 * STEPS, DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"q": draw(HEADS), "k": draw(KV_HEADS), "v": draw(KV_HEADS)}


@pytest.fixture
def store(drives: list[str], request: pytest.FixtureRequest) -> Any:
    opened = Store(settings(drives, **SPARSE, **getattr(request, "param", {})))
    yield opened
    opened.close()


def layer_in(store: Store) -> SwarmLayer:
    return SwarmLayer(store, 0, selectors.resolve(store.config.selector), CacheState())


def call(
    layer: SwarmLayer, tokens: dict[str, Tensor], at: slice, mask: Tensor | None = None
) -> Tensor:
    layer.update(tokens["k"][:, :, at], tokens["v"][:, :, at])
    return layer.attend(tokens["q"][:, :, at], mask, DIM**-0.5, None, None)


def only(tokens: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: tensor[rows] for name, tensor in tokens.items()}


@pytest.mark.parametrize(
    "store",
    [{"selector": name} for name in ("interval", *baselines.names())],
    ids=lambda setting: setting["selector"],
    indirect=True,
)
@pytest.mark.parametrize("several", [1, 3], ids=["one query", "three queries"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
def test_a_row_does_not_depend_on_the_others(
    tokens: dict[str, Tensor], store: Store, padded: bool, several: int
) -> None:
    mask = torch.ones(3, tokens["q"].shape[2], dtype=torch.bool)
    if padded:
        for row, pads in enumerate(PADS):
            mask[row, :pads] = False

    def play(rows: list[int]) -> Tensor:
        layer, own = layer_in(store), only(tokens, rows)
        outs = []
        for begin, end in [(0, PROMPT)] + [
            (PROMPT + step * several, PROMPT + (step + 1) * several) for step in range(STEPS)
        ]:
            shown = mask[rows, :end] if padded else None
            outs.append(call(layer, own, slice(begin, end), shown))
        return torch.cat(outs[1:], 1)

    together = play([0, 1, 2])
    alone = torch.cat([play([row]) for row in range(3)])
    assert torch.allclose(together, alone, rtol=0, atol=1e-14)
    assert not torch.allclose(together[0], together[1], rtol=0, atol=1e-3)


def test_rows_join_and_leave(tokens: dict[str, Tensor], store: Store) -> None:
    """Two leave and one forks; those that stay go on as if nothing had been."""
    layer, alone = layer_in(store), layer_in(store)
    call(layer, tokens, slice(0, PROMPT))
    call(alone, only(tokens, [2]), slice(0, PROMPT))
    now = slice(PROMPT, PROMPT + 1)
    assert torch.allclose(call(layer, tokens, now)[2:], call(alone, only(tokens, [2]), now))
    layer.batch_select_indices(torch.tensor([2, 0, 2]))
    now = slice(PROMPT + 1, PROMPT + 2)
    got = call(layer, only(tokens, [2, 0, 1]), now)  # the second fork gets another token
    expected = call(alone, only(tokens, [2]), now)
    assert torch.allclose(got[0], expected[0], rtol=0, atol=1e-14)
    assert not torch.allclose(got[2], expected[0], rtol=0, atol=1e-3)


def test_forks_read_what_they_share_once(tokens: dict[str, Tensor], store: Store) -> None:
    layer = layer_in(store)
    call(layer, only(tokens, [0]), slice(0, PROMPT))
    layer.batch_repeat_interleave(3)
    before = store.counters()["decode"]
    call(layer, only(tokens, [0, 0, 0]), slice(PROMPT, PROMPT + 1))
    after = store.counters()["decode"]
    budget = round(SPARSE["sparsity"] * (PROMPT + 1))
    assert after["read"] - before["read"] == budget
    assert after["fetches"] - before["fetches"] == 1


def test_each_sequence_is_told_what_its_own_queries_selected(
    tokens: dict[str, Tensor], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Sequence, Tensor, Tensor]] = []
    monkeypatch.setattr(
        Sequence, "observe", lambda self, query, wanted: told.append((self, query, wanted))
    )
    layer = layer_in(store)
    call(layer, tokens, slice(0, PROMPT))
    call(layer, tokens, slice(PROMPT, PROMPT + 1))
    assert [row for row, _, _ in told] == layer.rows
    for number, (row, query, wanted) in enumerate(told):
        assert torch.equal(query, tokens["q"][number, :, PROMPT : PROMPT + 1] * DIM**-0.5)
        index = row.index()
        assert index is not None
        budget = round(SPARSE["sparsity"] * len(row))
        _, selected = layer.selector(query, index, budget, store.config)
        assert torch.equal(wanted.sort().values, selected.sort().values)
