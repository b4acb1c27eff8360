"""One io_uring shared by all drives against one per drive: runs the C++ program `rings_bench`.

It reads random blocks of files in the directories given, in batches spread over 4 and 8 drives, and
prints a JSON list of rows: `drives`, `bytes`, `batch`, and for `shared` and `per_drive` the medians
of `_kiops` (thousand requests per second) and `_cpu_us` (CPU microseconds per request).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from typing import Any

from benchmarks.harness import Program, Report

KINDS = {"shared": "one ring", "per_drive": "a ring each"}
_SHORT = {"kiops": "rate", "cpu_us": "CPU"}


@dataclasses.dataclass(frozen=True)
class Parameters:
    program: str = ""
    """Path of rings_bench; built if empty."""
    paths: tuple[str, ...] = ()
    """Directories to read from, one per drive; one temporary directory if empty."""
    repeats: int = 1
    """Runs of the program, about a minute each."""
    timeout_s: float = 600.0
    """Limit of one run, in seconds."""


QUICK: dict[str, Any] = {"repeats": 1}


def run(parameters: Parameters, report: Report) -> None:
    program = Program("rings_bench", parameters.program)
    with tempfile.TemporaryDirectory(prefix="swarm_kv_bench_") as scratch:
        paths = list(parameters.paths) or [scratch]
        runs = [program.output(paths, parameters.timeout_s) for _ in range(parameters.repeats)]
    ratios: dict[str, list[float]] = {"kiops": [], "cpu_us": []}
    for rows in zip(*runs, strict=True):
        first = rows[0]
        case = f"{first['drives']} x {first['bytes'] // 1024} KiB, batch {first['batch']}"
        for figure, unit in (("kiops", "k requests/s"), ("cpu_us", "CPU us/request")):
            for kind, name in KINDS.items():
                report.measure(
                    f"{case}: {_SHORT[figure]}, {name}",
                    unit,
                    [row[f"{kind}_{figure}"] for row in rows],
                )
            ratios[figure].extend(
                row[f"shared_{figure}"] / row[f"per_drive_{figure}"] for row in rows
            )
    report.at_least(
        "rate, one ring / a ring each (geometric mean)",
        statistics.geometric_mean(ratios["kiops"]),
        1.0,
    )
    report.at_most(
        "CPU, one ring / a ring each (geometric mean)",
        statistics.geometric_mean(ratios["cpu_us"]),
        1.0,
    )
    if not parameters.paths:
        report.note("all drives were files in one temporary directory: give --set paths=/a,/b,...")
