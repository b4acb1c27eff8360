"""The device of a test: a GPU, and the CPU to try the tests themselves where there is none."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def gpu() -> str:
    """For what only a GPU can show."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"
