"""The selector that reads intervals of the layout."""

import dataclasses
from typing import Any

import pytest
import torch

from swarm_kv import SwarmConfig, codes, index, ops, selectors

ENTRIES, BUDGET = 200, 40


def some_index() -> index.Index:
    """Two clusters; the other entries are loose."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, ENTRIES, 16, generator=generator)
    offsets = torch.tensor([0, 30, 50]).int()
    members = torch.randperm(ENTRIES, generator=generator).int()
    return index.build(codes.train(keys, 4), keys, offsets, members)


QUERY = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(1))


def taken(which: index.Index) -> torch.Tensor:
    config = SwarmConfig(paths="/nowhere")
    chosen = selectors.resolve("interval")
    clusters, entries = chosen(QUERY, which, min(BUDGET, which.limit), config)
    assert clusters.numel() == 0
    return entries


def test_what_a_selector_ranks_by() -> None:
    assert selectors.summary_of(selectors.resolve("interval")) is None
    assert selectors.summary_of(selectors.resolve("medoid")) is selectors.medoids

    def plain(*_: Any) -> Any:
        raise NotImplementedError

    assert selectors.summary_of(plain) is selectors.medoids

    def summarise(*_: Any) -> Any:
        raise NotImplementedError

    assert selectors.selector("own", summary=summarise)(plain) is plain
    try:
        assert selectors.summary_of(plain) is summarise
        assert selectors.resolve("own") is plain
    finally:
        del selectors._SELECTORS["own"]


def test_goes_by_codes_order_and_request_cost() -> None:
    ours = some_index()
    probabilities = ours.probabilities(QUERY)
    entries = taken(ours)
    assert torch.equal(entries, ops.select_intervals(probabilities, ours.members, BUDGET, 1.5))
    assert not torch.isin(entries, ours.members[:50].long()).all()  # loose ones too
    dearer = ops.select_intervals(probabilities, ours.members, BUDGET, 8.0)
    assert torch.equal(taken(dataclasses.replace(ours, request_cost=8.0)), dearer)
    assert not torch.equal(dearer, entries)
    other = dataclasses.replace(ours, members=ours.members.sort().values)
    assert not torch.equal(taken(other), entries)


@pytest.mark.parametrize("limit", [1, 50, 120])
def test_never_takes_what_was_cropped(limit: int) -> None:
    ours = some_index()
    entries = taken(ours.cropped(limit))
    assert entries.numel() == min(limit, BUDGET)
    assert entries.max() < limit <= taken(ours).max()
