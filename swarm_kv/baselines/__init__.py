"""Other methods as strategies of this package, so that only their ideas differ.

    config = SwarmConfig(paths, sparsity=0.1, **baselines.settings("infllm"))

All run through the same store, memory and cluster cache, attend to the same sinks and window, and
choose entries with all KV heads, by what is best for the mean over heads. The originals choose per
head and have numbers of their own for sinks, window and cache. Each name is also a selector, which
may be used alone, on whatever layout there is: those that rank blocks rank its clusters.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError
from . import clusterkv, full, infllm, oracle, pqcache, quest, streaming

__all__ = [
    "clusterkv",
    "full",
    "infllm",
    "names",
    "oracle",
    "pqcache",
    "quest",
    "settings",
    "streaming",
]

_PLAIN = {
    "layout": "sequence",
    "maintenance": "sequence",
    "recluster": "off",
    "initial_fill": "none",
    "prefetch": "off",
}
"""What no baseline has: clusters by co-activation, foresight, a cache that knows the profile."""
_SINGLE = {"block": 1, "placement": "round_robin"}
"""Entries one by one, in token order, drives in turn."""

_BASELINES: dict[str, dict[str, Any]] = {
    "full": {"block": 16, "placement": "sequential"},
    "streaming": {"block": 16, "placement": "sequential"},
    "oracle": _SINGLE,
    "pqcache": _SINGLE,
    "quest": {"block": quest.PAGE, "placement": "sequential"},
    "infllm": {"block": infllm.BLOCK, "flush": infllm.BLOCK, "placement": "sequential"},
    "clusterkv": {
        "layout": "clusters",
        "clusterer": "kmeans_keys",
        "block": 16,
        "placement": "sequential",
        "recluster": "auto",  # new tokens get clusters of their own, as in the original
    },
}


def names() -> list[str]:
    """Names that `settings` takes; each is that of the baseline's selector."""
    return sorted(_BASELINES)


def settings(name: str) -> dict[str, Any]:
    """The settings of `SwarmConfig` that make up a baseline.

    Raises:
        ArgumentError: there is no such baseline.
    """
    if name not in _BASELINES:
        raise ArgumentError(f"unknown baseline ({name!r}); choose one of {names()}")
    return {"selector": name, **_PLAIN, **_BASELINES[name]}
