"""What a peer makes of a trial of `swarm_kv.eval`: the same context, the same questions."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import torch

from benchmarks.peers.models import LOAD_SECONDS, rows_of
from benchmarks.peers.process import Runner
from benchmarks.peers.registry import Peer
from swarm_kv.eval import (
    Answers,
    MethodResult,
    Reference,
    Trial,
    compare_predictions,
    mark,
)

ASK_SECONDS = 300.0
"""Time limit of all questions together."""


def measure(
    name: str, peer: Peer, folder: pathlib.Path, trial: Trial, reference: Reference, vocabulary: int
) -> MethodResult:
    """One peer, in its own environment.

    Everything behind the context is fed to it in one call per question: what it keeps of the
    context does not depend on that.

    Args:
        name, peer: a row of the registry that keeps its cache in memory.
        folder: with the model's weights.
        trial, reference: of `swarm_kv.eval`.
        vocabulary: size of a row of logits.

    Raises:
        Unavailable: its environment is not there, or it failed.
    """
    context = trial.context[0].tolist()
    following = trial.following[0].tolist()
    questions = [one for asked in trial.questions.values() for one in asked]
    asked = [following[:-1], *(list(one.ids[:-1]) for one in questions)]
    with tempfile.TemporaryDirectory(prefix="swarm_kv_peers_") as scratch:
        logits = pathlib.Path(scratch) / "logits.f32"
        runner = Runner(peer.runner, peer.environment)
        try:
            runner.ask(
                LOAD_SECONDS,
                model=str(folder),
                ids=context,
                context=len(context) + 1,
                folders=[],
                options=dict(peer.options),
                logits=str(logits),
            )
            seconds = runner.ask(LOAD_SECONDS)["seconds"]
            runner.ask(ASK_SECONDS, ask=asked)
        finally:
            runner.close()
        rows = rows_of(logits, vocabulary).log_softmax(-1)
    blocks = list(torch.split(rows, [len(ids) for ids in asked]))
    assert reference.log_probs is not None
    predictions = compare_predictions(reference.log_probs, blocks[:1], trial.following[0, 1:])
    marked = iter([mark(one, block) for one, block in zip(questions, blocks[1:], strict=True)])
    answers: dict[str, Any] = {
        task: Answers(tuple(next(marked) for _ in asked)) for task, asked in trial.questions.items()
    }
    return MethodResult(name, predictions, answers, seconds)
