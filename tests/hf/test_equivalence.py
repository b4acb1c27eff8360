"""At sparsity 1.0 a patched model equals the stock one, also where `test_table` does not look."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import swarm_kv
from swarm_kv import compat
from tests.hf.helpers import PROMPT, left_padded, settings, teacher_forced


@pytest.mark.parametrize("chunk", [None, 50, 8], ids=["whole", "chunks-50", "chunks-8"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_logits_equal_stock_attention(
    kind: str, padded: bool, chunk: int | None, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    """Four layers, and a prompt of many windows."""
    model, mask = tiny_model(kind), torch.ones_like(ids)
    if padded:
        ids, mask = left_padded(ids)
    expected = teacher_forced(model, ids, mask, chunk)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        got = teacher_forced(model, ids, mask, chunk)
        stats = swarm.stats()
    assert (got - expected).abs().max() < 1e-9
    assert stats.bytes_per_step > 0


def test_float32_logits_are_within_1e_4(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3", torch.float32)
    padded, mask = left_padded(ids)
    expected = teacher_forced(model, padded, mask)
    with swarm_kv.patch(model, settings(drives)):
        assert (teacher_forced(model, padded, mask) - expected).abs().max() < 1e-4


def test_a_second_turn_hides_what_followed_an_end_of_sequence(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    """Rows that ended early were filled up with padding, which the second turn's mask hides."""
    model = tiny_model("qwen3")
    name = compat.cache_arg(model)
    ends = list(range(2, 128, 3))
    turn = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": ends}
    stock = {name: DynamicCache(config=model.config)}
    first = model.generate(ids[:, :120], **turn, **stock)
    assert (first[:, 120:] == 0).any()
    longer = torch.cat([first, ids[:, 120:180]], 1)
    expected = model.generate(longer, **turn, **stock)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = {name: swarm.new_cache()}
        assert torch.equal(model.generate(ids[:, :120], **turn, **cache), first)
        assert torch.equal(model.generate(longer, **turn, **cache), expected)


def test_a_fork_stores_nothing_twice(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("gemma3")
    with torch.no_grad(), swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        model(ids[:, :150], **{compat.cache_arg(model): cache})
        stored = swarm.stats().stored_bytes
        fork = copy.deepcopy(cache)
        assert swarm.stats().stored_bytes == stored > 0
        assert fork.get_seq_length() == 150


@pytest.mark.skipif(
    not compat.crop_takes_removals(), reason="transformers' sliding layers go back since 5.17"
)
def test_a_patched_assistant(
    ids: Tensor, drives: list[str], tiny_model: Callable[..., Any]
) -> None:
    """Its sliding layers go back at every step, and so have to keep their past from the start."""
    model, assistant = tiny_model("qwen3"), tiny_model("gemma3", seed=5)
    arguments = {"input_ids": ids[:1, :PROMPT], "do_sample": False, "max_new_tokens": 16}
    arguments |= {"eos_token_id": -1, "pad_token_id": 0, "assistant_model": assistant}
    expected = model.generate(**arguments)
    with swarm_kv.patch(assistant, settings(drives)) as swarm:
        assert torch.equal(model.generate(**arguments), expected)
        assert swarm.stats().steps > 0


def test_long_generation_from_a_short_prompt(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    """Everything that is stored was generated; codes are trained anew as the context doubles."""
    model = tiny_model("llama")
    arguments = {"input_ids": ids[:2, :5], "do_sample": False, "max_new_tokens": 320}
    expected = model.generate(**arguments, pad_token_id=0, eos_token_id=-1)
    with swarm_kv.patch(model, settings(drives)):
        assert torch.equal(model.generate(**arguments, pad_token_id=0, eos_token_id=-1), expected)


def test_identical_prompts_are_stored_once(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad(), swarm_kv.patch(model, settings(drives)) as swarm:
        model(ids[:1])
        one = swarm.stats().written_bytes
        model(ids[:1].repeat(4, 1))
        assert swarm.stats().written_bytes == 2 * one


def test_a_small_staging_arena_takes_several_rounds(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    with swarm_kv.patch(model, settings(drives, staging_bytes=64 << 10)):
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9


def test_nothing_is_left_after_unpatch(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    with swarm_kv.patch(model, settings(drives)) as swarm:
        model.generate(ids[:, :PROMPT], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert all(os.listdir(path) == [] for path in drives)  # a killed process leaks nothing
        descriptors = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert swarm.store.closed
