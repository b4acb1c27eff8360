"""What the benchmarks decode: recorded activity of real models on real text.

A text is run through a model once; what its full-attention layers computed is kept on disk. Every
benchmark takes as much of it as it needs: attention is causal, so the first tokens of a recording
are a recording of the first tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Sequence

import torch
import transformers

from swarm_kv import models, texts, trace
from swarm_kv.errors import ArgumentError
from swarm_kv.trace import LayerTrace

WINDOW = 256
"""Tokens between a context and the first step, as in a decoding loop: they are in memory."""
SINKS = 4
TEXTS = ("topics", "stdlib")
"""Prose and code, see `swarm_kv.texts`."""

Parts = tuple[tuple[str, int], ...]
"""A text that is joined: names of texts, and how many of the first tokens of each."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """A model that is recorded.

    Attributes:
        title: for readers.
        layers: which of its full-attention layers.
        longest: tokens that it is trained for.
    """

    title: str
    layers: tuple[int, ...]
    longest: int


RECORDINGS = {
    "smollm2": Recording("SmolLM2-135M", (2, 10, 18, 26), 8192),
    "gemma3": Recording("Gemma 3 270M", (5, 11, 17), 32768),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The KV cache of one of the paper's models (Table 2) in 16 bits.

    Attributes:
        layers: with full attention.
        entry_bytes: K and V of one token in one layer, all KV heads.
        weights: bytes of weights that a token of decoding reads, active experts only.
    """

    name: str
    layers: int
    entry_bytes: int
    weights: float


GEOMETRIES = (
    Geometry("Qwen3-14B", 40, 4096, 29.6e9),
    Geometry("Qwen3-32B", 64, 4096, 65.6e9),
    Geometry("Llama-3.1-70B", 80, 4096, 141e9),
    Geometry("gpt-oss-120B", 18, 2048, 2.6e9),
    Geometry("Qwen3-235B", 94, 2048, 44e9),
)
"""Sizes by the public configurations. gpt-oss has 36 layers, of which 18 slide over 128 tokens, and
weights of 4 bits."""


def recorded(
    model: str,
    text: str = TEXTS[0],
    *,
    context: int,
    steps: int,
    stride: int = 1,
    layers: Sequence[int] | None = None,
    follows: str | None = None,
    entry_bytes: int | None = None,
) -> list[LayerTrace]:
    """Layers of `model` on the first tokens of `text`.

    Args:
        model: of `RECORDINGS`.
        text: of `TEXTS`.
        context: tokens before the window and the steps.
        steps: test queries; every `stride`-th of the last tokens is one.
        layers: which ones; those of `RECORDINGS` if not given.
        follows: text that comes behind context and window, if not `text` goes on.
        entry_bytes: that layers are `widened` to; as recorded if not given.
    """
    tokens = context + WINDOW + steps * stride
    longest = RECORDINGS[model].longest
    if tokens > longest:
        raise ArgumentError(
            f"`context` ({context}), window and `steps` ({steps} x {stride}) are {tokens} tokens, "
            f"more than {model} is trained for ({longest})"
        )
    if follows is None:
        lengths = [size for size in (2560, 8192, longest) if size >= tokens]
        kept = (size for size in lengths if _path(model, ((text, size),)).exists())
        parts: Parts = ((text, next(kept, lengths[0])),)
    else:
        parts = ((text, context + WINDOW), (follows, steps * stride))
    settings = trace.Settings(context, WINDOW, SINKS, stride=stride)
    whole = _whole(model, parts)
    found = [
        trace.layer_trace(
            number,
            *(tensor[:, :tokens].contiguous() for tensor in (own.q, own.k, own.v)),
            scale=own.scale,
            settings=settings,
        )
        for number, own in whole.layers.items()
        if layers is None or number in layers
    ]
    return found if entry_bytes is None else [widened(layer, entry_bytes) for layer in found]


@functools.lru_cache(maxsize=2)
def _whole(model: str, parts: Parts) -> trace.Trace:
    """All of a text, from disk where it has been recorded before."""
    path = _path(model, parts)
    with contextlib.suppress(OSError, ArgumentError):
        return trace.Trace.load(path)
    loaded, tokenizer = models.load(model)
    ids = torch.cat([texts.token_ids(tokenizer, count, text) for text, count in parts], dim=1)
    found = trace.record(
        loaded,
        ids,
        context=ids.shape[1] - WINDOW - 1,
        layers=RECORDINGS[model].layers,
        name=model,
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    found.save(path)
    return found


def _path(model: str, parts: Parts) -> pathlib.Path:
    named = [model, *(str(field) for part in parts for field in part)]
    named += [torch.__version__, transformers.__version__, str(trace.VERSION)]
    named += [texts.read_text(text) for text, _ in parts]
    digest = hashlib.sha256("\0".join(named).encode()).hexdigest()[:16]
    title = "-".join(f"{text}-{count}" for text, count in parts)
    return models.cache_dir().parent / "traces" / f"{model}-{title}-{digest}.safetensors"


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Parameters of a benchmark whose steps read recorded layers from slow drives."""

    model: str = "smollm2"
    text: str = "topics"
    context: int = 7424
    layers: tuple[int, ...] = (10, 26)
    entry_bytes: int = 4096
    steps: int = 8
    slowdown: float = 200.0
    """The drives deliver 1/`slowdown` of their rates."""
    cache: float = 0.0
    """Share of the entries that the cluster cache may hold."""

    def traces(self) -> list[LayerTrace]:
        """The layers, with a step before those that count, see `decoding.costs`."""
        return recorded(
            self.model,
            self.text,
            context=self.context,
            steps=self.steps + 1,
            layers=self.layers,
            entry_bytes=self.entry_bytes,
        )


def widened(layer: LayerTrace, entry_bytes: int) -> LayerTrace:
    """The same layer with its heads repeated until an entry has about `entry_bytes` bytes.

    Attention, averaged over heads, stays what it was; reads and scores cost what they cost in a
    model with so many heads.
    """
    heads, _, dim = layer.k.shape
    times = max(1, round(entry_bytes / (2 * heads * dim * layer.k.element_size())))
    q, k, v = (tensor.repeat(times, 1, 1) for tensor in (layer.q, layer.k, layer.v))
    return dataclasses.replace(layer, q=q, k=k, v=v)
