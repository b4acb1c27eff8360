"""Results for people: as a table and as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .results import MethodResult, Results

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = (
    "perplexity, KL and same first token: against full attention; tasks: share of the answers' "
    "tokens ranked first (answers that are right in full); recall: attention mass of what was "
    "read over that of the best entries, as many as the budget"
)


def title(figures: Mapping[str, Any]) -> str:
    """What was measured, of `Results.to_dict`."""
    return (
        f"{figures['model']}, {figures['context']} tokens of {figures['source']}, "
        f"{figures['sparsity']:.0%} of them read per step"
    )


def header(results: Results) -> list[str]:
    """Headings of the columns."""
    columns = ["method"]
    if results.full.predictions is not None:
        columns += ["perplexity", "ratio", "mean KL", "same first"]
    return [*columns, *results.full.answers, "recall", "prefill s"]


def cells(method: MethodResult) -> list[str]:
    """One row."""
    row = [method.name]
    if (found := method.predictions) is not None:
        row += [
            f"{found.ppl_sparse:.3f}",
            f"{found.ratio:.4f}",
            f"{found.mean_kl:.4f}",
            f"{found.top1_agreement:.3f}",
        ]
    row += [
        f"{answers.score:.3f} ({answers.exact}/{len(answers.cases)})"
        for answers in method.answers.values()
    ]
    recall = "" if method.recall is None else f"{method.recall:.3f}"
    return [*row, recall, f"{method.prefill_seconds:.1f}"]


def rows(results: Results) -> list[list[str]]:
    """Full attention, then the methods."""
    return [cells(method) for method in (results.full, *results.methods)]


def text(results: Results) -> str:
    """The table as plain text."""
    lines = [header(results), *rows(results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([title(results.to_dict()), *shown])


def table(results: Results) -> Table:
    """The table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(
        title=title(results.to_dict()), caption=LEGEND, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(header(results)):
        shown.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for number, row in enumerate(rows(results)):
        shown.add_row(*row, style=None if number else "bold")
    return shown


def plot(figures: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw scores by task and, beside them, KL divergences.

    Args:
        figures: what `Results.to_dict` gave.
        path: see `Results.plot`.
    """
    from matplotlib.figure import Figure

    methods = [figures["full"], *figures["methods"]]
    names = [method["name"] for method in methods]
    tasks = list(figures["full"]["answers"])
    apart = {
        method["name"]: method["predictions"]["mean_kl"]
        for method in figures["methods"]
        if method["predictions"] is not None
    }
    panels = max(1, bool(tasks) + bool(apart))
    figure = Figure(figsize=(6 * panels, 1.6 + 0.45 * len(names)), layout="constrained")
    axes = iter(figure.subplots(1, panels, squeeze=False)[0])
    if tasks:
        axis = next(axes)
        height = 0.8 / len(tasks)
        for number, task in enumerate(tasks):
            shift = (number - (len(tasks) - 1) / 2) * height
            scores = [method["answers"][task]["score"] for method in methods]
            axis.barh([place + shift for place in range(len(names))], scores, height, label=task)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set(xlabel="share of the answers' tokens ranked first", xlim=(0, 1))
        axis.legend(fontsize="small")
    if apart:
        axis = next(axes)
        axis.barh(list(apart), list(apart.values()), color="#4477aa")
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("mean KL(full || method), nats")
    figure.suptitle(title(figures), fontsize=10)
    try:
        figure.savefig(path)
    except ValueError as error:  # which names the known endings
        raise ArgumentError(f"cannot draw `{path}`: {error}") from None
