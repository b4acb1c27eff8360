"""Methods at equal budget beside full attention, on one text with things hidden in it.

All get the same context, computed once, and answer on forks of it: tokens that follow the text
(perplexity, KL), pass keys, keys by name among others (RULER's multi-key retrieval), chains of
variables (RULER's variable tracking). Scores are the share of the answers' tokens that are ranked
first, those before them being given. StreamingLLM, which sees sinks and recent tokens only, is the
control: it shows that the answers need the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks import contexts, plots, tables
from benchmarks.harness import Report, Unavailable
from benchmarks.peers import answers as peers
from benchmarks.peers.registry import PEERS
from swarm_kv import eval as evaluation
from swarm_kv import models

PAPER = (
    "figure 11(c) has the accuracy on tasks, normalised to that of exact selection: SWARM comes "
    "closest to it for all models and data sets. No figures are given."
)
REMARK = (
    "the paper's data sets need larger models. Here a small model completes sentences that repeat "
    "what was hidden, so that full attention answers well and what is lost is the method's. All "
    "but kvpress run in this store, with the same sinks and window and a tenth of the context "
    "beside them; kvpress keeps a tenth for good, without having seen the question, in an "
    "environment of its own."
)
DEFAULT, CONTROL = "default", "streaming"
NAMES = {
    DEFAULT: "swarm_kv",
    "oracle": "exact top entries",
    "quest": "Quest",
    "infllm": "InfLLM",
    "pqcache": "PQCache",
    "clusterkv": "k-means on keys",
    CONTROL: "StreamingLLM",
}
"""Methods by the names that the table shows."""
POINTS = 2.0
PERPLEXITY_CHANGE = 0.015
KL = 0.012
LOST_BY_CONTROL = 30.0
"""Points. Where less is lost, the answers do not need the context, or nobody can give them."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "smollm2"
    source: str = "topics"
    """Text, see `swarm_kv.texts`."""
    context: int = 8000
    """Tokens; with those that follow at most 8,192 for SmolLM2."""
    steps: int = 96
    questions: int = 16
    """Per task."""
    rows: int = 12
    """Questions that are decoded side by side."""
    sparsity: float = 0.10
    methods: tuple[str, ...] = ("oracle", "quest", "infllm", "pqcache", "clusterkv")
    """Names of `swarm_kv.eval.methods` beside the default and the control."""
    peers: tuple[str, ...] = ("kvpress SnapKV keeping 0.1", "kvpress Knorm keeping 0.1")
    """Rows of peers/registry.py."""
    drives: int = 4
    seed: int = 0


QUICK: dict[str, Any] = {
    "context": 1536,
    "steps": 8,
    "questions": 3,
    "methods": (),
    "peers": (),
}


def run(parameters: Parameters, report: Report) -> None:
    model, tokenizer = models.load(parameters.model)
    trial = evaluation.make_trial(
        tokenizer,
        parameters.context,
        list(evaluation.TASKS),
        questions=parameters.questions,
        following=parameters.steps + 1,
        source=parameters.source,
        seed=parameters.seed,
    )
    names = list(dict.fromkeys((DEFAULT, *parameters.methods, CONTROL)))
    stages = (len(names) + 1) * (len(trial.questions) + 2) + len(parameters.peers)
    with tqdm(total=stages, desc="tasks", disable=None) as bar:

        def on_stage(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        began = time.perf_counter()
        context = contexts.computed(model, trial.context, trial.context.shape[1])
        computing = time.perf_counter() - began
        reference = evaluation.measure_full(model, trial, filled=context.cache, on_stage=on_stage)
        measured = {}
        with evaluation.scratch_config(
            model,
            trial.length,
            paths=report.paths,
            drives=parameters.drives,
            sparsity=parameters.sparsity,
        ) as config:
            for name in names:
                own = dataclasses.replace(config, **evaluation.methods.settings(name))
                measured[name] = evaluation.measure(
                    model,
                    trial,
                    reference,
                    NAMES.get(name, name),
                    own,
                    rows=parameters.rows,
                    filled=context.cache,
                    on_stage=on_stage,
                )
        full, *methods = (
            dataclasses.replace(one, prefill_seconds=computing + one.prefill_seconds)
            for one in (reference.result, *measured.values())
        )
        for name in parameters.peers:
            with _noting(name, report):
                folder = models.converted(parameters.model)
                size = model.config.get_text_config().vocab_size
                methods.append(peers.measure(name, PEERS[name], folder, trial, reference, size))
            on_stage(name)
    results = evaluation.Results(
        model=parameters.model,
        context=parameters.context,
        sparsity=parameters.sparsity,
        source=parameters.source,
        seed=parameters.seed,
        full=full,
        methods=tuple(methods),
    )
    Console(stderr=True, width=160).print(results.table())
    for method in (results.full, *results.methods):
        report_method(method, report)
    report_checks(results, measured[DEFAULT], measured[CONTROL], report)
    report.note(
        f"{parameters.model} in float32, {parameters.context} tokens of context with "
        f"{parameters.questions} questions per task hidden in it, {parameters.steps} predictions "
        f"behind it; {parameters.sparsity:.0%} of the context beside sinks and window; "
        "teacher-forced, token by token; the model's own part of the prefill is measured once for "
        "all but kvpress"
    )


@contextlib.contextmanager
def _noting(name: str, report: Report) -> Iterator[None]:
    """A peer that cannot run is a note, and has no figures."""
    try:
        yield
    except Unavailable as error:
        report.note(f"{name}: cannot run here: {error}")


def report_method(method: evaluation.MethodResult, report: Report) -> None:
    """Every figure of one method."""
    found = method.predictions
    assert found is not None
    report.measure(f"{method.name}: perplexity", "perplexity", found.ppl_sparse)
    report.measure(f"{method.name}: perplexity / full attention", "ratio", found.ratio)
    report.measure(f"{method.name}: mean KL(full || this)", "nats", found.mean_kl)
    report.measure(f"{method.name}: same first token", "share", found.top1_agreement)
    for task, answers in method.answers.items():
        report.measure(f"{method.name}: {task}", "share", answers.score)
        exact = answers.exact / len(answers.cases)
        report.measure(f"{method.name}: {task}, right in full", "share", exact)
        report.measure(f"{method.name}: {task}, log-probability", "nats", answers.log_prob)
    if method.recall is not None:
        report.measure(f"{method.name}: recall", "share", method.recall)
    report.measure(f"{method.name}: prefill", "s", method.prefill_seconds)


def report_checks(
    results: evaluation.Results,
    default: evaluation.MethodResult,
    control: evaluation.MethodResult,
    report: Report,
) -> None:
    """The goals of the default, and what makes them mean something."""
    found = default.predictions
    assert found is not None
    report.at_most("|perplexity / full attention - 1|", abs(found.ratio - 1), PERPLEXITY_CHANGE)
    report.at_most("mean KL(full || sparse)", found.mean_kl, KL)
    for task in default.answers:
        lost = results.points_lost(default, task)
        report.at_most(f"{task}: points below full attention", lost, POINTS)
    for task in control.answers:
        lost = results.points_lost(control, task)
        report.at_least(f"{task}: points that {control.name} loses", lost, LOST_BY_CONTROL)


COLUMNS = {
    "perplexity / full attention": "perplexity ratio",
    "mean KL(full || this)": "KL, nats",
    "same first token": "same first token",
    **{task: task for task in evaluation.TASKS},
    "recall": "recall",
    "prefill": "prefill, s",
}


def table(result: dict[str, Any]) -> str:
    """The methods as one table, for the page."""
    return tables.of_subjects(result, COLUMNS, digits=4)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Scores by task, and KL divergences."""
    tasks = "|".join(evaluation.TASKS)
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                rf"(?P<x>[^:]+): (?P<series>{tasks})",
                "",
                "share of the answers' tokens ranked first",
                "hidden in the text",
                "bars",
            ),
            plots.Panel(
                r"(?P<x>(?!full attention)[^:]+): mean KL.*",
                "",
                "nats",
                "KL to full attention",
                "bars",
                log_y=True,
            ),
        ],
    )
