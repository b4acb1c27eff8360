"""`swarm-kv plan`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Annotated, Optional

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import plan as planning
from ..config import parse_bytes
from ..errors import ArgumentError
from ..measure import Speed, speeds, steps_of
from ..plan import Plan
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

DTYPES = ("bfloat16", "float16", "float32")


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, gemma3, a directory, a hub id or a config.json: only its sizes."
        ),
    ],
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    drives: Annotated[
        str,
        typer.Option(
            help='"4x pm9a3", "4x 6.9GB/s,1.1MIOPS", joined by "+", or directories to measure: '
            '"/mnt/a,/mnt/b".'
        ),
    ],
    sparsity: Annotated[float, typer.Option(help="Share of the context read per token.")] = 0.10,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"Of keys and values: {', '.join(DTYPES)}; the model's if not given."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    dram: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Memory for KV, as in "64GiB"; several sizes if not given.'),
    ] = None,
    hit_rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Share of the selected entries that the cache serves, where known."),
    ] = None,
    codec: Annotated[str, typer.Option(help="Form on the drives: none, int8, kivi4.")] = "none",
    window: Annotated[int, typer.Option(help="Most recent tokens, always in memory.")] = 256,
    step_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Milliseconds that a token takes without reads."),
    ] = None,
    weights_bandwidth: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='Instead: rate at which weights are read, as in "3.3TB", per second.'),
    ] = None,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
) -> None:
    """Reckon what a model and a context take on drives and in memory, and how fast they can be.

    Nothing is loaded or run but the measurement of drives that are given as directories.
    """
    console = console_beside(json_file)
    with one_line_errors(console):
        if step_ms is not None and weights_bandwidth is not None:
            raise ArgumentError("give `step-ms` or `weights-bandwidth`, not both")
        config = planning.load_config(model)
        skeleton = planning.skeleton(config)
        kv_dtype = _dtype(dtype, config)
        compute = None if step_ms is None else step_ms / 1e3
        if weights_bandwidth is not None:
            rate = parse_bytes(weights_bandwidth.removesuffix("/s"), "weights-bandwidth")
            compute = planning.weights_bytes(skeleton, kv_dtype) / rate
        found = planning.make(
            config,
            context,
            planning.parse_drives(drives, lambda paths: _measured(console, paths)),
            dtype=kv_dtype,
            batch=batch,
            dram_bytes=None if dram is None else parse_bytes(dram, "dram"),
            hit_rate=hit_rate,
            compute_seconds=compute,
            sparsity=sparsity,
            codec=codec,
            window=window,
        )
        show(found, model, console)
        write_json(json_file, "plan", {"model": model, **found.to_dict()})


def _dtype(name: str | None, config: object) -> torch.dtype:
    if name is None:
        return planning.dtype_of(config)
    if name not in DTYPES:
        raise ArgumentError(f'`dtype` ("{name}") must be one of {", ".join(DTYPES)}')
    found: torch.dtype = getattr(torch, name)
    return found


def _measured(console: Console, paths: Sequence[str]) -> list[Speed]:
    with progress_bar(console, steps_of(len(paths))) as step:
        return speeds(paths, on_step=step)


def show(found: Plan, model: str, console: Console) -> None:
    """The plan in tables."""
    sequences = f"{found.batch} x " if found.batch > 1 else ""
    title = (
        f"{model}, {sequences}{found.context} tokens, {found.dtype}, {found.sparsity:.0%} read per "
        "token"
    )
    console.print(Text(title, "bold"))
    console.print(sizes_of(found))
    console.print(rows_of(found))
    for note in notes_of(found):
        console.print(Text(note, "dim"))


def sizes_of(found: Plan) -> Table:
    """What is fixed."""
    table = Table.grid(padding=(0, 2, 0, 2))
    others = f", {found.other_layers} others stay in memory" if found.other_layers else ""
    drives = found.drives
    kinds = dict.fromkeys(drive.name for drive in drives)
    names = " + ".join(f"{sum(drive.name == kind for drive in drives)} x {kind}" for kind in kinds)
    held = ", ".join(f"{use} {amount(size)}" for use, size in found.dram.items())
    for name, text in (
        (
            "KV cache",
            f"{amount(found.kv_bytes)}: {found.layers} layers{others}, "
            f"{amount(found.entry_bytes)} per token and layer",
        ),
        ("drives", f"{names}, {amount(found.disk_bytes_per_drive)} on each"),
        (
            "per token",
            f"attention to {count(found.selected_entries)} stored entries per layer, "
            f"{amount(found.selected_bytes)} in all",
        ),
        ("DRAM", f"{held}; the rest is cluster cache"),
    ):
        table.add_row(name, text)
    return table


def rows_of(found: Plan) -> Table:
    """What each amount of memory gives."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("DRAM", "cached", "hits", "read/token", "requests", "I/O", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if found.compute_seconds is not None:
        table.add_column("with compute", justify="right", no_wrap=True)
    for row in found.rows:
        rate = "any" if row.tokens_per_second is None else three_digits(row.tokens_per_second)
        cells = [
            amount(row.dram_bytes),
            f"{row.cache_share:.0%}",
            f"{row.hit_rate:.0%}",
            amount(row.bytes_per_step),
            count(row.requests_per_step),
            f"{three_digits(row.io_seconds * 1e3)} ms",
            rate,
        ]
        if row.with_compute is not None:
            cells.append("–".join(map(three_digits, row.with_compute)))
        table.add_row(*cells)
    return table


def notes_of(found: Plan) -> list[str]:
    """What the figures rest on."""
    notes = [
        "cached: share of the stored entries in the cluster cache; tokens/s: at most, by the I/O "
        "alone"
    ]
    if found.assumed_hits:
        notes.append(
            "hits: assumed, as two small models had them; they depend on the text: give "
            "--hit-rate, the hit_rate of swarm.stats() in a run of yours"
        )
    if found.compute_seconds is not None:
        notes.append(
            f"with compute: {three_digits(found.compute_seconds * 1e3)} ms per token; from none of "
            "the I/O hidden behind it to all"
        )
    return [*notes, *found.notes]
