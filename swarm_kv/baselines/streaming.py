"""StreamingLLM (arXiv 2309.17453): sinks and the most recent tokens, whatever is asked."""

from __future__ import annotations

import torch

from ..config import SwarmConfig
from ..index import Index
from ..selectors import Selection, selector
from .ranking import NONE


@selector("streaming", summary=None)
def streaming(query: torch.Tensor, index: Index, budget: int, config: SwarmConfig) -> Selection:
    """The newest stored entries: a recent window of `budget` tokens, most of it in memory anyway.

    Nothing is read while the budget is no larger than `config.window`. The original drops what is
    older and numbers positions within its window; here keys keep their positions.

    Args:
        query: not looked at.
        index: of the stored entries.
        budget: length of the window.
        config: `window`.
    """
    first = max(0, index.limit - max(0, budget - config.window))
    return NONE, torch.arange(first, index.limit)
