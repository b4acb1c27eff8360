"""Page-locked memory, which a CUDA device copies from and to without a detour."""

from __future__ import annotations

import contextlib
import logging
import resource
from typing import Any

import torch

logger = logging.getLogger(__name__)

CHUNK = 64 << 20
"""Bytes that are pinned at once: what one refusal costs. No copy may begin in one chunk and end in
another (csrc/core/device_tier.cpp)."""


class Pinned:
    """A range of memory that is page-locked from its beginning on, as far as the system allows.

    Args:
        cudart: `torch.cuda.cudart()`.
        address: of the first byte, at a page.
        size: bytes to pin.
        chunk: bytes per registration.

    Attributes:
        size: bytes that are pinned.
        refusal: why it is not all of them, or None.
    """

    def __init__(self, cudart: Any, address: int, size: int, chunk: int) -> None:
        self.size = 0
        self.refusal: str | None = None
        self._cudart = cudart
        self._chunks: list[int] = []
        for begin in range(address, address + size, chunk):
            part = min(chunk, address + size - begin)
            result = cudart.cudaHostRegister(begin, part, 0)
            if int(result) != 0:
                self.refusal = str(cudart.cudaGetErrorString(result))
                _forget_error()
                break
            self._chunks.append(begin)
            self.size += part

    def release(self) -> None:
        """Unpin, before the memory goes. Twice is allowed."""
        self.size = 0
        while self._chunks:
            self._cudart.cudaHostUnregister(self._chunks.pop())


def pin(address: int, size: int) -> Pinned | None:
    """Pin memory where a CUDA device is there; a refusal is a warning, as copies then take longer.

    Returns:
        None without a device.
    """
    if not torch.cuda.is_available():
        return None
    cuda: Any = torch.cuda
    try:
        pinned = Pinned(cuda.cudart(), address, size, CHUNK)
    except RuntimeError as error:  # a device that cannot be used
        logger.warning("swarm_kv: staging memory is not pinned: %s", error)
        return None
    if pinned.refusal is not None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        logger.warning(
            "swarm_kv: %d of %d bytes of staging memory are pinned, then CUDA refused (%s); copies "
            "to the device take longer. The limit of locked memory (ulimit -l) is %s: raise it, or "
            "lower `staging_bytes`",
            pinned.size,
            size,
            pinned.refusal,
            "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes",
        )
    return pinned


def _forget_error() -> None:
    # CUDA remembers a refusal, and torch would report it as that of the next kernel. This one.
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")
