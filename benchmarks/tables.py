"""Tables of a result, for the page, where measurements are named "subject: quantity"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def medians(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By subject, which may have colons itself, and quantity."""
    found: dict[str, dict[str, float]] = {}
    for measured in result["measurements"]:
        subject, _, quantity = measured["name"].rpartition(": ")
        found.setdefault(subject, {})[quantity] = measured["median"]
    return found


def of_subjects(
    result: dict[str, Any],
    columns: Mapping[str, str],
    *,
    digits: int,
    factors: Mapping[str, float] | None = None,
) -> str:
    """A row for each subject that has one of the quantities.

    Args:
        columns: titles by quantity.
        digits: that mean something.
        factors: by which quantities are shown; 1 if not given.
    """
    factors = factors or {}
    rows = ["| | " + " | ".join(columns.values()) + " |", "|---|" + "---:|" * len(columns)]
    for subject, values in medians(result).items():
        if columns.keys().isdisjoint(values):
            continue
        cells = [
            f"{values[name] * factors.get(name, 1):.{digits}g}" if name in values else ""
            for name in columns
        ]
        rows.append(f"| {subject} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
