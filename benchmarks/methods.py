"""The methods that the paper compares, as settings of `SwarmConfig`."""

from __future__ import annotations

from typing import Any

from swarm_kv import baselines

OURS = "swarm"
METHODS: dict[str, dict[str, Any]] = {
    OURS: {},
    "No Cluster": baselines.settings("oracle"),
    "InfLLM": baselines.settings("infllm"),
    "PQCache": baselines.settings("pqcache"),
}
"""By the paper's names; `OURS` has the package's defaults."""
