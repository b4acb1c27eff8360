"""`swarm-kv bench`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import bench as benchmark
from ..bench import Result
from ..config import parse_bytes
from .common import (
    JSON_HELP,
    amount,
    console_beside,
    count,
    one_line_errors,
    progress_bar,
    three_digits,
    write_json,
)


def bench(
    paths: Annotated[
        list[str], typer.Option("--path", help="Directory of one drive; repeat for more.")
    ],
    size: Annotated[
        str, typer.Option(help="To write to each drive; it is gone at the end.")
    ] = "256MiB",
    seconds: Annotated[
        float, typer.Option(help="That each size of read is measured.", min=0.05)
    ] = 1.0,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
) -> None:
    """Measure what a store gets from your drives: reads of each size, and those of a step.

    The figures of the paper come from a checkout: python -m benchmarks list.
    """
    console = console_beside(json_file)
    with one_line_errors(console):
        most = parse_bytes(size, "size")
        with progress_bar(console, benchmark.steps_of(len(paths), most)) as step:
            result = benchmark.run(paths, size=most, seconds=seconds, on_step=step)
        show(result, console)
        write_json(json_file, "bench", result.to_dict())


def show(result: Result, console: Console) -> None:
    """The result in tables."""
    drives = f"{len(result.paths)} drive{'s' * (len(result.paths) > 1)}"
    console.print(Text(f"Reads of {drives} ({result.engine})", "bold"))
    console.print(rates_of(result))
    console.print(Text("Reads of a decoding step in one layer, entries of 4 KiB", "bold"))
    console.print(steps_of(result))
    console.print(
        Text(
            "of model: bytes per second over requests x t_base + bytes x t_transfer, fitted to the "
            "drive's reads of 4 and 256 KiB; planned: the step by the model that the store "
            "measured when it opened",
            "dim",
        )
    )


def rates_of(result: Result) -> Table:
    """By size and drive."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("drive", overflow="fold")
    for name in ("reads/s", "GB/s", "of model", "CPU"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for one in result.rates:
        size = one.rate.request_bytes
        table.add_row(
            amount(size) if size != last else "",
            one.drive,
            count(one.rate.requests_per_second),
            three_digits(one.rate.bytes_per_second / 1e9),
            f"{one.of_model:.0%}",
            f"{one.rate.cpu_share:.0%}",
            end_section=one.drive == ("all" if len(result.paths) > 1 else result.paths[0]),
        )
        last = size
    return table


def steps_of(result: Result) -> Table:
    """By context."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("context", "entries", "requests", "read", "time", "planned"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in result.steps:
        table.add_row(
            str(step.context),
            str(step.entries),
            count(step.requests),
            amount(step.bytes),
            f"{three_digits(step.median * 1e3)} ms",
            f"{three_digits(step.planned * 1e3)} ms",
        )
    return table
