"""The least `dram_bytes`, which errors name, is enough for the context that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import cache
from tests.hf.helpers import settings, teacher_forced

CONTEXT, STEPS, LAYERS = 600, 40, 2
SMALL = {"window": 64, "flush": 32}


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model("qwen3", layers=LAYERS)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (1, CONTEXT), generator=torch.Generator().manual_seed(1))


def least_of(model: Any, drives: list[str], **changes: Any) -> int:
    return cache.minimum_dram_bytes(
        model.config, settings(drives, **SMALL, **changes), model.dtype, CONTEXT
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"code_bits": 8},
        {"staging_bytes": 300_000},
        {"initial_fill": "none"},
        {"codec": "int8", "sparsity": 0.1},
        {"kv_dtype": "bfloat16", "sparsity": 0.1},
    ],
    ids=str,
)
def test_it_suffices(changes: Any, model: Any, ids: Tensor, drives: list[str]) -> None:
    least = least_of(model, drives, **changes)
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask, prompt=CONTEXT - STEPS)
    config = settings(drives, **SMALL, **changes, dram_bytes=least)
    with swarm_kv.patch(model, config) as swarm:
        own = swarm.new_cache()
        got = teacher_forced(model, ids, mask, cache=own, prompt=CONTEXT - STEPS)
        stats = swarm.stats()
        assert all(len(layer.rows[0]._recent) > 0 for layer in own.layers)
    assert got.shape == expected.shape
    if "sparsity" not in changes:
        assert (got - expected).abs().max() < 1e-9
    stored = CONTEXT - config.sinks - config.window - STEPS + config.flush  # flushed once
    entry = cache.entry_bytes(model.config, config.stored_dtype(model.dtype))
    assert stats.plain_bytes == LAYERS * stored * entry
    assert stats.dram_peak_bytes <= least
    held = sum(stats.dram[use] for use in ("staging", "window", "index"))
    assert held > 0.95 * least


@pytest.mark.parametrize("staging", [None, "256KiB"])
def test_a_byte_less_is_refused(
    staging: str | None, model: Any, ids: Tensor, drives: list[str]
) -> None:
    least = least_of(model, drives, staging_bytes=staging)
    config = settings(drives, **SMALL, staging_bytes=staging, dram_bytes=least - 1)
    with swarm_kv.patch(model, config) as swarm:
        with pytest.raises(swarm_kv.CapacityError) as refused:
            model(ids)
        assert swarm.stats().written_bytes == 0
    assert (
        f"`dram_bytes` ({least - 1}) is below the minimum of {least} for a context of {CONTEXT} "
        "tokens of this model with `window=64`: raise it, or lower `window` or `staging_bytes`"
    ) in str(refused.value)


def test_without_room_for_the_index_a_run_would_end(
    model: Any, ids: Tensor, drives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(drives, **SMALL)
    stored = CONTEXT - config.window - config.sinks
    index = cache.index_bytes(model.config, config, model.dtype, stored)
    monkeypatch.setattr(cache, "check_dram", lambda *args, **kwargs: None)
    short = least_of(model, drives) - LAYERS * index
    with (
        swarm_kv.patch(model, settings(drives, **SMALL, dram_bytes=short)),
        pytest.raises(swarm_kv.CapacityError, match="is too small: index needs"),
    ):
        model(ids)
