"""`swarm-kv eval`."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Annotated, Optional

import typer

from .. import eval as evaluation
from .. import models
from .common import (
    JSON_HELP,
    MODEL_HELP,
    PLOT_ENDINGS,
    TEXT_HELP,
    check_folder,
    console_beside,
    one_line_errors,
    progress_bar,
    write_json,
)

ALL = "all"
METHOD_HELP = (
    f'"{evaluation.methods.DEFAULT}", a baseline or a selector; repeat for more, or "{ALL}".'
)


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[str, typer.Option(help=TEXT_HELP)] = "topics",
    context: Annotated[int, typer.Option(help="Tokens before what is decoded.")] = 4096,
    steps: Annotated[int, typer.Option(help="Predictions that perplexity comes from.")] = 64,
    sparsity: Annotated[float, typer.Option(help="Share of the context read per token.")] = 0.10,
    methods: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--method", metavar="NAME", help=METHOD_HELP),
    ] = None,
    tasks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help=f"With commas between them, of {','.join(evaluation.task_names())}; all if not "
            "given."
        ),
    ] = None,
    questions: Annotated[int, typer.Option(help="Per task.")] = 12,
    paths: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--path",
            help="Directory of one drive; repeat for more. Four temporary ones if not given.",
        ),
    ] = None,
    json_file: Annotated[
        Optional[pathlib.Path], typer.Option("--json", help=JSON_HELP)  # noqa: UP045
    ] = None,
    plot: Annotated[
        Optional[pathlib.Path],  # noqa: UP045
        typer.Option(help=f"Draw scores and KL divergences: {PLOT_ENDINGS}."),
    ] = None,
) -> None:
    """Compare methods with full attention at equal budget: next tokens, and what a text hides.

    Perplexity and KL divergence of the tokens that follow a text; pass keys, keys by name and
    variables that are hidden in it. What decodes is teacher-forced.
    """
    console = console_beside(json_file)
    with one_line_errors(console), contextlib.ExitStack() as stack:
        if plot is not None:
            check_folder(plot)
        names = methods or [evaluation.methods.DEFAULT]
        if ALL in names:
            names = evaluation.methods.names()
        for name in names:
            evaluation.methods.settings(name)  # or an error before the model is loaded
        chosen = evaluation.task_names() if tasks is None else tasks.split(",")
        loaded, tokenizer = models.load(model)
        config = stack.enter_context(
            evaluation.scratch_config(loaded, context + steps, paths=paths or (), sparsity=sparsity)
        )
        stages = (len(names) + 1) * (len(chosen) + 1)
        step = stack.enter_context(progress_bar(console, stages))
        results = evaluation.compare(
            loaded,
            tokenizer,
            names,
            config=config,
            context=context,
            steps=steps,
            tasks=chosen,
            questions=questions,
            source=text,
            model_name=model,
            on_stage=step,
        )
        write_json(json_file, "eval", results.to_dict())
        if plot is not None:
            results.plot(plot)
    console.print(results.table())
