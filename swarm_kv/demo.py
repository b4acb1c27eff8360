"""`swarm-kv demo`: a real model answers a question about a long text whose KV lies on drives."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import TextStreamer
from transformers.cache_utils import DynamicCache

from . import compat, models, texts
from .cache import kv_bytes, minimum_dram_bytes
from .config import SwarmConfig
from .errors import ArgumentError
from .meter import Stats
from .patch import patch

QUESTION = "Explain in a few sentences what the text above says about the `with` statement."


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the demonstration runs on; see `swarm-kv demo --help`."""

    model: str = "smollm2"
    text: str | None = None
    question: str = QUESTION
    paths: tuple[str, ...] = ()
    drives: int = 4
    sparsity: float = 0.10
    dram_bytes: str | None = None
    context: int = 6144
    tokens: int = 96
    recall_every: int = 16


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What was measured.

    `tokens_per_second` and `dense_tokens_per_second` come from the median time between two tokens,
    with this cache and with transformers' `DynamicCache` in memory.
    """

    model: str
    context_tokens: int
    new_tokens: int
    kv_bytes: int
    answer: str
    dense_answer: str
    prefill_seconds: float
    dense_prefill_seconds: float
    tokens_per_second: float
    dense_tokens_per_second: float
    sparsity: float
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "stats": self.stats.to_dict()}


class _TimedStreamer(TextStreamer):
    """Prints text as it comes and remembers when each token came."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self.text = ""
        self._write = write
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(text)

    def tokens_per_second(self) -> float:
        pauses = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return 1 / statistics.median(pauses) if pauses else 0.0


def run(
    options: DemoOptions, say: Callable[[str], Any], stream: Callable[[str], Any]
) -> DemoResult:
    """Run the demonstration.

    Args:
        options: model, text, drives and budgets.
        say: takes one line about what happens next.
        stream: takes pieces of the answer as they are generated.

    Raises:
        ArgumentError: fewer than two tokens are asked for, or the text is too short.
    """
    if options.tokens < 2:
        raise ArgumentError(f"`tokens` ({options.tokens}) must be at least 2 to measure a rate")
    say(f"loading {options.model} (the first time converts its weights, about 20 s)")
    model, tokenizer = models.load(options.model)
    prompt = _prompt(tokenizer, options)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    settings: dict[str, Any] = {
        "max_new_tokens": options.tokens,
        "min_new_tokens": options.tokens,
        "do_sample": False,
    }
    size = kv_bytes(model.config, model.dtype, prompt.shape[1])

    with drive_paths(options.paths, options.drives) as paths:
        config = SwarmConfig(
            paths=paths,
            sparsity=options.sparsity,
            dram_bytes=size // 4 if options.dram_bytes is None else options.dram_bytes,
            recall_every=options.recall_every,
            recall_sample=0,
        )
        if options.dram_bytes is None:  # a quarter of a short context would not hold its window
            least = 2 * minimum_dram_bytes(model.config, config, model.dtype)
            config = dataclasses.replace(config, dram_bytes=max(size // 4, least))
        with patch(model, config) as swarm:
            say(f"prefilling {prompt.shape[1]} tokens; their KV goes to {len(paths)} drives")
            streamer = _TimedStreamer(tokenizer, stream)
            cache: dict[str, Any] = {compat.cache_arg(model): swarm.new_cache()}
            began = time.perf_counter()
            model.generate(**inputs, **settings, **cache, streamer=streamer)
            prefill = streamer.times[0] - began
            stats = swarm.stats()  # while the cache is alive
            stream("\n")

    say("the same with transformers' DynamicCache in memory, for comparison")
    dense = _TimedStreamer(tokenizer, lambda text: None)
    cache = {compat.cache_arg(model): DynamicCache(config=model.config)}
    began = time.perf_counter()
    model.generate(**inputs, **settings, **cache, streamer=dense)
    return DemoResult(
        model=options.model,
        context_tokens=prompt.shape[1],
        new_tokens=len(streamer.times),
        kv_bytes=size,
        answer=streamer.text,
        dense_answer=dense.text,
        prefill_seconds=prefill,
        dense_prefill_seconds=dense.times[0] - began,
        tokens_per_second=streamer.tokens_per_second(),
        dense_tokens_per_second=dense.tokens_per_second(),
        sparsity=options.sparsity,
        stats=stats,
    )


def _prompt(tokenizer: Any, options: DemoOptions) -> torch.Tensor:
    marker = "\N{REPLACEMENT CHARACTER}"
    question = f"{marker}\n\n{options.question}"
    if tokenizer.chat_template:
        framed = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
    else:
        framed = f"{question}\n"
    head, tail = framed.split(marker)
    before = tokenizer(head, add_special_tokens=False, return_tensors="pt").input_ids.long()
    after = tokenizer(tail, add_special_tokens=False, return_tensors="pt").input_ids.long()
    length = options.context - before.shape[1] - after.shape[1]
    if length < 1:
        raise ArgumentError(f"`context` ({options.context}) does not hold the question")
    return torch.cat([before, texts.token_ids(tokenizer, length, options.text), after], dim=1)


@contextlib.contextmanager
def drive_paths(given: Sequence[str], count: int) -> Iterator[list[str]]:
    """The directories `given`, or `count` temporary ones that go at the end."""
    if given:
        yield list(given)
        return
    with tempfile.TemporaryDirectory(prefix="swarm_kv_") as root:
        paths = [pathlib.Path(root, f"drive{number}") for number in range(count)]
        for path in paths:
            path.mkdir(mode=0o700)
        yield [str(path) for path in paths]
