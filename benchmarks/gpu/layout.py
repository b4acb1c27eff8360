"""Where the tensor cores put their numbers: `mma.m16n8k16` against a product that is known.

The kernels' sources and their emulation on a CPU share one description of that layout, which only
hardware can confirm. If it is wrong, all else about attention in 16 bits is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.harness import Report
from swarm_kv import ops

if TYPE_CHECKING:
    from benchmarks.gpu.check import Parameters

DIM = 64
SHAPES = ((1, 1), (1, 8), (1, 16), (2, 17), (32, 4))
"""Rows and heads, for whole tiles and parts of them."""
GOAL = 1e-3


def errors(device: str, dtype: torch.dtype, rows: int, heads: int) -> Tensor:
    """By how much attention is off, [rows, heads, 64]: 0 up to rounding where the layout is right.

    Keys and values are the unit vectors of 64 features, so that the score of entry i is the query's
    feature i and the output's feature i is that entry's weight: a product that takes a row, a
    column or a half of a pair of numbers for another one shows where.
    """
    # Neighbours are far apart, and each number is exact in 16 bits.
    grid = torch.arange(rows * heads * DIM) * 37 % 61 / 8
    q = grid.view(rows, heads, DIM).to(dtype)
    entries = torch.eye(DIM).repeat(1, 2)  # [K | V]
    order = torch.randperm(DIM, generator=torch.Generator().manual_seed(0))
    out, _ = ops.sparse_attention(
        q.to(device),
        entries.flatten().to(dtype).to(device),
        (order * 2 * DIM).repeat(rows).to(device),
        (torch.arange(rows + 1) * DIM).to(device),
        1,
        1.0,
    )
    return out.cpu().double() - q.double().softmax(-1)


def run(parameters: Parameters, report: Report) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        found = [errors(parameters.device, dtype, *shape) for shape in SHAPES]
        name = str(dtype).removeprefix("torch.")
        report.at_most(
            f"layout: greatest difference, {name}",
            max(float(one.abs().max()) for one in found),
            GOAL,
        )
        for shape, one in zip(SHAPES, found, strict=True):
            wrong = (one.abs() > GOAL).nonzero().tolist()
            if wrong:
                places = ", ".join(str(tuple(place)) for place in wrong[:8])
                report.note(
                    f"{name}, rows and heads {shape}: {len(wrong)} of {one.numel()} numbers are "
                    f"wrong, the first at (row, head, feature) {places}"
                )
