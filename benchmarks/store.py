"""Retrieval against fio: bytes per second, scaling over drives, and CPU time per request.

Retrieval is the path of a decoding step: `Store.fetch` plans and submits, `rounds` waits, checks
and delivers. Two fetches are outstanding, as with prefetch, each of as many requests per drive as
fio has in flight there. fio reads the same files with its io_uring engine: one thread and one ring
for all drives, fixed buffers, registered files.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import time
from collections import deque
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import plots
from benchmarks.drives import PM9A3, Drives, checked_drives, fio
from benchmarks.harness import Report
from swarm_kv import SwarmConfig
from swarm_kv.store import NOTHING, Fetch, Store, Wanted

HEADS, DIM = 8, 128
ENTRY_BYTES = 2 * HEADS * DIM * 2
"""K and V of Qwen3-32B in 16 bits: 4 KiB."""
DRIVE_BYTES = 32 << 20
"""Written on each drive."""
DEPTHS = {4 << 10: 128, 16 << 10: 64, 64 << 10: 32}
"""Bytes of a request, and how many are in flight on each drive."""
UNTHROTTLED_REQUESTS = {4 << 10: 200_000, 16 << 10: 100_000, 64 << 10: 40_000}
"""About what drives without limits serve in a second."""
OUTSTANDING = 2

FIO = "fio"
BATCHED = "fio, a quarter of the depth at a time"
CHECKED = "retrieval"
UNCHECKED = "retrieval without checksums"
WAYS = (FIO, BATCHED, CHECKED, UNCHECKED)


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of one run: all drives together, and user and system time per request."""

    bytes_per_second: float
    cpu_us: float


class Retrieval:
    """A store whose clusters are read in requests of `request` bytes, one cluster each.

    Cluster c lies on drive c mod drives. Only every second cluster of a drive is ever read, and the
    device model has it that a request costs nothing, so that no two are joined.
    """

    def __init__(self, drives: Drives, request: int, *, verify: bool) -> None:
        self._request = request
        self._drives = len(drives.files)
        members = request // ENTRY_BYTES
        entries = DRIVE_BYTES // request * members * self._drives
        self._store = Store(
            SwarmConfig(
                paths=drives.paths,
                dram_bytes="80MiB",
                staging_bytes="64MiB",
                verify=verify,
                placement="sequential",
                device_model=(1e-12, 1e-9),
            )
        )
        # The same for every store, because those of one run share the files.
        random = torch.Generator().manual_seed(1)
        half = torch.randint(2**15, (HEADS, entries, DIM), generator=random, dtype=torch.int16)
        half = half.view(torch.float16)
        with drives.unthrottled():
            self._segment = self._store.write(
                half,
                half,
                torch.arange(0, entries + 1, members, dtype=torch.int32),
                torch.arange(entries, dtype=torch.int32),
                "benchmark",
            )

    def close(self) -> None:
        del self._segment
        self._store.close()

    def _steps(self, count: int, seed: int) -> list[Wanted]:
        """Each wants `DEPTHS` random clusters of every drive, the drives in turn."""
        random = torch.Generator().manual_seed(seed)
        rows = self._segment.clusters // self._drives // 2
        steps = []
        for _ in range(count):
            chosen = torch.stack(
                [
                    torch.randperm(rows, generator=random)[: DEPTHS[self._request]]
                    for _ in range(self._drives)
                ],
                dim=1,
            )
            clusters = (2 * self._drives * chosen + torch.arange(self._drives)).flatten()
            steps.append(Wanted((self._segment,), clusters, NOTHING, self._segment.entries))
        return steps

    def run(self, requests: int, seed: int) -> Speed:
        """Make about `requests` requests; the rates are of those that were made."""
        steps = self._steps(max(1, requests // (DEPTHS[self._request] * self._drives)), seed)
        before = self._read()
        outstanding: deque[Fetch] = deque()
        cpu, begin = cpu_seconds(), time.perf_counter()
        for wanted in steps:
            outstanding.append(self._store.fetch([wanted], purpose="stream"))
            if len(outstanding) == OUTSTANDING:
                finish(outstanding.popleft())
        while outstanding:
            finish(outstanding.popleft())
        cpu, seconds = cpu_seconds() - cpu, time.perf_counter() - begin
        made, size = (after - old for after, old in zip(self._read(), before, strict=True))
        if size != made * self._request:
            raise AssertionError(f"{made} requests read {size} bytes, not {self._request} each")
        return Speed(size / seconds, cpu / made * 1e6)

    def _read(self) -> tuple[int, int]:
        drives = self._store.counters()["drives"]
        return sum(d["reads"] for d in drives), sum(d["read_bytes"] for d in drives)


def finish(fetch: Fetch) -> None:
    with fetch:
        fetch.complete()


def cpu_seconds() -> float:
    """User and system time of this process, all threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def by_fio(drives: Drives, request: int, requests: int, batched: bool, seed: int) -> Speed:
    depth = DEPTHS[request] * len(drives.files)
    done = fio.random_reads(
        drives.files,
        block=request,
        depth=depth,
        requests=requests,
        batch=depth // 4 if batched else 1,
        seed=seed,
    )
    return Speed(done.bytes_per_second, done.cpu_seconds / done.requests * 1e6)


def compare(drives: Drives, request: int, requests: int, repeats: int) -> dict[str, list[Speed]]:
    """Every way in turn, `repeats` times, so that a busy moment of the machine meets all."""
    speeds: dict[str, list[Speed]] = {way: [] for way in WAYS}
    stores = {
        way: Retrieval(drives, request, verify=verify)
        for way, verify in ((CHECKED, True), (UNCHECKED, False))
    }
    for seed in range(1, repeats + 1):
        for way in (FIO, BATCHED):
            speeds[way].append(by_fio(drives, request, requests, way == BATCHED, seed))
        for way, store in stores.items():
            speeds[way].append(store.run(requests, seed))
    for store in stores.values():
        store.close()
    return speeds


def median_ratio(speeds: dict[str, list[Speed]], way: str, base: str, figure: str) -> float:
    """Median over the repetitions of `way` / `base`."""
    return statistics.median(
        getattr(a, figure) / getattr(b, figure)
        for a, b in zip(speeds[way], speeds[base], strict=True)
    )


PAPER = (
    "(§1) 37.67 GB/s with eight drives: 68 % of what eight PM9A3 deliver, or all of four PM9A3 and "
    "four 900P."
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    counts: tuple[int, ...] = (1, 2, 4, 8)
    """Drives."""
    sizes: tuple[int, ...] = tuple(DEPTHS)
    """Bytes of a request."""
    slowdown: float = 200.0
    """The drives are PM9A3 at 1/`slowdown` of their rates."""
    seconds: float = 0.4
    """That a run takes, about."""
    repeats: int = 3


QUICK = {"counts": (1, 2), "sizes": (4096, 65536), "seconds": 0.3, "repeats": 1}


def run(parameters: Parameters, report: Report) -> None:
    """Measure reads.

    CPU time is also measured with the drives unthrottled: real ones answer many requests at a time,
    where slowed ones wake the reader for each.
    """
    counts, sizes, repeats = parameters.counts, parameters.sizes, parameters.repeats
    seconds = parameters.seconds
    model = PM9A3.slower(parameters.slowdown)
    rates: dict[tuple[int, int], float] = {}
    with checked_drives([model] * max(counts), DRIVE_BYTES, report, checked=sizes) as all_drives:
        cases = [(size, count) for size in sizes for count in counts]
        for size, count in tqdm(cases, desc="reads against fio", disable=None):
            drives = all_drives.first(count)
            requests = int(model.rate(size) * count * seconds)
            speeds = compare(drives, size, requests, repeats)
            case = f"{count} x {size >> 10} KiB"
            for way in WAYS:
                report.measure(
                    f"{case}: {way}", "B/s", [each.bytes_per_second for each in speeds[way]]
                )
            rates[size, count] = statistics.median(
                each.bytes_per_second for each in speeds[CHECKED]
            )
            report.at_least(
                f"{case}: bytes per second, retrieval / fio",
                median_ratio(speeds, CHECKED, FIO, "bytes_per_second"),
                0.90,
            )
            if count == max(counts):
                report_cpu(case, speeds, report)
        if all_drives.throttled and {1, 8} <= set(counts):
            for size in sizes:
                report.at_least(
                    f"{size >> 10} KiB: bytes per second of retrieval, 8 drives / 1",
                    rates[size, 8] / rates[size, 1],
                    7.2,
                )
        with all_drives.unthrottled() as drives:
            for size in sizes:
                # Some tenths of a second of CPU time.
                speeds = compare(drives, size, int(UNTHROTTLED_REQUESTS[size] * seconds), repeats)
                report_cpu(f"{max(counts)} x {size >> 10} KiB, unthrottled", speeds, report)
    report.note(
        "CPU time is user and system time of the reading process; retrieval plans, checks "
        "and delivers entries of 4 KiB, fio only reads; requests in flight on each drive: "
        + ", ".join(f"{depth} of {size >> 10} KiB" for size, depth in DEPTHS.items())
    )


def report_cpu(case: str, speeds: dict[str, list[Speed]], report: Report) -> None:
    for way in WAYS:
        report.measure(f"{case}: CPU, {way}", "us/request", [each.cpu_us for each in speeds[way]])
    for way in (CHECKED, UNCHECKED):
        report.at_most(
            f"{case}: CPU per request, {way} / fio", median_ratio(speeds, way, FIO, "cpu_us"), 1.0
        )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Bytes per second and CPU time per request."""
    name = r"(?P<x>\d+) x {size} KiB: "
    panels = [
        plots.Panel(
            name.replace("{size}", str(size >> 10)) + r"(?P<series>(?!CPU|bytes).+)",
            "drives",
            "MB/s",
            title=f"requests of {size >> 10} KiB",
            factor=1e-6,
        )
        for size in result["parameters"]["sizes"]
    ]
    panels.append(
        plots.Panel(
            r"\d+ x (?P<x>\d+ KiB(?:, unthrottled)?): CPU, (?P<series>.+)",
            "request",
            "CPU time per request (µs)",
            kind="bars",
        )
    )
    plots.draw(result, path, panels)
