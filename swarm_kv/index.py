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
        owner: int32 [clusters], the cluster that each is a part of (`maintenance.parts`): itself
            where it is none.
        request_cost: of one read on the drives, in transfer times of one entry.
    """

    codebook: Codebook
    codes: torch.Tensor
    offsets: torch.Tensor
    members: torch.Tensor
    medoids: Medoids | None
    limit: int
    owner: torch.Tensor
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
            "clusters": self.offsets.nbytes + self.members.nbytes + self.owner.nbytes,
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
        return dataclasses.replace(
            self, offsets=offsets, members=members, medoids=medoids, owner=_themselves(offsets)
        )

    def sizes(self) -> torch.Tensor:
        """int64 [clusters]: entries of each, all its parts counted; 0 for a part."""
        sizes = torch.zeros(self.offsets.numel() - 1, dtype=torch.int64)
        return sizes.index_add_(0, self.owner, self.offsets.diff().long())

    def decoded(self, entries: torch.Tensor) -> torch.Tensor:
        """float32 [kv_heads, n, head_dim]: keys of `entries`, int64, as their codes have them."""
        return self.codebook.decode(self.codes[:, :, entries])

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
        owner: torch.Tensor | None = None,
    ) -> Index:
        """With further entries: keys [kv_heads, n, head_dim] in clusters of their own.

        `medoids` and `weights` as in `build`; `owner` int64 [clusters], the cluster of this index
        that each of the new ones is a part of, -1 for its own, which all are if not given.
        """
        before = self.offsets.numel() - 1
        own = torch.arange(before, before + offsets.numel() - 1, dtype=torch.int32)
        if owner is not None:
            own = torch.where(owner < 0, own, owner).int()
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
            owner=torch.cat([self.owner, own]),
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
        owner=_themselves(offsets),
        request_cost=request_cost,
    )


def _themselves(offsets: torch.Tensor) -> torch.Tensor:
    return torch.arange(offsets.numel() - 1, dtype=torch.int32)


def concatenated(
    lists: list[tuple[torch.Tensor, torch.Tensor]], entries: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and members of the clusters of several segments, numbered through.

    Args:
        lists: offsets and members of each, see `Index`.
        entries: how many each has.
    """
    offsets = [torch.zeros(1, dtype=torch.int32)]
    clustered, loose = [], []
    clusters_end = entries_end = 0
    for (own_offsets, own_members), count in zip(lists, entries, strict=True):
        last = int(own_offsets[-1])
        offsets.append(own_offsets[1:] + clusters_end)
        clustered.append(own_members[:last] + entries_end)
        loose.append(own_members[last:] + entries_end)
        clusters_end, entries_end = clusters_end + last, entries_end + count
    return torch.cat(offsets), torch.cat(clustered + loose)


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
