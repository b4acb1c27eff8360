"""What was not fetched, estimated by the mean key and mean value of groups of entries."""

from __future__ import annotations

import dataclasses

import torch

LOOSE_GROUP = 64
"""Entries in no cluster that make up a group, neighbours in the sequence."""


@dataclasses.dataclass(frozen=True)
class ClusterMeans:
    """Means of groups that share out the entries: clusters, and neighbours that are in none.

    An entry of several clusters counts in the first of them alone. Immutable: growing makes new
    ones.

    Attributes:
        keys, values: float16 [kv_heads, groups, head_dim].
        sizes: int32 [groups], entries in each.
        group_of: int32 [entries].
    """

    keys: torch.Tensor
    values: torch.Tensor
    sizes: torch.Tensor
    group_of: torch.Tensor

    @classmethod
    def build(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        offsets: torch.Tensor,
        members: torch.Tensor,
    ) -> ClusterMeans:
        """Of entries with keys and values [kv_heads, n, head_dim] in the given clusters."""
        group_of = _groups(keys.shape[1], offsets, members)
        sizes = torch.bincount(group_of)
        return cls(
            _means(keys, group_of, sizes),
            _means(values, group_of, sizes),
            sizes.int(),
            group_of.int(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that they hold."""
        return sum(t.nbytes for t in (self.keys, self.values, self.sizes, self.group_of))

    def grown(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        offsets: torch.Tensor,
        members: torch.Tensor,
    ) -> ClusterMeans:
        """With further entries in groups of their own, as in `build`."""
        other = ClusterMeans.build(keys, values, offsets, members)
        return ClusterMeans(
            torch.cat([self.keys, other.keys], dim=1),
            torch.cat([self.values, other.values], dim=1),
            torch.cat([self.sizes, other.sizes]),
            torch.cat([self.group_of, other.group_of + len(self.sizes)]),
        )

    def estimate(
        self, query: torch.Tensor, fetched: torch.Tensor, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the entries that were not fetched, each taken for its group's mean.

        A group counts as one entry of logit `q . mean key + log(entries not fetched)`. Costs time
        in proportion to the groups.

        Args:
            query: [heads, queries, head_dim], scaled.
            fetched: int64 ids, without repeats, of entries that are attended by themselves, or
                that must not be seen.
            softcap: see `ops.sparse_attention`.

        Returns:
            out [heads, queries, head_dim] and lse [heads, queries], float32, as
            `ops.merge_attention` takes them; 0 and -inf where everything was fetched.
        """
        taken = torch.bincount(self.group_of[fetched], minlength=len(self.sizes))
        left = self.sizes - taken
        open_groups = left.nonzero()[:, 0]
        log_left = left[open_groups].float().log()
        rows = query.float().reshape(self.keys.shape[0], -1, query.shape[2])
        # One head after the other: the widened means are a few megabytes.
        out, lse = zip(
            *(
                _attend(
                    head,
                    keys[open_groups].float(),
                    values[open_groups].float(),
                    log_left,
                    softcap,
                )
                for head, keys, values in zip(rows, self.keys, self.values, strict=True)
            ),
            strict=True,
        )
        return torch.stack(out).view(query.shape), torch.stack(lse).view(query.shape[:2])


def _attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = rows @ keys.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[:, None]).exp()
    return weights @ values, lse


def _groups(entries: int, offsets: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Number of each entry's group: its first cluster, or one of the loose groups after those.

    Clusters that are the first of none of their members have no group.
    """
    sizes = offsets.diff()
    clusters = torch.arange(len(sizes)).repeat_interleave(sizes)
    group_of = torch.full((entries,), len(sizes))
    group_of.scatter_reduce_(0, members[: len(clusters)].long(), clusters, "amin")
    loose = (group_of == len(sizes)).nonzero()[:, 0]
    group_of[loose] += torch.arange(len(loose)) // LOOSE_GROUP
    numbers = (torch.bincount(group_of) > 0).cumsum(0) - 1
    return numbers[group_of]


def _means(rows: torch.Tensor, group_of: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float16).max
    return torch.stack(
        [
            torch.zeros(len(sizes), rows.shape[2])
            .index_add_(0, group_of, head.float())
            .div_(sizes[:, None])
            .clamp_(-limit, limit)
            .half()
            for head in rows
        ]
    )
