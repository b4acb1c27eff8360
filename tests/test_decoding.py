"""The decoder that benchmarks share: recorded layers through ingest, selection and fetch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import decoding, workload
from benchmarks.drives import PM9A3
from swarm_kv.errors import ArgumentError
from swarm_kv.trace import LayerTrace, Settings, layer_trace
from tests.groups import GROUPS, Groups


@pytest.fixture(scope="module")
def layer() -> LayerTrace:
    """Queries that want a few of eight scattered groups of entries."""
    groups = Groups(1400)
    wanted = groups.centres[torch.randint(GROUPS, (1400,), generator=groups.random)]
    q, k, v = groups.activity(wanted)
    settings = Settings(context=1024, window=256, sinks=4, sparsity=0.1, stride=8)
    tensors = (tensor.half() for tensor in (q, k, 1 + v))
    return layer_trace(0, *tensors, scale=1.0, settings=settings)


def test_reading_everything_is_exact(layer):
    with decoding.simulated(layer, PM9A3, 2) as decoder:
        everything = decoding.mean(decoder.steps(2, sparsity=1.0))
        some = decoding.mean(decoder.steps(2, sparsity=0.05))
    assert everything.recall == pytest.approx(1.0)
    assert everything.err < 1e-3
    assert everything.selected == decoder.entries
    assert some.recall < 0.9
    assert some.err > 0.01
    assert 0 < some.seconds < everything.seconds
    assert some.bytes < 0.3 * everything.bytes


def test_means_of_what_is_not_read_lower_the_error(layer):
    errors = []
    layer = dataclasses.replace(layer, q=layer.q / 8)  # many entries matter a little
    for estimate in (False, True):
        with decoding.simulated(layer, PM9A3, 2, estimate_unfetched=estimate) as decoder:
            errors.append(decoding.mean(decoder.steps(4, sparsity=0.05)).err)
    assert errors[1] < 0.95 * errors[0]


def test_the_cache_holds_what_it_is_limited_to(layer):
    with decoding.simulated(layer, PM9A3, 2) as decoder:
        nothing = [decoding.mean(decoder.steps(3)).bytes for _ in range(2)]
        decoder.limit_cache(1.0)
        decoder.steps(3)
        assert decoding.mean(decoder.steps(3)).bytes == 0
        decoder.limit_cache(0.05)
        few = decoding.mean(decoder.steps(3)).bytes
    assert nothing[0] == nothing[1] > few > 0


def test_rows_of_a_batch_share_nothing(layer):
    read = []
    for batch in (1, 3):
        with decoding.simulated(layer, PM9A3, 2, batch=batch) as decoder:
            read.append(decoding.mean(decoder.steps(2, sparsity=1.0)).bytes)
    assert read[1] == 3 * read[0]


def test_widened_layers_attend_as_before(layer):
    wide = workload.widened(layer, 512)
    assert 2 * wide.k.shape[0] * wide.k.shape[2] * wide.k.element_size() == 512
    assert torch.allclose(wide.exact.mass, layer.exact.mass, atol=1e-6)


def test_recordings_are_kept_and_cut_to_length(monkeypatch, tmp_path):
    recorded = []

    def record(model, ids, *, context, layers, name):
        recorded.append(ids.shape[1])
        random = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, ids.shape[1], 8, generator=random) for _ in range(3))
        settings = Settings(context)
        own = {
            n: layer_trace(n, q.clone(), k.clone(), v.clone(), scale=1.0, settings=settings)
            for n in layers
        }
        return workload.trace.Trace(name, "digest", {}, settings, own)

    monkeypatch.setenv("SWARM_KV_CACHE_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(workload.models, "load", lambda name: (None, None))
    monkeypatch.setattr(
        workload.texts, "token_ids", lambda _, length, text: torch.zeros(1, length).long()
    )
    monkeypatch.setattr(workload.trace, "record", record)
    workload._whole.cache_clear()
    short = workload.recorded("smollm2", context=500, steps=10, layers=[10])
    workload._whole.cache_clear()
    longer = workload.recorded("smollm2", context=900, steps=20, stride=2)
    assert recorded == [2560]  # once; the second came from disk
    assert [one.layer for one in longer] == [2, 10, 18, 26]
    assert short[0].k.shape[1] == 500 + 256 + 10
    assert len(longer[0].positions) == 20
    assert torch.equal(short[0].k, longer[1].k[:, : short[0].k.shape[1]])
    with pytest.raises(ArgumentError, match="more than smollm2 is trained for"):
        workload.recorded("smollm2", context=8000, steps=10)
    workload._whole.cache_clear()
