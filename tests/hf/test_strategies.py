"""Every strategy by name: exact at sparsity 1.0, close below, and the default better than none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import baselines, clusterers, compat, selectors
from tests.hf.helpers import settings, teacher_forced

CHOICES = [
    *[("selector", name) for name in selectors.names()],
    *[("router", name) for name in ("swarm", "static", "dedup_only", "balance_only")],
    *[("placement", name) for name in ("round_robin", "fixed_start", "sequential", "weighted")],
    *[("clusterer", name) for name in clusterers.names()],
    *[("layout", name) for name in ("clusters", "sequence")],
    *[("cold", name) for name in ("packed", "single")],
    *[("heads", name) for name in ("max", "union")],
    *[("initial_fill", name) for name in ("product", "none")],
    *[("code_bits", 8), ("tau", 0.6), ("estimate_unfetched", True)],
    *[("cache_policy", name) for name in ("decayed_frequency", "swarm", "lru", "lfu", "arc")],
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
    # An empty cache to begin with, or it would hold all of so short a context; and what a request
    # costs with entries of 4 KiB, or half a KiB would make it a dozen entries, and runs as long.
    sparse = {"sparsity": 0.5, "initial_fill": "none", "request_cost": 1.5}
    with swarm_kv.patch(model, settings(drives, **{**sparse, **choice})) as swarm:
        got = teacher_forced(model, ids, mask)
        assert swarm.stats().bytes_per_step > 0 or setting == "initial_fill"
    decoded = slice(200, None)
    error = (got - expected)[decoded].norm() / expected[decoded].norm()
    # Random weights: nothing is as sparse as in a trained model, as recent or as well bounded.
    assert error < {"streaming": 1.0, "quest": 0.7}.get(value, 0.6)
    assert (error > 1e-9) == (value != "full")
    assert torch.equal(got[:200], expected[:200])  # prefill is exact whatever the sparsity


@pytest.mark.parametrize(("codec", "worst"), [("int8", 0.02), ("kivi4", 0.3)])
def test_codecs_lose_little_and_shrink_what_is_stored(
    codec: str, worst: float, ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    stored = {}
    for name in ("none", codec):
        # Nothing cached to begin with: what the cache starts with was never coded.
        config = settings(drives, codec=name, initial_fill="none", layout="sequence")
        with swarm_kv.patch(model, config) as swarm:
            got = teacher_forced(model, ids, mask)
            stored[name] = swarm.stats().written_bytes
    error = (got - expected)[200:].norm() / expected[200:].norm()
    assert 0 < error < worst
    assert stored[codec] < stored["none"] / 3  # float64 entries


def test_recall_tells_selectors_from_a_function_that_does_not_look(
    ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)

    exact = {"recall_every": 1, "recall_sample": 0}

    def recall(selector: Any, **more: Any) -> float:
        config = settings(drives, sparsity=0.2, selector=selector, **exact, **more)
        with swarm_kv.patch(model, config) as swarm:
            teacher_forced(model, ids, mask)
            stats = swarm.stats()
        assert stats.recall_samples == 12 * 4  # steps times layers
        assert stats.recall is not None
        return stats.recall

    assert recall("codes", code_bits=8) > 0.99
    assert recall("codes") > 0.9
    # Random weights activate hardly anything together, so clusters and runs bring little here.
    assert recall("two_level", max_size=64) > 0.9
    assert recall("interval", request_cost=1.5) > 0.75
    assert recall(first) < 0.7


@pytest.mark.parametrize("name", baselines.names())
def test_a_baseline_is_exact_at_full_sparsity_while_it_grows_and_is_cropped(
    name: str, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    ids = torch.randint(3, 128, (1, 240), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    small = {**baselines.settings(name), "flush": 8}
    with swarm_kv.patch(model, settings(drives, **small)) as swarm:
        cache = swarm.new_cache()
        assert (teacher_forced(model, ids, mask, cache=cache) - expected).abs().max() < 1e-9
        for length in (215, 150):  # within a lot that left the window, and within the prompt
            cache.crop(length)
            for begin in range(length, length + 10):
                held = {compat.cache_arg(model): cache}
                with torch.no_grad():
                    logits = model(ids[:, begin : begin + 1], **held).logits
                assert (logits[0] - expected[begin]).abs().max() < 1e-9


def test_streaming_reads_only_what_its_window_of_the_budget_asks_for(
    ids: torch.Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)

    def read(sparsity: float, window: int) -> int:
        more = {**baselines.settings("streaming"), "sparsity": sparsity, "window": window}
        with swarm_kv.patch(model, settings(drives, recall_every=0, **more)) as swarm:
            teacher_forced(model, ids, mask)
            return int(swarm.store.counters()["decode"]["wanted"])

    assert read(0.1, 24) == 0
    steps = range(201, 213)
    beyond = sum(round(0.1 * length) - 16 for length in steps)
    assert read(0.1, 16) == 4 * beyond > 0
