"""Tests and measurements on a GPU, in steps that do not wait for each other.

A step that fails or runs over its limit is told as not finished, and the others still run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch

from benchmarks import plots
from benchmarks.harness import ROOT, Report, Unavailable

MISSING = "not run: no GPU here"
REMARK = "One run of `scripts/gpu_check.sh` on the machine that the notes name."


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the check.

    Attributes:
        module: that has `run(parameters, report)`.
        seconds: after which it is cut.
    """

    module: str
    seconds: float

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


STEPS = {
    "layout": Step("benchmarks.gpu.layout", 30),
    "tests": Step("benchmarks.gpu.suite", 130),
    "kernels": Step("benchmarks.gpu.kernels", 90),
    "overlap": Step("benchmarks.gpu.overlap", 20),
    "model": Step("benchmarks.gpu.model", 120),
    "storage": Step("benchmarks.gpu.storage", 30),
}


@dataclasses.dataclass(frozen=True)
class Parameters:
    seconds: float = 460
    """For all steps together: what is left of it cuts a step too."""
    device: str = "cuda"
    """`cpu` tries the steps themselves; its figures mean nothing."""
    steps: tuple[str, ...] = tuple(STEPS)
    seed: int = 0
    repeats: int = 20
    context: int = 131072
    """Entries of one layer, for the kernels."""
    copy_bytes: int = 1 << 30
    """Of the copies that tell the bandwidth of memory."""
    link_bytes: int = 256 << 20
    """Of a copy from pinned host memory."""
    width: int = 4096
    """Of the square matrices whose products run beside that copy."""
    tests: str = "tests/cuda"
    model: str = "smollm2"
    """Or `random`: a small model with random weights."""
    prompt: int = 2048
    tokens: int = 16


QUICK = {"repeats": 5, "context": 32768}


def run_step(name: str, parameters: Parameters, report: Report) -> None:
    """Run a step in a process of its own and take over what it reports."""
    seconds = max(0.0, min(STEPS[name].seconds, parameters.seconds - report.seconds))
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "report.json"
        given = json.dumps({**dataclasses.asdict(parameters), "paths": report.paths})
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, given, str(found)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
            reason = (errors.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"took longer than {seconds:.3g} s"
        finally:  # with what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finished = process.returncode == 0 and found.exists()
        if finished:
            fragment = json.loads(found.read_text())
            report.measurements += fragment["measurements"]
            report.checks += fragment["checks"]
            for note in fragment["notes"]:
                report.note(f"{name}: {note}")
        else:
            report.note(f"{name}: not finished: {reason}")
        report.at_least(f"{name}: finished", finished, 1)


def run(parameters: Parameters, report: Report) -> None:
    unknown = set(parameters.steps) - set(STEPS)
    if unknown:
        raise Unavailable(f"unknown steps {sorted(unknown)}; choose among {', '.join(STEPS)}")
    if parameters.device == "cuda":
        if not torch.cuda.is_available():
            raise Unavailable("no GPU here: torch finds no CUDA device")
        gpu = torch.cuda.get_device_properties(0)
        report.note(
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
            f"{gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB; "
            f"CUDA {torch.version.cuda}"
        )
    for name in parameters.steps:
        print(f"-- {name}", flush=True)
        run_step(name, parameters, report)


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Times of the kernels, and of a token."""
    plots.draw(
        result,
        path,
        [
            plots.Panel(r"kernels: (?P<x>.+): time", "", "us", kind="bars", log_y=True),
            plots.Panel(
                r"kernels: (?P<x>.+): share of a copy's bandwidth", "", "share", kind="bars"
            ),
            plots.Panel(r"model: (?P<x>.+): token", "", "ms per token", kind="bars", factor=1e3),
        ],
    )


def main(arguments: list[str]) -> None:
    """Run one step: its name, the parameters, and the file that its report goes to."""
    name, given, found = arguments
    values = json.loads(given)
    report = Report(values.pop("paths"))
    STEPS[name].load().run(Parameters(**values), report)
    fragment = {field: getattr(report, field) for field in ("measurements", "checks", "notes")}
    pathlib.Path(found).write_text(json.dumps(fragment))


if __name__ == "__main__":
    main(sys.argv[1:])
