"""RESULTS.md: what was measured, beside what the paper reports."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jsonschema

from benchmarks.harness import validate
from benchmarks.registry import BENCHMARKS

HERE = pathlib.Path(__file__).parent
MISSING = "Not measured: no result is there. A failed run leaves none."


def write(folder: pathlib.Path) -> pathlib.Path:
    """Write the page of the results in `folder`: beside it where it is ours, else into it.

    Returns:
        Its path.
    """
    path = (HERE if folder.resolve().parent == HERE else folder) / "RESULTS.md"
    results = {name: load(folder / f"{name}.json") for name in BENCHMARKS}
    path.write_text(text(results, pathlib.Path(os.path.relpath(folder, path.parent))))
    return path


def load(path: pathlib.Path) -> dict[str, Any] | None:
    """A result, or None where there is none of this form."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        validate(result)
    except (OSError, ValueError, jsonschema.ValidationError):
        return None
    return result


def text(results: dict[str, dict[str, Any] | None], folder: pathlib.Path) -> str:
    """The page.

    Args:
        results: by name; None for a benchmark that was not measured.
        folder: of pictures, as seen from the page.
    """
    parts = [
        "# Results",
        "Made by `python -m benchmarks all` from the files in "
        f"`{folder}`; do not edit. Each ratio compares within one run. Drives are simulated SSDs "
        "with scaled rates unless stated otherwise: what a ratio of reads says carries over, CPU "
        "time beside it weighs less than it would on drives of full speed.",
        _machines(results),
        _overview(results),
    ]
    parts += [_section(name, result, folder) for name, result in results.items()]
    return "\n\n".join(parts) + "\n"


def _machines(results: dict[str, dict[str, Any] | None]) -> str:
    found = {
        f"{r['machine']['cores']} cores of {r['machine']['cpu']}, "
        f"{r['machine']['memory_bytes'] / 2**30:.0f} GiB, Linux {r['machine']['kernel']}; "
        f"Python {r['versions']['python']}, torch {r['versions']['torch']}, transformers "
        f"{r['versions']['transformers']}"
        for r in results.values()
        if r is not None
    }
    return "\n".join(f"- {machine}" for machine in sorted(found)) or "- no machine"


def _overview(results: dict[str, dict[str, Any] | None]) -> str:
    rows = ["| benchmark | what it measures | goals that hold |", "|---|---|---|"]
    for name, result in results.items():
        rows.append(f"| [{name}](#{name}) | {BENCHMARKS[name].summary} | {_state(name, result)} |")
    return "\n".join(rows)


def _state(name: str, result: dict[str, Any] | None) -> str:
    if result is None:
        return getattr(BENCHMARKS[name].load(), "MISSING", "not measured")
    if result["unavailable"] is not None:
        return "not measured"
    checks = result["checks"]
    state = f"{sum(c['holds'] for c in checks)} of {len(checks)}" if checks else "none set"
    return state + (" (quick)" if result["quick"] else "")


def _section(name: str, result: dict[str, Any] | None, folder: pathlib.Path) -> str:
    module = BENCHMARKS[name].load()
    parts = [f"## {name}", BENCHMARKS[name].summary[0].upper() + BENCHMARKS[name].summary[1:] + "."]
    if paper := getattr(module, "PAPER", ""):
        parts.append(f"**The paper**: {paper}")
    if result is None:
        missing = getattr(module, "MISSING", "")
        return "\n\n".join([*parts, f"{missing[0].upper()}{missing[1:]}." if missing else MISSING])
    if result["unavailable"] is not None:
        return "\n\n".join([*parts, f"Not measured: {result['unavailable']}"])
    if remark := getattr(module, "REMARK", ""):
        parts.append(f"**Ours**: {remark}")
    parts.append(f"![{name}]({folder / name}.svg)")
    if table := getattr(module, "table", None):
        parts.append(table(result))
    if result["checks"]:
        rows = ["| goal | value | wanted | holds |", "|---|---:|---:|---|"]
        rows += [
            f"| {c['name']} | {c['value']:.4g} | {c['goal']} | "
            f"{'yes' if c['holds'] else '**no**'} |"
            for c in result["checks"]
        ]
        parts.append("\n".join(rows))
    if result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n\n".join(parts)
