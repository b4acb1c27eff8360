"""`swarm-kv doctor`."""

from __future__ import annotations

import itertools
import pathlib
from typing import Annotated, Optional

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .. import doctor as examining
from ..config import parse_bytes
from ..doctor import Report, State
from ..measure import PIECE_BYTES, steps_of
from .common import JSON_HELP, console_beside, one_line_errors, progress_bar, write_json

STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    paths: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[PATH]...", help="One directory per drive; the machine alone if not given."
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(help="Most to write to each drive; it is gone at the end.")
    ] = "256MiB",
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
) -> None:
    """Try what a store needs of this machine and its drives, and tell how to mend what is wrong.

    io_uring, locked memory, O_DIRECT, alignment, space, file systems, the page cache, bandwidth and
    reads per second, and whether several paths are one drive. Status 1 if a path cannot be used.
    """
    console = console_beside(json_file)
    given = tuple(paths or ())
    with one_line_errors(console):
        most = max(parse_bytes(size, "size"), PIECE_BYTES)
        with progress_bar(console, 2 + steps_of(len(given), most)) as step:
            report = examining.examine(given, size=most, on_step=step)
        console.print(table_of(report))
        console.print(verdict(report))
        if not given:
            console.print("To try your drives too: swarm-kv doctor DIRECTORY ...", style="dim")
        write_json(json_file, "doctor", report.to_dict())
    if report.count("error"):
        raise typer.Exit(1)


def table_of(report: Report) -> Group:
    """Findings by subject, each with its fix below it."""
    parts: list[RenderableType] = []
    widest = max(len(one.check) for one in report.findings)
    for subject, findings in itertools.groupby(report.findings, key=lambda one: one.subject):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=max(map(len, STYLES)))
        table.add_column(width=widest)
        table.add_column(overflow="fold")
        for one in findings:
            table.add_row(Text(one.state, STYLES[one.state]), one.check, Text(one.found))
            if one.fix:
                table.add_row("", "", Text.assemble(("→ ", "bold"), one.fix))
        parts += [Text(subject, "bold"), Padding(table, (0, 0, 1, 2))]
    return Group(*parts)


def verdict(report: Report) -> Text:
    """One line."""
    states: tuple[State, ...] = ("error", "warning")
    counts = [(state, report.count(state)) for state in states]
    found = [f"{count} {state}{'s' * (count > 1)}" for state, count in counts if count]
    worst: State = next((state for state, count in counts if count), "ok")
    return Text(" and ".join(found) or "All is well.", STYLES[worst])
