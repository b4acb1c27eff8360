"""The command `swarm-kv`."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Optional

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"swarm-kv needs {error.name}: pip install 'swarm-kv[demo]'") from None

from .demo import QUESTION, DemoOptions, DemoResult
from .demo import run as run_demo
from .errors import SwarmError
from .models import ModelUnavailable

app = typer.Typer(
    help="KV cache of long-context language models on several SSDs.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """KV cache of long-context language models on several SSDs."""


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="smollm2, gemma3, a local directory or a hub id.")
    ] = "smollm2",
    text: Annotated[
        Optional[str], typer.Option(help="Text file; Python's language topics if not given.")  # noqa: UP045
    ] = None,
    question: Annotated[str, typer.Option(help="What to ask about the text.")] = QUESTION,
    paths: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--path",
            help="Directory of one drive; repeat for more. Four temporary ones if not given.",
        ),
    ] = None,
    sparsity: Annotated[float, typer.Option(help="Share of the context read per token.")] = 0.10,
    dram_bytes: Annotated[
        Optional[str], typer.Option(help='As in "64MiB"; a quarter of the KV if not given.')  # noqa: UP045
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 6144,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 96,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help="Write the figures to this file.")  # noqa: UP045
    ] = None,
) -> None:
    """Let a real model answer a question about a long text whose KV cache lies on drives."""
    console = Console()
    options = DemoOptions(
        model=model,
        text=text,
        question=question,
        paths=tuple(paths or ()),
        sparsity=sparsity,
        dram_bytes=dram_bytes,
        context=context,
        tokens=tokens,
    )
    try:
        result = run_demo(
            options,
            say=lambda line: console.print(f"[dim]· {line}[/dim]", highlight=False),
            stream=lambda piece: console.print(piece, end="", markup=False, highlight=False),
        )
    except (SwarmError, ModelUnavailable, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    console.print()
    console.print(summary(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=2) + "\n")


def mebibytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size < 10 * 2**20 else f"{size / 2**20:.1f} MiB"


def summary(result: DemoResult) -> Table:
    """The figures of a demonstration."""
    stats = result.stats
    table = Table(title=f"swarm_kv: {result.model}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    dram = ", ".join(f"{use} {mebibytes(size)}" for use, size in stats.dram.items())
    rows = [
        ("context", f"{result.context_tokens} tokens, then {result.new_tokens} generated"),
        (
            "KV on SSD",
            f"{mebibytes(stats.stored_bytes)} ({mebibytes(stats.plain_bytes)} of KV, "
            f"{stats.stored_bytes / max(stats.plain_bytes, 1):.2f} times with replicas)",
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
        steps = max(stats.steps, 1)
        rows.append(
            (
                "",
                f"{pathlib.Path(drive.name).name}: {mebibytes(drive.decode_bytes / steps)} in "
                f"{drive.decode_requests / steps:.0f} requests, p50 {drive.read_p50_us:.0f} µs, "
                f"p99 {drive.read_p99_us:.0f} µs",
            )
        )
    recall = "not measured" if stats.recall is None else f"{stats.recall:.3f}"
    ratio = result.tokens_per_second / max(result.dense_tokens_per_second, 1e-9)
    rows += [
        ("cache hit rate", f"{stats.hit_rate:.1%}"),
        (
            "recall",
            f"{recall} of the attention mass of the exact top {result.sparsity:.0%} "
            f"({stats.recall_samples} samples)",
        ),
        (
            "tokens per second",
            f"{result.tokens_per_second:.1f}, DynamicCache in memory "
            f"{result.dense_tokens_per_second:.1f} ({ratio:.2f} times)",
        ),
        (
            "time to first token",
            f"{result.prefill_seconds:.1f} s with clustering and writing, DynamicCache "
            f"{result.dense_prefill_seconds:.1f} s",
        ),
        ("engine", stats.engine),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
