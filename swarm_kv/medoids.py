"""One key per cluster, by which the paper's selector ranks clusters."""

from __future__ import annotations

import dataclasses

import torch

from . import ops
from .errors import ArgumentError
from .summary import Clustered, half

REPRESENTATIVES = ("medoid", "weighted_mean")
BITS = (16, 4)


@dataclasses.dataclass(frozen=True)
class Medoids:
    """The keys of some clusters. Immutable: growing makes new ones.

    Attributes:
        keys: float16 [kv_heads, clusters, head_dim]; or with 4 bits uint8 [kv_heads, clusters,
            head_dim / 2], byte j with feature j in its low half and feature j + head_dim / 2 in its
            high half.
        scales: float32 [kv_heads, head_dim], what one step of a feature is worth; None with 16
            bits.
        zeros: float32 [kv_heads, head_dim], what step 0 stands for; None with 16 bits.
        representative: "medoid" or "weighted_mean".
    """

    keys: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    representative: str

    @classmethod
    def build(
        cls,
        keys: torch.Tensor,
        offsets: torch.Tensor,
        members: torch.Tensor,
        weights: torch.Tensor | None = None,
        representative: str = "medoid",
        bits: int = 16,
    ) -> Medoids:
        """Of clusters of entries with keys [kv_heads, n, head_dim].

        Args:
            keys: floating.
            offsets: int32 [clusters + 1]; no cluster is empty.
            members: int32, medoids first; those beyond the last cluster are passed over.
            weights: [n], how much each entry counts in a mean, such as how often it was activated;
                None: all alike.
            representative: "medoid", the medoid's own key, or "weighted_mean" of the members'.
            bits: 16, or 4 with a scale and zero per feature over all these clusters.

        Raises:
            ArgumentError: a name or number that is not known, or an odd head size with 4 bits.
        """
        if representative not in REPRESENTATIVES:
            raise ArgumentError(
                f"unknown representative ({representative!r}); choose one of {REPRESENTATIVES}"
            )
        if bits not in BITS:
            raise ArgumentError(f"medoid bits ({bits}) must be one of {BITS}")
        if bits == 4 and keys.shape[2] % 2:
            raise ArgumentError(f"medoids of 4 bits need an even head size, not {keys.shape[2]}")
        chosen = _represent(keys, offsets, members, weights, representative)
        if bits == 16:
            return cls(half(chosen), None, None, representative)
        if chosen.shape[1] == 0:
            low = high = chosen.new_zeros(keys.shape[0], keys.shape[2])
        else:
            low, high = chosen.amin(1), chosen.amax(1)
        scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
        return cls(_pack(chosen, scales, low), scales, low, representative)

    @property
    def nbytes(self) -> int:
        """Bytes that they hold."""
        tensors = (self.keys, self.scales, self.zeros)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """Softmax over clusters of a scaled query [heads, queries, head_dim], mean over the others.

        Returns:
            float32 [clusters].
        """
        if self.scales is None:
            return ops.score_clusters(query, self.keys, 1.0)
        return ops.score_coded_clusters(query, self.keys, self.scales, 1.0)

    def alike(self, of: Clustered) -> Medoids:
        """Those of other clusters, as in `build`; 4 bits keep their scales and clamp."""
        chosen = _represent(of.keys, of.offsets, of.members, of.weights, self.representative)
        if self.scales is None or self.zeros is None:
            return dataclasses.replace(self, keys=half(chosen))
        return dataclasses.replace(self, keys=_pack(chosen, self.scales, self.zeros))

    def replaced(self, first: int, last: int, others: Medoids) -> Medoids:
        """With those of `others`, which are `alike`, in the place of clusters `first` to `last`."""
        parts = [self.keys[:, :first], others.keys, self.keys[:, last:]]
        return dataclasses.replace(self, keys=torch.cat(parts, dim=1))

    def grown(self, more: Clustered) -> Medoids:
        """With those of further clusters, as in `build`."""
        count = self.keys.shape[1]
        return self.replaced(count, count, self.alike(more))


def _represent(
    keys: torch.Tensor,
    offsets: torch.Tensor,
    members: torch.Tensor,
    weights: torch.Tensor | None,
    representative: str,
) -> torch.Tensor:
    if representative == "medoid":
        return keys[:, members[offsets[:-1]]].float()
    sizes = offsets.diff()
    clustered = members[: int(offsets[-1])]
    if weights is None:
        weights = torch.ones(keys.shape[1])
    of_cluster = torch.arange(len(sizes)).repeat_interleave(sizes)
    # A cluster whose members all weigh nothing is their plain mean.
    each = weights.float()[clustered]
    total = torch.zeros(len(sizes)).index_add_(0, of_cluster, each)
    each = torch.where(total[of_cluster] > 0, each, 1.0)
    total = torch.where(total > 0, total, sizes.float())
    return torch.stack(
        [
            torch.zeros(len(sizes), keys.shape[2]).index_add_(
                0, of_cluster, head[clustered].float() * (each / total[of_cluster])[:, None]
            )
            for head in keys
        ]
    )


def _pack(keys: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    steps = (keys - zeros[:, None]) / scales[:, None]
    low, high = steps.round().clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4
