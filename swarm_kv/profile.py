"""Profiles of a context by probe texts: which of its entries real questions activate together.

A prefill profiles a context by its own last queries. For a context that is kept and asked many
times, `profile_context` asks it some typical questions (probes) once; clusters can then be made of
what these activated, as `swarm_kv.ops.cluster` takes it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from . import compat, ops, tensor_file, texts
from .errors import ArgumentError
from .trace import capturing

KIND = "swarm_kv profile"
VERSION = 1
PREFILL_CHUNK = 4096
"""Tokens per forward pass over the context; bounds the activations."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Which entries of a context the probe queries activated, per full-attention layer.

    Attributes:
        model: name of the model.
        tokens: digest of the context's token ids, see `texts.digest`.
        entries: tokens of the context; row i of `bits` is token i.
        queries: probe queries.
        sparsity, window, sinks: as for `swarm_kv.ops.activation_signatures`.
        bits: int64 [entries, words] by layer. At least `queries` bits per row are in use; a merge
            leaves unused ones, which are 0, between the parts.
    """

    model: str
    tokens: str
    entries: int
    queries: int
    sparsity: float
    window: int
    sinks: int
    bits: dict[int, torch.Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> Profile:
        """The same: it never changes, and caches that are forked share it."""
        return self

    def bits_for(self, layer_idx: int) -> torch.Tensor:
        """int64 [entries, words]: signatures of layer `layer_idx`.

        Raises:
            ArgumentError: the profile does not have this layer.
        """
        if layer_idx not in self.bits:
            raise ArgumentError(f"this profile has no layer {layer_idx}, only {sorted(self.bits)}")
        return self.bits[layer_idx]

    def matches(self, ids: torch.Tensor) -> bool:
        """Whether the token ids `[T]` or `[1, T]` begin with the context that was profiled."""
        flat = ids.reshape(-1)
        return flat.numel() >= self.entries and texts.digest(flat[: self.entries]) == self.tokens

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file that only its owner may read.

        Raises:
            OSError: the folder does not exist, is not writable or is full.
        """
        fields = {name: getattr(self, name) for name in _FIELDS}
        tensors = {str(layer): bits for layer, bits in self.bits.items()}
        tensor_file.save(path, KIND, VERSION, tensors, fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote.

        Raises:
            ArgumentError: no profile, another version, or ill-shaped tensors.
            OSError: the file cannot be read.
        """
        tensors, raw = tensor_file.load(path, KIND, VERSION)
        fields = tensor_file.take(path, raw, _FIELDS)
        words = -(-fields["queries"] // 64)
        for name, bits in tensors.items():
            shaped = bits.ndim == 2 and bits.shape[0] == fields["entries"]
            if not name.isdigit() or bits.dtype != torch.int64 or not shaped:
                raise ArgumentError(
                    f"tensor `{name}` of `{path}` is {bits.dtype} {list(bits.shape)}; a profile "
                    f"has int64 [{fields['entries']}, words], named by layer"
                )
            if bits.shape[1] < words:
                raise ArgumentError(
                    f"tensor `{name}` of `{path}` has {bits.shape[1]} words, but "
                    f"{fields['queries']} queries take {words}"
                )
        if not tensors:
            raise ArgumentError(f"`{path}` is a profile without layers")
        return cls(**fields, bits={int(name): bits for name, bits in tensors.items()})


_FIELDS: dict[str, type] = {
    "model": str,
    "tokens": str,
    "entries": int,
    "queries": int,
    "sparsity": float,
    "window": int,
    "sinks": int,
}
_SAME = ("model", "tokens", "entries", "sparsity", "window", "sinks")


def merge(first: Profile, second: Profile) -> Profile:
    """One profile of both profiles' queries.

    Raises:
        ArgumentError: they are of different contexts, models, settings or layers; names the field.
    """
    for name in _SAME:
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            raise ArgumentError(
                f"profiles differ in `{name}` ({one!r} and {other!r}): only profiles of one "
                "context, made with the same model and settings, can be merged"
            )
    if set(first.bits) != set(second.bits):
        raise ArgumentError(
            f"profiles differ in `layers` ({sorted(first.bits)} and {sorted(second.bits)})"
        )
    return dataclasses.replace(
        first,
        queries=first.queries + second.queries,
        bits={n: torch.cat([bits, second.bits[n]], dim=1) for n, bits in first.bits.items()},
    )


@torch.no_grad()
def profile_context(
    model: Any,
    tokenizer: Any,
    context_ids: torch.Tensor,
    probes: Sequence[str | torch.Tensor],
    *,
    sparsity: float = 0.10,
    window: int = 256,
    sinks: int = 4,
    name: str | None = None,
) -> Profile:
    """Read a context once, then each probe after it, and note which entries the probes activate.

    Every probe begins right behind the context: it does not see the other probes.

    Args:
        model: a causal language model of transformers, not patched.
        tokenizer: the model's tokenizer; needed only for probes that are text.
        context_ids (`torch.Tensor`): int64 `[N]` or `[1, N]`.
        probes: texts, or token ids `[n]` or `[1, n]`; each of their tokens is one query.
        sparsity, window, sinks: as for `swarm_kv.ops.activation_signatures`.
        name (`str`, *optional*): of the model; what its config says if not given.

    Raises:
        ArgumentError: no probes, an empty context or probe, or a model that
            `swarm_kv.trace.capturing` refuses.
        StateError: the model is patched.
    """
    context = context_ids.reshape(1, -1).to(model.device)
    if context.numel() == 0:
        raise ArgumentError("`context_ids` is empty: give the tokens of the context")
    if not probes:
        raise ArgumentError("`probes` is empty: give at least one text to ask about the context")
    asked = [_ids(tokenizer, probe).to(model.device) for probe in probes]
    queries: dict[int, list[torch.Tensor]] = {}
    scales: dict[int, float] = {}
    probing = False

    def take(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        if probing:
            queries.setdefault(layer, []).append(q.cpu())
            scales[layer] = scale

    def feed(ids: torch.Tensor, cache: DynamicCache) -> None:
        kwargs = {compat.cache_arg(model): cache, **compat.last_logits_only(model)}
        model(ids, use_cache=True, **kwargs)

    cache: Any = DynamicCache(config=model.config)
    with capturing(model, take):
        for part in torch.split(context, PREFILL_CHUNK, dim=1):
            feed(part, cache)
        probing = True
        for ids in asked:
            # Sliding layers cannot be cropped back, so that each probe gets a copy.
            feed(ids, copy.deepcopy(cache))

    length = context.shape[1]
    positions = torch.cat([torch.arange(length, length + ids.shape[1]) for ids in asked])
    bits = {
        layer: ops.activation_signatures(
            torch.cat(parts, dim=1),
            cache.layers[layer].keys[0].cpu(),
            positions,
            sparsity=sparsity,
            window=window,
            sinks=sinks,
            scale=scales[layer],
        )
        for layer, parts in queries.items()
    }
    return Profile(
        model=name or str(model.config.name_or_path) or type(model).__name__,
        tokens=texts.digest(context),
        entries=length,
        queries=len(positions),
        sparsity=sparsity,
        window=window,
        sinks=sinks,
        bits=bits,
    )


def _ids(tokenizer: Any, probe: str | torch.Tensor) -> torch.Tensor:
    if isinstance(probe, str):
        ids = torch.tensor([texts.encode(tokenizer, probe)], dtype=torch.int64)
    else:
        ids = probe.reshape(1, -1)
    if ids.numel() == 0:
        raise ArgumentError("a probe is empty: give at least one token")
    return ids
