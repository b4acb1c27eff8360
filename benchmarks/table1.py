"""Table 1 of the paper: how large the KV cache of a model is beside its weights.

Arithmetic only: nothing is run.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from benchmarks import plots, workload
from benchmarks.harness import Report

PAPER = "GPT-3 in FP16, 326 GB of weights: 144 GB (0.44x) at 32K to 2.25 TB (7.07x) at 512K."
REMARK = "The same, from 4.5 MiB per token; the paper's units are binary."
GPT3_BYTES_PER_TOKEN = 2 * 96 * 12288 * 2
"""K and V, 96 layers of width 12288, 16 bits."""
GPT3_WEIGHTS = 326 << 30
PAPER_RATIOS = {32: 0.44, 64: 0.88, 128: 1.77, 256: 3.53, 512: 7.07}
"""KV over weights, by context in K tokens, as printed: to two decimals."""
PAPER_SIZES = {32: 144, 64: 288, 128: 576, 256: 1.13 * 1024, 512: 2.25 * 1024}
"""GiB."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    contexts: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    """K tokens."""


QUICK: dict[str, Any] = {}


def run(parameters: Parameters, report: Report) -> None:
    """Sizes and ratios of GPT-3 and of the paper's five models."""
    for context in parameters.contexts:
        size = context * 1024 * GPT3_BYTES_PER_TOKEN
        report.measure(f"GPT-3, {context}K: KV", "GiB", size / 2**30)
        report.measure(f"GPT-3, {context}K: KV / weights", "ratio", size / GPT3_WEIGHTS)
        if context in PAPER_RATIOS:
            off = abs(size / GPT3_WEIGHTS - PAPER_RATIOS[context])
            report.at_most(f"GPT-3, {context}K: ratio, distance from the paper's", off, 0.005)
            off = abs(size / 2**30 / PAPER_SIZES[context] - 1)
            report.at_most(f"GPT-3, {context}K: size, relative to the paper's", off, 0.005)
        for model in workload.GEOMETRIES:
            size = context * 1024 * model.layers * model.entry_bytes
            report.measure(f"{model.name}, {context}K: KV", "GiB", size / 2**30)
            report.measure(f"{model.name}, {context}K: KV / weights", "ratio", size / model.weights)
    report.note(
        "weights of the five models: what a token of decoding reads, active experts only; "
        "gpt-oss without its layers of a sliding window"
    )


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    name = r"(?P<series>.+), (?P<x>\d+)K"
    panels = [
        plots.Panel(f"{name}: KV", "context (K tokens)", "KV (GiB)", log_x=True, log_y=True),
        plots.Panel(
            f"{name}: KV / weights",
            "context (K tokens)",
            "KV / weights",
            log_x=True,
            log_y=True,
            level=(1.0, "as large as the weights"),
        ),
    ]
    plots.draw(result, path, panels)
