"""The C++ stages by themselves, and the operators against torch.

`micro_bench` (csrc/bench/micro.cpp) measures the stages on one thread, its repetitions in random
order, with copies of memory among them: what a stage reads and writes per second is also given as a
share of what a copy does. The operators run from Python, each in turn with what torch offers for
the same purpose.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Program, Report
from swarm_kv import ops

QUICK = {"entries": 8192, "seconds": 0.005, "repeats": 2}

COPY = "copy/32 MiB"
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5


@dataclasses.dataclass(frozen=True)
class Parameters:
    program: str = ""
    """Path of `micro_bench`; built if empty."""
    only: str = ""
    """Stages whose name matches this regular expression; all if empty."""
    entries: int = 32768
    """Of the context that the operators work on."""
    seconds: float = 0.15
    """At least so long is each repetition, of a stage as of an operator."""
    repeats: int = 5
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """An operator and what torch offers for the same purpose; `same` if results are equal too."""

    name: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    same: bool


def stages(parameters: Parameters) -> dict[str, list[dict[str, Any]]]:
    """What Google Benchmark reports of each repetition, by stage."""
    only = f"{COPY}|{parameters.only}" if parameters.only else "."
    output = Program("micro_bench", parameters.program).output(
        [
            "--benchmark_format=json",
            f"--benchmark_filter={only}",
            f"--benchmark_min_time={parameters.seconds}",
            f"--benchmark_repetitions={parameters.repeats}",
            "--benchmark_enable_random_interleaving=true",
        ],
        timeout_s=600,
    )
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(output["benchmarks"], key=lambda row: row["family_index"]):
        if row["run_type"] == "iteration":
            rows.setdefault(row["run_name"], []).append(row)
    return rows


def measure_stages(parameters: Parameters, report: Report) -> None:
    measured = stages(parameters)
    copies = [row["bytes_per_second"] for row in measured.pop(COPY)]
    copied = statistics.median(copies)
    report.measure("copy of memory, read and written", "GB/s", [rate / 1e9 for rate in copies])
    for name, rows in measured.items():
        report.measure(name, "ns/entry", [1e9 / row["items_per_second"] for row in rows])
    for name, rows in measured.items():
        if "bytes_per_second" in rows[0]:
            shares = [row["bytes_per_second"] / copied for row in rows]
            report.measure(name, "of a copy's bandwidth", shares)


def pairs(entries: int, seed: int) -> list[Pair]:
    """Decoding steps that attend to a tenth of `entries` entries of 32 query and 8 KV heads."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    budget = entries // 10
    size = 2 * KV_HEADS * DIM
    pool = normal(entries * size).to(torch.bfloat16)
    slots = torch.randperm(entries, generator=random)[:budget] * size
    query = normal(1, HEADS, DIM).to(torch.bfloat16)
    rows = torch.tensor([0, budget])

    def gathered() -> Tensor:
        return pool.view(entries, 2, KV_HEADS, DIM)[slots // size]

    def attend(chosen: Tensor) -> Tensor:
        # The heads of a group as so many queries: faster on a CPU than `enable_gqa`.
        keys, values = (chosen[:, half].transpose(0, 1)[None] for half in (0, 1))
        grouped = query.view(1, KV_HEADS, -1, DIM)
        out = functional.scaled_dot_product_attention(grouped, keys, values, scale=SCALE)
        return out.reshape(1, HEADS, DIM)

    dense = gathered()
    out = [normal(HEADS, DIM) for _ in range(2)]
    lse = [normal(HEADS) for _ in range(2)]

    def merge() -> tuple[Tensor, Tensor]:
        total = torch.logaddexp(*lse)
        weights = [(part - total).exp()[:, None] for part in lse]
        return weights[0] * out[0] + weights[1] * out[1], total

    one_query = query.transpose(0, 1).float()  # [Hq, 1, D]
    keys = pool.view(entries, 2, KV_HEADS, DIM)[:, 0].transpose(0, 1).contiguous()

    def score(some: Tensor) -> Tensor:
        """Exact scores of entries by their keys [Hkv, n, D]."""
        grouped = one_query.view(KV_HEADS, -1, DIM).to(some.dtype)
        logits = (grouped @ some.transpose(1, 2)).float() * SCALE
        return logits.softmax(-1).mean((0, 1))

    medoids = keys[:, : entries // 16].contiguous()
    codebooks = normal(KV_HEADS, DIM // 4, 16, 4)
    codes = torch.randint(256, (KV_HEADS, DIM // 8, entries), dtype=torch.uint8, generator=random)
    probs = score(keys)
    order = torch.randperm(entries, generator=random).to(torch.int32)
    return [
        Pair(
            "sparse_attention / gather, then SDPA",
            lambda: ops.sparse_attention(query, pool, slots, rows, KV_HEADS, SCALE)[0],
            lambda: attend(gathered()),
            same=True,
        ),
        Pair(
            "sparse_attention / SDPA of entries that lie together",
            lambda: ops.sparse_attention(query, pool, slots, rows, KV_HEADS, SCALE)[0],
            lambda: attend(dense),
            same=True,
        ),
        Pair(
            "merge_attention / its definition in torch",
            lambda: ops.merge_attention(out[0], lse[0], out[1], lse[1]),
            merge,
            same=True,
        ),
        Pair(
            "gather_entries / index",
            lambda: torch.ops.swarm_kv.gather_entries(pool, slots, size),
            lambda: gathered().view(budget, size),
            same=True,
        ),
        Pair(
            "score_clusters / matmul and softmax of the medoids",
            lambda: ops.score_clusters(one_query, medoids, SCALE),
            lambda: score(medoids),
            same=True,
        ),
        Pair(
            "score_packed_codes / matmul and softmax of all keys",
            lambda: ops.score_packed_codes(one_query, codebooks, codes, SCALE),
            lambda: score(keys),
            same=False,
        ),
        Pair(
            "select_intervals / topk",
            lambda: ops.select_intervals(probs, order, budget),
            lambda: probs.topk(budget),
            same=False,
        ),
    ]


def calls_for(call: Callable[[], Any], seconds: float) -> int:
    """How many calls take that long."""
    call()
    begin = time.perf_counter()
    call()
    return max(1, round(seconds / max(time.perf_counter() - begin, 1e-7)))


def cpu_seconds(call: Callable[[], Any], calls: int) -> float:
    """CPU time of this thread for one of `calls` calls: what others do on the machine is none."""
    begin = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begin) / calls


def measure_operators(parameters: Parameters, report: Report) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for pair in pairs(parameters.entries, parameters.seed):
            both = (pair.ours, pair.torch)
            counts = [calls_for(call, parameters.seconds) for call in both]
            times: list[list[float]] = [[], []]
            for repeat in range(parameters.repeats):
                for side in (repeat % 2, 1 - repeat % 2):  # a busy moment hits both
                    times[side].append(cpu_seconds(both[side], counts[side]))
            report.measure(f"{pair.name}: operator", "us", [1e6 * t for t in times[0]])
            report.measure(f"{pair.name}: torch", "us", [1e6 * t for t in times[1]])
            ratios = [a / b for a, b in zip(*times, strict=True)]
            report.measure(pair.name, "of torch's time", ratios)
    finally:
        torch.set_num_threads(threads)


def run(parameters: Parameters, report: Report) -> None:
    measure_stages(parameters, report)
    measure_operators(parameters, report)
    report.note("one thread; CPU time")
    report.note(
        "score_packed_codes and select_intervals do something else than torch's side: codes in "
        "place of keys, and intervals of the layout in place of single entries"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Time per entry, bandwidth and the ratios to torch, on logarithmic axes."""
    from matplotlib.figure import Figure

    panels = {
        "ns/entry": "ns per entry, one thread",
        "of a copy's bandwidth": "bytes per second, relative to a copy of memory",
        "of torch's time": "operator's time, relative to torch",
    }
    rows = {unit: [m for m in result["measurements"] if m["unit"] == unit] for unit in panels}
    figure = Figure(
        figsize=(9, 2 + 0.2 * sum(len(r) + 3 for r in rows.values())), layout="constrained"
    )
    axes = figure.subplots(
        len(panels), 1, gridspec_kw={"height_ratios": [len(r) + 2 for r in rows.values()]}
    )
    for axis, (unit, label) in zip(axes, panels.items(), strict=True):
        for number, m in enumerate(rows[unit]):
            axis.plot([min(m["raw"]), max(m["raw"])], [number] * 2, color="#bbbbbb", linewidth=4)
            axis.plot(m["median"], number, "o", color="#4477aa")
        axis.set_yticks(range(len(rows[unit])), [m["name"] for m in rows[unit]], fontsize=8)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
        if unit != "ns/entry":
            axis.axvline(1, color="#cc6677", linewidth=1)
    figure.suptitle(f"{result['name']} · {result['machine']['cpu']} · {result['time']}")
    figure.savefig(path, dpi=120)
