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
    "accuracy": Benchmark(
        "benchmarks.accuracy", "perplexity, KL and pass keys against full attention"
    ),
    "offline": Benchmark(
        "benchmarks.offline", "profiling, clustering, layouts, selection and codecs"
    ),
    "online": Benchmark(
        "benchmarks.online", "reads, scheduling, prefetch, maintenance, cluster cache and stress"
    ),
    "peers": Benchmark(
        "benchmarks.peers.table", "what others offer: DynamicCache, oLLM, kvpress, files per layer"
    ),
    "rings": Benchmark("benchmarks.rings", "one io_uring for all drives against one per drive"),
}
