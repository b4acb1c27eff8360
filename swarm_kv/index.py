"""What fast memory knows about the stored entries of one layer: codes, clusters, medoids."""

from __future__ import annotations

import dataclasses

import torch

from .codes import Codebook
from .medoids import Medoids


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of one sequence's stored entries in one layer. Immutable: growing makes a new one.

    Attributes:
        codebook: centroids of the codes.
        codes: uint8 [kv_heads, bytes, entries].
        offsets: int32 [clusters + 1].
        members: int32; cluster c is `members[offsets[c]:offsets[c + 1]]`, its medoid first. What
            follows the last cluster is in none.
        medoids: of the clusters, or None where no selector needs them.
        limit: entries at or above it are never chosen (a cropped sequence).
        request_cost: of one read on the drives, in transfer times of one entry.
    """

    codebook: Codebook
    codes: torch.Tensor
    offsets: torch.Tensor
    members: torch.Tensor
    medoids: Medoids | None
    limit: int
    request_cost: float = 1.5

    @property
    def entries(self) -> int:
        """Number of stored entries."""
        return self.codes.shape[-1]

    def nbytes(self) -> int:
        """Bytes that the index holds."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of `codes`, `codebook`, `clusters` and `medoids`."""
        return {
            "codes": self.codes.nbytes,
            "codebook": self.codebook.nbytes,
            "clusters": self.offsets.nbytes + self.members.nbytes,
            "medoids": 0 if self.medoids is None else self.medoids.nbytes,
        }

    def bytes_per_entry(self) -> dict[str, float]:
        """The same per stored entry, and their sum under `total`."""
        parts = self.bytes_by_part()
        parts["total"] = sum(parts.values())
        return {name: size / max(self.entries, 1) for name, size in parts.items()}

    def probabilities(self, query: torch.Tensor) -> torch.Tensor:
        """Attention that a scaled query [heads, queries, head_dim] would give: float32 [entries].

        By codes; the mean over heads and queries, over stored entries alone.
        """
        scores = self.codebook.score(query, self.codes)
        if self.limit < self.entries:
            scores[self.limit :] = 0
        return scores

    def laid_out(
        self, offsets: torch.Tensor, members: torch.Tensor, medoids: Medoids | None
    ) -> Index:
        """The same entries in other clusters."""
        return dataclasses.replace(self, offsets=offsets, members=members, medoids=medoids)

    def cropped(self, limit: int) -> Index:
        """The same index with only the first `limit` entries in reach."""
        return dataclasses.replace(self, limit=limit)

    def grown(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor,
        members: torch.Tensor,
        medoids: bool,
        weights: torch.Tensor | None = None,
    ) -> Index:
        """With further entries: keys [kv_heads, n, head_dim] in clusters of their own.

        `medoids` and `weights` as in `build`.
        """
        ours, theirs = int(self.offsets[-1]), int(offsets[-1])
        grown = None
        if medoids and self.medoids is not None:
            grown = self.medoids.grown(keys, offsets, members, weights)
        members = members + self.entries
        return Index(
            codebook=self.codebook,
            codes=torch.cat([self.codes, self.codebook.encode(keys)], dim=-1),
            offsets=torch.cat([self.offsets, offsets[1:] + ours]),
            members=torch.cat(
                [self.members[:ours], members[:theirs], self.members[ours:], members[theirs:]]
            ),
            medoids=grown,
            limit=self.limit + keys.shape[1],
            request_cost=self.request_cost,
        )


def build(
    codebook: Codebook,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    members: torch.Tensor,
    medoids: bool,
    weights: torch.Tensor | None = None,
    representative: str = "medoid",
    medoid_bits: int = 16,
    request_cost: float = 1.5,
) -> Index:
    """Index of entries with keys [kv_heads, n, head_dim] in the given clusters.

    Args:
        codebook: for the keys' codes.
        keys: floating.
        offsets, members: see `Index`.
        medoids: whether a selector needs them.
        weights, representative, medoid_bits: see `Medoids.build`.
        request_cost: see `Index`.
    """
    return Index(
        codebook=codebook,
        codes=codebook.encode(keys),
        offsets=offsets,
        members=members,
        medoids=Medoids.build(keys, offsets, members, weights, representative, medoid_bits)
        if medoids
        else None,
        limit=keys.shape[1],
        request_cost=request_cost,
    )


def sequence_blocks(entries: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of `block` neighbours: offsets and members, int32."""
    starts = torch.arange(0, entries, block, dtype=torch.int32)
    end = torch.tensor([entries], dtype=torch.int32)
    return torch.cat([starts, end]), torch.arange(entries, dtype=torch.int32)


def members_of(
    offsets: torch.Tensor, members: torch.Tensor, clusters: torch.Tensor, entries: torch.Tensor
) -> torch.Tensor:
    """Numbers of all entries in the clusters `clusters` and in `entries`, each once: int64."""
    starts = offsets.long()[clusters]
    sizes = offsets.long()[clusters + 1] - starts
    behind = sizes.cumsum(0) - sizes
    places = torch.arange(int(sizes.sum())) + (starts - behind).repeat_interleave(sizes)
    return torch.unique(torch.cat([members[places].long(), entries]))
