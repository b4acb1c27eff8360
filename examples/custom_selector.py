"""A selector of your own, by name, compared with the default at the same budget.

    python examples/custom_selector.py

The default selector goes by the mean over all heads. This one goes by the KV head that wants an
entry most, which is the head that would lose most without it. Recall is the attention that the read
entries hold, of what the best ones would; KL is that of the next token's distribution to full
attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

import torch

import swarm_kv
from swarm_kv import eval as evaluation
from swarm_kv import models, ops, texts
from swarm_kv.index import Index
from swarm_kv.selectors import Selection, selector

NONE = torch.empty(0, dtype=torch.int64)


@selector("any_head", summary=None)  # None: it needs nothing but the codes
def any_head(
    query: torch.Tensor, index: Index, budget: int, config: swarm_kv.SwarmConfig
) -> Selection:
    """Runs of the layout by the KV head that wants them most.

    Args:
        query: [heads, queries, head_dim], scaled.
        index: of the layer's stored entries.
        budget: entries to read.
        config: not looked at.
    """
    book, codes = index.codebook, index.codes
    wishes = []
    for head, asked in enumerate(query.chunk(codes.shape[0])):
        own = slice(head, head + 1)
        of_head = dataclasses.replace(book, centroids=book.centroids[own], turn=book.turn[own])
        wishes.append(of_head.score(asked, codes[own]))
    strongest = torch.stack(wishes).amax(0)
    in_reach = index.members[index.members < index.limit]
    return NONE, ops.select_intervals(strongest, in_reach, budget, index.request_cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=768, help="tokens")
    parser.add_argument("--steps", type=int, default=16, help="tokens that are predicted")
    parser.add_argument("--sparsity", type=float, default=0.10)
    options = parser.parse_args()

    model, tokenizer = models.load("smollm2")
    ids = texts.token_ids(tokenizer, options.context + options.steps)
    reference = evaluation.full_attention(model, ids, options.context, options.steps)
    print("selector    recall      KL  MiB per step")
    for name in ("interval", "any_head", "streaming"):
        config = swarm_kv.SwarmConfig(
            [tempfile.mkdtemp() for _ in range(2)],
            dram_bytes="48MiB",
            sparsity=options.sparsity,
            selector=name,
            recall_every=8,
            recall_sample=0,  # exact, by reading everything now and then
        )
        with swarm_kv.patch(model, config) as swarm:
            found = evaluation.perplexity_kl(
                model, ids, options.context, options.steps, reference=reference
            )
            stats = swarm.stats()
        read = stats.bytes_per_step / 2**20
        print(f"{name:10}  {stats.recall or 0:6.3f}  {found.mean_kl:.4f}  {read:12.2f}")


if __name__ == "__main__":
    main()
