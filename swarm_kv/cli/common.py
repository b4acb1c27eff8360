"""What all commands share: words of their help, errors, progress, sizes, and files of figures."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from tqdm import tqdm

from ..errors import ArgumentError, SwarmError
from ..models import ModelUnavailable

MODEL_HELP = "smollm2, gemma3, a local directory or a hub id."
TEXT_HELP = "topics (Python's manual), stdlib (Python's source code) or a text file."
JSON_HELP = "Write the figures to this file; - for standard output."
PLOT_ENDINGS = ".png, .svg or .pdf"

LONG = 2.0
"""Seconds of work from which on it shows a progress bar."""
STDOUT = pathlib.Path("-")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def console_beside(json_file: pathlib.Path | None) -> Console:
    """Where tables go: standard error when standard output takes the figures."""
    return Console(stderr=json_file == STDOUT)


@contextlib.contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """Show what users can mend as one line, without a traceback, and exit with status 1."""
    try:
        yield
    except (SwarmError, ModelUnavailable, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; yields a function that takes one step and its description.

    It shows after `LONG` seconds, and only on a terminal.
    """
    with tqdm(total=total, file=console.file, disable=None, delay=LONG, leave=False) as bar:

        def step(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        yield step


def check_folder(output: pathlib.Path) -> None:
    """Raise ArgumentError, before minutes of work, when `output` has no folder to be written to."""
    if not output.expanduser().parent.is_dir():
        raise ArgumentError(f"the folder of `{output}` does not exist: make it first")


def parse_list(text: str, name: str, kind: Any) -> list[Any]:
    """Numbers of `text`, as in "16,64".

    Raises:
        ArgumentError: something in it is no number.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(
            f'`{name}` ("{text}") must be numbers with commas between them, as in "16,64"'
        ) from None


def mebibytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size < 10 * 2**20 else f"{size / 2**20:.1f} MiB"


def amount(size: float) -> str:
    """Bytes for people in the unit that fits, with three digits: "6.25 GiB"."""
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{three_digits(size)} {UNITS[unit]}"


def count(number: float) -> str:
    """A number of things for people: "612", "612 K", "1.10 M"."""
    for size, letter in ((1e6, " M"), (1e3, " K")):
        if number >= 0.9995 * size:
            return f"{three_digits(number / size)}{letter}"
    return three_digits(number)


def three_digits(number: float) -> str:
    """Without more digits than mean something: "0.52", "6.25", "62.5", "625"."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"


def write_json(path: pathlib.Path | None, kind: str, figures: dict[str, Any]) -> None:
    """Write what a command found, with its `kind`, by which `swarm-kv plot` knows it.

    Args:
        path: a file, `STDOUT`, or None to write nothing.
        kind: name of the command.
        figures: plain values.
    """
    if path is None:
        return
    text = json.dumps({"kind": kind, **figures}, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Figures that a command wrote.

    Raises:
        ArgumentError: no JSON object, or one without `kind`.
    """
    try:
        figures = json.loads(path.read_text())
    except ValueError as error:
        raise ArgumentError(f"`{path}` is no JSON file: {error}") from None
    if not isinstance(figures, dict) or not isinstance(figures.get("kind"), str):
        raise ArgumentError(
            f"`{path}` has no `kind`: give a file that a swarm-kv command wrote by --json"
        )
    return figures
