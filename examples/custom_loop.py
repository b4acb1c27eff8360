"""The operators without a model: store a context, select, fetch and attend, and compare.

    python examples/custom_loop.py

One layer of 8 query heads, 2 KV heads of 64, 4,096 entries whose keys form topics.
"""

from __future__ import annotations

import functools
import json
import tempfile

import torch

import swarm_kv  # noqa: F401  (loads torch.ops.swarm_kv)
from swarm_kv.codes import train

HEADS, KV_HEADS, DIM, ENTRIES, PROFILE, BUDGET = 8, 2, 64, 4096, 256, 410
SCALE = DIM**-0.5
ops = torch.ops.swarm_kv


def topics(count: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    """[heads, count, DIM]: vectors around 64 centres that all heads share."""
    centres = 3 * torch.randn(64, DIM, generator=torch.Generator().manual_seed(0))
    chosen = torch.randint(64, (count,), generator=generator)
    return centres[chosen] + torch.randn(heads, count, DIM, generator=generator)


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    k, v = topics(ENTRIES, KV_HEADS, generator), topics(ENTRIES, KV_HEADS, generator)
    profile = topics(PROFILE, HEADS, generator)

    # profile, cluster, place, write
    positions = torch.full((PROFILE,), ENTRIES)  # each query comes after the whole context
    bits = ops.activation_signatures(profile, k, positions, 0.10, 0, 0, SCALE)
    offsets, members = ops.cluster(bits, "swarm", "jaccard", 0.6, 64, 3, 4, "coded", 16, 0, 0)
    drives = [tempfile.mkdtemp() for _ in range(4)]
    store = ops.store_open(
        drives, "auto", True, True, 30.0, 32 << 20, 8 << 20, 0,
        "round_robin", "swarm", "decayed_frequency", True, 0.0, 0.0,
    )  # fmt: skip
    segment = ops.segment_write(store, k, v, offsets, members, "layer 0")
    book = train(k, DIM // 8, profile)
    codes = book.encode(k)
    pool = ops.store_pool(store).view(torch.float32)

    # select, fetch, attend
    query = topics(1, HEADS, generator)
    probabilities = book.score(query * SCALE, codes)
    clusters, entries = ops.select_two_level(probabilities, offsets, members, BUDGET, 1.5, 0.1)
    one_row = torch.tensor([0, len(clusters)]), torch.tensor([0, len(entries)])
    ticket, _, _, _ = ops.fetch_submit(
        store, [segment], [0, 1], clusters, one_row[0], entries, one_row[1], [ENTRIES], "decode", 0
    )  # fmt: skip
    q = query.transpose(0, 1).contiguous()
    parts, fetched, more = [], 0, True
    while more:  # what has arrived is attended to while the rest is read
        ids, slots, _, more = ops.fetch_wait(store, ticket)
        rows = torch.tensor([0, len(slots)])
        parts.append(ops.sparse_attention(q, pool, slots // 4, rows, KV_HEADS, SCALE))
        fetched += len(ids)
    sparse, _ = functools.reduce(lambda a, b: ops.merge_attention(*a, *b), parts)
    ops.fetch_release(store, ticket)

    group = HEADS // KV_HEADS
    full = torch.nn.functional.scaled_dot_product_attention(
        query, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), scale=SCALE
    ).transpose(0, 1)
    error = (sparse - full).norm() / full.norm()
    traffic = json.loads(ops.store_stats(store))["decode"]
    print(f"{fetched} of {ENTRIES} entries in {traffic['requests']} reads, error {error:.3f}")
    assert error < 0.1

    ops.segment_free(store, segment)
    ops.store_close(store)


if __name__ == "__main__":
    main()
