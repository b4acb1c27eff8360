"""What fast memory knows about the stored entries of one layer: codes, clusters, medoid keys."""

from __future__ import annotations

import dataclasses

import torch

from . import ops
from .codes import Codebook


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of one sequence's stored entries in one layer. Immutable: growing makes a new one.

    Attributes:
        codebook: centroids of the codes.
        codes: uint8 [kv_heads, parts, entries].
        offsets: int64 [clusters + 1].
        members: int64; cluster c is `members[offsets[c]:offsets[c + 1]]`, its medoid first.
        medoid_keys: [kv_heads, clusters, head_dim], or empty where no selector needs them.
        limit: entries at or above it are never chosen (a cropped sequence).
    """

    codebook: Codebook
    codes: torch.Tensor
    offsets: torch.Tensor
    members: torch.Tensor
    medoid_keys: torch.Tensor
    limit: int

    @property
    def entries(self) -> int:
        """Number of stored entries."""
        return self.codes.shape[-1]

    def nbytes(self) -> int:
        """Bytes that the index holds."""
        tensors = (
            self.codebook.centroids,
            self.codes,
            self.offsets,
            self.members,
            self.medoid_keys,
        )
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def probabilities(self, query: torch.Tensor) -> torch.Tensor:
        """Attention that a scaled query [heads, queries, head_dim] would give: float32 [entries].

        By codes; the mean over heads and queries, over stored entries alone.
        """
        scores = ops.score_codes(query, self.codebook.centroids, self.codes, 1.0)
        if self.limit < self.entries:
            scores[self.limit :] = 0
        return scores

    def cropped(self, limit: int) -> Index:
        """The same index with only the first `limit` entries in reach."""
        return dataclasses.replace(self, limit=limit)

    def grown(
        self, keys: torch.Tensor, offsets: torch.Tensor, members: torch.Tensor, medoids: bool
    ) -> Index:
        """With further entries: keys [kv_heads, n, head_dim] in clusters of their own."""
        return Index(
            codebook=self.codebook,
            codes=torch.cat([self.codes, self.codebook.encode(keys)], dim=-1),
            offsets=torch.cat([self.offsets, offsets[1:] + self.members.numel()]),
            members=torch.cat([self.members, members + self.entries]),
            medoid_keys=_append(self.medoid_keys, keys, offsets, members, medoids),
            limit=self.limit + keys.shape[1],
        )


def _append(
    medoid_keys: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    members: torch.Tensor,
    wanted: bool,
) -> torch.Tensor:
    if not wanted:
        return medoid_keys
    return torch.cat([medoid_keys, keys[:, members[offsets[:-1]]]], dim=1)


def build(
    codebook: Codebook,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    members: torch.Tensor,
    medoids: bool,
) -> Index:
    """Index of entries with keys [kv_heads, n, head_dim] in the given clusters."""
    nothing = keys[:, :0]
    return Index(
        codebook=codebook,
        codes=codebook.encode(keys),
        offsets=offsets,
        members=members,
        medoid_keys=_append(nothing, keys, offsets, members, medoids),
        limit=keys.shape[1],
    )


def sequence_blocks(entries: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of `block` neighbours: offsets and members, int64."""
    starts = torch.arange(0, entries, block, dtype=torch.int64)
    end = torch.tensor([entries], dtype=torch.int64)
    return torch.cat([starts, end]), torch.arange(entries, dtype=torch.int64)
