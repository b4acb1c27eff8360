"""Pictures of results: panels of lines or bars, found by the names of their measurements."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 6.0, 3.8
"""Inches of a panel."""
BAR_SHARE = 0.8
"""Of the room of a group of bars that the bars fill."""

TICKS_APART = 1.4
"""Least factor between two places that are written at a logarithmic axis."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        pattern: regular expression for whole names of measurements, with the groups `series`
            (optional) and `x`: a number for lines, a text for bars.
        xlabel, ylabel: with units. title: what is seen.
        kind: `lines` or `bars`.
        factor: multiplies what was measured, such as 1000 for milliseconds.
        log_x, log_y: scales.
        level: a dashed line at this height, and its label.
    """

    pattern: str
    xlabel: str
    ylabel: str
    title: str = ""
    kind: str = "lines"
    factor: float = 1.0
    log_x: bool = False
    log_y: bool = False
    level: tuple[float, str] | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """A measurement at a place: median, least and greatest repetition."""

    x: str
    median: float
    least: float
    greatest: float


def series_of(result: dict[str, Any], panel: Panel) -> dict[str, list[Point]]:
    """What a panel shows, in the order of the result; only finite medians."""
    found: dict[str, list[Point]] = {}
    for measured in result["measurements"]:
        match = re.fullmatch(panel.pattern, measured["name"])
        if match is None or not math.isfinite(measured["median"]):
            continue
        name = match.groupdict().get("series") or ""
        values = (measured["median"], min(measured["raw"]), max(measured["raw"]))
        point = Point(match["x"], *(value * panel.factor for value in values))
        found.setdefault(name, []).append(point)
    return found


def draw(
    result: dict[str, Any], path: str | os.PathLike[str], panels: Sequence[Panel], columns: int = 2
) -> None:
    """Draw panels; whiskers and shades go from the least to the greatest repetition.

    The format follows the ending of `path`. A panel without measurements is left out.
    """
    from matplotlib.figure import Figure

    shown = [(panel, found) for panel in panels if (found := series_of(result, panel))]
    columns = max(1, min(columns, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (panel, found) in zip(axes, shown, strict=False):
        (_bars if panel.kind == "bars" else _lines)(axis, panel, found)
        if panel.level is not None:
            axis.axhline(panel.level[0], linestyle="--", color="grey", label=panel.level[1])
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
        axis.grid(alpha=0.3)
        if len(found) > 1 or "" not in found or panel.level is not None:
            axis.legend(fontsize="small")
    for axis in axes:  # those that are left over
        axis.set_axis_off()
    quick = " (quick)" if result["quick"] else ""
    drives = ", ".join(f"{one['count']} x {one['model']}" for one in result["drives"])
    figure.suptitle(" · ".join(filter(None, [f"{result['name']}{quick}", drives])), fontsize=10)
    figure.savefig(path, dpi=120)


def _lines(axis: Any, panel: Panel, found: dict[str, list[Point]]) -> None:
    for name, points in found.items():
        points = sorted(points, key=lambda point: float(point.x))
        across = [float(point.x) for point in points]
        (line,) = axis.plot(across, [point.median for point in points], marker="o", label=name)
        axis.fill_between(
            across,
            [point.least for point in points],
            [point.greatest for point in points],
            color=line.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    if panel.log_x:
        axis.set_xscale("log", base=2)
        ticks: list[float] = []
        for place in sorted({float(point.x) for points in found.values() for point in points}):
            if not ticks or place >= TICKS_APART * ticks[-1]:
                ticks.append(place)
        axis.set_xticks(ticks, [_short(tick) for tick in ticks], minor=False)
    if panel.log_y:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)


def _bars(axis: Any, panel: Panel, found: dict[str, list[Point]]) -> None:
    groups = list(dict.fromkeys(point.x for points in found.values() for point in points))
    width = BAR_SHARE / len(found)
    for number, (name, points) in enumerate(found.items()):
        shift = (number - (len(found) - 1) / 2) * width
        medians = [point.median for point in points]
        whiskers = [
            [point.median - point.least for point in points],
            [point.greatest - point.median for point in points],
        ]
        across = [groups.index(point.x) + shift for point in points]
        axis.bar(across, medians, width, yerr=whiskers, capsize=2, label=name)
    axis.set_xticks(range(len(groups)), groups)
    if len(groups) > 3:
        axis.tick_params("x", labelrotation=20)
        for label in axis.get_xticklabels():
            label.set_horizontalalignment("right")
    if panel.log_y:
        axis.set_yscale("log")


def _short(number: float) -> str:
    """A length in tokens, such as 32K."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and number % (size // 8) == 0:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
