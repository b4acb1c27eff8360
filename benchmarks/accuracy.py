"""Accuracy of sparse decoding on a real model and text, against full attention of the same model.

The context is computed exactly, once for all rows; pass keys are prefilled by the patched model,
each in a text of its own. Every predicted token comes from a decoding step that reads
`sparsity` of the context from storage. The control row keeps nothing but the sinks and the window:
it shows that the text needs the context, so that the goals could be missed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from tqdm import tqdm

import swarm_kv
from benchmarks import contexts
from benchmarks.harness import Report
from swarm_kv import eval as evaluation
from swarm_kv import models, texts
from swarm_kv.cache import kv_bytes
from swarm_kv.demo import drive_paths


@dataclasses.dataclass(frozen=True)
class Parameters:
    model: str = "smollm2"
    source: str = ""
    """Text file; the Python topics if empty."""
    context: int = 6144
    steps: int = 128
    sparsity: float = 0.10
    dram_share: float = 0.25
    """dram_bytes as a share of the context's KV bytes."""
    paths: tuple[str, ...] = ()
    """Directories to store in; `drives` temporary ones if empty."""
    drives: int = 4
    passkey_context: int = 3072
    passkey_cases: int = 8
    seed: int = 0


QUICK = {"context": 3072, "steps": 8, "passkey_context": 3072, "passkey_cases": 2}


def run(parameters: Parameters, report: Report) -> None:
    model, tokenizer = models.load(parameters.model)
    context, steps = parameters.context, parameters.steps
    source = parameters.source or None
    ids = texts.token_ids(tokenizer, context + steps, source)
    computed = contexts.computed(model, ids, context - 1)
    reference = computed.reference(model)

    def config(paths: list[str], tokens: int, sparsity: float) -> Any:
        dram = math.ceil(kv_bytes(model.config, model.dtype, tokens) * parameters.dram_share)
        return swarm_kv.SwarmConfig(paths=paths, sparsity=sparsity, dram_bytes=dram)

    def compare(row: str, paths: list[str], sparsity: float) -> tuple[evaluation.Comparison, Any]:
        with (
            swarm_kv.patch(model, config(paths, context, sparsity)) as swarm,
            tqdm(total=steps, desc=row, unit="tok", disable=None) as bar,
        ):
            started = time.perf_counter()
            found = computed.predictions(model, swarm)
            result = evaluation.compare_predictions(reference, found, ids[0, context:], bar.update)
            seconds = time.perf_counter() - started
            stats = swarm.stats()
        report.measure(f"{row}: perplexity", "perplexity", result.ppl_sparse)
        report.measure(f"{row}: mean KL(full || sparse)", "nats", result.mean_kl)
        report.measure(f"{row}: same first token", "share", result.top1_agreement)
        report.measure(f"{row}: index and decode", "s", seconds)
        return result, stats

    with drive_paths(parameters.paths, parameters.drives) as paths:
        sparse, stats = compare(f"sparsity {parameters.sparsity:g}", paths, parameters.sparsity)
        control, _ = compare("sinks and window only", paths, 1 / context)
        with swarm_kv.patch(model, config(paths, parameters.passkey_context, parameters.sparsity)):
            keys = evaluation.passkey(
                model,
                tokenizer,
                parameters.passkey_context,
                n=parameters.passkey_cases,
                source=source,
                seed=parameters.seed,
            )

    report.measure("full attention: perplexity", "perplexity", sparse.ppl_full)
    report.measure("pass keys found", "keys", float(keys.found))
    report.measure("DRAM held, peak", "bytes", float(stats.dram_peak_bytes))
    report.at_most("|perplexity / full attention - 1|", abs(sparse.ratio - 1), 0.02)
    report.at_most("mean KL(full || sparse)", sparse.mean_kl, 0.02)
    report.at_least("pass keys found", keys.found, math.ceil(7 / 8 * keys.total))
    report.at_most("DRAM held / dram_bytes", stats.dram_peak_bytes / stats.dram_bytes, 1.0)
    report.at_least("control: mean KL without the context", control.mean_kl, 2 * 0.02)
    text = "the Python topics (they vary with the Python version)" if source is None else source
    report.note(
        f"{steps} tokens after {context} of {text}, teacher-forced, one decoding step each; "
        f"{keys.found} of {keys.total} pass keys at {parameters.passkey_context} tokens"
    )
