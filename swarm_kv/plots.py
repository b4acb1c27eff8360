"""Pictures of what the commands of `swarm-kv` found, by the `kind` of their figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import tune
from .errors import ArgumentError
from .eval import report
from .meter import Stats
from .miss_ratio import MissRatioCurve

Figures = dict[str, Any]
WIDTH, HEIGHT = 4.6, 3.6
"""Inches of a panel."""


def kinds() -> list[str]:
    """Kinds of figures that `draw` knows."""
    return sorted(_PLOTS)


def draw(figures: Figures, path: str | os.PathLike[str]) -> None:
    """Draw figures as a command writes them by `--json`.

    Needs matplotlib. The format follows the name's ending, such as .png or .svg.

    Raises:
        ArgumentError: a kind without a picture, figures of another version, no matplotlib, or an
            ending that it does not know.
        OSError: the file cannot be written.
    """
    kind = figures.get("kind")
    if kind not in _PLOTS:
        raise ArgumentError(f"no picture is known for figures of kind {kind!r}, but of {kinds()}")
    try:
        _PLOTS[kind](figures, path)
    except ImportError as error:
        raise ArgumentError(f"pictures need {error.name}: pip install 'swarm-kv[demo]'") from None
    except (KeyError, TypeError, IndexError) as error:
        raise ArgumentError(
            f"these figures of kind {kind} are of another version of swarm_kv ({error!r}): write "
            "them anew"
        ) from None


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # which names the known endings
        raise ArgumentError(f"cannot draw `{path}`: {error}") from None


def _bars(axis: Any, values: Mapping[str, float], label: str) -> None:
    """One bar for each name, its value at the end."""
    bars = axis.barh(list(values), list(values.values()), color="#4477aa")
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.margins(x=0.18)
    axis.invert_yaxis()
    axis.set_xlabel(label)


def _name(path: str) -> str:
    """The end of a long path."""
    return path if len(path) <= 24 else f"…{path[-23:]}"


def _demo(figures: Figures, path: str | os.PathLike[str]) -> None:
    figure, (rates, memory, reads) = _panels(3)
    theirs, stats = "DynamicCache", figures["stats"]
    ours = {"swarm_kv": figures["tokens_per_second"], theirs: figures["dense_tokens_per_second"]}
    _bars(rates, ours, "tokens per second")
    held = {"swarm_kv": stats["dram_peak_bytes"], theirs: figures["kv_bytes"]}
    _bars(memory, {name: size / 2**20 for name, size in held.items()}, "memory for KV (MiB)")
    _reads_by_drive(reads, stats)
    figure.suptitle(f"{figures['model']}, {figures['context_tokens']} tokens")
    _save(figure, path)


def _reads_by_drive(axis: Any, stats: Figures) -> None:
    steps = max(stats["steps"], 1)
    sizes = {
        _name(drive["name"]): drive["decode_bytes"] / steps / 2**20 for drive in stats["drives"]
    }
    _bars(axis, sizes, "read per step (MiB)")


def _stats(figures: Figures, path: str | os.PathLike[str]) -> None:
    stats = Stats.from_dict(figures)
    figure, (memory, reads, misses) = _panels(3)
    _bars(memory, {use: size / 2**20 for use, size in stats.dram.items()}, "memory (MiB)")
    _reads_by_drive(reads, figures)
    _curve(misses, stats.miss_ratio)
    figure.suptitle(f"{stats.steps} decoding steps, hit rate {stats.hit_rate:.1%}")
    _save(figure, path)


def _curve(axis: Any, curve: MissRatioCurve) -> None:
    last = len(curve.misses) - 1
    axis.plot([100 * i / last for i in range(last + 1)], [100 * missed for missed in curve.misses])
    axis.set(xlabel="cache, % of the context", ylabel="misses, %", ylim=(0, 100))


def _tune(figures: Figures, path: str | os.PathLike[str]) -> None:
    tune.plot([tune.Point.from_dict(point) for point in figures["points"]], figures["title"], path)


def _plan(figures: Figures, path: str | os.PathLike[str]) -> None:
    figure, (rates, reads) = _panels(2)
    rows = figures["rows"]
    across = [row["dram_bytes"] / 2**30 for row in rows]
    rates.plot(
        across, [row["tokens_per_second"] or float("nan") for row in rows], marker="o",
        label="I/O alone",
    )  # fmt: skip
    if figures["compute_seconds"] is not None:
        least, most = zip(*(row["with_compute"] for row in rows), strict=True)
        rates.fill_between(across, least, most, alpha=0.3, label="with compute")
    rates.legend()
    rates.set(xlabel="DRAM for KV (GiB)", ylabel="tokens per second, at most", ylim=(0, None))
    reads.plot(across, [row["bytes_per_step"] / 2**20 for row in rows], marker="o")
    reads.set(xlabel="DRAM for KV (GiB)", ylabel="read per token (MiB)", ylim=(0, None))
    figure.suptitle(
        f"{figures['model']}, {figures['context']} tokens, {len(figures['drives'])} drives"
    )
    _save(figure, path)


def _doctor(figures: Figures, path: str | os.PathLike[str]) -> None:
    if not figures["drives"]:
        raise ArgumentError("these figures hold no drive that was measured: give directories")
    figure, (large, small) = _panels(2)
    rates = {_name(drive["path"]): drive["bytes_per_second"] / 1e9 for drive in figures["drives"]}
    if figures["together"] is not None:
        rates["together"] = figures["together"]["bytes_per_second"] / 1e9
    _bars(large, rates, "reads of 256 KiB (GB/s)")
    each = {_name(drive["path"]): drive["iops"] / 1e3 for drive in figures["drives"]}
    _bars(small, each, "reads of 4 KiB (1000 per second)")
    _save(figure, path)


def _bench(figures: Figures, path: str | os.PathLike[str]) -> None:
    figure, (rates, steps) = _panels(2)
    by_drive: dict[str, list[dict[str, float]]] = {}
    for one in figures["rates"]:
        by_drive.setdefault(one["drive"], []).append(one["rate"])
    for drive, found in by_drive.items():
        rates.plot(
            [rate["request_bytes"] / 1024 for rate in found],
            [rate["bytes_per_second"] / 1e9 for rate in found],
            marker="o",
            label=_name(drive),
        )
    sizes = sorted({one["rate"]["request_bytes"] // 1024 for one in figures["rates"]})
    rates.set_xscale("log", base=2)
    rates.set_xticks(sizes, [str(size) for size in sizes])
    rates.set(xlabel="size of a read (KiB)", ylabel="GB/s", ylim=(0, None))
    rates.legend()
    contexts = [step["context"] for step in figures["steps"]]
    for name, label in (("median", "measured"), ("planned", "by the drives' model")):
        steps.plot(
            contexts, [step[name] * 1e3 for step in figures["steps"]], marker="o", label=label
        )
    steps.set(xlabel="context (tokens)", ylabel="reads of a step in a layer (ms)", ylim=(0, None))
    steps.legend()
    figure.suptitle(figures["engine"])
    _save(figure, path)


_PLOTS: dict[str, Callable[[Figures, str | os.PathLike[str]], None]] = {
    "bench": _bench,
    "demo": _demo,
    "doctor": _doctor,
    "eval": report.plot,
    "plan": _plan,
    "stats": _stats,
    "tune": _tune,
}
