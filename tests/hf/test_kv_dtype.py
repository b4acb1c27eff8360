"""Keys and values in 16 bits under a model of more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat
from tests.hf.helpers import PROMPT, left_padded, settings, teacher_forced


@pytest.mark.parametrize("chunk", [None, 50], ids=["whole", "chunks-50"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
def test_only_rounding_differs_from_full_attention(
    padded: bool, chunk: int | None, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    """By a bit more in bfloat16 than in float16, which is the control."""
    model, mask = tiny_model("qwen3", torch.float32), torch.ones_like(ids)
    if padded:
        ids, mask = left_padded(ids)
    expected = teacher_forced(model, ids, mask, chunk)
    error, stored = {}, {}
    for dtype in ("auto", "float16", "bfloat16"):
        with swarm_kv.patch(model, settings(drives, kv_dtype=dtype)) as swarm:
            got = teacher_forced(model, ids, mask, chunk)
            stored[dtype] = swarm.stats().stored_bytes
        error[dtype] = float((got - expected).abs().max() / expected.abs().max())
    assert error["auto"] < 1e-5 < error["float16"] < 3e-3 < error["bfloat16"] < 3e-2
    assert stored["float16"] == stored["bfloat16"] == stored["auto"] / 2


def test_a_prefill_in_one_call_is_not_rounded(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3", torch.float32)
    with torch.no_grad():
        expected = model(ids[:, :PROMPT]).logits
        with swarm_kv.patch(model, settings(drives, kv_dtype="bfloat16")):
            got = model(ids[:, :PROMPT]).logits
    assert (got - expected).abs().max() < 1e-4


def test_the_same_memory_holds_more(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    """A cache of half of the entries, in float32, is one of all of them in float16."""
    model, mask = tiny_model("qwen3", torch.float32), torch.ones_like(ids)
    hits = {}
    for dtype in ("auto", "float16"):
        config = settings(drives, kv_dtype=dtype, sparsity=0.5, dram_bytes="1800KiB")
        with swarm_kv.patch(model, config) as swarm:
            teacher_forced(model, ids, mask)
            hits[dtype] = swarm.stats().hit_rate
    assert hits["float16"] > hits["auto"] + 0.1


def test_generation_with_beams_and_prefetch(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    how = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    expected = model.generate(ids[:, :PROMPT], eos_token_id=-1, **how)
    config = settings(drives, kv_dtype="float16", prefetch="post_attention")
    with swarm_kv.patch(model, config) as swarm:
        got = model.generate(ids[:, :PROMPT], eos_token_id=-1, **how)
        assert swarm.stats().prefetch.prefetches > 0
    assert torch.equal(got, expected)


def test_a_number_that_does_not_fit_is_refused_before_it_is_stored(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model("llama", torch.float32), torch.ones_like(ids)
    layer = model.model.layers[1].self_attn.v_proj
    with swarm_kv.patch(model, settings(drives, kv_dtype="float16")) as swarm:
        cache = swarm.new_cache()
        given = {compat.cache_arg(model): cache}
        with torch.no_grad():
            model(ids[:, :PROMPT], **given)
            before = layer.weight.clone()
            layer.weight *= 1e7
            message = (
                r'layer 1: a value of magnitude \S+ does not fit `kv_dtype` "float16", which ends '
                r'at 65504: use "bfloat16" or "auto"'
            )
            with pytest.raises(swarm_kv.ArgumentError, match=message):
                model(ids[:, PROMPT : PROMPT + 1], **given)
            layer.weight.copy_(before)
        lengths = [layer.get_seq_length() for layer in cache.layers]
        assert lengths == [PROMPT + 1, PROMPT, PROMPT, PROMPT]  # it ended in the second
    with torch.no_grad():
        layer.weight *= 1e7
    with swarm_kv.patch(model, settings(drives, kv_dtype="bfloat16")):
        assert teacher_forced(model, ids, mask).isfinite().all()


def test_an_unknown_dtype_is_refused(drives: list[str]) -> None:
    with pytest.raises(swarm_kv.ArgumentError, match=r"unknown `kv_dtype` \('fp8'\).*'bfloat16'"):
        settings(drives, kv_dtype="fp8")
