"""`swarm-kv plot`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import typer
from rich.console import Console

from .. import plots
from .common import PLOT_ENDINGS, check_folder, one_line_errors, read_json


def plot(
    file: Annotated[
        pathlib.Path, typer.Argument(help="Figures that a command of swarm-kv wrote by --json.")
    ],
    output: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(
            "--output", "-o", help=f"Picture to write: {PLOT_ENDINGS}; FILE.svg if not given."
        ),
    ] = None,
) -> None:
    """Draw what a command found."""
    console = Console()
    with one_line_errors(console):
        figures = read_json(file)
        picture = output or file.with_suffix(".svg")
        check_folder(picture)
        plots.draw(figures, picture)
    console.print(str(picture), markup=False, highlight=False)
