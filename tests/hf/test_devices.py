"""Models whose weights accelerate keeps elsewhere: on the CPU, on a disk, a part here and there."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import swarm_kv
from swarm_kv import compat
from tests.hf.test_equivalence import settings, teacher_forced

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

PROMPT, STEPS = 200, 12  # of `teacher_forced`
LAYERS = 4


def on_cpu(model: Any, folder: pathlib.Path) -> None:
    accelerate.cpu_offload(model, torch.device("cpu"))


def on_disk(model: Any, folder: pathlib.Path) -> None:
    accelerate.disk_offload(model, str(folder), torch.device("cpu"), offload_buffers=True)


def whole_layers(model: Any, folder: pathlib.Path) -> None:
    kinds = [type(model.model.layers[0]).__name__]
    accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=kinds)


def two_devices(model: Any, folder: pathlib.Path) -> None:
    """Layers 2 and 3 lie on a disk, the others in memory."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    for number in range(LAYERS):
        places[f"model.layers.{number}"] = "cpu" if number < 2 else "disk"
    accelerate.dispatch_model(model, places, offload_dir=str(folder))


def one_hook(model: Any, folder: pathlib.Path) -> None:
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(torch.device("cpu")), append=True)


WAYS = {way.__name__: way for way in (on_cpu, on_disk, whole_layers, two_devices, one_hook)}
OFFLOADED = ("on_cpu", "on_disk", "whole_layers")
"""Ways that leave no weight in memory between calls."""


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def weights(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("first", ["patched first", "placed first"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_equal_the_stock_models(
    way: str, first: str, ids: Tensor, drives: list[str], weights: pathlib.Path, tiny_model: Any
) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    place: Callable[..., None] = WAYS[way]
    if first == "placed first":
        place(model, weights)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        if first == "patched first":
            place(model, weights)
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
        assert swarm.stats().bytes_per_step > 0
    assert model.config._attn_implementation == "sdpa"
    assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
    hooks.remove_hook_from_submodules(model)
    assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9


def test_generate_with_weights_on_two_devices(
    ids: Tensor, drives: list[str], weights: pathlib.Path, tiny_model: Any
) -> None:
    model = tiny_model("gemma3")
    call = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    expected = model.generate(ids[:, :PROMPT], num_beams=2, **call)
    two_devices(model, weights)
    with swarm_kv.patch(model, settings(drives)):
        assert torch.equal(model.generate(ids[:, :PROMPT], num_beams=2, **call), expected)


@pytest.mark.parametrize("way", WAYS)
def test_layers_without_weights_in_memory_are_not_prefetched(
    way: str,
    ids: Tensor,
    drives: list[str],
    weights: pathlib.Path,
    tiny_model: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Layer 1 is predicted by the query of the token before, which needs no weights."""
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    WAYS[way](model, weights)
    config = settings(drives, prefetch="post_attention")
    with caplog.at_level(logging.WARNING), swarm_kv.patch(model, config) as swarm:
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
        prefetches = swarm.stats().prefetch.prefetches
    layers = 1 if way in OFFLOADED else 2 if way == "two_devices" else LAYERS
    assert prefetches == STEPS * layers
    notes = [record for record in caplog.records if "not prefetched" in record.message]
    assert len(notes) == (layers < LAYERS)


def test_a_stock_cache_without_layers_yet(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    """A plain `DynamicCache()` grows layer by layer, and has none where one is read ahead for."""
    model = tiny_model("qwen3")
    name = compat.cache_arg(model)
    expected = model(ids).logits
    with torch.no_grad(), swarm_kv.patch(model, settings(drives, prefetch="post_attention")):
        got = model(ids, **{name: DynamicCache()}).logits
    assert (got - expected).abs().max() < 1e-9
