"""`patch`: let a model's calls use a `SwarmCache` until `unpatch`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from . import clusterers, compat, maintenance, predictors, selectors
from .attention import NO_WEIGHTS
from .cache import (
    ATTENTION_NAME,
    SwarmCache,
    check_dram,
    full_attention_layers,
    least_kv_heads,
    unknown_layers,
)
from .config import SwarmConfig
from .errors import ArgumentError, StateError
from .meter import Stats
from .prefetch import Prefetcher
from .store import Store
from .untraced import untraced

if TYPE_CHECKING:
    from .profile import Profile

logger = logging.getLogger(__name__)

_HANDLE = "_swarm_kv"
OWN_ATTENTION = {
    "diffllama": "it splits values between two attentions after its cache took them",
    "doge": "it hides tokens by a mask that it makes from all values",
    "jetmoe": "it repeats keys and values for its experts after its cache took them",
}
"""Models, by `model_type`, that use transformers' interface for an attention of their own."""


class Swarm:
    """A patched model's store; a context manager that unpatches at its end.

    Attributes:
        model: the patched model.
        store (`Store`): shared by all caches that its calls make.
        config (`SwarmConfig`): the settings.
    """

    def __init__(self, model: Any, config: SwarmConfig) -> None:
        self.model = model
        self.config = config
        self.store = Store(config)
        self._undo: list[Callable[[], Any]] = []

    def new_cache(self, profile: Profile | None = None) -> SwarmCache:
        """An empty cache in this store, to pass to a call and to keep across calls.

        Args:
            profile: of the context that it will hold, see `SwarmCache`.
        """
        return SwarmCache(
            self.model.config, store=self.store, dtype=self.model.dtype, profile=profile
        )

    def stats(self) -> Stats:
        """Bytes, requests, rates and memory; see `Stats`."""
        return self.store.stats()

    def unpatch(self) -> None:
        """Undo `patch`; the model is as it was. The store closes, its caches end. Idempotent."""
        if getattr(self.model, _HANDLE, None) is self:
            delattr(self.model, _HANDLE)
        while self._undo:
            self._undo.pop()()
        self.store.close()

    def __enter__(self) -> Swarm:
        """The handle itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Unpatch."""
        self.unpatch()


def refusal(model: Any) -> str | None:
    """Why `model` cannot be patched, or None when it can."""
    if not hasattr(model, "_prepare_cache_for_generation"):
        return "it has no `generate`: swarm_kv needs a transformers model with a causal head"
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, whose two caches swarm_kv does not handle"
    if text.model_type in OWN_ATTENTION:
        return OWN_ATTENTION[text.model_type]
    if getattr(text, "kv_lora_rank", None):
        return "it uses multi-head latent attention (`kv_lora_rank`), which stores no keys per head"
    if getattr(text, "num_kv_shared_layers", 0):
        return "its layers share keys and values (`num_kv_shared_layers`)"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return "it has layers that attend within chunks of the text (`chunked_attention`)"
    if not model._supports_default_dynamic_cache():
        return "it keeps a cache of a kind of its own"
    unknown = unknown_layers(config)
    if unknown:
        return f"its cache has layers of a kind that swarm_kv does not know ({', '.join(unknown)})"
    if not full_attention_layers(config):
        return "it has no full-attention layer, so its cache does not grow with the context"
    return None


def patch(model: Any, config: SwarmConfig) -> Swarm:
    """Make `model` keep its KV cache on drives.

    After this `generate`, `pipeline` and plain calls of the model make a `SwarmCache` unless given
    a cache of their own. Calls that train (training mode, gradients on) do not, and attend exactly.
    The model's code, weights and config stay untouched.

    Args:
        model (`PreTrainedModel`): a decoder-only model with full-attention layers.
        config (`SwarmConfig`): settings.

    Returns:
        `Swarm`: use it in a `with` statement, or call `unpatch(model)` at the end.

    Raises:
        ArgumentError: the model is not supported, or a setting is wrong; says why.
        CapacityError: `dram_bytes` is below the minimum, which the message names.
        StateError: the model is patched already.
        StorageError: a path does not exist, is not writable or is full.

    Example:
        ```python
        config = swarm_kv.SwarmConfig(paths=["/mnt/nvme0", "/mnt/nvme1"])
        with swarm_kv.patch(model, config) as swarm:
            output = model.generate(**inputs, max_new_tokens=64)
            print(swarm.stats())
        ```
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if getattr(model, _HANDLE, None) is not None:
        raise StateError("this model is patched already: call swarm_kv.unpatch(model) first")
    reason = refusal(model)
    if reason is not None:
        raise ArgumentError(f"`{type(model).__name__}` cannot be patched: {reason}")
    selectors.resolve(config.selector)
    clusterers.resolve(config.clusterer)
    maintenance.resolve(config.maintenance)
    predictors.resolve(config.predictor)
    check_dram(model.config, config, model.dtype, kv_heads=least_kv_heads(model.config))
    before = compat.attention_name(model)
    swarm = Swarm(model, config)
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        swarm._undo.append(lambda: model.set_attn_implementation(before))
        if compat.attention_name(model) != ATTENTION_NAME:
            raise ArgumentError(
                f"`{type(model).__name__}` cannot be patched: its code does not use transformers' "
                "attention interface"
            )
        _use_cache_in_generate(model, swarm)
        _use_cache_in_forward(model, swarm)
        swarm._undo.append(Prefetcher(model, config).remove)
    except BaseException:
        swarm.unpatch()
        raise
    setattr(model, _HANDLE, swarm)
    return swarm


def unpatch(model: Any) -> Any:
    """Undo `patch` and return the model.

    Raises:
        StateError: the model is not patched.
    """
    swarm = getattr(model, _HANDLE, None)
    if swarm is None:
        raise StateError("this model is not patched")
    swarm.unpatch()
    return model


def _use_cache_in_generate(model: Any, swarm: Swarm) -> None:
    name = compat.cache_arg(model)
    original = model._prepare_cache_for_generation

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        kind = generation_config.cache_implementation
        if kind in ALL_STATIC_CACHE_IMPLEMENTATIONS:  # the model would keep a half-made one
            raise ArgumentError(
                f"swarm_kv does not work with StaticCache (`cache_implementation={kind!r}`): leave "
                "`cache_implementation` unset, or unpatch the model"
            )
        if (
            model_kwargs.get(name) is None
            and generation_config.use_cache is not False
            and kind in (None, "dynamic")
        ):
            model_kwargs[name] = swarm.new_cache()
            generation_config.cache_implementation = None
            if getattr(generation_config, "is_assistant", False):
                compat.keep_past(model_kwargs[name])  # what it drafts goes back at every step
        return original(generation_config, model_kwargs, *args, **kw)

    model._prepare_cache_for_generation = prepare
    swarm._undo.append(lambda: model.__dict__.pop("_prepare_cache_for_generation", None))


def _use_cache_in_forward(model: Any, swarm: Swarm) -> None:
    name, position = compat.cache_arg(model), compat.cache_position(model)
    default = model.config.get_text_config(decoder=True).use_cache

    @untraced
    def inject(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        wanted = kwargs.get("use_cache")
        given = compat.given_cache(position, args, kwargs)
        weights = kwargs.get("output_attentions")
        if module.config.output_attentions if weights is None else weights:
            raise ArgumentError(NO_WEIGHTS)
        if isinstance(given, SwarmCache):
            given.check_call(module, _batch(args, kwargs))
        elif module.training and torch.is_grad_enabled():
            pass  # what is on drives has no gradient
        elif given is None and (default if wanted is None else wanted):
            kwargs[name] = swarm.new_cache()
        return args, kwargs

    hook = model.register_forward_pre_hook(inject, with_kwargs=True)
    swarm._undo.append(hook.remove)


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Sequences of a call, by its tokens or their embeddings; None where it has neither."""
    for given in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]):
        if given is not None:
            return int(given.shape[0])
    return None
