"""What a codec saves in reads and costs in accuracy, on a real model."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from tqdm import tqdm

import swarm_kv
from benchmarks import contexts, plots
from benchmarks.harness import Report
from swarm_kv import eval as evaluation
from swarm_kv import models, texts
from swarm_kv.cache import kv_bytes
from swarm_kv.demo import drive_paths


@dataclasses.dataclass(frozen=True)
class Parameters:
    context: int = 4096
    steps: int = 96
    dram_share: float = 0.25
    """dram_bytes as a share of the context's KV bytes."""
    drives: int = 4


QUICK = {"context": 2048, "steps": 8}
CODECS = ("none", "int8", "kivi4")


def rows(parameters: Parameters) -> list[dict[str, Any]]:
    """Per codec: perplexity, KL to full attention, and bytes read per step."""
    context, steps = parameters.context, parameters.steps
    model, tokenizer = models.load("smollm2")
    ids = texts.token_ids(tokenizer, context + steps)
    computed = contexts.computed(model, ids, context - 1)
    reference = computed.reference(model)
    dram = math.ceil(kv_bytes(model.config, model.dtype, context) * parameters.dram_share)
    table = []
    for codec in CODECS:
        with drive_paths((), parameters.drives) as paths:
            config = swarm_kv.SwarmConfig(paths=paths, dram_bytes=dram, codec=codec)
            with (
                swarm_kv.patch(model, config) as swarm,
                tqdm(total=steps, desc=f"codec {codec}", unit="tok", disable=None) as bar,
            ):
                found = computed.predictions(model, swarm)
                result = evaluation.compare_predictions(
                    reference, found, ids[0, context:], bar.update
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


def run(parameters: Parameters, report: Report) -> None:
    table = rows(parameters)
    plain = table[0]
    for row in table:
        name = f"codec {row['codec']}"
        report.measure(f"{name}: perplexity", "perplexity", row["perplexity"])
        report.measure(f"{name}: mean KL(full || sparse)", "nats", row["kl"])
        report.measure(f"{name}: read per step", "bytes", row["bytes_per_step"])
        report.measure(f"{name}: requests per step", "requests", row["requests_per_step"])
    report.measure("full attention: perplexity", "perplexity", plain["full"])
    coded = next(row for row in table if row["codec"] == "kivi4")
    report.at_most(
        "kivi4 / none: bytes per step", coded["bytes_per_step"] / plain["bytes_per_step"], 0.5
    )
    report.at_most(
        "kivi4: |perplexity / none - 1|", abs(coded["perplexity"] / plain["perplexity"] - 1), 0.01
    )
    report.note(
        f"SmolLM2, {parameters.steps} steps after {parameters.context} tokens "
        "of the Python topics, float32 entries"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Reads and accuracy of each codec."""
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                r"codec (?P<x>\w+): read per step", "codec", "MiB per token", "", "bars", 2**-20
            ),
            plots.Panel(
                r"codec (?P<x>\w+): mean KL.*", "codec", "KL to full attention", "", "bars"
            ),
        ],
    )
