"""Time and memory of profiling and clustering one layer, each length in a process of its own.

python -m benchmarks.scale ENTRIES QUERIES prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tqdm import tqdm

from benchmarks import plots
from benchmarks.harness import ROOT, Report

HEADS, KV_HEADS, DIM = 32, 8, 128
CENTROID_ENTRIES = 16
ITERATIONS = 20


@dataclasses.dataclass(frozen=True)
class Parameters:
    lengths: tuple[int, ...] = (16384, 32768, 65536)
    """Entries; all with 1,024 profiled queries."""
    longest: int = 1048576
    """Entries, with 256 profiled queries; 0 to leave it out."""
    kmeans: int = 16384
    """Entries that faiss k-means is timed on, of `lengths`; 0 to leave it out."""


QUICK = {"lengths": (4096, 8192), "longest": 0, "kmeans": 4096}


def _resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `_forget_peak`."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _forget_peak() -> None:
    # What was freed is given back first: work that took it again would not show.
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure(entries: int, queries: int) -> dict[str, Any]:
    """Seconds and peak memory of signatures and clustering, and of what they return."""
    from benchmarks import synthetic
    from swarm_kv import ops

    context = synthetic.context(entries, queries, heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
    # Starts threads and touches code pages, so that they do not count as memory of the work.
    ops.cluster(
        ops.activation_signatures(
            context.queries[:, :64], context.keys[:, :4096], context.positions[:64].clamp(max=4095)
        )
    )
    _forget_peak()
    before = _resident("VmRSS")
    begin = time.perf_counter()
    bits = ops.activation_signatures(
        context.queries,
        context.keys,
        context.positions,
        sparsity=0.1,
        window=256,
        sinks=4,
        scale=context.scale,
    )
    profiled = time.perf_counter()
    offsets, members = ops.cluster(bits)
    clustered = time.perf_counter()
    peak = _resident("VmHWM") - before
    signature_bytes = bits.numel() * bits.itemsize
    result_bytes = sum(t.numel() * t.itemsize for t in (offsets, members))
    ops.cluster(bits, "hypergraph")
    bisected = time.perf_counter()
    return {
        "entries": entries,
        "queries": queries,
        "signatures_s": profiled - begin,
        "clustering_s": clustered - profiled,
        "hypergraph_s": bisected - clustered,
        "peak_bytes": peak,
        "signature_bytes": signature_bytes,
        "result_bytes": result_bytes,
        "held_bytes": signature_bytes + result_bytes,
        "clusters": offsets.numel() - 1,
        "copies": members.numel() / entries,
    }


def measure_apart(entries: int, queries: int) -> dict[str, Any]:
    """`measure` in a fresh process, so that no length sees memory of another."""
    command = [sys.executable, "-m", "benchmarks.scale", str(entries), str(queries)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def kmeans_seconds(entries: int) -> float:
    """Seconds that faiss takes for k-means of the same keys into one centroid per 16 entries."""
    import faiss
    import torch

    from benchmarks import synthetic

    context = synthetic.context(entries, 16, heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
    points = context.keys.transpose(0, 1).reshape(entries, -1).float().numpy()
    del context
    faiss.omp_set_num_threads(torch.get_num_threads())
    kmeans = faiss.Kmeans(
        points.shape[1],
        entries // CENTROID_ENTRIES,
        niter=ITERATIONS,
        max_points_per_centroid=CENTROID_ENTRIES,
        min_points_per_centroid=1,
        seed=1,
    )
    begin = time.perf_counter()
    kmeans.train(points)
    return time.perf_counter() - begin


def run(parameters: Parameters, report: Report) -> None:
    sizes = [(entries, 1024) for entries in parameters.lengths]
    if parameters.longest:
        sizes.append((parameters.longest, 256))
    rows = []
    for entries, queries in tqdm(sizes, desc="signatures and clustering", disable=None):
        row = measure_apart(entries, queries)
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
        "synthetic keys of 8 KV heads x 128 and 32 query heads (benchmarks/synthetic.py); "
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
        row = next(row for row in rows if row["entries"] == parameters.kmeans)
        seconds = kmeans_seconds(parameters.kmeans)
        report.measure(f"{parameters.kmeans} entries: faiss k-means", "s", seconds)
        for name, figure in (("Algorithm 1", "clustering_s"), ("hypergraph", "hypergraph_s")):
            report.at_most(f"clustering ({name}) / faiss k-means", row[figure] / seconds, 1.0)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Time against entries."""
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                r"(?P<x>\d+) entries, \d+ queries: (?P<series>signatures|clustering.*)",
                "entries",
                "time (s)",
                log_x=True,
                log_y=True,
            ),
            plots.Panel(
                r"(?P<x>\d+) entries, \d+ queries: (?P<series>memory, peak|signatures and result)",
                "entries",
                "MiB",
                factor=2**-20,
                log_x=True,
                log_y=True,
            ),
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("entries", type=int)
    parser.add_argument("queries", type=int)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.entries, arguments.queries)))
