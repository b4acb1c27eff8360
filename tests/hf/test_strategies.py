"""Every strategy by name: exact at sparsity 1.0, close below, and the default better than none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import selectors
from tests.hf.test_equivalence import settings, teacher_forced

CHOICES = [
    *[("selector", name) for name in selectors.names()],
    *[("router", name) for name in ("swarm", "static")],
    *[("placement", name) for name in ("round_robin", "fixed_start", "sequential")],
    *[("cache_policy", name) for name in ("decayed_frequency", "lru")],
    *[("engine", name) for name in ("io_uring", "threads", "memory", "simulated")],
    ("shared_ring", False),
    ("direct", False),
    ("verify", False),
]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 212), generator=torch.Generator().manual_seed(1))


def first(query: Any, index: Any, budget: int, config: Any) -> Any:
    """A selector of a user's own: the oldest entries."""
    return torch.empty(0, dtype=torch.int64), torch.arange(min(budget, index.limit))


@pytest.mark.parametrize(("setting", "value"), CHOICES, ids=lambda choice: str(choice))
def test_exact_at_full_sparsity_and_close_below(
    setting: str, value: Any, ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    choice = {setting: value}
    with swarm_kv.patch(model, settings(drives, **choice)):
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
    with swarm_kv.patch(model, settings(drives, sparsity=0.5, **choice)) as swarm:
        got = teacher_forced(model, ids, mask)
        assert swarm.stats().bytes_per_step > 0
    decoded = slice(200, None)
    error = (got - expected)[decoded].norm() / expected[decoded].norm()
    assert 0 < error < 0.6  # random weights: nothing is as sparse as in a trained model
    assert torch.equal(got[:200], expected[:200])  # prefill is exact whatever the sparsity


def test_recall_tells_selectors_from_a_function_that_does_not_look(
    ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)

    def recall(selector: Any) -> float:
        config = settings(drives, sparsity=0.2, selector=selector, recall_every=1)
        with swarm_kv.patch(model, config) as swarm:
            teacher_forced(model, ids, mask)
            stats = swarm.stats()
        assert stats.recall_samples == 12 * 4  # steps times layers
        assert stats.recall is not None
        return stats.recall

    # Random weights activate hardly anything together, so whole clusters bring little here.
    assert recall("codes") > 0.99
    assert recall("two_level") > 0.75
    assert recall(first) < 0.7
