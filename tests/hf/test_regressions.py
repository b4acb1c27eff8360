"""Bugs that were found once, each with the way it showed."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DynamicCache, GPT2Config

import swarm_kv
from swarm_kv import compat, selectors
from swarm_kv.store import Store
from tests.hf.helpers import settings, teacher_forced

PROMPT = 200


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (3, PROMPT + 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model("qwen3")


def call(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    logits: Tensor = model(ids, **{compat.cache_arg(model): cache}, **more).logits
    return logits


@torch.no_grad()
def test_a_chunk_after_a_crop_that_emptied_memory(
    model: Any, ids: Tensor, drives: list[str]
) -> None:
    """Nothing resident and a long chunk: torch's kernel divided by zero and ended the process."""
    with swarm_kv.patch(model, settings(drives, sinks=0)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :PROMPT], cache)
        cache.crop(-100)
        got = call(model, ids[:, 100:PROMPT], cache)
    assert (got - model(ids[:, :PROMPT]).logits[:, 100:]).abs().max() < 1e-9


@torch.no_grad()
def test_the_padded_sequences_leave_the_batch(model: Any, ids: Tensor, drives: list[str]) -> None:
    """The rest has no padding, so no mask arrives: it was taken for a forgotten one."""
    mask = torch.ones_like(ids)
    mask[:2, :50] = 0
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        padded = ids[:, :PROMPT].masked_fill(mask[:, :PROMPT] == 0, 0)
        call(model, padded, cache, attention_mask=mask[:, :PROMPT])
        cache.batch_select_indices(torch.tensor([2]))
        row = slice(PROMPT, PROMPT + 1)
        got = call(model, ids[2:, row], cache, attention_mask=mask[2:, : PROMPT + 1])
    assert (got - model(ids[2:, : PROMPT + 1]).logits[:, -1:]).abs().max() < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("how", ["keyword", "old keyword", "position"])
def test_a_cache_of_the_users_own_is_used(
    how: str, model: Any, ids: Tensor, drives: list[str]
) -> None:
    """Given by position or by its name before 5.24, it was replaced by a new SwarmCache."""
    cache = DynamicCache(config=model.config)
    args, kwargs = {
        "keyword": ((), {compat.cache_arg(model): cache}),
        "old keyword": ((), {"past_key_values": cache}),
        "position": ((None,) * (compat.cache_position(model) - 1) + (cache,), {}),
    }[how]
    with swarm_kv.patch(model, settings(drives)) as swarm:
        output = model(ids, *args, **kwargs)
        assert swarm.stats().written_bytes == 0
    assert compat.cache_of(output) is cache
    assert cache.get_seq_length() == ids.shape[1]


@torch.no_grad()
def test_a_step_interrupted_between_layers(model: Any, ids: Tensor, drives: list[str]) -> None:
    """Ctrl-C in a layer's MLP leaves earlier layers a token ahead: the next step was wrong."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :PROMPT], cache)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(model, ids[:, PROMPT : PROMPT + 1], cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(swarm_kv.StateError, match="interrupted: layer 2 has 200 tokens"):
                call(model, ids[:, PROMPT : PROMPT + 1], cache)


@torch.no_grad()
def test_a_reset_cache_may_be_used_after_a_failure(
    model: Any, ids: Tensor, drives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_attend, calls = Store.fetch_attend, list[None]()

    def fail_in_the_second_layer(self: Store, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise swarm_kv.StorageError("drive 1 is gone")
        return fetch_attend(self, *args, **kwargs)

    monkeypatch.setattr(Store, "fetch_attend", fail_in_the_second_layer)
    with swarm_kv.patch(model, settings(drives, prefetch="off", recall_every=0)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :PROMPT], cache)
        with pytest.raises(swarm_kv.StorageError):
            call(model, ids[:, PROMPT : PROMPT + 1], cache)
        with pytest.raises(swarm_kv.StateError, match=r"layer 1.*drive 1 is gone"):
            call(model, ids[:, PROMPT : PROMPT + 1], cache)
        cache.reset()
        assert swarm.stats().stored_bytes == 0
        got = call(model, ids, cache)
    assert (got - model(ids).logits).abs().max() < 1e-9


@torch.no_grad()
def test_a_refused_call_leaves_the_cache_usable(model: Any, ids: Tensor, drives: list[str]) -> None:
    """Its keys stayed staged, and the next call said that attention was missing."""
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :PROMPT], cache)
        with pytest.raises(swarm_kv.ArgumentError, match="output_attentions"):
            call(model, ids[:, PROMPT:], cache, output_attentions=True)
        assert cache.get_seq_length() == PROMPT
        got = call(model, ids[:, PROMPT:], cache)
    assert (got - model(ids).logits[:, PROMPT:]).abs().max() < 1e-9


@torch.no_grad()
def test_the_short_rest_of_a_prefill_is_exact(model: Any, ids: Tensor, drives: list[str]) -> None:
    """Right after the first chunk it was read sparsely; a later short call still is."""
    whole = model(ids).logits
    with swarm_kv.patch(model, settings(drives, sparsity=0.05)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :180], cache)
        assert (call(model, ids[:, 180:200], cache) - whole[:, 180:200]).abs().max() < 1e-9
        assert (call(model, ids[:, 200:], cache) - whole[:, 200:]).abs().max() > 1e-3


def test_steps_of_assisted_decoding_count(model: Any, ids: Tensor, drives: list[str]) -> None:
    """They check several tokens at once and counted as none, which made bytes per step absurd."""
    prompt = ids[:1, :100].repeat(1, 2)
    arguments = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1, "pad_token_id": 0}
    with swarm_kv.patch(model, settings(drives)) as swarm:
        model.generate(prompt, **arguments, prompt_lookup_num_tokens=4)
        stats = swarm.stats()
    assert stats.steps >= 24 // 5
    assert stats.bytes_per_step <= 2 * stats.stored_bytes + 2 * stats.plain_bytes + 2**20


def test_a_gradient_is_refused(model: Any, ids: Tensor, drives: list[str]) -> None:
    """The part of attention was missing from it, without a word."""

    def gradient(**more: Any) -> Tensor:
        model.zero_grad()
        model(ids, labels=ids, **more).loss.backward()
        grad: Tensor = model.model.layers[0].self_attn.q_proj.weight.grad
        return grad.clone()

    expected = gradient()
    with swarm_kv.patch(model, settings(drives)):
        with pytest.raises(swarm_kv.ArgumentError, match="use_cache=False"):
            gradient()
        assert (gradient(use_cache=False) - expected).abs().max() < 1e-6


@torch.no_grad()
def test_memory_goes_back_when_the_store_closes(
    tiny_model: Any, ids: Tensor, drives: list[str]
) -> None:
    """The handle of `with patch(...) as swarm` outlives the block and kept all of it mapped."""
    model = tiny_model("qwen3", torch.float32)

    def held() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    with swarm_kv.patch(model, settings(drives, dram_bytes="256MiB")) as swarm:
        model(ids)
        swarm.store.pool(torch.uint8)[: 128 << 20] = 1
        before = held()
    assert swarm.store.closed
    assert held() < before - (100 << 20)
    with pytest.raises(swarm_kv.StateError, match="closed"):
        swarm.store.pool(torch.uint8)


def test_a_wait_that_is_interrupted_gives_its_ticket_back(
    model: Any, ids: Tensor, drives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C mostly comes while reads are waited for; then the store could not be closed."""
    from swarm_kv import store as module

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops.swarm_kv, name)

        def fetch_wait(self, *args: Any) -> Any:
            torch.ops.swarm_kv.fetch_wait(*args)
            raise KeyboardInterrupt

    with torch.no_grad(), swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        call(model, ids[:, :100], cache)
        with monkeypatch.context() as patched:
            patched.setattr(module, "_ops", Interrupted())
            with pytest.raises(KeyboardInterrupt):  # in a long chunk, which streams what it stored
                call(model, ids[:, 100:PROMPT], cache)
    assert swarm.store.closed


def test_a_selector_of_ones_own_sees_medoid_keys(
    model: Any, ids: Tensor, drives: list[str]
) -> None:
    """They were kept for the function `medoid` alone, not for one that calls it."""

    def wrapped(*args: Any) -> Any:
        return selectors.medoid(*args)

    mask = torch.ones_like(ids)
    results = []
    for choice in (wrapped, "medoid"):
        with swarm_kv.patch(model, settings(drives, sparsity=0.2, selector=choice)):
            results.append(teacher_forced(model, ids, mask))
    assert torch.equal(*results)


@torch.no_grad()
def test_a_config_without_key_value_heads(ids: Tensor, drives: list[str]) -> None:
    """GPT-2's has only attention heads; patching raised AttributeError."""
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    assert not hasattr(config, "num_key_value_heads")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    mask = torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
        assert swarm.stats().bytes_per_step > 0


@torch.no_grad()
def test_a_model_that_changes_values_after_its_cache(ids: Tensor, drives: list[str]) -> None:
    """DiffLlama splits them for two attentions; the first one was wrong, the second an assert."""
    config = DiffLlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("swarm_kv")  # `patch` refuses this model by its name
    if compat.attention_name(model) != "swarm_kv":
        pytest.skip("this transformers' DiffLlama has attention of its own")
    cache = swarm_kv.SwarmCache(config, settings(drives))
    with pytest.raises(swarm_kv.ArgumentError, match=r"layer 0's cache.*unpatch"):
        call(model, ids, cache)
