"""What a codec saves in reads and costs in accuracy, on a real model."""

from __future__ import annotations

import math
from typing import Any

from tqdm import tqdm

import swarm_kv
from swarm_kv import eval as evaluation
from swarm_kv import models, texts
from swarm_kv.cache import kv_bytes
from swarm_kv.demo import drive_paths

CODECS = ("none", "int8", "kivi4")


def rows(context: int, steps: int, dram_share: float, drives: int) -> list[dict[str, Any]]:
    """Per codec: perplexity, KL to full attention, and bytes read per step."""
    model, tokenizer = models.load("smollm2")
    ids = texts.token_ids(tokenizer, context + steps)
    reference = evaluation.full_attention(model, ids, context, steps)
    dram = math.ceil(kv_bytes(model.config, model.dtype, context) * dram_share)
    table = []
    for codec in CODECS:
        with drive_paths((), drives) as paths:
            config = swarm_kv.SwarmConfig(paths=paths, dram_bytes=dram, codec=codec)
            with (
                swarm_kv.patch(model, config) as swarm,
                tqdm(total=steps, desc=f"codec {codec}", unit="tok", disable=None) as bar,
            ):
                result = evaluation.perplexity_kl(
                    model, ids, context, steps, reference=reference, on_step=bar.update
                )
                stats = swarm.stats()
        table.append(
            {
                "codec": codec,
                "perplexity": result.ppl_sparse,
                "full": result.ppl_full,
                "kl": result.mean_kl,
                "bytes_per_step": stats.bytes_per_step,
                "requests_per_step": stats.requests_per_step,
                "stored_bytes": stats.stored_bytes,
                "hit_rate": stats.hit_rate,
            }
        )
    return table
