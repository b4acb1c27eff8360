"""Every benchmark by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark's module and what it measures.

    The module has `Parameters`, a frozen dataclass with defaults; `QUICK`, a dict of the parameters
    that --quick replaces; `run(parameters, report)`; and may have `plot(result, path)`.
    """

    module: str
    summary: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


BENCHMARKS: dict[str, Benchmark] = {
    "fig11": Benchmark("benchmarks.fig11", "throughput, bandwidth and accuracy of all methods"),
    "table4": Benchmark("benchmarks.table4", "time to select, and bytes of the index"),
    "table5": Benchmark("benchmarks.table5", "clusters while a context grows"),
    "fig14": Benchmark("benchmarks.fig14", "scheduling: deduplication and balance"),
    "fig15": Benchmark("benchmarks.fig15", "cluster cache: policies by cache ratio"),
    "pareto": Benchmark("benchmarks.pareto", "recall against I/O time, every selector"),
    "store": Benchmark("benchmarks.store", "retrieval against fio"),
    "prefetch": Benchmark("benchmarks.prefetch", "predicted queries, and the I/O time they hide"),
    "accuracy": Benchmark(
        "benchmarks.accuracy", "perplexity, KL and pass keys against full attention"
    ),
    "codecs": Benchmark("benchmarks.codecs", "what codecs save and cost on a real model"),
    "scale": Benchmark("benchmarks.scale", "profiling and clustering against length"),
    "stress": Benchmark("benchmarks.stress", "ten thousand steps over drives that fail"),
    "rings": Benchmark("benchmarks.rings", "one io_uring for all drives against one per drive"),
}
