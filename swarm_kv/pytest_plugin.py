"""A pytest fixture: how close sparse decoding comes to full attention on your model and settings.

Loaded by `pytest_plugins = ["swarm_kv.pytest_plugin"]` in the topmost conftest.py; then

    def test_accuracy(swarm_accuracy):
        model, tokenizer = load()
        config = SwarmConfig(paths=["/mnt/nvme0", "/mnt/nvme1"], sparsity=0.05)
        swarm_accuracy(model, tokenizer, config, context=8000).check(mean_kl=0.02)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from .config import SwarmConfig
from .eval import MethodResult, Results, compare
from .eval.methods import DEFAULT


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """One configuration beside full attention.

    Attributes:
        results: the table of both.
    """

    results: Results

    @property
    def method(self) -> MethodResult:
        """Figures of the configuration."""
        return self.results.methods[0]

    @property
    def mean_kl(self) -> float | None:
        """Mean KL(full || sparse) in nats; None where `perplexity` is not among the tasks."""
        return None if self.method.predictions is None else self.method.predictions.mean_kl

    @property
    def perplexity_change(self) -> float | None:
        """|perplexity / that of full attention - 1|, or None as for `mean_kl`."""
        return None if self.method.predictions is None else abs(self.method.predictions.ratio - 1)

    @property
    def points_lost(self) -> dict[str, float]:
        """By task, how many percentage points fewer of the answers' tokens are ranked first."""
        return {task: self.results.points_lost(self.method, task) for task in self.method.answers}

    def check(
        self, *, mean_kl: float = 0.012, perplexity: float = 0.015, points: float = 2.0
    ) -> None:
        """Fail, with every figure, where one of them is beyond its limit.

        Args:
            mean_kl: most nats.
            perplexity: most `perplexity_change`.
            points: most of `points_lost`, in any task.

        Raises:
            AssertionError: tells what is beyond its limit.
        """
        __tracebackhide__ = True
        missed = []
        if self.mean_kl is not None and not self.mean_kl <= mean_kl:
            missed.append(f"mean KL: {self.mean_kl:.4g} nats, at most {mean_kl:g} are allowed")
        change = self.perplexity_change
        if change is not None and not change <= perplexity:
            missed.append(f"perplexity: changes by {change:.2%}, at most {perplexity:.2%} allowed")
        for task, lost in self.points_lost.items():
            if not lost <= points:
                missed.append(f"{task}: {lost:.1f} points lost, at most {points:g} are allowed")
        if missed:
            lines = ["sparse decoding is too far from full attention:", *missed]
            way_out = "read more of the context (`sparsity`, `window`), or allow more in check()"
            raise AssertionError("\n  ".join([*lines, way_out]) + f"\n\n{self.results.text()}")


@pytest.fixture(scope="session")
def swarm_accuracy() -> Callable[..., Accuracy]:
    """`swarm_accuracy(model, tokenizer, config=None, **options)` gives an `Accuracy`.

    `options` are those of `swarm_kv.eval.compare`, such as `context`, `steps`, `tasks`, `source`.
    The model must not be patched; it is as before afterwards.
    """

    def accuracy(
        model: Any, tokenizer: Any, config: SwarmConfig | None = None, **options: Any
    ) -> Accuracy:
        return Accuracy(compare(model, tokenizer, [DEFAULT], config=config, **options))

    return accuracy
