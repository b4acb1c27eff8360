"""Fixtures of tests of whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.hf.helpers import PROMPT, STEPS


@pytest.fixture
def ids() -> Tensor:
    """Three prompts and what follows them; a file whose sizes differ has its own."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (3, PROMPT + STEPS), generator=generator)
