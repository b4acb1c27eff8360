"""How much of what decoding steps want a cache of each size would miss, and what size is worth it.

    curve = swarm.stats().miss_ratio
    print(curve.table())

The store measures reuse distances on a sample of its entries in every decoding step
(csrc/core/reuse_distance.h); they give the miss ratio of a least-recently-used cache of every size
at once (Mattson's stack). The cluster cache's own policy misses about as much or a little less.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from .errors import ArgumentError

LEAST_GAIN = 0.5
"""Points of the miss ratio that one more percent of the context must save to be worth having."""
SPAN = 5
"""Percent of the context over which the gain is averaged: single buckets are noisy."""


@dataclasses.dataclass(frozen=True)
class MissRatioCurve:
    """Miss ratio against the share of the stored entries that the cluster cache holds.

    Attributes:
        activations: sampled activations that the curve rests on.
        misses: share of them that a cache of i / (len - 1) of the entries would have missed; entry
            0 is 1.0. An entry's first activation counts as a miss at every size, which a cache that
            begins with the profile's entries avoids.
        first: share of such first activations.
        context_bytes: fast memory that a cache of all stored entries would take.
    """

    activations: int
    misses: tuple[float, ...]
    first: float
    context_bytes: int

    @classmethod
    def of(
        cls, distances: Sequence[int], first: int, expected: float, context_bytes: int
    ) -> MissRatioCurve:
        """From the store's counts, see `ReuseDistances` in csrc/core/reuse_distance.h."""
        total = left = sum(distances) + first
        misses = [1.0]
        for count in distances:
            left -= count
            misses.append(min(left / expected, 1.0) if total else 1.0)
        return cls(total, tuple(misses), first / total if total else 0.0, context_bytes)

    def at(self, share: float) -> float:
        """Miss ratio of a cache of `share` of the context; linear between the measured sizes.

        Raises:
            ArgumentError: `share` is outside [0, 1].
        """
        if not 0 <= share <= 1:
            raise ArgumentError(f"`share` ({share}) of the context must be in [0, 1]")
        place = share * (len(self.misses) - 1)
        below = min(int(place), len(self.misses) - 2)
        left, right = self.misses[below : below + 2]
        return left + (right - left) * (place - below)

    def worth_having(self, least_gain: float = LEAST_GAIN) -> float | None:
        """The share of the context whose last percent still pays; None before any activation.

        The smallest size from which on no percent of the context, as the mean over the next `SPAN`,
        saves `least_gain` points of the miss ratio or more.
        """
        if not self.activations:
            return None
        step = 100 / (len(self.misses) - 1)
        for size in range(len(self.misses) - 1, 0, -1):
            end = min(size - 1 + round(SPAN / step), len(self.misses) - 1)
            gain = 100 * (self.misses[size - 1] - self.misses[end]) / ((end - size + 1) * step)
            if gain >= least_gain:
                return size / (len(self.misses) - 1)
        return 0.0

    def table(self, sizes: Sequence[float] = (0.05, 0.10, 0.15, 0.25, 0.5, 0.75, 1.0)) -> str:
        """Text with a line per size and the size worth having.

        Args:
            sizes: shares of the context.
        """
        best = self.worth_having()
        if best is None:
            return "no decoding step was sampled yet"
        lines = ["cache, of the context    bytes           misses"]
        for size in sorted({*sizes, best}):
            bar = "#" * round(40 * self.at(size))
            mark = "  <- worth having" if size == best else ""
            amount = f"{round(size * self.context_bytes / 2**20, 1)} MiB"
            lines.append(f"{size:>20.0%}    {amount:<14}  {self.at(size):6.1%}  {bar}{mark}")
        lines.append(f"{self.activations} sampled activations, {self.first:.1%} of them first ones")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve. Needs matplotlib; the format follows the name's ending."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        count = len(self.misses) - 1
        axis.plot([100 * i / count for i in range(count + 1)], [100 * m for m in self.misses])
        best = self.worth_having()
        if best is not None:
            axis.axvline(100 * best, linestyle="--", color="#aa3377", label="worth having")
            axis.legend()
        axis.set_xlabel("cache, % of the context")
        axis.set_ylabel("misses, %")
        axis.set_ylim(0, 100)
        figure.savefig(path, dpi=120)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "worth_having": self.worth_having()}
