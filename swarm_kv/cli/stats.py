"""`swarm-kv stats`."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import ArgumentError
from ..meter import Stats
from .common import mebibytes, one_line_errors, read_json


def stats(
    file: Annotated[
        pathlib.Path,
        typer.Argument(help="What `swarm.stats().save(file)` or `swarm-kv demo --json` wrote."),
    ],
    watch: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Read the file again every so many seconds, until Ctrl-C.", min=0.1),
    ] = None,
) -> None:
    """Show what a program wrote about its store: memory, reads, hits, recall, drives."""
    console = Console()
    with one_line_errors(console):
        if watch is None:
            console.print(table_of(file))
            return
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(table_of(file), console=console, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(watch)
                live.update(table_of(file), refresh=True)


def table_of(file: pathlib.Path) -> Table:
    """The figures in a file of kind `stats`, or of another kind that holds some.

    Raises:
        ArgumentError: it holds none.
    """
    figures = read_json(file)
    held: Any = figures if figures["kind"] == "stats" else figures.get("stats")
    if not isinstance(held, dict):
        raise ArgumentError(
            f"`{file}` is of kind {figures['kind']} and holds no stats: write them by "
            "`swarm.stats().save(file)`"
        )
    found = Stats.from_dict(held)
    return two_columns(str(file), [("decoding steps", str(found.steps)), *rows_of(found)])


def two_columns(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what belongs to them; an empty name goes on with the one before."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def rows_of(stats: Stats) -> list[tuple[str, str]]:
    """Figures of a store in words."""
    dram = ", ".join(f"{use} {mebibytes(size)}" for use, size in stats.dram.items())
    steps = max(stats.steps, 1)
    rows = [
        (
            "KV on SSD",
            f"{mebibytes(stats.stored_bytes)} ({mebibytes(stats.plain_bytes)} of KV, "
            f"{stats.overhead:.2f} times with replicas)",
        ),
        (
            "DRAM for KV",
            f"{mebibytes(stats.dram_used_bytes)} now, {mebibytes(stats.dram_peak_bytes)} at most, "
            f"of dram_bytes = {mebibytes(stats.dram_bytes)}",
        ),
        ("", dram),
        (
            "read per step",
            f"{mebibytes(stats.bytes_per_step)} in {stats.requests_per_step:.0f} requests",
        ),
    ]
    for drive in stats.drives:
        failed = f", {drive.errors} errors" if drive.errors else ""
        rows.append(
            (
                "",
                f"{pathlib.Path(drive.name).name}: {mebibytes(drive.decode_bytes / steps)} in "
                f"{drive.decode_requests / steps:.0f} requests, p50 {drive.read_p50_us:.0f} µs, "
                f"p99 {drive.read_p99_us:.0f} µs{failed}",
            )
        )
    rows += [("cache hit rate", f"{stats.hit_rate:.1%}"), ("recall", _recall(stats))]
    if stats.prefetch.prefetches:
        rows.append(("read ahead", f"hides {stats.prefetch.hidden_share:.0%} of the I/O time"))
    if stats.repaired:
        rows.append(("repaired", f"{stats.repaired} entries came from another copy"))
    return [*rows, ("engine", stats.engine)]


def _recall(stats: Stats) -> str:
    if stats.recall is not None:
        return (
            f"{stats.recall:.3f} of the attention mass of the exact best entries "
            f"({stats.recall_samples} samples)"
        )
    if stats.mass is not None:
        return (
            f"the read entries hold {stats.mass:.3f} ± {stats.mass_error:.3f} of the attention to "
            "stored ones"
        )
    return "not measured"
