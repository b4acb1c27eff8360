"""The model-level peers, in the order of the table. A new one is a runner and a line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SWARM_EXACT = "swarm_kv sparsity 1"
SWARM = "swarm_kv sparsity 0.1"
REFERENCE = "DynamicCache"


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to decode.

    Attributes:
        runner: module of benchmarks.peers.runners.
        environment: made by `scripts/setup.sh peers`; this project's own if empty.
        drives: that it can use: "none", "one" or "all".
        buffered: reads through the page cache, so that there are two rows: the page cache loses the
            peer's files before each step, or keeps them.
        exact: attends to everything.
    """

    runner: str
    environment: str = ""
    drives: str = "none"
    buffered: bool = False
    exact: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def swarm(sparsity: float) -> Peer:
    return Peer("swarm", drives="all", exact=sparsity == 1, options={"sparsity": sparsity})


def press(name: str) -> Peer:
    # Keeps as much as swarm_kv reads.
    options = {"press": name, "compression_ratio": 0.9}
    return Peer("kvpress", "kvpress", exact=False, options=options)


PEERS: dict[str, Peer] = {
    REFERENCE: Peer("dynamic_cache"),
    SWARM: swarm(0.1),
    SWARM_EXACT: swarm(1.0),
    "torch.save per layer": Peer("torch_save", drives="all", buffered=True),
    "numpy.memmap per layer": Peer("memmap", drives="all", buffered=True),
    "oLLM disk cache": Peer("ollm", "ollm", drives="one", buffered=True),
    "kvpress SnapKV keeping 0.1": press("SnapKVPress"),
    "kvpress Knorm keeping 0.1": press("KnormPress"),
    "kvpress ExpectedAttention keeping 0.1": press("ExpectedAttentionPress"),
    "DynamicCache offloading": Peer("dynamic_cache", options={"offloading": True}),
}
