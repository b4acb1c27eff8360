"""Queries that are not numbers: what full attention makes of them, and no harm to later steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import compat
from swarm_kv.errors import ArgumentError, StateError
from tests.hf.helpers import settings

PROMPT, BAD, STEPS = 200, 203, 212
ANSWERING = ["codes", "interval", "two_level", "infllm", "oracle"]
"""Selectors by codes, and one each of those that rank clusters and entries by a summary."""


def decode(model: Any, ids: torch.Tensor, number: float | None, cache: Any = None) -> torch.Tensor:
    """Logits of each step; at step `BAD` a part of the last layer's query is `number`."""
    now = {"step": 0}

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if number is not None and now["step"] == BAD:
            output = output.clone()
            output[..., :5] = number
        return output

    logits, start = [], 0
    hook = model.model.layers[-1].self_attn.q_proj.register_forward_hook(spoil)
    try:
        for end in [PROMPT, *range(PROMPT + 1, STEPS + 1)]:
            now["step"] = end
            held = {} if cache is None else {compat.cache_arg(model): cache}
            output = model(ids[:, start:end], use_cache=True, **held)
            cache, start = compat.cache_of(output), end
            logits.append(output.logits[:, -1])
    finally:
        hook.remove()
    return torch.cat(logits)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, STEPS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("selector", ANSWERING)
def test_the_step_is_not_a_number_and_the_next_ones_are_as_ever(
    selector: str, number: float, ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    bad = BAD - PROMPT
    dense = decode(model, ids, number)
    assert dense[bad].isnan().all()
    config = settings(drives, sparsity=0.3, selector=selector, recall_every=1)
    with swarm_kv.patch(model, config) as swarm:
        whole = decode(model, ids, None)
    with swarm_kv.patch(model, config) as swarm:
        got = decode(model, ids, number, swarm.new_cache())
        stats = swarm.stats()
    assert got[bad].isnan().all()
    others = [step for step in range(STEPS - PROMPT + 1) if step != bad]
    assert got[others].isfinite().all()
    # What the step read stays in the cluster cache, so only the order of sums may differ.
    assert torch.allclose(got[others], whole[others], atol=1e-9)
    measured = {layer.layer: layer.samples for layer in stats.mass_by_layer}
    assert measured == {0: 12, 1: 12, 2: 12, 3: 11}  # no mass of what is not a number
    assert stats.mass is not None
    assert math.isfinite(stats.mass)


def test_medoids_refuse_them_by_name(ids: torch.Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    with swarm_kv.patch(model, settings(drives, sparsity=0.3, selector="medoid")) as swarm:
        cache = swarm.new_cache()
        with pytest.raises(ArgumentError, match="scores must not be NaN"):
            decode(model, ids, math.nan, cache)
        with pytest.raises(StateError, match=r"scores must not be NaN.*start a new cache"):
            model(ids[:, :1], **{compat.cache_arg(model): cache})
        assert decode(model, ids, None, swarm.new_cache()).isfinite().all()
