"""What fast memory knows about the stored entries of one layer: codes, clusters, a summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch

from .codes import Codebook
from .errors import ArgumentError
from .summary import Clustered, Summary

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of one sequence's stored entries in one layer. Immutable: growing makes a new one.

    Attributes:
        codebook: centroids of the codes.
        codes: uint8 [kv_heads, bytes, entries].
        offsets: int32 [clusters + 1].
        members: int32; cluster c is `members[offsets[c]:offsets[c + 1]]`, its medoid first. What
            follows the last cluster is in none.
        summary: what the selector ranks by, or None where codes and clusters are all that it does.
        limit: entries at or above it are never chosen (a cropped sequence).
        owner: int32 [clusters], the cluster that each is a part of (`maintenance.parts`): itself
            where it is none.
        request_cost: of one read on the drives, in transfer times of one entry.
        scorer: in the stead of `Codebook.score`, with the codebook before its arguments.
    """

    codebook: Codebook
    codes: torch.Tensor
    offsets: torch.Tensor
    members: torch.Tensor
    summary: Summary | None
    limit: int
    owner: torch.Tensor
    request_cost: float = 1.5
    scorer: Callable[[Codebook, torch.Tensor, torch.Tensor], torch.Tensor] = Codebook.score

    @property
    def entries(self) -> int:
        """Number of stored entries."""
        return self.codes.shape[-1]

    def nbytes(self) -> int:
        """Bytes that the index holds."""
        return sum(self.bytes_by_part().values())

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of `codes`, `codebook`, `clusters` and `summary`."""
        return {
            "codes": self.codes.nbytes,
            "codebook": self.codebook.nbytes,
            "clusters": self.offsets.nbytes + self.members.nbytes + self.owner.nbytes,
            "summary": 0 if self.summary is None else self.summary.nbytes,
        }

    def known(self, kind: type[S]) -> S:
        """The summary, which a selector knows to be of this kind.

        Raises:
            ArgumentError: it is of another kind, or there is none.
        """
        if not isinstance(self.summary, kind):
            has = "none" if self.summary is None else type(self.summary).__name__
            raise ArgumentError(
                f"the selector ranks by {kind.__name__}, but the summary of this index is {has}: "
                "make it with `selectors.summary_of(selector)`"
            )
        return self.summary

    def bytes_per_entry(self) -> dict[str, float]:
        """The same per stored entry, and their sum under `total`."""
        parts = self.bytes_by_part()
        parts["total"] = sum(parts.values())
        return {name: size / max(self.entries, 1) for name, size in parts.items()}

    def probabilities(self, query: torch.Tensor) -> torch.Tensor:
        """Attention that a scaled query [heads, queries, head_dim] would give: float32 [entries].

        By codes; the mean over heads and queries, over stored entries alone.
        """
        scores = self.scorer(self.codebook, query, self.codes)
        if self.limit < self.entries:
            scores[self.limit :] = 0
        return scores

    def laid_out(
        self, offsets: torch.Tensor, members: torch.Tensor, summary: Summary | None
    ) -> Index:
        """The same entries in other clusters."""
        return dataclasses.replace(
            self, offsets=offsets, members=members, summary=summary, owner=_themselves(offsets)
        )

    def in_reach(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and members of the clusters without what is at `limit` or above.

        A cluster keeps its number, and may be empty.
        """
        if self.limit == self.entries:
            return self.offsets, self.members
        kept = self.members < self.limit
        before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        return before[self.offsets.long()].int(), self.members[kept]

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

    def grown(self, more: Clustered, owner: torch.Tensor | None = None) -> Index:
        """With further entries, in clusters of their own.

        `owner` int64 [clusters], the cluster of this index that each of the new ones is a part of,
        -1 for its own, which all are if not given.
        """
        before = self.offsets.numel() - 1
        own = torch.arange(before, before + more.clusters, dtype=torch.int32)
        if owner is not None:
            own = torch.where(owner < 0, own, owner).int()
        ours, theirs = int(self.offsets[-1]), int(more.offsets[-1])
        members = more.members + self.entries
        return Index(
            codebook=self.codebook,
            codes=torch.cat([self.codes, self.codebook.encode(more.keys)], dim=-1),
            offsets=torch.cat([self.offsets, more.offsets[1:] + ours]),
            members=torch.cat(
                [self.members[:ours], members[:theirs], self.members[ours:], members[theirs:]]
            ),
            summary=None if self.summary is None else self.summary.grown(more),
            limit=self.limit + more.keys.shape[1],
            owner=torch.cat([self.owner, own]),
            request_cost=self.request_cost,
        )


def build(
    codebook: Codebook,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    members: torch.Tensor,
    summary: Summary | None = None,
    request_cost: float = 1.5,
) -> Index:
    """Index of entries with keys [kv_heads, n, head_dim] in the given clusters.

    Args:
        codebook: for the keys' codes.
        keys: floating.
        offsets, members, summary, request_cost: see `Index`.
    """
    return Index(
        codebook=codebook,
        codes=codebook.encode(keys),
        offsets=offsets,
        members=members,
        summary=summary,
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
