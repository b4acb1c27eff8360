"""`swarm-kv demo`."""

from __future__ import annotations

import pathlib
from typing import Annotated, Optional

import typer
from rich.table import Table

from ..demo import QUESTION, DemoOptions, DemoResult
from ..demo import run as run_demo
from .common import JSON_HELP, MODEL_HELP, TEXT_HELP, console_beside, one_line_errors, write_json
from .stats import rows_of, two_columns


def demo(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    text: Annotated[
        Optional[str], typer.Option(help=f"{TEXT_HELP} Topics if not given.")  # noqa: UP045
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
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
) -> None:
    """Let a real model answer a question about a long text whose KV cache lies on drives."""
    console = console_beside(json_file)
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
    with one_line_errors(console):
        result = run_demo(
            options,
            say=lambda line: console.print(f"[dim]· {line}[/dim]", highlight=False),
            stream=lambda piece: console.print(piece, end="", markup=False, highlight=False),
        )
    console.print()
    console.print(summary(result))
    with one_line_errors(console):
        write_json(json_file, "demo", result.to_dict())


def summary(result: DemoResult) -> Table:
    """The figures of a demonstration."""
    ratio = result.tokens_per_second / max(result.dense_tokens_per_second, 1e-9)
    return two_columns(
        f"swarm_kv: {result.model}",
        [
            ("context", f"{result.context_tokens} tokens, then {result.new_tokens} generated"),
            *rows_of(result.stats),
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
        ],
    )
