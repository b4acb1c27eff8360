"""What all benchmarks share: parameters, measurements, checks, the result file and its picture."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import jsonschema

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "bench"
SCHEMA = pathlib.Path(__file__).with_name("result.schema.json")


class Unavailable(RuntimeError):
    """A benchmark cannot run here; the message says what is missing and how to get it."""


def summary(name: str, unit: str, raw: Sequence[float]) -> dict[str, Any]:
    """A measurement: its repetitions, their median, and their spread (max - min) / |median|."""
    if not raw:
        raise ValueError(f"measurement `{name}` has no repetitions")
    median = statistics.median(raw)
    spread = (max(raw) - min(raw)) / abs(median) if median else 0.0
    values = [float(value) for value in raw]
    return {"name": name, "unit": unit, "raw": values, "median": float(median), "spread": spread}


class Report:
    """Collects what a benchmark measures and which of its goals hold.

    Args:
        paths: directories of real drives; simulated ones if empty.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._began = time.monotonic()
        self.paths = tuple(paths)
        self.drives: list[dict[str, Any]] = []
        self.measurements: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def measure(self, name: str, unit: str, raw: Sequence[float] | float) -> None:
        """Add a measurement, given all its repetitions (or the one there is)."""
        self.measurements.append(
            summary(name, unit, [raw] if isinstance(raw, float | int) else raw)
        )

    def at_most(self, name: str, value: float, goal: float) -> None:
        self._check(name, value, f"<= {goal:g}", value <= goal)

    def at_least(self, name: str, value: float, goal: float) -> None:
        self._check(name, value, f">= {goal:g}", value >= goal)

    def _check(self, name: str, value: float, goal: str, holds: bool) -> None:
        self.checks.append(
            {"name": name, "value": float(value), "goal": goal, "holds": bool(holds)}
        )

    def use(self, drives: Sequence[dict[str, Any]], note: str) -> None:
        """Tell which drives are measured, see `benchmarks.drives.Drives.describe`."""
        self.drives += [one for one in drives if one not in self.drives]
        self.note(note)

    def note(self, text: str) -> None:
        """Add a sentence that a reader of the figures needs."""
        if text not in self.notes:
            self.notes.append(text)


def build(name: str) -> pathlib.Path:
    """The program `name` of csrc/bench, built with fixed flags unless it is up to date.

    Raises:
        Unavailable: cmake or ninja is missing, or it does not compile.
    """
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=", "-DSWARM_KV_TESTS=OFF"]
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", name]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise Unavailable(f"{name} needs cmake: bash scripts/setup.sh test") from error
        if done.returncode != 0:
            said = f"{done.stdout}{done.stderr}"[-8000:].strip()
            raise Unavailable(f"{name} could not be built (bash scripts/setup.sh test): {said}")
    return BUILD / name


class Program:
    """A C++ program of csrc/bench that prints JSON.

    Args:
        name: its target.
        configured: its path; built here if empty.

    Raises:
        Unavailable: it is not there and cannot be built.
    """

    def __init__(self, name: str, configured: str) -> None:
        self.path = pathlib.Path(configured) if configured else build(name)
        if not os.access(self.path, os.X_OK):
            raise Unavailable(f"`{self.path}` is not a program: leave it out to have it built")

    def output(self, arguments: Sequence[str], timeout_s: float) -> Any:
        """What it prints.

        Raises:
            Unavailable: it failed or did not finish.
        """
        try:
            done = subprocess.run(
                [self.path, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"`{self.path}` took longer than {timeout_s:g} s") from error
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"`{self.path}` failed: {error.stderr.strip()}") from error
        return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    """The machine, without anything that identifies it."""
    cpu = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
    }


def git_commit() -> str | None:
    """Commit of this checkout, with `-dirty` where files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "swarm_kv": version("swarm-kv"),
        "commit": git_commit(),
    }


def override(parameters: Any, settings: Sequence[str]) -> Any:
    """Replace fields of the dataclass `parameters` by `name=value` strings, values JSON or text."""
    known = {
        field.name: getattr(parameters, field.name) for field in dataclasses.fields(parameters)
    }
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"cannot set `{setting}`: write name=value, name one of {', '.join(known)}"
            )
        old = known[name]
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if isinstance(old, tuple):
            given = value if isinstance(value, list) else str(value).split(",")
            value = tuple(given) if given != [""] else ()
        elif isinstance(old, float) and isinstance(value, int):
            value = float(value)
        elif isinstance(old, str):
            value = text
        if type(value) is not type(old):
            raise ValueError(f"cannot set `{setting}`: `{name}` is a {type(old).__name__}")
        changes[name] = value
    return dataclasses.replace(parameters, **changes)


def validate(result: dict[str, Any]) -> None:
    """Check `result` against result.schema.json.

    Raises:
        jsonschema.ValidationError: it has another form.
    """
    jsonschema.validate(result, json.loads(SCHEMA.read_text()))


def result_of(
    name: str, parameters: Any, report: Report, *, quick: bool, unavailable: str | None = None
) -> dict[str, Any]:
    """The result as it is written to file, validated.

    Args:
        name: of the benchmark.
        parameters: its dataclass.
        report: what it measured.
        quick: whether they are those of --quick.
        unavailable: why nothing was measured, if so.
    """
    values = dataclasses.asdict(parameters)
    result = {
        "name": name,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "drives": report.drives,
        "versions": versions(),
        "quick": quick,
        "unavailable": unavailable,
        "seconds": report.seconds if unavailable is None else None,
        "seed": values.get("seed"),
        "parameters": json.loads(json.dumps(values)),  # tuples become lists, as a reader gets them
        "measurements": report.measurements,
        "checks": report.checks,
        "notes": report.notes,
    }
    validate(result)
    return result


def plot(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the medians as bars, one panel for each unit, with whiskers from minimum to maximum."""
    from matplotlib.figure import Figure

    units = list(dict.fromkeys(m["unit"] for m in result["measurements"]))
    panels = [[m for m in result["measurements"] if m["unit"] == unit] for unit in units]
    figure = Figure(figsize=(9, 1 + sum(0.35 * len(p) + 0.8 for p in panels)), layout="constrained")
    axes = figure.subplots(
        len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [len(p) + 1 for p in panels]}
    )
    for axis, unit, panel in zip(axes[:, 0], units, panels, strict=True):
        medians = [m["median"] for m in panel]
        whiskers = [
            [m["median"] - min(m["raw"]) for m in panel],
            [max(m["raw"]) - m["median"] for m in panel],
        ]
        axis.barh([m["name"] for m in panel], medians, xerr=whiskers, color="#4477aa")
        axis.invert_yaxis()
        axis.set_xlabel(unit or "(no unit)")
    figure.suptitle(f"{result['name']} · {result['machine']['cpu']} · {result['time']}")
    figure.savefig(path, dpi=120)
