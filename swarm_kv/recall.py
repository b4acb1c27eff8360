"""The recall meter: how much of the attention to stored entries a step's reads hold.

Attention mass is the softmax over all entries, mean over heads. What was read is known exactly from
attention's own log-sum-exp. What was not read is estimated from a sample that is read for the
purpose, drawn by the codes' scores: codes are what the reads were chosen by, so that the sample's
weights vary little even where attention does. The estimate of that mass is unbiased; the share that
follows from it has a bias of the order of 1 / sample ** 2.
"""

from __future__ import annotations

import dataclasses
import logging
import math

import torch

from .errors import CapacityError, StorageError
from .index import Index
from .meter import Mass
from .sequence import Sequence

logger = logging.getLogger(__name__)

UNIFORM = 0.1
"""Share of the sample that is drawn without regard to the codes: bounds the weight of an entry that
they underrate. Between 0 and 0.2 the error hardly differs, at 1 it is 2 to 3 times as large."""


@dataclasses.dataclass(frozen=True)
class Attended:
    """What a decoding step has attended to in one layer.

    Attributes:
        query: [heads, queries, head_dim], scaled.
        fetched: int64, the stored entries, each once.
        lse: [queries, heads], log-sum-exp over sinks, window and `fetched`.
        resident_lse: the same without `fetched`.
        softcap: see `ops.sparse_attention`.
    """

    query: torch.Tensor
    fetched: torch.Tensor
    lse: torch.Tensor
    resident_lse: torch.Tensor
    softcap: float | None = None


def due(step: int, layer: int, every: int) -> bool:
    """Whether a layer is measured at a cache's decoding step `step`.

    Layers take turns, so that no step bears the reads of all.
    """
    return every > 0 and (step - layer) % every == 0


def measure(
    sequence: Sequence, index: Index, attended: Attended, budget: int, sample: int, seed: int
) -> Mass | None:
    """Measure the mass of a step, after the step's own entry was appended.

    Args:
        sequence: whose entries were attended.
        index: of its stored entries.
        attended: what was attended to.
        budget: how many entries an oracle may take.
        sample: entries that are read to estimate the rest, at least 2; 0 reads every entry and is
            exact.
        seed: of the sample.

    Returns:
        None where scores are not finite, or what the meter alone wanted could not be read: that is
        logged, because decoding can go on.
    """
    try:
        if sample == 0:
            mass = _exact(sequence, attended, budget)
        else:
            mass = _estimated(sequence, index, attended, sample, seed)
    except (StorageError, CapacityError) as error:
        logger.warning("swarm_kv: recall of %s was not measured: %s", sequence.label, error)
        return None
    return None if math.isnan(mass.share) else mass


def draw(weights: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Draw `size` numbers with replacement, one in each of `size` strata of equal probability.

    Args:
        weights: [n], at least 0; probabilities but for a factor.
        size: at least 1.
        seed: equal seeds draw alike.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(size, generator=generator, dtype=torch.float64) + torch.arange(size)
    ends = weights.double().cumsum(0)
    return torch.searchsorted(ends, places / size * ends[-1]).clamp(max=len(weights) - 1)


def _exact(sequence: Sequence, attended: Attended, budget: int) -> Mass:
    weights = _weights(sequence, attended, torch.arange(sequence.limit), attended.resident_lse)
    masses = (weights / (1 + weights.sum(-1, keepdim=True))).mean(0)
    fetched, stored = float(masses[attended.fetched].sum()), float(masses.sum())
    best = float(masses.topk(min(budget, sequence.limit)).values.sum())
    return Mass(fetched / stored if stored != 0 else 1.0, exact=(fetched, best))


def _estimated(
    sequence: Sequence, index: Index, attended: Attended, sample: int, seed: int
) -> Mass:
    # Weights are relative to what was attended to: sinks, window and fetched entries weigh 1.
    resident = (attended.resident_lse - attended.lse).double().exp().T.reshape(-1, 1)
    rest = torch.ones(sequence.limit, dtype=torch.bool)
    rest[attended.fetched] = False
    numbers = rest.nonzero()[:, 0]
    if len(numbers) <= sample:
        missing = _weights(sequence, attended, numbers, attended.lse).sum(-1, keepdim=True)
        return Mass(float(_share(resident, missing)))
    chance = _chances(index.probabilities(attended.query)[numbers])
    drawn, times = torch.unique(draw(chance, sample, seed), return_counts=True)
    terms = _weights(sequence, attended, numbers[drawn], attended.lse) / chance[drawn]
    total = (terms @ times.double())[:, None]
    # The share is not linear in what is missing, so that the estimate is biased though `total` is
    # not. The jackknife takes most of that away, and tells the error.
    plain = _share(resident, total / sample)
    without_one = _share(resident, (total - terms) / (sample - 1)).repeat_interleave(times)
    mean = without_one.mean()
    error = ((without_one - mean).square().mean() * (sample - 1)).sqrt()
    return Mass(float(plain - (sample - 1) * (mean - plain)), float(error))


def _share(resident: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Share of the fetched entries, for each column of weights [rows, n] that are missing: [n]."""
    total = 1 + missing
    stored = ((total - resident) / total).sum(0)
    return torch.where(stored == 0, 1.0, ((1 - resident) / total).sum(0) / stored)


def _chances(scores: torch.Tensor) -> torch.Tensor:
    total = scores.double().sum()
    even = torch.full((len(scores),), 1 / len(scores), dtype=torch.float64)
    return UNIFORM * even + (1 - UNIFORM) * scores / total if total > 0 else even


def _weights(
    sequence: Sequence, attended: Attended, numbers: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """exp(score - lse) of stored entries, which it reads: float64 [heads * queries, entries].

    `numbers` must ascend.
    """
    shape = sequence.geometry
    rows = attended.query.reshape(shape.kv_heads, -1, shape.head_dim).float()
    wanted = torch.zeros(len(sequence), dtype=torch.bool)
    wanted[numbers + len(sequence.sinks)] = True
    scores = torch.empty(*rows.shape[:2], len(numbers))
    for ids, keys, _ in sequence.stream(wanted):
        scores[..., torch.searchsorted(numbers, ids)] = rows @ keys.float().transpose(-1, -2)
    if attended.softcap is not None:
        scores = attended.softcap * torch.tanh(scores / attended.softcap)
    return (scores.flatten(0, 1) - lse.T.reshape(-1, 1)).double().exp()
