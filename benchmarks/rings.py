"""One io_uring shared by all drives against one per drive: runs the C++ program `rings_bench`.

It reads random blocks of files in the directories given, in batches spread over 4 and 8 drives, and
prints a JSON list of rows: `drives`, `bytes`, `batch`, and for `shared` and `per_drive` the medians
of `_kiops` (thousand requests per second) and `_cpu_us` (CPU microseconds per request).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
from typing import Any

from benchmarks.harness import ROOT, Report, Unavailable

KINDS = {"shared": "one ring", "per_drive": "a ring each"}
_SHORT = {"kiops": "rate", "cpu_us": "CPU"}
BUILD = (
    "cmake -S . -B build/release -DCMAKE_BUILD_TYPE=Release -DSWARM_KV_TESTS=OFF && "
    "cmake --build build/release --target rings_bench"
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    program: str = ""
    """Path of rings_bench; the newest one below build/ if empty."""
    paths: tuple[str, ...] = ()
    """Directories to read from, one per drive; one temporary directory if empty."""
    repeats: int = 3
    """Runs of the program, about a minute each."""
    timeout_s: float = 600.0
    """Limit of one run, in seconds."""


QUICK: dict[str, Any] = {"repeats": 1}


def find_program(configured: str) -> pathlib.Path:
    if configured:
        program = pathlib.Path(configured)
        if not os.access(program, os.X_OK):
            raise Unavailable(f"`{program}` is not a program; build it: {BUILD}")
        return program
    # Sanitizer builds are too slow to measure.
    built = [p for p in ROOT.glob("build/**/rings_bench") if "san" not in p.parent.name]
    if not built:
        raise Unavailable(f"rings_bench is not built: {BUILD}")
    return max(built, key=lambda program: program.stat().st_mtime)


def run_program(program: pathlib.Path, paths: list[str], timeout_s: float) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [program, *paths], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"`{program}` took longer than {timeout_s:g} s") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"`{program}` failed: {error.stderr.strip()}") from error
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def run(parameters: Parameters, report: Report) -> None:
    program = find_program(parameters.program)
    with tempfile.TemporaryDirectory(prefix="swarm_kv_bench_") as scratch:
        paths = list(parameters.paths) or [scratch]
        runs = [
            run_program(program, paths, parameters.timeout_s) for _ in range(parameters.repeats)
        ]
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
