"""At sparsity 1.0 a patched model equals the stock one on real drives, however it is called."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

import swarm_kv
from swarm_kv import compat
from swarm_kv.store import Fetch, Store, Wanted

KINDS = ("qwen3", "llama", "qwen3_moe", "gpt_oss", "gemma3")
PROMPT = 200
STEPS = 12
PADS = (37, 90, 0)


def settings(paths: list[str], **changes: Any) -> swarm_kv.SwarmConfig:
    """Small windows, so that most of a short prompt lies on the drives."""
    small = {
        "sparsity": 1.0,
        "window": 16,
        "sinks": 2,
        "flush": 8,
        "block": 4,
        "dram_bytes": "8MiB",
        "min_activation": 2,
    }
    return swarm_kv.SwarmConfig(paths=paths, **{**small, **changes})


@pytest.fixture
def ids() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (3, PROMPT + STEPS), generator=generator)


def left_padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def teacher_forced(
    model: Any, ids: Tensor, mask: Tensor, chunk: int | None = None, cache: Any = None
) -> Tensor:
    """Logits of every real token: the prompt in one call or in chunks, then one token at a time."""
    name = compat.cache_arg(model)
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    ends = [*range(chunk, PROMPT, chunk), PROMPT] if chunk else [PROMPT]
    ends += range(PROMPT + 1, ids.shape[1] + 1)
    logits, start = [], 0
    for end in ends:
        output = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=position[:, start:end],
            use_cache=True,
            **({} if cache is None else {name: cache}),
        )
        cache = compat.cache_of(output)
        logits.append(output.logits)
        start = end
    return torch.cat(logits, 1)[mask.bool()]


def calls(ids: Tensor) -> dict[str, dict[str, Any]]:
    padded, mask = left_padded(ids)
    batch = {"input_ids": padded[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}
    greedy = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    return {
        "greedy": {**batch, **greedy},
        "chunked prefill": {**batch, **greedy, "prefill_chunk_size": 64},
        "beams": {**batch, **greedy, "num_beams": 3, "max_new_tokens": 12},
        "prompt lookup": {
            "input_ids": ids[:1, :100].repeat(1, 2),
            **greedy,
            "prompt_lookup_num_tokens": 4,
        },
    }


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Any]) -> Any:
    return tiny_model(request.param)


@pytest.mark.parametrize("chunk", [None, 50, 8], ids=["whole", "chunks-50", "chunks-8"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
def test_logits_equal_stock_attention(
    model: Any, ids: Tensor, drives: list[str], chunk: int | None, padded: bool
) -> None:
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = left_padded(ids)
    expected = teacher_forced(model, ids, mask, chunk)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        got = teacher_forced(model, ids, mask, chunk)
        stats = swarm.stats()
    assert (got - expected).abs().max() < 1e-9
    assert stats.engine.startswith("io_uring")
    assert stats.bytes_per_step > 0


def test_float32_logits_are_within_1e_4(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3", torch.float32)
    padded, mask = left_padded(ids)
    expected = teacher_forced(model, padded, mask)
    with swarm_kv.patch(model, settings(drives)):
        assert (teacher_forced(model, padded, mask) - expected).abs().max() < 1e-4


def test_a_lost_block_shows(
    model: Any, ids: Tensor, drives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the tests above: 16 entries fewer, and the logits move."""
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    fetch = Store.fetch

    def lose_a_block(self: Store, rows: Iterable[Wanted], **how: Any) -> Fetch:
        def lost(entries: Tensor) -> Tensor:
            return entries[(entries < 32) | (entries >= 48)]

        return fetch(
            self, [dataclasses.replace(row, entries=lost(row.entries)) for row in rows], **how
        )

    monkeypatch.setattr(Store, "fetch", lose_a_block)
    with swarm_kv.patch(model, settings(drives)):
        assert (teacher_forced(model, ids, mask) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("call", ["greedy", "chunked prefill", "beams", "prompt lookup"])
def test_generated_ids_equal_stock(model: Any, ids: Tensor, drives: list[str], call: str) -> None:
    sliding = any(DynamicCache(config=model.config).is_sliding)
    if call == "prompt lookup" and sliding and not hasattr(DynamicLayer, "is_croppable"):
        pytest.skip("transformers' sliding layers cannot be cropped before 5.17")
    arguments = calls(ids)[call]
    expected = model.generate(**arguments)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        assert torch.equal(model.generate(**arguments), expected)
        assert swarm.stats().bytes_per_step > 0


def test_assisted_decoding_equals_stock(
    ids: Tensor, drives: list[str], tiny_model: Callable[..., Any]
) -> None:
    model, assistant = tiny_model("qwen3"), tiny_model("qwen3", seed=5)
    arguments = {"input_ids": ids[:1, :PROMPT], "do_sample": False, "max_new_tokens": 24}
    expected = model.generate(**arguments, assistant_model=assistant)
    with swarm_kv.patch(model, settings(drives)):
        assert torch.equal(model.generate(**arguments, assistant_model=assistant), expected)


def test_two_turns_reuse_the_cache(model: Any, ids: Tensor, drives: list[str]) -> None:
    turn = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    name = compat.cache_arg(model)
    # The second prompt hides what follows an end of sequence in the first answer, so the reference
    # is the stock cache reused, not the stock model from scratch.
    cache = {name: DynamicCache(config=model.config)}
    first = model.generate(ids[:, :120], **turn, **cache)
    second_prompt = torch.cat([first, ids[:, 120:180]], dim=1)
    expected = model.generate(second_prompt, **turn, **cache)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = {name: swarm.new_cache()}
        assert torch.equal(model.generate(ids[:, :120], **turn, **cache), first)
        assert torch.equal(model.generate(second_prompt, **turn, **cache), expected)


def test_a_forked_cache_grows_on_its_own(model: Any, ids: Tensor, drives: list[str]) -> None:
    name = compat.cache_arg(model)
    with torch.no_grad(), swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        model(ids[:, :150], **{name: cache})
        stored = swarm.stats().stored_bytes
        fork = copy.deepcopy(cache)
        assert swarm.stats().stored_bytes == stored
        one = model(ids[:, 150:160], **{name: cache}).logits
        other = model(ids.flip(1)[:, :10], **{name: fork}).logits
        again = model(ids[:, 160:], **{name: cache}).logits
    whole = model(ids).logits
    assert (one - whole[:, 150:160]).abs().max() < 1e-9
    assert (again - whole[:, 160:]).abs().max() < 1e-9
    assert (other - one).abs().max() > 1e-3


def test_cropping_into_the_stored_part(model: Any, ids: Tensor, drives: list[str]) -> None:
    """Far more tokens go than the window holds, then the sequence grows past where it was."""
    if any(DynamicCache(config=model.config).is_sliding):
        pytest.skip("transformers' sliding layers cannot go back further than their window")
    name = compat.cache_arg(model)
    with torch.no_grad(), swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        model(ids[:, :PROMPT], **{name: cache})
        model(ids[:, PROMPT : PROMPT + 1], **{name: cache})
        cache.crop(-100)
        assert cache.get_seq_length() == PROMPT - 99
        start = PROMPT - 99
        got = [model(ids[:, start : start + 1], **{name: cache}).logits]
        got += [model(ids[:, i : i + 1], **{name: cache}).logits for i in range(start + 1, PROMPT)]
    whole = model(ids[:, :PROMPT]).logits
    assert (torch.cat(got, 1) - whole[:, start:]).abs().max() < 1e-9


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
    import os

    model = tiny_model("qwen3")
    before = model(ids).logits
    state = {k: v for k, v in model.__dict__.items() if k not in ("_modules", "_parameters")}
    with swarm_kv.patch(model, settings(drives)) as swarm:
        model.generate(ids[:, :PROMPT], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert all(os.listdir(path) == [] for path in drives)  # a killed process leaks nothing
        descriptors = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert swarm.store.closed
    assert model.config._attn_implementation == "sdpa"
    after = {k: v for k, v in model.__dict__.items() if k not in ("_modules", "_parameters")}
    assert after.keys() == state.keys()
    assert torch.equal(model(ids).logits, before)
