"""`swarm-kv record`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import models, replay, texts, trace
from ..cache import full_attention_layers
from .common import (
    MODEL_HELP,
    TEXT_HELP,
    check_folder,
    mebibytes,
    one_line_errors,
    parse_list,
    progress_bar,
)


def record(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", help="File to write.")],
    text: Annotated[str, typer.Option(help=TEXT_HELP)] = "topics",
    context: Annotated[int, typer.Option(help="Tokens of the context.")] = 6144,
    tokens: Annotated[
        int, typer.Option(help="All tokens; those behind context + window are the test.")
    ] = 8192,
    layers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Full-attention layers, as in "2,10,18,26"; all if not given.'),
    ] = None,
    window: Annotated[int, typer.Option(help="Most recent tokens, always resident.")] = 256,
    sinks: Annotated[int, typer.Option(help="First tokens, always resident.")] = 4,
    sparsity: Annotated[float, typer.Option(help="Share of the context that a query gets.")] = 0.10,
    stride: Annotated[int, typer.Option(help="Tokens between two test queries.")] = 16,
) -> None:
    """Record what a model attends to on a text: queries, keys, values and exact selections.

    The file is what tune and the benchmarks replay. It tells what the text said: it is private.
    """
    console = Console()
    with one_line_errors(console):
        check_folder(output)
        numbers = None if layers is None else parse_list(layers, "layers", int)
        loaded, tokenizer = models.load(model)
        ids = texts.token_ids(tokenizer, tokens, text)
        total = len(full_attention_layers(loaded.config))
        with progress_bar(console, total) as step:
            recorded = trace.record(
                loaded,
                ids,
                context=context,
                layers=numbers,
                window=window,
                sinks=sinks,
                sparsity=sparsity,
                stride=stride,
                name=model,
                on_layer=lambda number: step(f"layer {number}"),
            )
        recorded.save(output)
    console.print(trace_summary(recorded, output))


def trace_summary(recorded: trace.Trace, path: pathlib.Path) -> Table:
    """What a trace holds, layer by layer."""
    settings = recorded.settings
    size = mebibytes(path.stat().st_size)
    table = Table(
        title=f"{recorded.model}: {settings.context} tokens of context, {settings.budget} entries "
        f"selected per query; {path} ({size})"
    )
    for name in ("layer", "heads / KV heads", "test queries", "resident mass", "oracle recall"):
        table.add_column(name, justify="right")
    for number, layer in recorded.layers.items():
        chosen = torch.zeros(layer.exact.mass.shape, dtype=torch.bool)
        chosen.scatter_(1, layer.selections.long(), True)
        table.add_row(
            str(number),
            f"{layer.q.shape[0]} / {layer.k.shape[0]} of {layer.q.shape[2]}",
            str(len(layer.selections)),
            f"{layer.exact.rest_mass.mean().item():.3f}",
            f"{replay.quality(layer, chosen)[0]:.3f}",
        )
    return table
