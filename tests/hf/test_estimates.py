"""`estimate_unfetched`: closer than without, however the cache has grown, and exact at 1.0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat
from swarm_kv.means import ClusterMeans
from tests.hf.helpers import settings

PROMPT, STEPS = 200, 12


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 128, (1, 260), generator=torch.Generator().manual_seed(1))


def feed(model: Any, cache: Any, ids: Tensor, pieces: list[int]) -> Tensor:
    """Logits of `ids`, whose pieces of these lengths come one after the other."""
    logits = []
    for piece in ids.split(pieces, dim=1):
        logits.append(model(piece, **{compat.cache_arg(model): cache}).logits)
    return torch.cat(logits, 1)


def decoded(model: Any, cache: Any, ids: Tensor, start: int) -> Tensor:
    tokens = ids[:, start : start + STEPS]
    return feed(model, cache, tokens, [1] * STEPS)


def whole(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    feed(model, cache, ids[:, :PROMPT], [PROMPT])
    return decoded(model, cache, ids, PROMPT), ids[:, : PROMPT + STEPS]


def chunks(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Laid out anew before the first step."""
    feed(model, cache, ids[:, :PROMPT], [80, 60, 60])
    return decoded(model, cache, ids, PROMPT), ids[:, : PROMPT + STEPS]


def flushes(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The entries that left the window while decoding have means of their own."""
    feed(model, cache, ids[:, :120], [120])
    feed(model, cache, ids[:, 120:PROMPT], [1] * 80)
    return decoded(model, cache, ids, PROMPT), ids[:, : PROMPT + STEPS]


def crop(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    feed(model, cache, ids[:, :240], [240])
    cache.crop(PROMPT - 240)
    return decoded(model, cache, ids, PROMPT), ids[:, : PROMPT + STEPS]


def fork(model: Any, cache: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    feed(model, cache, ids[:, :PROMPT], [PROMPT])
    other = copy.deepcopy(cache)
    decoded(model, cache, ids, PROMPT)
    other_ids = torch.cat([ids[:, :PROMPT], ids[:, :STEPS].flip(1)], dim=1)
    return decoded(model, other, other_ids, PROMPT), other_ids


GROWTH = (whole, chunks, flushes, crop, fork)


@torch.no_grad()
@pytest.mark.parametrize("grow", GROWTH)
def test_closer_than_without(
    grow: Callable[..., tuple[Tensor, Tensor]],
    ids: Tensor,
    drives: list[str],
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("qwen3")

    def error(**changes: Any) -> float:
        with swarm_kv.patch(model, settings(drives, **changes)) as swarm:
            got, seen = grow(model, swarm.new_cache(), ids)
        right = model(seen).logits[:, -STEPS:]
        return float((got - right).norm() / right.norm())

    sparse = {"sparsity": 0.3, "request_cost": 1.5, "layout": "sequence"}
    without = error(**sparse)
    assert error(**sparse, estimate_unfetched=True) < 0.85 * without
    assert error(estimate_unfetched=True) < 1e-9  # reading everything
    # Means of other entries are no help.
    build = ClusterMeans.build
    monkeypatch.setattr(
        ClusterMeans, "build", lambda k, v, *lists: build(k.flip(1), v.flip(2), *lists)
    )
    assert error(**sparse, estimate_unfetched=True) > without


@torch.no_grad()
def test_clusters_and_models_with_sink_logits(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    for kind in ("qwen3", "gpt_oss"):
        model = tiny_model(kind)
        config = settings(drives, estimate_unfetched=True, layout="clusters", max_overhead=3.0)
        with swarm_kv.patch(model, config) as swarm:
            got, seen = chunks(model, swarm.new_cache(), ids)
        assert (got - model(seen).logits[:, -STEPS:]).abs().max() < 1e-9
