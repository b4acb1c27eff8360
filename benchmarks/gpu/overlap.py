"""Whether copies from the host run while the GPU computes, by events on two streams of torch."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.timing import event, settle
from benchmarks.harness import Report

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters

GOAL = 0.8


def run(parameters: Parameters, report: Report) -> None:
    device = parameters.device
    on_gpu = device == "cuda"
    host = torch.zeros(parameters.link_bytes, dtype=torch.uint8)
    host = host.pin_memory() if on_gpu else host
    target = torch.empty(parameters.link_bytes, dtype=torch.uint8, device=device)
    matrix = torch.zeros(parameters.width, parameters.width, dtype=torch.bfloat16, device=device)
    copies = torch.cuda.Stream() if on_gpu else None

    def seconds(copy: bool, products: int) -> float:
        """Of a copy on its own stream and products on torch's, until both have ended."""
        begin, copied, end = (event(device) for _ in range(3))
        begin.record()
        with torch.cuda.stream(copies):
            begin.wait()
            if copy:
                target.copy_(host, non_blocking=True)
            copied.record()
        for _ in range(products):
            matrix @ matrix
        copied.wait()
        end.record()
        settle(device)
        taken: float = begin.elapsed_time(end)
        return taken / 1e3

    seconds(True, 1)
    copy = statistics.median(seconds(True, 0) for _ in range(3))
    product = statistics.median(seconds(False, 4) for _ in range(3)) / 4
    products = max(1, min(1000, round(copy / product)))  # as long as the copy
    taken: dict[str, list[float]] = {"copy": [], "products": [], "both": []}
    for _ in range(parameters.repeats):
        taken["copy"].append(seconds(True, 0))
        taken["products"].append(seconds(False, products))
        taken["both"].append(seconds(True, products))
    for name, values in taken.items():
        report.measure(f"overlap: {name}", "ms", [1e3 * value for value in values])
    report.measure(
        "overlap: copy from pinned memory",
        "GB/s",
        [1e-9 * parameters.link_bytes / value for value in taken["copy"]],
    )
    hidden = [
        (alone + computed - both) / min(alone, computed)
        for alone, computed, both in zip(*taken.values(), strict=True)
    ]
    report.measure("overlap: share of the shorter one that is hidden", "share", hidden)
    report.at_least("overlap: hidden (median)", statistics.median(hidden), GOAL)
    report.note(
        f"{parameters.link_bytes >> 20} MiB from pinned memory beside {products} products of "
        f"square matrices of {parameters.width} in bfloat16"
    )
