"""Models that decode for long: layouts change under way, the logits of full attention do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import compat, recode, rewrite

PREFILL = 150


def decoded(model: Any, ids: torch.Tensor, config: Any) -> tuple[torch.Tensor, Any]:
    """Logits of every token after the prefill, one step each, and the cache."""
    rows = []
    with torch.no_grad(), swarm_kv.patch(model, config) as swarm:
        cache = swarm.new_cache()
        how = {compat.cache_arg(model): cache}
        model(ids[:, :PREFILL], **how)
        for token in range(PREFILL, ids.shape[1]):
            rows.append(model(ids[:, token : token + 1], **how).logits[0])
        layer = cache.layers[0]
        state = len(layer.rows[0].stored.segments), swarm.store.background.failures
    return torch.cat(rows), state


@pytest.mark.parametrize(
    "steps", [400, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("maintenance", ["sequence", "swarm"])
def test_everything_read_stays_full_attention(
    maintenance: str, steps: int, tiny_model: Any, drives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "MERGED", 64)
    monkeypatch.setattr(recode, "LEAST", 64)
    model = tiny_model("qwen3")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (1, PREFILL + steps), generator=generator)
    with torch.no_grad():
        expected = model(ids).logits[0, PREFILL:]
    settings = {
        "paths": drives,
        "dram_bytes": "8MiB",
        "staging_bytes": "1MiB",
        "device_model": (1e-4, 1e-9),
        "window": 32,
        "flush": 8,
        "maintenance": maintenance,
    }
    logits, (segments, failures) = decoded(
        model, ids, swarm_kv.SwarmConfig(sparsity=1.0, **settings)
    )
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert failures == 0
    assert segments < 24  # of some 40 lots, or 375
    if steps < 1000:  # the control: what is read sparsely does differ
        sparse, _ = decoded(model, ids, swarm_kv.SwarmConfig(sparsity=0.1, **settings))
        assert not torch.allclose(sparse, expected, rtol=1e-6, atol=1e-6)
