"""The command `swarm-kv`."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Optional

import torch

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"swarm-kv needs {error.name}: pip install 'swarm-kv[demo]'") from None

from . import models, profile, replay, texts, trace, tune
from .cache import full_attention_layers
from .demo import QUESTION, DemoOptions, DemoResult
from .demo import run as run_demo
from .errors import ArgumentError, SwarmError
from .models import ModelUnavailable

app = typer.Typer(
    help="KV cache of long-context language models on several SSDs.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """KV cache of long-context language models on several SSDs."""


MODEL_HELP = "smollm2, gemma3, a local directory or a hub id."
TEXT_HELP = "topics (Python's manual), stdlib (Python's source code) or a text file."


@contextlib.contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """Show what users can mend as one line, without a traceback, and exit with status 1."""
    try:
        yield
    except (SwarmError, ModelUnavailable, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Any]:
    """A bar of `total` steps; yields a function that takes one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=total)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        yield step


@app.command()
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
    with one_line_errors(console):
        result = run_demo(
            options,
            say=lambda line: console.print(f"[dim]· {line}[/dim]", highlight=False),
            stream=lambda piece: console.print(piece, end="", markup=False, highlight=False),
        )
    console.print()
    console.print(summary(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=2) + "\n")


@app.command()
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


@app.command("profile")
def profile_command(
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
        earlier = None if add_to is None else profile.Profile.load(add_to)
        asked = [texts.read_text(probe) for probe in probes]
        loaded, tokenizer = models.load(model)
        if context is None:
            encoded = tokenizer(texts.read_text(text), add_special_tokens=False, verbose=False)
            ids = torch.tensor([encoded.input_ids], dtype=torch.int64)
        else:
            ids = texts.token_ids(tokenizer, context, text)
        with console.status(f"reading {ids.shape[1]} tokens and {len(asked)} probes"):
            made = profile.profile_context(
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
            made = profile.merge(earlier, made)
        made.save(output)
    console.print(
        f"{output}: {made.queries} probe queries over {made.entries} entries in "
        f"{len(made.bits)} layers ({mebibytes(output.stat().st_size)})",
        markup=False,
        highlight=False,
    )


@app.command("tune")
def tune_command(
    trace_file: Annotated[
        pathlib.Path, typer.Argument(metavar="TRACE", help="File that `swarm-kv record` wrote.")
    ],
    tau: Annotated[str, typer.Option(help="Cluster radii to try.")] = "0.45,0.6,0.75",
    max_size: Annotated[str, typer.Option(help="Largest cluster sizes to try.")] = "16,64",
    entry_bytes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="K and V of one entry, such as 4096; the model's own if not given."),
    ] = None,
    drives: Annotated[int, typer.Option(help="Drives of the device model.")] = 1,
    plot: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(help="Draw recall against seconds and overhead: .png, .svg or .pdf."),
    ] = None,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help="Write the figures to this file.")  # noqa: UP045
    ] = None,
) -> None:
    """Try clustering settings on a trace: recall, requests, bytes, seconds, storage and index.

    Seconds are those of the device model of a PM9A3, with nothing cached.
    """
    console = Console()
    with one_line_errors(console):
        taus = parse_list(tau, "tau", float)
        sizes = parse_list(max_size, "max-size", int)
        if drives < 1:
            raise ArgumentError(f"`drives` ({drives}) must be at least 1")
        recorded = trace.Trace.load(trace_file)
        with progress_bar(console, len(recorded.layers) * len(taus) * len(sizes)) as step:
            points = tune.sweep(
                recorded,
                taus,
                sizes,
                entry_bytes=entry_bytes,
                drives=[replay.PM9A3] * drives,
                on_point=lambda: step("clustering and replaying"),
            )
        console.print(tune_table(points, f"{recorded.model}, {recorded.settings.context} tokens"))
        if plot is not None:
            tune.plot(points, f"{recorded.model}, {recorded.settings.context} tokens", plot)
        if json_file is not None:
            figures = {
                "model": recorded.model,
                "tokens": recorded.tokens,
                "points": [point.to_dict() for point in points],
            }
            json_file.write_text(json.dumps(figures, indent=2) + "\n")


TUNE_LEGEND = (
    "reads, KiB and µs: per query and layer; copies: stored per entry; index KiB: of all layers in "
    "a mean; share: of the keys in 16 bits"
)


def tune_table(points: list[tune.Point], title: str) -> Table:
    """Every setting with its layers and their mean."""
    table = Table(title=title, caption=TUNE_LEGEND, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("τ", "size", "layer", "recall", "error", "reads", "KiB", "µs", "copies"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("index KiB", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        rows = [(str(number), one) for number, one in point.layers.items()]
        for name, one in [*rows, ("mean", point.mean)]:
            table.add_row(
                f"{point.tau:g}",
                str(point.max_size),
                name,
                f"{one.recall:.3f}",
                f"{one.err:.4f}",
                f"{one.reads:.0f}",
                f"{one.bytes / 1024:.0f}",
                f"{one.seconds * 1e6:.0f}",
                f"{one.overhead:.2f}",
                f"{one.index_bytes / 1024:.0f}",
                f"{one.index_share:.1%}",
                style="bold" if name == "mean" else None,
                end_section=name == "mean",
            )
    return table


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
