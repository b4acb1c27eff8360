"""The methods that the paper compares, as settings of the package."""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "swarm": {},
    "No Cluster": {"selector": "codes", "layout": "sequence", "placement": "round_robin"},
    "InfLLM": {"selector": "medoid", "layout": "sequence", "block": 128},
    "PQCache": {"selector": "codes", "layout": "sequence"},
}
"""By title; `swarm` has the package's defaults. All read a tenth of the context unless told
otherwise, through the same store."""
