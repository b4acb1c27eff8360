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
    elsewhere: bool = False
    """Run by a script of its own, on another machine: `all` leaves it and its result alone."""

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


BENCHMARKS: dict[str, Benchmark] = {
    "table1": Benchmark("benchmarks.table1", "size of the KV cache beside the weights"),
    "fig3": Benchmark("benchmarks.fig3", "few entries hold the attention, and they change"),
    "fig4": Benchmark("benchmarks.fig4", "how often entries are activated together"),
    "fig5": Benchmark("benchmarks.fig5", "overlapping groups, replica paths, naive updates"),
    "fig11": Benchmark("benchmarks.fig11", "throughput, bandwidth and accuracy of all methods"),
    "fig12": Benchmark("benchmarks.fig12", "latency by clusterer"),
    "fig13": Benchmark("benchmarks.fig13", "latency and bandwidth by placement"),
    "table4": Benchmark("benchmarks.table4", "time to select, and bytes of the index"),
    "fig14": Benchmark("benchmarks.fig14", "scheduling: deduplication and balance"),
    "table5": Benchmark("benchmarks.table5", "clusters while a context grows"),
    "fig15": Benchmark("benchmarks.fig15", "cluster cache: policies by cache ratio"),
    "fig16": Benchmark("benchmarks.fig16", "latency against context length and batch"),
    "fig17": Benchmark("benchmarks.fig17", "throughput by kind of drive and context length"),
    "fig18": Benchmark("benchmarks.fig18", "throughput and bandwidth by number of drives"),
    "fig19": Benchmark("benchmarks.fig19", "throughput by cluster radius, on shifted data too"),
    "fig20": Benchmark("benchmarks.fig20", "throughput by sparsity"),
    "pareto": Benchmark("benchmarks.pareto", "recall against I/O time, every selector"),
    "store": Benchmark("benchmarks.store", "retrieval against fio"),
    "prefetch": Benchmark("benchmarks.prefetch", "predicted queries, and the I/O time they hide"),
    "accuracy": Benchmark(
        "benchmarks.accuracy", "perplexity, KL and pass keys against full attention"
    ),
    "tasks": Benchmark(
        "benchmarks.tasks", "questions about what a text hides: all methods at equal budget"
    ),
    "kernels": Benchmark(
        "benchmarks.kernels", "stages of the C++ core and operators by themselves, against torch"
    ),
    "gpu_model": Benchmark(
        "benchmarks.gpu_model",
        "bytes and time of CUDA kernels at the limits of an H200: a model",
    ),
    "gpu_check": Benchmark(
        "benchmarks.gpu.check",
        "tests and times of CUDA kernels and of a model on a GPU",
        elsewhere=True,
    ),
    "peers": Benchmark(
        "benchmarks.peers.table", "what others offer: DynamicCache, oLLM, kvpress, files per layer"
    ),
    "speed": Benchmark("benchmarks.speed", "decoding at 8K against DynamicCache in memory"),
    "plan": Benchmark("benchmarks.plan", "what `swarm-kv plan` reckons against what runs do"),
    "codecs": Benchmark("benchmarks.codecs", "what codecs save and cost on a real model"),
    "scale": Benchmark("benchmarks.scale", "profiling and clustering against length"),
    "stress": Benchmark("benchmarks.stress", "ten thousand steps over drives that fail"),
    "rings": Benchmark("benchmarks.rings", "one io_uring for all drives against one per drive"),
}
