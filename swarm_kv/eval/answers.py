"""How many of the tokens of known answers a model ranks first."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from .session import CacheFactory, Session
from .trial import Question, make_trial


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model makes of one question.

    Attributes:
        wanted: the right answer.
        depths: where its needles stand, as shares of the context.
        tokens: of the answer.
        first: how many of them are ranked first, those before them being given.
        log_prob: of all of them together.
    """

    wanted: str
    depths: tuple[float, ...]
    tokens: int
    first: int
    log_prob: float

    @property
    def exact(self) -> bool:
        """Whether greedy decoding gives the answer, token by token."""
        return self.first == self.tokens


@dataclasses.dataclass(frozen=True)
class Answers:
    """Result of one task."""

    cases: tuple[Answer, ...]

    @property
    def score(self) -> float:
        """Share of the answers' tokens that are ranked first, those before them being given."""
        return sum(case.first for case in self.cases) / sum(case.tokens for case in self.cases)

    @property
    def exact(self) -> int:
        """Answers that greedy decoding gives in full."""
        return sum(case.exact for case in self.cases)

    @property
    def log_prob(self) -> float:
        """Mean log-probability of the answers' tokens."""
        return statistics.fmean(case.log_prob / case.tokens for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "score": self.score,
            "exact": self.exact,
            "total": len(self.cases),
            "log_prob": self.log_prob,
            "cases": [dataclasses.asdict(case) for case in self.cases],
        }


def mark(question: Question, log_probs: torch.Tensor) -> Answer:
    """Judge predictions.

    Args:
        question: with its answer.
        log_probs: `[tokens - 1, vocabulary]`; row i predicts token i + 1 of the question. Rows in
            front may be missing as long as those for the answer are there.
    """
    missing = len(question.ids) - 1 - len(log_probs)
    rows = log_probs[[at - 1 - missing for at in question.asked]]
    wanted = torch.tensor([question.ids[at] for at in question.asked])
    return Answer(
        question.answer,
        question.depths,
        len(wanted),
        int((rows.argmax(-1) == wanted).sum()),
        float(rows.gather(1, wanted[:, None]).double().sum()),
    )


def ask(
    session: Session, questions: Sequence[Question], *, stride: int = 1, rows: int = 1
) -> Answers:
    """Ask questions one after another, each on a fork of the session, which stays as it is.

    The answers' tokens are fed, too (teacher-forced): what a model would generate is the right
    answer exactly where it ranks all of them first.

    Args:
        session: that has been fed the context.
        questions: about it.
        stride: tokens per call. Only 1 decodes as generation does.
        rows: questions of equal length that are asked side by side, at most.
    """
    shared = _shared(questions)
    begun = session.fork()
    if shared:
        _ = list(begun.predict(torch.tensor([questions[0].ids[:shared]]), stride))
    marked: dict[int, Answer] = {}
    for group in _groups(questions, rows):
        ids = torch.tensor([questions[number].ids[shared:-1] for number in group])
        predicted = torch.cat(list(begun.fork(len(group)).predict(ids, stride)), dim=1)
        for number, log_probs in zip(group, predicted, strict=True):
            marked[number] = mark(questions[number], log_probs)
    return Answers(tuple(marked[number] for number in range(len(questions))))


def _shared(questions: Sequence[Question]) -> int:
    """Length of what all questions begin with, the token that predicts an answer left out."""
    most = min(question.asked[0] - 1 for question in questions)
    columns = zip(*(question.ids[:most] for question in questions), strict=True)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _groups(questions: Sequence[Question], rows: int) -> list[list[int]]:
    """Numbers of questions of equal length, at most `rows` together."""
    by_length: dict[int, list[int]] = {}
    for number, question in enumerate(questions):
        by_length.setdefault(len(question.ids), []).append(number)
    return [
        same[first : first + rows]
        for same in by_length.values()
        for first in range(0, len(same), rows)
    ]


def retrieval(
    model: Any,
    tokenizer: Any,
    task: str,
    context: int,
    questions: int = 12,
    *,
    cache_factory: CacheFactory | None = None,
    source: str | None = None,
    prefill_chunk: int | None = None,
    seed: int = 0,
) -> Answers:
    """Let a model do one task: `passkey`, `multikey` or `tracking`.

    Args:
        model: a causal language model of transformers, patched or not.
        tokenizer: the model's tokenizer.
        task (`str`): a name in `swarm_kv.eval.TASKS`.
        context (`int`): tokens before the questions.
        questions (`int`, *optional*, defaults to 12): all of them are about one context.
        cache_factory (`Callable`, *optional*): makes the cache; the model makes one if not given.
        source (`str`, *optional*): text to hide things in; the Python topics if not given.
        prefill_chunk (`int`, *optional*): tokens per prefill call; the whole context if not given.
        seed (`int`, *optional*, defaults to 0): of names, numbers and places.

    Raises:
        ArgumentError: see `make_trial`.
    """
    trial = make_trial(tokenizer, context, [task], questions=questions, source=source, seed=seed)
    session = Session(model, cache_factory)
    session.prefill(trial.context, prefill_chunk)
    return ask(session, trial.questions[task])
