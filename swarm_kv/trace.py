"""Recorded attention of a real model on a real text, to replay experiments on the same activity.

    trace = record(model, ids, context=6144)
    trace.save("trace.safetensors")

The first `context` tokens are the context. Its *entries* are its tokens without the first `sinks`
ones, which are always in memory: entry i is token `sinks + i`. Test queries stand `window` tokens
behind the context and further on, so that all entries are out of their window, and what follows the
context counts as resident.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from . import compat, tensor_file, texts
from .attention import swarm_attention, swarm_mask
from .cache import ATTENTION_NAME, full_attention_layers
from .dense import dense_attention
from .errors import ArgumentError, StateError

KIND = "swarm_kv trace"
VERSION = 1
RECORDER = "swarm_kv_recorder"
TEST_BLOCK = 32
"""Test queries whose scores are held in float32 at once."""

Take = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Takes layer, q [Hq, n, D], k and v [Hkv, m, D] and the scale of one full-attention call."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is context, what is resident and how much a test query selects.

    Attributes:
        context: tokens of the context.
        window: most recent tokens, resident.
        sinks: first tokens, resident.
        sparsity: share of the context that a query selects.
        stride: tokens between two test queries.
    """

    context: int
    window: int = 256
    sinks: int = 4
    sparsity: float = 0.10
    stride: int = 16

    def check(self, tokens: int) -> None:
        """Raise ArgumentError unless a text of `tokens` tokens leaves at least one test query."""
        if self.window < 0 or self.sinks < 0 or self.stride < 1:
            raise ArgumentError(
                f"`window` ({self.window}) and `sinks` ({self.sinks}) must be at least 0 and "
                f"`stride` ({self.stride}) at least 1"
            )
        if not 0 < self.sparsity <= 1:
            raise ArgumentError(f"`sparsity` ({self.sparsity}) must be in (0, 1]")
        if self.context <= self.sinks:
            raise ArgumentError(
                f"`context` ({self.context}) must be longer than `sinks` ({self.sinks})"
            )
        if tokens <= self.context + self.window:
            raise ArgumentError(
                f"{tokens} tokens leave no test query: it stands at token `context` + `window` "
                f"({self.context + self.window}) or later; give more tokens or a smaller `context`"
            )

    @property
    def entries(self) -> int:
        """Entries of the context."""
        return self.context - self.sinks

    @property
    def budget(self) -> int:
        """Entries that a test query selects."""
        return min(max(1, math.floor(self.sparsity * self.context + 0.5)), self.entries)


@dataclasses.dataclass(frozen=True)
class Exact:
    """True attention of a layer's test queries, split into entries and what is resident.

    Attributes:
        probs: [Hq, tests, entries] float32, each query's attention to the entries.
        rest_mass: [Hq, tests] float32, attention to resident tokens; adds up to 1 with the above.
        rest_out: [Hq, tests, D] float32, their part of the output.
        out: [Hq, tests, D] float32, the output of full attention.
    """

    probs: torch.Tensor
    rest_mass: torch.Tensor
    rest_out: torch.Tensor
    out: torch.Tensor

    @functools.cached_property
    def mass(self) -> torch.Tensor:
        """[tests, entries] float32: mean over heads of `probs`."""
        return self.probs.mean(0)


@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """What one full-attention layer computed.

    Attributes:
        layer: position among the model's layers.
        q: [Hq, n, D], queries of the last n tokens as attention sees them: rotated, not scaled.
            `record` keeps all T.
        k, v: [Hkv, T, D].
        scale: multiplies q . k.
        settings: of the trace.
        selections: int32 [tests, budget], ascending: the entries of highest attention (mean over
            heads) of each test query.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    settings: Settings
    selections: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """int64 [tests]: tokens of the test queries."""
        return query_positions(self.settings, self.k.shape[1])

    @property
    def keys(self) -> torch.Tensor:
        """[Hkv, entries, D]: keys of the entries."""
        return self.k[:, self.settings.sinks : self.settings.context]

    @functools.cached_property
    def exact(self) -> Exact:
        """True attention of the test queries. Computed once, then kept."""
        return exact_attention(self.q, self.k, self.v, self.scale, self.settings)

    def queries(self) -> torch.Tensor:
        """float32 [tests, Hq, D]: the test queries, scaled."""
        return (self.at(self.positions).float() * self.scale).transpose(0, 1).contiguous()

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """[Hq, len(positions), D]: queries of the tokens `positions`, which must be among them."""
        return self.q[:, positions - self.first]

    @property
    def first(self) -> int:
        """Token of the first query."""
        return self.k.shape[1] - self.q.shape[1]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Recorded layers of one model on one text.

    Attributes:
        model: name of the model.
        tokens: digest of all token ids, see `texts.digest`.
        versions: of the programs that recorded it.
        settings: shared by all layers.
        layers: by position in the model.
    """

    model: str
    tokens: str
    versions: dict[str, str]
    settings: Settings
    layers: dict[int, LayerTrace]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file that only its owner may read.

        Raises:
            OSError: the folder does not exist, is not writable or is full.
        """
        tensors: dict[str, torch.Tensor] = {}
        for number, layer in self.layers.items():
            for name in _TENSORS:
                tensors[f"{number}.{name}"] = getattr(layer, name)
        fields = {
            "model": self.model,
            "tokens": self.tokens,
            "versions": self.versions,
            "settings": dataclasses.asdict(self.settings),
            "scales": {str(number): layer.scale for number, layer in self.layers.items()},
        }
        tensor_file.save(path, KIND, VERSION, tensors, fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote.

        Raises:
            ArgumentError: no trace, another version, or missing, unknown or ill-shaped tensors.
            OSError: the file cannot be read.
        """
        tensors, raw = tensor_file.load(path, KIND, VERSION)
        fields = tensor_file.take(path, raw, _FIELDS)
        settings = Settings(**tensor_file.take(path, fields["settings"], _SETTINGS))
        scales = fields["scales"]
        if not all(key.isdigit() and isinstance(scale, float) for key, scale in scales.items()):
            raise ArgumentError(f"field `scales` of `{path}` is no map of layers to scales")
        wanted = {f"{number}.{name}" for number in scales for name in _TENSORS}
        if wanted != set(tensors):
            raise ArgumentError(
                f"`{path}` lacks the tensors {sorted(wanted - set(tensors))} and has unknown ones "
                f"{sorted(set(tensors) - wanted)}: it was cut short or changed"
            )
        layers = {}
        for number, scale in scales.items():
            parts = {name: tensors[f"{number}.{name}"] for name in _TENSORS}
            layer = LayerTrace(layer=int(number), scale=scale, settings=settings, **parts)
            _check_layer(path, layer)
            layers[int(number)] = layer
        return cls(fields["model"], fields["tokens"], fields["versions"], settings, layers)


_TENSORS = ("q", "k", "v", "selections")
_FIELDS: dict[str, type] = {
    "model": str,
    "tokens": str,
    "versions": dict,
    "settings": dict,
    "scales": dict,
}
_SETTINGS: dict[str, type] = {
    "context": int,
    "window": int,
    "sinks": int,
    "sparsity": float,
    "stride": int,
}


def _check_layer(path: object, layer: LayerTrace) -> None:
    q, k, v, selections = layer.q, layer.k, layer.v, layer.selections
    named = f"layer {layer.layer} of `{path}`"
    if not q.ndim == k.ndim == v.ndim == 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        shapes = [list(tensor.shape) for tensor in (q, k, v)]
        raise ArgumentError(f"{named} has q, k and v of shapes {shapes}, which do not match")
    if 0 in q.shape or 0 in k.shape or q.shape[0] % k.shape[0]:
        raise ArgumentError(f"{named} has {q.shape[0]} query heads for {k.shape[0]} KV heads")
    if not all(tensor.is_floating_point() for tensor in (q, k, v)):
        raise ArgumentError(f"{named} has q, k and v of types {q.dtype}, {k.dtype}, {v.dtype}")
    layer.settings.check(k.shape[1])
    if not 0 <= layer.first <= int(layer.positions[0]):
        raise ArgumentError(
            f"{named} has {q.shape[1]} queries for {k.shape[1]} tokens, its first test query "
            f"is that of token {int(layer.positions[0])}"
        )
    expected = [len(layer.positions), layer.settings.budget]
    if selections.dtype != torch.int32 or list(selections.shape) != expected:
        raise ArgumentError(
            f"{named} has selections {selections.dtype} {list(selections.shape)}, expected "
            f"torch.int32 {expected}"
        )
    if int(selections.min()) < 0 or int(selections.max()) >= layer.settings.entries:
        raise ArgumentError(f"{named} selects entries outside 0 to {layer.settings.entries - 1}")


def query_positions(settings: Settings, tokens: int) -> torch.Tensor:
    """int64 [tests]: every `stride`-th token from `context + window` on."""
    return torch.arange(settings.context + settings.window, tokens, settings.stride)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, settings: Settings
) -> Exact:
    """True attention of the test queries, in float32, block by block.

    Args:
        q: [Hq, n, D], of the last n tokens, the test queries among them.
        k, v: [Hkv, T, D].
        scale, settings: see `LayerTrace`.
    """
    kv_heads, tokens, _ = k.shape
    positions = query_positions(settings, tokens)
    queries = q[:, positions - (tokens - q.shape[1])].float() * scale
    stored = slice(settings.sinks, settings.context)
    heads = []
    for number, own in enumerate(queries.view(kv_heads, -1, *queries.shape[1:])):
        keys, values = k[number].float(), v[number].float()
        blocks = []
        for begin in range(0, len(positions), TEST_BLOCK):
            at = positions[begin : begin + TEST_BLOCK, None]
            seen = int(at[-1]) + 1
            scores = own[:, begin : begin + TEST_BLOCK] @ keys[:seen].T
            probs = scores.masked_fill_(torch.arange(seen) > at, -math.inf).softmax(-1)
            out = probs @ values[:seen]
            entries = probs[:, :, stored].clone()
            probs[:, :, stored] = 0
            blocks.append((entries, probs.sum(-1), probs @ values[:seen], out))
        heads.append([torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)])
    return Exact(*(torch.cat(parts) for parts in zip(*heads, strict=True)))


@contextlib.contextmanager
def capturing(model: Any, take: Take) -> Iterator[None]:
    """Let the model attend exactly and give every full-attention call to `take`.

    Works block by block, so that no matrix of tokens x tokens exists. When the context ends, also
    by an error, the model and transformers' registries are as they were.

    Args:
        model: a model of transformers that uses its attention interface; one sequence per call.
        take: called after each full-attention call.

    Raises:
        StateError: the model is patched.
        ArgumentError: the model has no full-attention layer, does not use the interface, or
            changes scores (a soft cap, gpt-oss's sinks), which a trace does not hold.
    """
    if compat.attention_name(model) == ATTENTION_NAME:
        raise StateError("this model attends through swarm_kv: call swarm_kv.unpatch(model) first")

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        number: Any = module.layer_idx
        full = number in layers
        if full and (softcap is not None or s_aux is not None):
            raise ArgumentError(
                f"`{type(model).__name__}` changes its scores by "
                f"{'a soft cap' if s_aux is None else 'sink logits'}: recording is for models "
                "whose attention is the softmax of scale * q . k"
            )
        if full and attention_mask is None and query.shape[2] == key.shape[2]:
            out, _ = dense_attention(
                query[0], key[0], value[0], scale=scale, causal=True, softcap=None
            )
            output = out.transpose(0, 1)[None].to(query.dtype)
        else:
            output, _ = swarm_attention(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                s_aux=s_aux,
                **kwargs,
            )
        if full:
            take(number, query[0], key[0], value[0], scale)
        return output, None

    layers = set(full_attention_layers(model.config))
    if not layers:
        raise ArgumentError(f"`{type(model).__name__}` has no full-attention layer to record")
    before = compat.attention_name(model)
    with compat.registered(RECORDER, attention, swarm_mask):
        try:
            model.set_attn_implementation(RECORDER)
            if compat.attention_name(model) != RECORDER:
                raise ArgumentError(
                    f"`{type(model).__name__}` cannot be recorded: its code does not use "
                    "transformers' attention interface"
                )
            yield
        finally:
            model.set_attn_implementation(before)


@torch.no_grad()
def record(
    model: Any,
    ids: torch.Tensor,
    *,
    context: int,
    layers: Sequence[int] | None = None,
    window: int = 256,
    sinks: int = 4,
    sparsity: float = 0.10,
    stride: int = 16,
    dtype: torch.dtype = torch.float16,
    name: str | None = None,
    on_layer: Callable[[int], object] | None = None,
) -> Trace:
    """Run a model once over a text and keep what its full-attention layers saw.

    Args:
        model: a causal language model of transformers, not patched.
        ids (`torch.Tensor`): one sequence, int64 `[T]` or `[1, T]`, longer than
            `context + window`.
        context (`int`): tokens of the context.
        layers (`Sequence[int]`, *optional*): which full-attention layers; all if not given.
        window, sinks, sparsity, stride: see `Settings`.
        dtype (`torch.dtype`, *optional*): of the recorded tensors.
        name (`str`, *optional*): of the model; what its config says if not given.
        on_layer (`Callable`, *optional*): called with the number of each full-attention layer that
            is done, for progress bars.

    Raises:
        ArgumentError: a value outside its limits, a layer without full attention, or a model that
            `capturing` refuses.
        StateError: the model is patched.
    """
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ArgumentError(f"`ids` must be one sequence, [T] or [1, T]; got {list(ids.shape)}")
    settings = Settings(context, window, sinks, sparsity, stride)
    settings.check(ids.shape[1])
    available = full_attention_layers(model.config)
    wanted = list(available if layers is None else layers)
    if not wanted or not set(wanted) <= set(available) or len(set(wanted)) < len(wanted):
        raise ArgumentError(
            f"`layers` ({wanted}) must name full-attention layers of this model, each once: "
            f"{available}"
        )
    found: dict[int, LayerTrace] = {}

    def take(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        if number in wanted:
            kept = (tensor.to("cpu", dtype, copy=True).contiguous() for tensor in (q, k, v))
            found[number] = layer_trace(number, *kept, scale=scale, settings=settings)
        if on_layer is not None:
            on_layer(number)

    with capturing(model, take):
        model(ids.to(model.device), use_cache=False, **compat.last_logits_only(model))
    return Trace(
        model=name or str(model.config.name_or_path) or type(model).__name__,
        tokens=texts.digest(ids),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        settings=settings,
        layers={number: found[number] for number in wanted},
    )


def layer_trace(
    number: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    settings: Settings,
) -> LayerTrace:
    """A `LayerTrace` of these tensors, with its exact selections.

    Raises:
        ArgumentError: a value is NaN or infinite.
    """
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (q, k, v)):
        raise ArgumentError(
            f"layer {number} has values that {q.dtype} cannot hold: record with another `dtype`, "
            "such as torch.float32"
        )
    # From the tensors as they are kept, so that a replay finds the same selections.
    mass = exact_attention(q, k, v, scale, settings).mass
    best = mass.topk(settings.budget, dim=1).indices.sort(dim=1).values
    return LayerTrace(number, q, k, v, scale, settings, best.to(torch.int32))
