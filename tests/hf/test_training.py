"""A patched model trains like the stock one: exactly, without a cache on drives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat
from tests.conftest import TINY_KINDS
from tests.hf.test_equivalence import left_padded, settings

TOKENS = 300  # more than a block of queries


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (3, TOKENS), generator=torch.Generator().manual_seed(1))


def gradients(
    model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any
) -> dict[str, Tensor]:
    """Of the loss of the next tokens, padding left out."""
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, **more).loss.backward()
    parameters = model.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("kind", "padded"),
    [*((kind, False) for kind in TINY_KINDS), ("qwen3", True), ("gemma3", True), ("gpt_oss", True)],
)
def test_gradients_equal_the_stock_models(
    kind: str, padded: bool, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model(kind).train(), None
    if padded:
        ids, mask = left_padded(ids)
    expected = gradients(model, ids, mask)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        assert distance(gradients(model, ids, mask), expected) < 1e-9
        assert distance(gradients(model, ids, mask, use_cache=padded), expected) < 1e-9
        assert swarm.stats().written_bytes == 0


def test_other_tokens_show(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    """The negative control of the test above."""
    model = tiny_model("qwen3").train()
    expected = gradients(model, ids)
    ids[:, 10] = ids[:, 11]
    with swarm_kv.patch(model, settings(drives)):
        assert distance(gradients(model, ids), expected) > 1e-3


def test_gradient_checkpointing(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3").train()
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable()
    with swarm_kv.patch(model, settings(drives)):
        assert distance(gradients(model, ids), expected) < 1e-9


def test_training_and_generating_in_turn(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    """As a training loop that samples now and then: the same texts, by the weights of each step."""
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}

    def run(model: Any) -> list[Tensor]:
        texts = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(3):
            gradients(model.train(), ids)
            optimizer.step()
            texts.append(model.eval().generate(ids[:, :200], **greedy))
        return texts

    expected = run(tiny_model("qwen3"))
    assert not torch.equal(expected[0], expected[2])
    model = tiny_model("qwen3")
    with swarm_kv.patch(model, settings(drives)) as swarm:
        for one, other in zip(run(model), expected, strict=True):
            assert torch.equal(one, other)
        assert swarm.stats().steps == 3 * 7
        assert swarm.stats().written_bytes > 0


def test_a_cache_on_drives_is_refused(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3").train()
    name = compat.cache_arg(model)
    with swarm_kv.patch(model, settings(drives)) as swarm:
        cache = swarm.new_cache()
        with pytest.raises(swarm_kv.ArgumentError, match=r"no gradient: pass `use_cache=False`"):
            model(ids, **{name: cache})
        assert cache.get_seq_length() == 0
        assert swarm.stats().written_bytes == 0
        with torch.no_grad():
            model(ids, **{name: cache})
        assert cache.get_seq_length() == TOKENS


def test_dropout_is_refused(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model = tiny_model("qwen3").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with (
        swarm_kv.patch(model, settings(drives)),
        pytest.raises(swarm_kv.ArgumentError, match=r"asks for 0\.1: .*`attention_dropout`"),
    ):
        model(ids)
