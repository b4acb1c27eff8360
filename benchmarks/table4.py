"""Table 4 of the paper: time to select and bytes of the index, against scoring every key."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import plots
from benchmarks.harness import Report
from swarm_kv import ops
from swarm_kv.medoids import Medoids

HEADS, KV_HEADS, DIM = 64, 8, 128  # Qwen3-32B
MEMBERS = 14
"""Entries per cluster: with 1.4 copies per entry, one medoid per 10 entries, as Table 4 implies."""
COPIES = 1.4

PAPER_GAIN = (6.9, 12.2)
"""Selection against scoring all keys, at 128K and at 1M entries."""


PAPER = (
    "at 128K to 1M entries of Qwen3-32B, selection by medoids takes 0.236 to 0.999 ms and is 6.9 "
    "to 12.2 times faster than scoring all keys; the index has 0.053 to 0.412 GB."
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    lengths: tuple[int, ...] = (131072, 262144, 524288, 1048576)
    repeats: int = 3
    seed: int = 0


QUICK = {"lengths": (65536,), "repeats": 2}

Way = Callable[[], Any]


def ratio(slow: list[float], fast: list[float]) -> float:
    """Of the medians."""
    return statistics.median(slow) / statistics.median(fast)


def random_clusters(entries: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of MEMBERS, every entry in one, some in more."""
    more = torch.randint(entries, (int((COPIES - 1) * entries),), generator=random)
    members = torch.cat([torch.randperm(entries, generator=random), more]).int()
    offsets = torch.arange(0, members.numel() + MEMBERS, MEMBERS).clamp(max=members.numel())
    return offsets.int(), members


def ways(entries: int, random: torch.Generator) -> tuple[dict[str, Way], dict[str, int]]:
    """Ways to choose a tenth of `entries`, and the bytes of each one's index."""
    budget = entries // 10
    query = torch.randn(HEADS, 1, DIM, generator=random) * DIM**-0.5
    keys = torch.empty(KV_HEADS, entries, DIM, dtype=torch.float16)
    for head in range(KV_HEADS):
        keys[head] = torch.randn(entries, DIM, generator=random).half()
    lists = random_clusters(entries, random)
    full = Medoids.build(keys, *lists)
    coarse = Medoids.build(keys, *lists, bits=4)
    parts = DIM // 4
    codebooks = torch.randn(KV_HEADS, parts, 16, DIM // parts, generator=random)
    codes = torch.randint(256, (KV_HEADS, parts // 2, entries), generator=random, dtype=torch.uint8)
    order = torch.randperm(entries, generator=random).int()

    def by_medoids(medoids: Medoids) -> Way:
        return lambda: ops.select_clusters(medoids.score(query), *lists, budget)

    def by_codes() -> torch.Tensor:
        return ops.score_packed_codes(query, codebooks, codes, 1.0)

    list_bytes = sum(t.nbytes for t in lists)
    code_bytes = codes.nbytes + codebooks.nbytes
    return {
        "all keys": lambda: torch.topk(ops.score_clusters(query, keys, 1.0), budget, sorted=False),
        "medoids": by_medoids(full),
        "medoids of 4 bits": by_medoids(coarse),
        "intervals by codes": lambda: ops.select_intervals(by_codes(), order, budget, 1.5),
        "two_level by codes": lambda: ops.select_two_level(by_codes(), *lists, budget, 1.5, 0.3),
    }, {
        "all keys": keys.nbytes,
        "medoids": full.nbytes + list_bytes,
        "medoids of 4 bits": coarse.nbytes + list_bytes,
        "intervals by codes": code_bytes + order.nbytes,
        "two_level by codes": code_bytes + list_bytes,
    }


def rows(lengths: tuple[int, ...], repeats: int, seed: int) -> list[dict[str, Any]]:
    """Per length: seconds of each way to choose a tenth of the entries, and index bytes."""
    random = torch.Generator().manual_seed(seed)
    table = []
    for entries in lengths:
        work, held = ways(entries, random)
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(repeats + 1):
            # In turn, so that a busy moment of the machine meets all of them.
            for name, choose in work.items():
                begin = time.perf_counter()
                choose()
                if turn > 0:
                    seconds[name].append(time.perf_counter() - begin)
        table.append({"entries": entries, "seconds": seconds, "index_bytes": held})
    return table


def run(parameters: Parameters, report: Report) -> None:
    for row in rows(parameters.lengths, parameters.repeats, parameters.seed):
        case = f"{row['entries']} entries"
        slow = row["seconds"]["all keys"]
        for way, seconds in row["seconds"].items():
            report.measure(f"{case}: selection by {way}", "s", seconds)
            report.measure(f"{case}: index, {way}", "bytes", float(row["index_bytes"][way]))
        goal = PAPER_GAIN[1] if row["entries"] >= 2**20 else PAPER_GAIN[0]
        for way in ("medoids", "medoids of 4 bits", "intervals by codes"):
            report.at_least(
                f"{case}: selection time, all keys / {way}",
                ratio(slow, row["seconds"][way]),
                goal,
            )
    report.note(
        "a tenth of random entries of 8 KV heads x 128 by 64 "
        "query heads; all keys in 16 bits; one medoid per 10 entries, 1.4 copies per entry; times "
        "of whole selections with their ranking"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Time and index bytes against length."""
    name = r"(?P<x>\d+) entries"
    plots.draw(
        result,
        path,
        [
            plots.Panel(
                name + ": selection by (?P<series>.+)",
                "entries",
                "time to select (ms)",
                factor=1e3,
                log_x=True,
                log_y=True,
            ),
            plots.Panel(
                name + ": index, (?P<series>.+)",
                "entries",
                "index of one layer (MiB)",
                factor=2**-20,
                log_x=True,
                log_y=True,
            ),
        ],
    )
