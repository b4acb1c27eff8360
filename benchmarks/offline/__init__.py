"""The offline stage: profiling, clustering, layouts, selection and codecs.

Five parts. `scale`: time and memory of signatures and clustering against length, and k-means of the
same keys. `replays`: ways to lay out and to select, on recorded activity of two models and texts.
`selection`: Table 4 of the paper. `codecs`: what they save and cost on a real model. All ratios are
made within this run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tqdm import tqdm

from benchmarks.harness import Report
from benchmarks.offline import codecs, replays, scale, selection


@dataclasses.dataclass(frozen=True)
class Parameters:
    parts: tuple[str, ...] = ("scale", "replays", "selection", "codecs")
    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072)
    """Entries; all with 1,024 profiled queries."""
    longest: int = 1048576
    """Entries, with 256 profiled queries; 0 to leave it out."""
    kmeans: bool = True
    """Whether faiss k-means of the longest of `lengths` is timed: several minutes."""
    smollm2_context: int = 6144
    smollm2_tokens: int = 8192
    gemma_context: int = 16384
    gemma_tokens: int = 18432
    stride: int = 32
    """Tokens between two test queries."""
    selection_lengths: tuple[int, ...] = (131072, 262144, 524288, 1048576)
    repeats: int = 5
    codec_context: int = 6144
    codec_steps: int = 256
    dram_share: float = 0.25
    drives: int = 4
    seed: int = 0


QUICK = {
    "lengths": (16384, 32768),
    "longest": 0,
    "kmeans": False,
    "gemma_context": 0,
    "selection_lengths": (131072,),
    "repeats": 3,
    "codec_steps": 32,
}

MODELS = {"smollm2": (2, 10, 18, 26), "gemma3": (5, 11, 17)}
TEXTS = ("topics", "stdlib")
PAPER_GAIN = (6.9, 12.2)
"""Table 4: selection against scoring all keys, at 128K and at 1M entries."""


def run(parameters: Parameters, report: Report) -> None:
    parts = {
        "scale": run_scale,
        "replays": run_replays,
        "selection": run_selection,
        "codecs": run_codecs,
    }
    for name in parameters.parts:
        parts[name](parameters, report)


def run_scale(parameters: Parameters, report: Report) -> None:
    sizes = [(entries, 1024) for entries in parameters.lengths]
    if parameters.longest:
        sizes.append((parameters.longest, 256))
    rows = []
    for entries, queries in tqdm(sizes, desc="signatures and clustering", disable=None):
        row = scale.measure_apart(entries, queries)
        case = f"{entries} entries, {queries} queries"
        report.measure(f"{case}: signatures", "s", row["signatures_s"])
        report.measure(f"{case}: clustering (Algorithm 1)", "s", row["clustering_s"])
        report.measure(f"{case}: clustering (hypergraph)", "s", row["hypergraph_s"])
        report.measure(f"{case}: memory, peak", "bytes", row["peak_bytes"])
        report.measure(f"{case}: signatures and result", "bytes", row["held_bytes"])
        report.at_most(
            f"{case}: (peak - result) / signatures",
            (row["peak_bytes"] - row["result_bytes"]) / row["signature_bytes"],
            4.0,
        )
        rows.append(row)
    report.note(
        "scale: synthetic keys of 8 KV heads x 128 and 32 query heads (benchmarks/synthetic.py); "
        "memory is the growth of the resident set over what inputs took"
    )
    first, last = rows[0], rows[len(parameters.lengths) - 1]
    times = last["entries"] / first["entries"]
    report.at_most(
        f"{times:g} times the entries: time of signatures and clustering",
        (last["signatures_s"] + last["clustering_s"])
        / (first["signatures_s"] + first["clustering_s"]),
        1.5 * times,
    )
    if parameters.kmeans:
        seconds = scale.kmeans_seconds(last["entries"])
        report.measure(f"{last['entries']} entries: faiss k-means", "s", seconds)
        report.at_most(
            "clustering (Algorithm 1) / faiss k-means", last["clustering_s"] / seconds, 1.0
        )
        report.at_most(
            "clustering (hypergraph) / faiss k-means", last["hypergraph_s"] / seconds, 1.0
        )


def run_replays(parameters: Parameters, report: Report) -> None:
    contexts = {
        "smollm2": (parameters.smollm2_context, parameters.smollm2_tokens),
        "gemma3": (parameters.gemma_context, parameters.gemma_tokens),
    }
    table: dict[tuple[str, int, int], list[Any]] = {}
    for model, layers in MODELS.items():
        context, tokens = contexts[model]
        if context == 0:
            report.note(f"replays: {model} was left out")
            continue
        for text in TEXTS:
            trace = replays.recorded(model, text, context, tokens, layers, parameters.stride)
            for layer in tqdm(trace.layers.values(), desc=f"{model}, {text}", disable=None):
                for row in replays.every_way(layer):
                    key = (row.way, row.drives, row.entry_bytes)
                    table.setdefault(key, []).append(row.result)
    replays.summarise(table, report)


def run_selection(parameters: Parameters, report: Report) -> None:
    for row in selection.rows(parameters.selection_lengths, parameters.repeats, parameters.seed):
        case = f"{row['entries']} entries"
        slow = row["seconds"]["all keys"]
        for way, seconds in row["seconds"].items():
            report.measure(f"{case}: selection by {way}", "s", seconds)
            report.measure(f"{case}: index, {way}", "bytes", float(row["index_bytes"][way]))
        goal = PAPER_GAIN[1] if row["entries"] >= 2**20 else PAPER_GAIN[0]
        for way in ("medoids", "medoids of 4 bits", "intervals by codes"):
            report.at_least(
                f"{case}: selection time, all keys / {way}",
                selection.ratio(slow, row["seconds"][way]),
                goal,
            )
    report.note(
        "selection (Table 4 of the paper): a tenth of random entries of 8 KV heads x 128 by 64 "
        "query heads; all keys in 16 bits; one medoid per 10 entries, 1.4 copies per entry; times "
        "of whole selections with their ranking"
    )


def run_codecs(parameters: Parameters, report: Report) -> None:
    rows = codecs.rows(
        parameters.codec_context, parameters.codec_steps, parameters.dram_share, parameters.drives
    )
    plain = rows[0]
    for row in rows:
        name = f"codec {row['codec']}"
        report.measure(f"{name}: perplexity", "perplexity", row["perplexity"])
        report.measure(f"{name}: mean KL(full || sparse)", "nats", row["kl"])
        report.measure(f"{name}: read per step", "bytes", row["bytes_per_step"])
        report.measure(f"{name}: requests per step", "requests", row["requests_per_step"])
    report.measure("full attention: perplexity", "perplexity", plain["full"])
    coded = next(row for row in rows if row["codec"] == "kivi4")
    report.at_most(
        "kivi4 / none: bytes per step", coded["bytes_per_step"] / plain["bytes_per_step"], 0.5
    )
    report.at_most(
        "kivi4: |perplexity / none - 1|", abs(coded["perplexity"] / plain["perplexity"] - 1), 0.01
    )
    report.note(
        f"codecs: SmolLM2, {parameters.codec_steps} steps after {parameters.codec_context} tokens "
        "of the Python topics, float32 entries"
    )
