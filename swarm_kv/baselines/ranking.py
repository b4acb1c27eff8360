"""What is read once clusters or entries are ranked.

Scores that are no numbers, as those of a query that is none, count as 0.
"""

from __future__ import annotations

import torch

from .. import ops
from ..index import Index, members_of
from ..selectors import Selection

Lists = tuple[torch.Tensor, torch.Tensor]
"""Offsets and members of clusters."""
NONE = torch.empty(0, dtype=torch.int64)


def best_entries(scores: torch.Tensor, index: Index, budget: int) -> Selection:
    """The entries of highest score, float [entries], one by one."""
    reach = scores[: index.limit].nan_to_num()
    return NONE, torch.topk(reach, min(budget, index.limit), sorted=False).indices


def whole_clusters(scores: torch.Tensor, index: Index, budget: int) -> Selection:
    """Clusters by descending score, float [clusters]: as near to the budget as whole ones come."""
    lists, taken = _until_met(scores, index, budget)
    beyond = _held(lists, taken) - budget
    if len(taken) > 1 and beyond > budget - _held(lists, taken[:-1]):
        taken = taken[:-1]
    return taken, NONE


def trimmed_clusters(scores: torch.Tensor, index: Index, budget: int) -> Selection:
    """Clusters by descending score, and of the last one the first members, up to the budget."""
    lists, taken = _until_met(scores, index, budget)
    if _held(lists, taken) <= budget:
        return taken, NONE
    offsets, members = lists
    begin, end = offsets[taken[-1] :][:2].tolist()
    read, last = members_of(*lists, taken[:-1], NONE), members[begin:end].long()
    return taken[:-1], last[~torch.isin(last, read)][: budget - len(read)]


def _until_met(scores: torch.Tensor, index: Index, budget: int) -> tuple[Lists, torch.Tensor]:
    """Clusters that are in reach, and those to take; the last one may exceed the budget."""
    lists = index.in_reach()
    return lists, ops.select_clusters(scores.nan_to_num(), *lists, budget)


def _held(lists: Lists, clusters: torch.Tensor) -> int:
    """How many distinct entries the clusters hold."""
    return members_of(*lists, clusters, NONE).numel()
