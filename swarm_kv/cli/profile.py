"""`swarm-kv profile`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console

from .. import models, texts
from ..profile import Profile, merge, profile_context
from .common import MODEL_HELP, TEXT_HELP, check_folder, mebibytes, one_line_errors


def profile(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    probes: Annotated[
        list[pathlib.Path],
        typer.Option("--probe", help="Text file with a typical question; repeat for more."),
    ],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="File to write.")],
    text: Annotated[str, typer.Option(help=f"The context: {TEXT_HELP}")] = "topics",
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Tokens of the context; the whole text if not given."),
    ] = None,
    window: Annotated[int, typer.Option(help="Most recent tokens, always resident.")] = 256,
    sinks: Annotated[int, typer.Option(help="First tokens, always resident.")] = 4,
    sparsity: Annotated[float, typer.Option(help="Share of the context that a query gets.")] = 0.10,
    add_to: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(help="Earlier profile of the same context whose queries to keep."),
    ] = None,
) -> None:
    """Profile a context that is asked many times: what do typical questions activate together?

    Reads the context once and every probe after it.
    """
    console = Console()
    with one_line_errors(console):
        check_folder(output)
        earlier = None if add_to is None else Profile.load(add_to)
        asked = [texts.read_text(probe) for probe in probes]
        loaded, tokenizer = models.load(model)
        if context is None:
            encoded = texts.encode(tokenizer, texts.read_text(text))
            ids = torch.tensor([encoded], dtype=torch.int64)
        else:
            ids = texts.token_ids(tokenizer, context, text)
        with console.status(f"reading {ids.shape[1]} tokens and {len(asked)} probes"):
            made = profile_context(
                loaded,
                tokenizer,
                ids,
                asked,
                sparsity=sparsity,
                window=window,
                sinks=sinks,
                name=model,
            )
        if earlier is not None:
            made = merge(earlier, made)
        made.save(output)
    console.print(
        f"{output}: {made.queries} probe queries over {made.entries} entries in "
        f"{len(made.bits)} layers ({mebibytes(output.stat().st_size)})",
        markup=False,
        highlight=False,
    )
