"""`SwarmCache`: transformers' cache object whose full-attention layers lie on drives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from . import clusterers, compat, maintenance, selectors
from .config import SwarmConfig
from .errors import ArgumentError, CapacityError, StateError
from .layer import CacheState, SwarmLayer, another_batch
from .meter import Stats
from .store import Store
from .untraced import untraced

if TYPE_CHECKING:
    from .profile import Profile

ATTENTION_NAME = "swarm_kv"
PROGRESS_TOKENS = 2048
"""Prefills from this length on show a progress bar when they take `PROGRESS_SECONDS`."""
PROGRESS_SECONDS = 2.0


def full_attention_layers(config: Any) -> list[int]:
    """Positions of the layers that a `SwarmCache` takes over."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]


KEPT_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"}
"""Classes of transformers' cache layers beside which, or in whose place, a `SwarmLayer` works."""


def unknown_layers(config: Any) -> list[str]:
    """Classes of the model's cache layers that a `SwarmCache` does not know."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return sorted({type(layer).__name__ for layer in layers} - KEPT_LAYERS)


def entry_shape(model_config: Any) -> tuple[int, int]:
    """KV heads, and numbers per head, of an entry's keys (and of its values)."""
    text = model_config.get_text_config(decoder=True)
    return _kv_heads(text), _head_dim(text)


def entry_bytes(model_config: Any, dtype: torch.dtype, kv_heads: int | None = None) -> int:
    """Bytes of K and V of one token in one layer, all KV heads or `kv_heads` of them."""
    text = model_config.get_text_config(decoder=True)
    return 2 * (kv_heads or _kv_heads(text)) * _head_dim(text) * dtype.itemsize


def kv_bytes(
    model_config: Any, dtype: torch.dtype, tokens: int, kv_heads: int | None = None
) -> int:
    """Bytes of K and V of `tokens` tokens in all full-attention layers."""
    layers = len(full_attention_layers(model_config))
    return layers * entry_bytes(model_config, dtype, kv_heads) * tokens


def least_kv_heads(model_config: Any) -> int:
    """KV heads that this process holds at least.

    With tensor parallelism a rank has a part of the model's. Whether it has is known when the first
    keys come.
    """
    heads = _kv_heads(model_config.get_text_config(decoder=True))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return max(1, heads // torch.distributed.get_world_size())
    return heads


def _kv_heads(text: Any) -> int:
    # Configs without grouped queries (GPT-2, OPT) do not have the name.
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


_SHAPE: dict[str, Callable[[Any], int]] = {
    "layers": lambda text: text.num_hidden_layers,
    "KV heads": _kv_heads,
    "numbers per head": _head_dim,
}
"""What two models must have in common to take turns with a cache."""

LEAST_INDEX_BYTES = 58
"""Index memory of one stored entry, its codes not counted, when it has a single copy."""


def minimum_dram_bytes(
    model_config: Any,
    config: SwarmConfig,
    dtype: torch.dtype,
    context: int = 0,
    kv_heads: int | None = None,
) -> int:
    """Smallest `dram_bytes` for one sequence: staging, sinks and window, and an index.

    Args:
        model_config (`PretrainedConfig`): `model.config`.
        config (`SwarmConfig`): settings.
        dtype (`torch.dtype`): of the model's keys and values.
        context (`int`, *optional*, defaults to 0): tokens. Replicas and centroids add to what
            their index takes at least.
        kv_heads (`int`, *optional*): that this process holds, where these are not all of them.
    """
    text = model_config.get_text_config(decoder=True)
    resident = config.sinks + config.window + config.flush
    codes = (kv_heads or _kv_heads(text)) * config.code_size(_head_dim(text))
    index = max(0, context - resident) * (codes + LEAST_INDEX_BYTES)
    layers = len(full_attention_layers(model_config))
    window = kv_bytes(model_config, config.stored_dtype(dtype), resident, kv_heads)
    return config.dram_beside(window + layers * index)


class SwarmCache(Cache):
    """A cache that keeps keys and values of full-attention layers on several drives.

    Sliding-window, chunked and linear layers stay transformers' own, in memory. Pass it to a model
    that runs with `attn_implementation="swarm_kv"`: `model.generate(..., cache=cache)`.

    Args:
        model_config (`PretrainedConfig`): `model.config`.
        config (`SwarmConfig`, *optional*): opens a store for this cache alone.
        store (`Store`, *optional*): a store to share with other caches.
        dtype (`torch.dtype`, *optional*): of the model, to check `dram_bytes` before it is needed.
        profile (`swarm_kv.profile.Profile`, *optional*): of the context that this cache will be
            filled with first: what probe texts activate in it counts when it is clustered. That it
            is the same context is for the caller to check, by `profile.matches(ids)`.

    Raises:
        ArgumentError: neither or both of `config` and `store`; the model has no full-attention
            layer; the profile was made with other settings or lacks a layer.
        CapacityError: `dram_bytes` is below the minimum, which the message names.
        StorageError: a path cannot be used.
    """

    def __init__(
        self,
        model_config: Any,
        config: SwarmConfig | None = None,
        *,
        store: Store | None = None,
        dtype: torch.dtype | None = None,
        profile: Profile | None = None,
    ) -> None:
        if (config is None) == (store is None):
            raise ArgumentError("SwarmCache needs either `config` or `store`")
        self.model_config = model_config.get_text_config(decoder=True)
        taken = set(full_attention_layers(model_config))
        if not taken:
            raise ArgumentError(
                f"`{self.model_config.model_type}` has no full-attention layer: its cache does not "
                "grow with the context, so there is nothing to keep on drives"
            )
        settings = config if config is not None else store.config  # type: ignore[union-attr]
        selector = selectors.resolve(settings.selector)
        clusterers.resolve(settings.clusterer)  # or an error before anything is stored
        maintenance.resolve(settings.maintenance)
        dtype = dtype or self.model_config.dtype or torch.float32
        check_dram(model_config, settings, dtype, kv_heads=least_kv_heads(model_config))
        self.store = store if store is not None else Store(settings)
        self.state = CacheState(profile=checked_profile(profile, taken, settings))
        self._progress: tqdm[Any] | None = None
        self._model_dtype: torch.dtype | None = None
        layers = [
            SwarmLayer(self.store, number, selector, self.state) if number in taken else layer
            for number, layer in enumerate(DynamicCache(config=self.model_config).layers)
        ]
        self._first, self._last = min(taken), max(taken)
        super().__init__(layers=layers)

    @untraced
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage one layer's new keys and values; see `SwarmLayer.update`.

        Raises:
            StateError: the model's attention is not swarm_kv's, so it would see the newest tokens
                only; or an earlier step failed.
            ArgumentError: the model has more layers than the one this cache was made for.
        """
        if layer_idx <= self._first:
            check_attention(self.model_config)
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"this cache was made for a model with {len(self.layers)} layers, the model has a "
                f"layer {layer_idx}: make a SwarmCache with its own config"
            )
        self._check_step(layer_idx)
        tokens = key_states.shape[-2]
        if layer_idx == self._first and tokens > self.store.config.window:
            heads, dtype = key_states.shape[1], key_states.dtype
            check_dram(self.model_config, self.store.config, dtype, tokens, heads)
        self._count(layer_idx, tokens)
        result: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return result

    @untraced
    def check_call(self, model: Any, batch: int | None) -> None:
        """Refuse a call of a model that this cache does not fit, before a layer has seen it.

        Args:
            model (`PreTrainedModel`): that is called.
            batch: sequences of the call; None if not known.

        Raises:
            ArgumentError: the cache was made for a model of another shape, or holds tokens in
                another dtype or batch.
            StateError: the model's attention is not swarm_kv's.
        """
        text, dtype = model.config.get_text_config(decoder=True), model.dtype
        check_attention(text)
        if text is not self.model_config:
            for what, count in _SHAPE.items():
                found, wanted = count(text), count(self.model_config)
                if found != wanted:
                    raise ArgumentError(
                        f"this cache was made for a model with {wanted} {what}, this one has "
                        f"{found}: make a cache for it with swarm.new_cache()"
                    )
        layer: Any = self.layers[self._first]
        if layer.get_seq_length() == 0:
            self._model_dtype = dtype
            return
        if self._model_dtype not in (None, dtype):
            raise ArgumentError(
                f"this cache was begun by a model in {self._model_dtype}, which is in {dtype} now: "
                "cast it back, or unpatch it and patch it again"
            )
        if batch not in (None, layer.batch):
            raise another_batch(layer.batch, batch)

    def _check_step(self, layer_idx: int) -> None:
        """Refuse to go on from a step that some layers have and others lost (Ctrl-C in between)."""
        state, length = self.state, self.get_seq_length(layer_idx)
        if layer_idx <= state.reached or state.reached < 0:
            state.length = length
        elif length != state.length and state.failure is None:
            state.failure = (
                f"an earlier step was interrupted: layer {layer_idx} has {length} tokens where the "
                f"layers before it have {state.length}"
            )
        state.reached = layer_idx
        if state.failure is not None:
            raise StateError(
                f"this cache cannot go on after an error ({state.failure}): start a new cache"
            )

    def reset(self) -> None:
        """Forget everything, also that a step failed."""
        super().reset()  # type: ignore[no-untyped-call]
        vars(self.state).update(vars(CacheState()))

    def _count(self, layer_idx: int, tokens: int) -> None:
        """Steps, and the progress bar of a long prefill."""
        if layer_idx == self._first:
            layer: Any = self.layers[layer_idx]
            if layer.decodes(layer.get_seq_length(), tokens):
                self.store.meter.steps += 1
                self.state.step += 1
            if self._progress is None and tokens >= PROGRESS_TOKENS:
                self._progress = tqdm(
                    total=len(self.layers),
                    desc=f"prefill and clustering of {tokens} tokens",
                    unit="layer",
                    disable=None,  # silent unless standard error is a terminal
                    delay=PROGRESS_SECONDS,
                    leave=False,
                )
        if self._progress is not None:
            self._progress.update(layer_idx - self._progress.n)
            if layer_idx == self._last:
                self._progress.close()
                self._progress = None

    def crop(self, n: int) -> None:
        """Drop the newest tokens.

        Args:
            n: minus the number of tokens to drop, or the length to keep; see
                `compat.cropped_length`.

        Raises:
            ArgumentError: there are fewer tokens, or a layer of transformers' own cannot go back.
                Nothing has changed then.
        """
        length = self.get_seq_length()
        count = length - compat.cropped_length(length, n)
        if count:
            self._check_crop(count)
        layer: Any
        for layer in self.layers:
            # A layer that records its past goes back to its usual size even by 0 tokens.
            if count or getattr(layer, "record_past", False):
                layer.crop(-count)

    def _check_crop(self, count: int) -> None:
        for number, layer in enumerate(self.layers):
            if isinstance(layer, SwarmLayer):
                continue
            reason = compat.crop_refusal(layer, count)
            if reason is not None:
                raise ArgumentError(
                    f"{count} tokens cannot be cropped: layer {number} {reason}. A copy "
                    "(copy.deepcopy(cache)) that is made before them can be gone back to"
                )

    def stats(self) -> Stats:
        """State and totals of the store."""
        return self.store.stats()

    def __deepcopy__(self, memo: dict[int, Any]) -> SwarmCache:
        """A fork: what is stored is shared, both grow on their own."""
        other = copy.copy(self)
        other._progress = None
        other.state = copy.deepcopy(self.state, memo)
        other.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return other


def check_attention(text_config: Any) -> None:
    """Refuse a model whose attention would see the newest tokens only.

    Raises:
        StateError: names the attention and the way to swarm_kv's.
    """
    found = text_config._attn_implementation
    if found != ATTENTION_NAME:
        raise StateError(
            f'SwarmCache needs attn_implementation="{ATTENTION_NAME}" but the model runs with '
            f'"{found}": call swarm_kv.patch(model, config), or '
            f'model.set_attn_implementation("{ATTENTION_NAME}")'
        )


def check_dram(
    model_config: Any,
    config: SwarmConfig,
    dtype: torch.dtype,
    context: int = 0,
    kv_heads: int | None = None,
) -> None:
    """Refuse a `dram_bytes` that cannot hold one sequence of `context` tokens.

    Takes the arguments of `minimum_dram_bytes`.

    Raises:
        CapacityError: names the value and the minimum.
    """
    minimum = minimum_dram_bytes(model_config, config, dtype, context, kv_heads)
    assert isinstance(config.dram_bytes, int)
    if config.dram_bytes < minimum:
        what = f"a context of {context} tokens of this model" if context else "this model"
        raise CapacityError(
            f"`dram_bytes` ({config.dram_bytes}) is below the minimum of {minimum} for {what} "
            f"with `window={config.window}`: raise it, or lower `window` or `staging_bytes`"
        )


def checked_profile(
    profile: Profile | None, layers: set[int], config: SwarmConfig
) -> Profile | None:
    """The profile itself.

    Raises:
        ArgumentError: it was made with another `sparsity`, `window` or `sinks`, or lacks a layer.
    """
    if profile is None:
        return None
    for name in ("sparsity", "window", "sinks"):
        if getattr(profile, name) != getattr(config, name):
            raise ArgumentError(
                f"the profile was made with `{name}` {getattr(profile, name)}, this cache has "
                f"{getattr(config, name)}: make them equal"
            )
    for layer in sorted(layers):
        profile.bits_for(layer)
    return profile
