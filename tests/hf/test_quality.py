"""A real model on real text at sparsity 0.10, with a quarter of the KV's bytes in memory."""

from __future__ import annotations

from typing import Any

import pytest

import swarm_kv
from swarm_kv import eval as evaluation
from swarm_kv import texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT, STEPS = 6144, 192
ENTRY_BYTES, LAYERS = 1536, 30  # SmolLM2-135M: 3 KV heads of 64 in float32


@pytest.fixture(scope="module")
def text(smollm2: tuple[Any, Any]) -> tuple[Any, Any]:
    """The text and what full attention says about its last tokens."""
    model, tokenizer = smollm2
    ids = texts.token_ids(tokenizer, CONTEXT + STEPS)
    return ids, evaluation.full_attention(model, ids, CONTEXT, STEPS)


@pytest.fixture
def paths(tmp_path: Any) -> list[str]:
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


def resident_bytes(address: int) -> int:
    """What the kernel says is in memory of the mapping that holds `address`."""
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                first, last = (int(end, 16) for end in head.split("-"))
                inside = first <= address < last
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("the mapping was not found")


def test_perplexity_kl_and_memory(smollm2: Any, text: Any, paths: list[str]) -> None:
    model, _ = smollm2
    ids, reference = text
    dram = CONTEXT * ENTRY_BYTES * LAYERS // 4
    held = []
    with swarm_kv.patch(model, swarm_kv.SwarmConfig(paths, dram_bytes=dram)) as swarm:
        pool = swarm.store._pool.data_ptr()

        def measure(*_: Any) -> None:
            if len(held) % 32 == 0:
                held.append(resident_bytes(pool) + swarm.stats().dram["index"])
            else:
                held.append(0)

        result = evaluation.perplexity_kl(
            model, ids, CONTEXT, STEPS, reference=reference, on_step=measure
        )
        stats = swarm.stats()
    print(result, stats)
    assert result.ratio <= 1.02
    assert result.mean_kl <= 0.02
    assert max(held) <= dram
    assert stats.dram_peak_bytes <= dram
    assert stats.written_bytes < 2 * CONTEXT * ENTRY_BYTES * LAYERS
    assert 0.3 < stats.hit_rate < 1


def test_without_the_context_the_goal_is_missed(smollm2: Any, text: Any, paths: list[str]) -> None:
    """The negative control: sinks, window and next to nothing else."""
    model, _ = smollm2
    ids, reference = text
    config = swarm_kv.SwarmConfig(paths, sparsity=1 / CONTEXT, dram_bytes="128MiB")
    with swarm_kv.patch(model, config):
        result = evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, reference=reference)
    assert result.mean_kl > 0.04


def test_pass_keys_are_found(smollm2: Any, paths: list[str]) -> None:
    model, tokenizer = smollm2
    dram = 4096 * ENTRY_BYTES * LAYERS // 4
    with swarm_kv.patch(model, swarm_kv.SwarmConfig(paths, dram_bytes=dram)):
        keys = evaluation.passkey(model, tokenizer, 4096, n=8)
    assert keys.found >= 7, keys
