"""Loads the operator libraries that stand beside this file, once, on import."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

__all__ = ["CudaStatus", "cuda_status"]


@dataclasses.dataclass(frozen=True)
class CudaStatus:
    """Whether the CUDA operators are loaded, and why not if they are not.

    Attributes:
        loaded: True when swarm_kv/_C_cuda.so is loaded.
        reason: what keeps it from being used; empty when loaded.
    """

    loaded: bool
    reason: str = ""


def _load_cpu() -> None:
    path = Path(__file__).with_name("_C.so")
    if not path.exists():
        raise ImportError(
            f"{path} does not exist: swarm_kv is not built. "
            "Build it with: pip install -e . --no-build-isolation"
        )
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"{path} could not be loaded under torch {torch.__version__} "
            f"(2.11 or later is needed): {error}"
        ) from error


def _load_cuda() -> CudaStatus:
    if torch.version.cuda is None:
        return CudaStatus(False, f"torch {torch.__version__} is a build without CUDA")
    path = Path(__file__).with_name("_C_cuda.so")
    if not path.exists():
        return CudaStatus(
            False, "swarm_kv was built without its CUDA library; build with SWARM_KV_CUDA=1"
        )
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        return CudaStatus(False, f"{path.name} could not be loaded: {error}")
    return CudaStatus(True)


_load_cpu()
_CUDA_STATUS = _load_cuda()


def cuda_status() -> CudaStatus:
    """Whether the CUDA operators are loaded; whether there is a GPU is another question."""
    return _CUDA_STATUS
