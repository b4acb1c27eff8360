"""What the CUDA kernels must move and compute, and how long that takes at the limits of a GPU.

A roofline sheet: arithmetic only. No kernel has run on hardware for it; the figures say what to
look for when one does.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from benchmarks import plots, tables
from benchmarks.harness import Report

REMARK = (
    "A model, not a measurement: bytes, instructions and limits are counted by hand from the "
    "kernels' sources and the data sheet of an H200."
)

WARP = 32
ROWS = 8
"""Query rows that share a key head here, and that a kernel scores together."""
CODE_BYTES = 16
"""Of an entry and KV head: 32 parts of 4 bits, the default at 128 features."""
ITEMS = 1024
"""Entries that a block scores."""
RUN = 128
"""Entries of which a warp keeps one maximum and one sum."""
SLOT = 8
"""Bytes that say where an entry lies."""
WAVE = 64
"""Queries that are profiled at a time."""
SELECTS = 4
"""Reads of the probabilities by a radix select: as many bytes as a float has."""
BLOCKS = 3
"""Of decode attention that a multiprocessor holds; the entries are cut into so many pieces that all
run at once."""
OPERATIONS = {"float32": 2 * 128, "tensor cores": 2 * 2048}
"""Of a multiprocessor in one cycle; tensor cores with 16 bits in."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    layers: int = 64
    query_heads: int = 64
    kv_heads: int = 8
    dim: int = 128
    weights: float = 65.6e9
    """Bytes that a token of decoding reads beside the KV cache. These are Qwen3-32B's."""
    context: int = 131072
    share: float = 0.10
    """Of the context that is attended to."""
    resident: int = 260
    """Sinks and window, outside of it."""
    cluster: int = 16
    """Entries of a cluster; with replicas there are 1.4 as many members as entries."""
    queries: int = 1024
    """That a context is profiled by."""
    hits: tuple[float, ...] = (0.0, 0.5, 0.9)
    """Shares of the selected entries that the device cache has."""
    memory: float = 4.8e12
    """Bytes per second of an H200's HBM3e."""
    link: float = 64e9
    """Of PCIe 5 with 16 lanes, one way."""
    processors: int = 132
    clock: float = 1.98e9
    attained: float = 0.8
    """Of the tightest limit, by kernels that do little else than stream."""
    launch: float = 2e-6
    """Seconds between two kernels of which the second needs the first."""

    @property
    def entry(self) -> int:
        """Bytes of an entry: K and V of all heads in 16 bits."""
        return 2 * self.kv_heads * self.dim * 2


QUICK: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One stage of a layer.

    Attributes:
        memory: bytes that it reads and writes, each array once.
        instructions: of warps.
        shared: bytes that it reads from shared memory.
        operations: additions, multiplications and exponentials.
        unit: that does nothing else than these operations, if one does.
        link: bytes to or from the host.
        launches: kernels.
    """

    name: str
    memory: float
    instructions: float = 0
    shared: float = 0
    operations: float = 0
    unit: str = ""
    link: float = 0
    launches: int = 1

    def limits(self, p: Parameters) -> dict[str, float]:
        """Seconds that each unit of the GPU needs at least, if it were alone."""
        rate = p.processors * p.clock
        limits = {
            "memory": self.memory / p.memory,
            "instructions": self.instructions / (4 * rate),
            "shared memory": self.shared / (128 * rate),
            "link": self.link / p.link,
        }
        if self.unit:
            limits[self.unit] = self.operations / (OPERATIONS[self.unit] * rate)
        return limits

    def expected(self, p: Parameters) -> float:
        """Seconds: the tightest limit as far as it is attained, and the gaps between kernels."""
        return max(self.limits(p).values()) / p.attained + self.launches * p.launch


def step(p: Parameters) -> list[Kernel]:
    """One layer of one decoding step."""
    rows = p.query_heads
    scores = rows * p.context * 2
    codebooks = p.kv_heads * 2 * CODE_BYTES * 16 * (p.dim / (2 * CODE_BYTES)) * 4
    taken = p.share * p.context + p.resident
    codes = p.kv_heads * p.context * CODE_BYTES
    # Two look-ups and sixteen instructions for each byte of code, 250 to store four scores of each
    # of the eight rows and to reduce them.
    scan = (codes * 18 + p.kv_heads * p.context / 4 * 250) / WARP
    clusters = p.context * 1.4 / p.cluster
    return [
        Kernel("tables", 2 * codebooks, launches=2),
        Kernel(
            "code scan",
            codes + scores,
            instructions=scan,
            shared=2 * codes * 8,
            operations=2 * codes * ROWS,
        ),
        Kernel(
            "softmax mean",
            scores + 4 * p.context + 16 * rows * p.context / RUN,
            instructions=rows * p.context * 7 / WARP,
            operations=4 * rows * p.context,
            launches=2,
        ),
        Kernel("scores to host", 4 * p.context, link=4 * p.context),
        Kernel("slots to device", SLOT * taken, link=SLOT * taken),
        Kernel(
            "gather, all from the host",
            p.share * p.context * (p.entry + 2 * SLOT),
            link=p.share * p.context * p.entry,
        ),
        attention("attention", p, taken),
        Kernel(
            "medoid scan",
            p.kv_heads * clusters * p.dim * 2 + 8 * rows * clusters,
            # Nine reads of shared memory and 32 multiply-adds for four features of a key, and 16
            # to bring them there. A warp reads twelve times 128 bytes: queries serve all lanes.
            instructions=p.kv_heads * clusters * p.dim / 4 * (9 + 32 + 16) / WARP,
            shared=p.kv_heads * clusters * p.dim / 4 / WARP * 12 * 128,
            operations=2 * rows * clusters * p.dim,
            launches=3,
        ),
        # Keys and ids pass the sort four times, members and entries are looked at twice.
        Kernel("cluster top-k", clusters * 8 * 8 + 8 * p.context * 2.4, launches=10),
    ]


def attention(name: str, p: Parameters, entries: float) -> Kernel:
    """Decode attention and the merge of its parts."""
    pieces = BLOCKS * p.processors / p.kv_heads
    parts = pieces * p.query_heads * (p.dim + 1) * 4
    return Kernel(
        name,
        entries * (p.entry + SLOT) + 2 * parts,
        operations=4 * p.query_heads * entries * p.dim,
        unit="tensor cores",
        launches=2,
    )


def profile(p: Parameters) -> list[Kernel]:
    """One layer of the profile that clusters are made from; once per context."""
    waves = p.queries / WAVE
    keys = p.kv_heads * p.context * p.dim * 2
    probabilities = WAVE * p.context * 4
    products = 2 * p.query_heads * p.queries * p.context * p.dim
    # A warp reads three times 128 bytes for sixteen multiply-adds of each lane: threads of a tile
    # share what they read.
    shared = products / 2 / (16 * WARP) * 3 * 128
    return [
        Kernel(
            "profile: lse",
            waves * keys,
            shared=shared,
            operations=products,
            unit="float32",
            launches=2 * int(waves),
        ),
        Kernel(
            "profile: scores",
            waves * (keys + probabilities),
            shared=shared,
            operations=products,
            unit="float32",
            launches=int(waves),
        ),
        Kernel("profile: select", waves * SELECTS * probabilities, launches=int(waves)),
        Kernel("profile: pack", waves * (probabilities + 8 * p.context), launches=int(waves)),
    ]


def run(parameters: Parameters, report: Report) -> None:
    """The sheet, and what it says of a token."""
    p = parameters
    stages = step(p)
    for kernel in [*stages, *profile(p)]:
        limits = kernel.limits(p)
        expected = kernel.expected(p)
        report.measure(f"{kernel.name}: bytes", "MB", kernel.memory / 1e6)
        report.measure(f"{kernel.name}: bytes over the link", "MB", kernel.link / 1e6)
        report.measure(f"{kernel.name}: operations", "millions", kernel.operations / 1e6)
        for unit, seconds in limits.items():
            if seconds > 0:
                report.measure(f"{kernel.name}: limit by {unit}", "us", seconds * 1e6)
        report.measure(f"{kernel.name}: expected", "us", expected * 1e6)
        report.measure(
            f"{kernel.name}: expected share of the memory limit",
            "ratio",
            limits["memory"] / expected,
        )
    times = {kernel.name: kernel.expected(p) for kernel in stages}
    select = times["tables"] + times["code scan"] + times["softmax mean"]
    dense = attention("full attention", p, p.context).expected(p)
    weights = p.weights / p.memory / p.attained
    report.measure("token: weights", "ms", weights * 1e3)
    report.measure("token: full attention in HBM", "ms", p.layers * dense * 1e3)
    report.measure("token: scores of all entries", "ms", p.layers * select * 1e3)
    report.measure("token: attention to the share", "ms", p.layers * times["attention"] * 1e3)
    for hits in p.hits:
        moved = (1 - hits) * p.share * p.context * p.entry
        report.measure(
            f"token: copies from the host, {hits:.0%} in the device cache",
            "ms",
            p.layers * moved / p.link / p.attained * 1e3,
        )
    report.at_most(
        "scores and attention to the share, of full attention in HBM",
        (select + times["attention"]) / dense,
        0.5,
    )
    report.note(
        "this is a model and has not run on hardware; an H200 by its data sheet: "
        f"{p.memory / 1e12:g} TB/s, {p.processors} multiprocessors at {p.clock / 1e9:g} GHz, "
        f"PCIe 5 x16 {p.link / 1e9:g} GB/s; batch 1, {p.context} entries of "
        f"{p.query_heads}/{p.kv_heads} heads of {p.dim} features in 16 bits, {p.share:.0%} of "
        "them attended to"
    )
    report.note(
        f"a kernel is expected to take its tightest limit divided by {p.attained:g}, what streams "
        f"attain, and {p.launch * 1e6:g} us per launch, unless a CUDA graph takes that "
        "away; arrays between two kernels count as read from memory, although most stay in the "
        "second-level cache of 50 MB"
    )
    report.note(
        "code scan: bound by instructions, since each byte of code is two look-ups for eight rows; "
        "a part's table takes each bank of shared memory once, so look-ups do not collide"
    )
    report.note(
        "attention: reads each key and value once for the eight query heads that share it, and is "
        "bound by memory; entries are runs of 2 KiB per key or value of all heads"
    )
    report.note(
        "cluster top-k and tables: bound by launches, not by bytes; the share of the memory limit "
        "says little there"
    )
    report.note(
        "profile: products in float32, so that thresholds are those of the CPU; tensor cores would "
        "take a tenth of the time but round queries and keys that are float32"
    )
    report.note(
        "the default selector (interval) works on the host: scores go there, slots come back; its "
        "time on the host is in `kernels`"
    )


COLUMNS = {
    "bytes": "MB",
    "operations": "operations (millions)",
    "limit by memory": "memory limit (us)",
    "expected": "expected (us)",
    "expected share of the memory limit": "share of the limit",
}


def table(result: dict[str, Any]) -> str:
    """The kernels as one table, for the page."""
    rows = [
        "| one layer | " + " | ".join(COLUMNS.values()) + " | bound by |",
        "|---|" + "---:|" * len(COLUMNS) + "---|",
    ]
    for kernel, values in tables.medians(result).items():
        if "expected" not in values:
            continue
        cells = [f"{values[name]:.3g}" for name in COLUMNS]
        limits = {name: value for name, value in values.items() if name.startswith("limit by ")}
        bound = max(limits, key=lambda name: limits[name]).removeprefix("limit by ")
        rows.append(f"| {kernel} | " + " | ".join(cells) + f" | {bound} |")
    return "\n".join(rows)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Limits and expected times of the kernels of a step, and of a token."""
    kernels = r"code scan|softmax mean|attention|medoid scan|cluster top-k"
    panels = [
        plots.Panel(
            rf"(?P<x>{kernels}): (?P<series>limit by memory|expected)",
            "",
            "us per layer",
            "model, not measured",
            kind="bars",
        ),
        plots.Panel(
            r"token: (?P<x>weights|full|scores|attention)(?P<series>)(?: .*)?",
            "",
            "ms per token",
            "model, not measured",
            kind="bars",
        ),
    ]
    plots.draw(result, path, panels)
