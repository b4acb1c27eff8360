"""`benchmarks.contexts`: one computed context serves caches as their own prefill would."""

from __future__ import annotations

import pytest
import torch

import swarm_kv
from benchmarks import contexts
from swarm_kv import eval as evaluation
from swarm_kv.errors import StateError

CONTEXT, STEPS = 700, 6


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", torch.float32)


@pytest.fixture
def ids(model):
    size = (1, CONTEXT + STEPS)
    return torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(3))


def test_predictions_are_those_after_a_prefill(model, ids, drives):
    config = swarm_kv.SwarmConfig(paths=drives, dram_bytes="64MiB")
    computed = contexts.computed(model, ids, CONTEXT - 1)
    full = evaluation.full_attention(model, ids, CONTEXT, STEPS)
    assert torch.allclose(computed.reference(model), full, atol=1e-4)
    with swarm_kv.patch(model, config) as swarm:
        prefilled = evaluation.teacher_forced(model, ids, CONTEXT, STEPS)
        found = torch.cat(list(computed.predictions(model, swarm)))
        layer = computed.cache(swarm).layers[0]
        with pytest.raises(StateError, match="start a new cache"):
            layer.ingest(*computed.layers[0])
    assert torch.allclose(found, prefilled, atol=1e-4)
    # Control: the steps read sparsely, so that they are not full attention's.
    assert not torch.allclose(found, full, atol=1e-4)
