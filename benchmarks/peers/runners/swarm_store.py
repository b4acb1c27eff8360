"""swarm_kv's store: random clusters of every drive, with checksums, two fetches outstanding.

The first request has `folders`, `size` of a cluster in bytes, `drive_bytes` and `depth`, the
clusters per drive of one fetch; the others `requests` and `seed`.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from benchmarks.peers.channel import Channel
from swarm_kv import SwarmConfig
from swarm_kv.store import NOTHING, Store, Wanted

HEADS, DIM = 8, 128
ENTRY_BYTES = 2 * HEADS * DIM * 2
OUTSTANDING = 2


def main() -> None:
    channel = Channel()
    requests = channel.requests()
    first = next(requests)
    size, depth, drives = first["size"], first["depth"], len(first["folders"])
    members = size // ENTRY_BYTES
    entries = first["drive_bytes"] // size * members * drives
    staging = 2 * OUTSTANDING * depth * drives * size
    store = Store(
        SwarmConfig(
            paths=first["folders"],
            dram_bytes=staging + (32 << 20),
            staging_bytes=staging,
            placement="sequential",
            device_model=(1e-12, 1e-9),  # requests cost nothing: none are joined
        )
    )
    half = torch.randint(2**15, (HEADS, entries, DIM), dtype=torch.int16).view(torch.float16)
    segment = store.write(
        half,
        half,
        torch.arange(0, entries + 1, members, dtype=torch.int32),
        torch.arange(entries, dtype=torch.int32),
        "benchmark",
    )
    channel.answer()
    # Cluster c lies on drive c mod drives; of a drive every second one is wanted.
    rows = segment.clusters // drives // 2
    for request in requests:
        random = torch.Generator().manual_seed(request["seed"])
        rounds = -(-request["requests"] // (depth * drives))
        outstanding: deque = deque()
        before, begin = read_bytes(store), time.perf_counter()
        for _ in range(rounds):
            chosen = torch.stack(
                [torch.randperm(rows, generator=random)[:depth] for _ in range(drives)], dim=1
            )
            clusters = (2 * drives * chosen + torch.arange(drives)).flatten()
            wanted = Wanted((segment,), clusters, NOTHING, segment.entries)
            outstanding.append(store.fetch([wanted], purpose="stream"))
            if len(outstanding) == OUTSTANDING:
                finish(outstanding.popleft())
        while outstanding:
            finish(outstanding.popleft())
        seconds = time.perf_counter() - begin
        channel.answer(bytes=read_bytes(store) - before, seconds=seconds)
    del segment
    store.close()


def read_bytes(store: Store) -> int:
    return sum(drive["read_bytes"] for drive in store.counters()["drives"])


def finish(fetch) -> None:
    with fetch:
        fetch.complete()


if __name__ == "__main__":
    main()
