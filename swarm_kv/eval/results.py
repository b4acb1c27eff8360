"""What was found about each method."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .answers import Answers
from .predictions import Comparison

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """One method.

    Attributes:
        name: of the method.
        predictions: of the tokens that follow the context; None where they were not asked for.
        answers: by task.
        prefill_seconds: time of the prefill, with clustering and writing where there is any.
        recall: attention mass of the entries read over that of the best ones, as many as the
            budget; None where it was not measured.
    """

    name: str
    predictions: Comparison | None
    answers: Mapping[str, Answers]
    prefill_seconds: float
    recall: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "predictions": None
            if self.predictions is None
            else dataclasses.asdict(self.predictions),
            "answers": {task: answers.to_dict() for task, answers in self.answers.items()},
            "prefill_seconds": self.prefill_seconds,
            "recall": self.recall,
        }


@dataclasses.dataclass(frozen=True)
class Results:
    """Methods beside full attention: the same context, the same questions.

    Attributes:
        model: its class, or the name that it was loaded by.
        context: tokens.
        sparsity: share of the context that a decoding step reads, window and sinks not counted.
        source: the text.
        seed: of what is hidden in it.
        full: full attention by the model itself, in memory.
        methods: the others.
    """

    model: str
    context: int
    sparsity: float
    source: str
    seed: int
    full: MethodResult
    methods: tuple[MethodResult, ...]

    def __getitem__(self, name: str) -> MethodResult:
        """The method of that name."""
        return next(one for one in self.methods if one.name == name)

    def points_lost(self, method: MethodResult, task: str) -> float:
        """By how many percentage points `method` scores less than full attention in a task."""
        lost = self.full.answers[task].score - method.answers[task].score
        return round(100 * lost, 6)  # or a loss of 2 points would exceed 2

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "context": self.context,
            "sparsity": self.sparsity,
            "source": self.source,
            "seed": self.seed,
            "full": self.full.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
        }

    def text(self) -> str:
        """The table as plain text."""
        from .report import text

        return text(self)

    def table(self) -> Table:
        """The table for a terminal; needs rich."""
        from .report import table

        return table(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw tasks and KL divergence; needs matplotlib. The format follows the name's ending.

        Raises:
            ArgumentError: matplotlib does not know the ending.
            OSError: the file cannot be written.
        """
        from .report import plot

        plot(self.to_dict(), path)
