"""Methods at equal budget: each answers the same questions about the same context."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..cache import check_dram, kv_bytes, minimum_dram_bytes
from ..config import SwarmConfig
from ..demo import drive_paths
from ..errors import ArgumentError
from ..patch import Swarm, patch, refusal
from . import methods as _methods
from .answers import ask
from .predictions import REFERENCE_CHUNK, Comparison, check_unpatched, compare_predictions
from .results import MethodResult, Results
from .session import Session
from .tasks import TASKS
from .trial import Trial, make_trial

PERPLEXITY = "perplexity"
FULL = "full attention"
RECALL_EVERY = 32
"""Steps between two measurements of a layer's recall, which reads the layer's whole context."""

OnStage = Callable[[str], object]
Filled = Callable[[Swarm | None], Any]
"""Makes a cache that holds a trial's context: in the store of a patched model, or, given None, one
for the model by itself. In place of prefills, where the context has been computed before."""


def task_names() -> list[str]:
    """What `compare` can measure."""
    return [PERPLEXITY, *TASKS]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Full attention on a trial.

    Attributes:
        result: its figures.
        log_probs: `[steps, vocabulary]` of the following tokens but the first; None without any.
    """

    result: MethodResult
    log_probs: torch.Tensor | None


@contextlib.contextmanager
def scratch_config(
    model: Any, context: int, *, paths: Sequence[str] = (), drives: int = 4, sparsity: float = 0.10
) -> Iterator[SwarmConfig]:
    """Settings with memory for any method, on temporary directories unless `paths` are given.

    Memory does not change what is attended to, and some methods keep all keys in it.

    Args:
        model: a causal language model of transformers.
        context (`int`): tokens of the longest sequence.
        paths (`Sequence[str]`, *optional*): one directory per drive.
        drives (`int`, *optional*, defaults to 4): number of temporary directories.
        sparsity (`float`, *optional*, defaults to 0.10): share of the context that a step reads.

    Raises:
        ArgumentError: the model is not supported, or the sparsity is out of range.
    """
    _check_supported(model)
    with drive_paths(paths, drives) as folders:
        config = SwarmConfig(paths=folders, sparsity=sparsity)
        least = minimum_dram_bytes(model.config, config, model.dtype, context)
        size = kv_bytes(model.config, model.dtype, context)
        yield dataclasses.replace(config, dram_bytes=size + 2 * least)


def measure_full(
    model: Any,
    trial: Trial,
    *,
    prefill_chunk: int | None = None,
    filled: Filled | None = None,
    on_stage: OnStage | None = None,
) -> Reference:
    """Full attention by the model itself: what methods are compared with.

    Raises:
        ArgumentError: the model is patched.
    """
    check_unpatched(model)
    end = _teller(FULL, on_stage)
    session, seconds = _prefilled(model, trial, prefill_chunk or 2 * REFERENCE_CHUNK, filled)
    end("prefill")
    predictions: Comparison | None = None
    log_probs: torch.Tensor | None = None
    if trial.following.numel():
        blocks = session.fork().predict(trial.following[:, :-1], REFERENCE_CHUNK)
        log_probs = torch.cat(list(blocks), dim=1)[0]
        predictions = compare_predictions(log_probs, [log_probs], trial.following[0, 1:])
        end(PERPLEXITY)
    answers = {}
    for task, questions in trial.questions.items():
        answers[task] = ask(session, questions, stride=REFERENCE_CHUNK)
        end(task)
    return Reference(MethodResult(FULL, predictions, answers, seconds), log_probs)


def measure(
    model: Any,
    trial: Trial,
    reference: Reference,
    name: str,
    config: SwarmConfig,
    *,
    rows: int = 1,
    prefill_chunk: int | None = None,
    filled: Filled | None = None,
    on_stage: OnStage | None = None,
) -> MethodResult:
    """One method: patches the model, and unpatches it.

    Args:
        model: as it was for `measure_full`.
        trial: the same.
        reference: what `measure_full` gave.
        name: of the method, for the result.
        config: its settings; how often recall is measured is set here.
        rows, prefill_chunk, on_stage: see `compare`.
        filled: see `Filled`; the context is prefilled if not given.
    """
    end = _teller(name, on_stage)
    exact_recall = dataclasses.replace(config, recall_every=RECALL_EVERY, recall_sample=0)
    with patch(model, exact_recall) as swarm:
        session, seconds = _prefilled(model, trial, prefill_chunk, filled, swarm)
        end("prefill")
        predictions: Comparison | None = None
        recall: float | None = None
        if reference.log_probs is not None:
            blocks = session.fork().predict(trial.following[:, :-1])
            predictions = compare_predictions(
                reference.log_probs, (block[0] for block in blocks), trial.following[0, 1:]
            )
            recall = swarm.stats().recall  # before forks whose few steps measure some layers only
            end(PERPLEXITY)
        answers = {}
        for task, questions in trial.questions.items():
            answers[task] = ask(session, questions, rows=rows)
            end(task)
    return MethodResult(name, predictions, answers, seconds, recall)


def compare(
    model: Any,
    tokenizer: Any,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] = (_methods.DEFAULT,),
    *,
    config: SwarmConfig | None = None,
    context: int = 4096,
    steps: int = 64,
    tasks: Sequence[str] | None = None,
    questions: int = 12,
    rows: int = 1,
    source: str | None = None,
    prefill_chunk: int | None = None,
    seed: int = 0,
    model_name: str | None = None,
    on_stage: OnStage | None = None,
) -> Results:
    """Compare methods with full attention, at equal budget, on one context.

    The context is prefilled once per method and forked for each task. Everything after it is
    decoded token by token, teacher-forced.

    Args:
        model: a causal language model of transformers, not patched.
        tokenizer: its tokenizer.
        methods (`Sequence[str]` or `Mapping`, *optional*): names, see `methods.names`; or any name
            with the settings of `SwarmConfig` that make it.
        config (`SwarmConfig`, *optional*): what all methods share; `default` is these settings as
            they are. Temporary drives, a sparsity of 0.10 and ample memory if not given.
        context (`int`, *optional*, defaults to 4096): tokens before what is decoded.
        steps (`int`, *optional*, defaults to 64): predictions that perplexity and KL come from.
        tasks (`Sequence[str]`, *optional*): of `task_names()`; all if not given.
        questions (`int`, *optional*, defaults to 12): per task.
        rows (`int`, *optional*, defaults to 1): questions decoded side by side, as a batch.
        source (`str`, *optional*): the text, see `texts.read_text`; the Python topics if not given.
        prefill_chunk (`int`, *optional*): tokens per prefill call; the whole context if not given.
        seed (`int`, *optional*, defaults to 0): of names, numbers and places.
        model_name (`str`, *optional*): for the result; the model's class if not given.
        on_stage (`Callable`, *optional*): called with a few words after each of the
            `(len(methods) + 1) * (len(tasks) + 1)` stages, for progress bars.

    Returns:
        `Results`: full attention and each method.

    Raises:
        ArgumentError: an unknown method or task, a model that is patched or not supported, or a
            length that does not fit; before anything is run.
        CapacityError: `config.dram_bytes` does not hold the context.
    """
    check_unpatched(model)
    _check_supported(model)
    chosen = task_names() if tasks is None else list(tasks)
    if unknown := [task for task in chosen if task not in task_names()]:
        raise ArgumentError(f"unknown tasks {unknown}; choose from {task_names()}")
    if steps < 1:
        raise ArgumentError(f"`steps` ({steps}) must be at least 1")
    changes = (
        {name: dict(settings) for name, settings in methods.items()}
        if isinstance(methods, Mapping)
        else {name: _methods.settings(name) for name in methods}
    )
    trial = make_trial(
        tokenizer,
        context,
        [task for task in chosen if task != PERPLEXITY],
        questions=questions,
        following=steps + 1 if PERPLEXITY in chosen else 0,
        source=source,
        seed=seed,
    )
    _check_positions(model, trial)
    with contextlib.ExitStack() as stack:
        if config is None:
            config = stack.enter_context(scratch_config(model, trial.length))
        configs = {name: dataclasses.replace(config, **own) for name, own in changes.items()}
        for own_config in configs.values():
            check_dram(model.config, own_config, model.dtype, context)
        reference = measure_full(model, trial, prefill_chunk=prefill_chunk, on_stage=on_stage)
        measured = tuple(
            measure(
                model,
                trial,
                reference,
                name,
                own_config,
                rows=rows,
                prefill_chunk=prefill_chunk,
                on_stage=on_stage,
            )
            for name, own_config in configs.items()
        )
    return Results(
        model=model_name or type(model).__name__,
        context=context,
        sparsity=config.sparsity,
        source="topics" if source is None else str(source),
        seed=seed,
        full=reference.result,
        methods=measured,
    )


def _teller(name: str, on_stage: OnStage | None) -> OnStage:
    """Tells what of a method has ended."""
    return lambda stage: None if on_stage is None else on_stage(f"{name}: {stage}")


def _prefilled(
    model: Any,
    trial: Trial,
    chunk: int | None,
    filled: Filled | None,
    swarm: Swarm | None = None,
) -> tuple[Session, float]:
    began = time.perf_counter()
    session = Session(model, None if filled is None else lambda: filled(swarm))
    if filled is None:
        session.prefill(trial.context, chunk)
    return session, time.perf_counter() - began


def _check_supported(model: Any) -> None:
    if (reason := refusal(model)) is not None:
        raise ArgumentError(f"`{type(model).__name__}` cannot be evaluated: {reason}")


def _check_positions(model: Any, trial: Trial) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and trial.length > limit:
        raise ArgumentError(
            f"the context and what follows it are {trial.length} tokens, but this model knows "
            f"{limit} positions: give a shorter `context` or fewer `steps`"
        )
