"""What tests of whole models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat

PROMPT = 200
STEPS = 12
PADS = (37, 90, 0)


def settings(paths: list[str], **changes: Any) -> swarm_kv.SwarmConfig:
    """Small windows, so that most of a short prompt lies on the drives."""
    small = {
        "sparsity": 1.0,
        "window": 16,
        "sinks": 2,
        "flush": 8,
        "block": 4,
        "dram_bytes": "8MiB",
        "min_activation": 2,
    }
    return swarm_kv.SwarmConfig(paths=paths, **{**small, **changes})


def left_padded(ids: Tensor, pads: tuple[int, ...] = PADS) -> tuple[Tensor, Tensor]:
    """The same tokens behind paddings, which take the place of the first ones, and their mask."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def teacher_forced(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    chunk: int | None = None,
    cache: Any = None,
    prompt: int = PROMPT,
) -> Tensor:
    """Logits of every real token: the prompt in one call or in chunks, then one token at a time."""
    name = compat.cache_arg(model)
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    ends = [*range(chunk, prompt, chunk), prompt] if chunk else [prompt]
    ends += range(prompt + 1, ids.shape[1] + 1)
    logits, start = [], 0
    for end in ends:
        output = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=position[:, start:end],
            use_cache=True,
            **({} if cache is None else {name: cache}),
        )
        cache = compat.cache_of(output)
        logits.append(output.logits)
        start = end
    return torch.cat(logits, 1)[mask.bool()]
