"""`swarm-kv tune`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import plots, replay, trace
from .. import tune as sweeping
from ..errors import ArgumentError
from .common import (
    JSON_HELP,
    PLOT_ENDINGS,
    console_beside,
    one_line_errors,
    parse_list,
    progress_bar,
    write_json,
)


def tune(
    trace_file: Annotated[
        pathlib.Path, typer.Argument(metavar="TRACE", help="File that `swarm-kv record` wrote.")
    ],
    tau: Annotated[str, typer.Option(help="Cluster radii to try.")] = "0.45,0.6,0.75",
    max_size: Annotated[str, typer.Option(help="Largest cluster sizes to try.")] = "16,64",
    entry_bytes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="K and V of one entry, such as 4096; the model's own if not given."),
    ] = None,
    drives: Annotated[int, typer.Option(help="Drives of the device model.")] = 1,
    plot: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(help=f"Draw recall against seconds and overhead: {PLOT_ENDINGS}."),
    ] = None,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
) -> None:
    """Try clustering settings on a trace: recall, requests, bytes, seconds, storage and index.

    Seconds are those of the device model of a PM9A3, with nothing cached.
    """
    console = console_beside(json_file)
    with one_line_errors(console):
        taus = parse_list(tau, "tau", float)
        sizes = parse_list(max_size, "max-size", int)
        if drives < 1:
            raise ArgumentError(f"`drives` ({drives}) must be at least 1")
        recorded = trace.Trace.load(trace_file)
        with progress_bar(console, len(recorded.layers) * len(taus) * len(sizes)) as step:
            points = sweeping.sweep(
                recorded,
                taus,
                sizes,
                entry_bytes=entry_bytes,
                drives=[replay.PM9A3] * drives,
                on_point=lambda: step("clustering and replaying"),
            )
        title = f"{recorded.model}, {recorded.settings.context} tokens"
        console.print(tune_table(points, title))
        figures = {
            "title": title,
            "model": recorded.model,
            "tokens": recorded.tokens,
            "points": [point.to_dict() for point in points],
        }
        write_json(json_file, "tune", figures)
        if plot is not None:
            plots.draw({"kind": "tune", **figures}, plot)


TUNE_LEGEND = (
    "reads, KiB and µs: per query and layer; copies: stored per entry; index KiB: of all layers in "
    "a mean; share: of the keys in 16 bits"
)


def tune_table(points: list[sweeping.Point], title: str) -> Table:
    """Every setting with its layers and their mean."""
    table = Table(title=title, caption=TUNE_LEGEND, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("τ", "size", "layer", "recall", "error", "reads", "KiB", "µs", "copies"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("index KiB", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        rows = [(str(number), one) for number, one in point.layers.items()]
        for name, one in [*rows, ("mean", point.mean)]:
            table.add_row(
                f"{point.tau:g}",
                str(point.max_size),
                name,
                f"{one.recall:.3f}",
                f"{one.err:.4f}",
                f"{one.reads:.0f}",
                f"{one.bytes / 1024:.0f}",
                f"{one.seconds * 1e6:.0f}",
                f"{one.overhead:.2f}",
                f"{one.index_bytes / 1024:.0f}",
                f"{one.index_share:.1%}",
                style="bold" if name == "mean" else None,
                end_section=name == "mean",
            )
    return table
