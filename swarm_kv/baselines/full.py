"""Full attention to what lies on the drives: everything is read at every step."""

from __future__ import annotations

import torch

from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from .ranking import NONE


@selector("full", summary=None)
def full(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """All stored entries, whatever the budget.

    Args:
        query: not looked at.
        index: of the stored entries.
        budget: not looked at.
        config: not looked at.
    """
    return NONE, torch.arange(index.limit)
