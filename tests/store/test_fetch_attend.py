"""`fetch_attend` is submit, attend, complete, attend and merge in one: equal to dense attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm_kv.dense import dense_attention
from swarm_kv.errors import ArgumentError, CapacityError, StateError, StorageError, converted
from swarm_kv.store import NOTHING, Asking, Store, Wanted

from .helpers import BadFile, Data, open_store

pytestmark = pytest.mark.timeout(120)

KV_HEADS, HEADS, DIM, STORED, OWN = 2, 6, 16, 60, 9
SCALE = DIM**-0.5
DATA, RECENT = Data.random(STORED), Data.random(OWN, seed=1)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def queries(count: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, DIM, generator=generator)


def expected(
    q: Tensor, counts: list[int], chosen: list[Tensor], softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of each query to its sequence's chosen entries and to its own up to itself."""
    outs, lses, row = [], [], 0
    for count, entries in zip(counts, chosen, strict=True):
        for number in range(count):
            seen = OWN - (count - 1 - number)
            k = torch.cat([DATA.k[:, entries], RECENT.k[:, :seen]], dim=1)
            v = torch.cat([DATA.v[:, entries], RECENT.v[:, :seen]], dim=1)
            out, lse = dense_attention(
                q[row, :, None], k, v, scale=SCALE, causal=False, softcap=softcap
            )
            outs.append(out[:, 0])
            lses.append(lse[:, 0])
            row += 1
    return torch.stack(outs), torch.stack(lses)


class Rig:
    """A store with one segment and a window of its own.

    With `hbm_bytes` it attends on a device whose memory is the host's.
    """

    def __init__(self, drives: list[str], **settings: Any) -> None:
        self.store = open_store(drives, **settings)
        self.segment = DATA.write(self.store)
        self.slots = self.store.append(RECENT.k, RECENT.v)
        if "hbm_bytes" in settings:
            attach(self.store, settings["hbm_bytes"])

    def wanted(self, entries: Tensor, clusters: Tensor = NOTHING) -> Wanted:
        return Wanted((self.segment,), clusters, entries, STORED)

    def asking(self, q: Tensor, counts: list[int], **other: Any) -> Asking:
        own = [[self.slots[:4], self.slots[4:]] for _ in counts]
        given = Asking(q, counts, own, KV_HEADS, SCALE, None, None, None)
        return given._replace(**other)


def attach(store: Store, hbm_bytes: int) -> None:
    opened = torch.ops.swarm_kv.device_open(NOTHING)
    with converted():
        torch.ops.swarm_kv.store_attach(store._handle, opened, hbm_bytes)


PLACES = [{}, {"hbm_bytes": 0}, {"hbm_bytes": 2000}, {"hbm_bytes": 1 << 20}]
"""The host, and devices that keep nothing, seven entries, or everything."""


@pytest.fixture(params=PLACES, ids=["host", "device", "small device", "large device"])
def rig(request: pytest.FixtureRequest, drives: list[str]) -> Rig:
    return Rig(drives, **request.param)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_is_dense_attention(rig: Rig, softcap: float | None) -> None:
    counts, q = [1, 3], queries(4)
    chosen = [torch.tensor([0, 7, 30, 31, 59]), torch.arange(16, 40)]
    rows = [rig.wanted(chosen[0]), rig.wanted(NOTHING, torch.tensor([2, 3, 4]))]
    got = rig.store.fetch_attend(rows, rig.asking(q, counts, softcap=softcap))
    out, lse = expected(q, counts, chosen, softcap=softcap)
    torch.testing.assert_close(got.out, out, **TOLERANCE)
    torch.testing.assert_close(got.lse, lse, **TOLERANCE)
    assert [ids.sort().values.tolist() for ids in got.ids] == [part.tolist() for part in chosen]
    assert got.submitting > 0
    assert got.waiting > 0
    # An entry fewer shows.
    fewer = expected(q, counts, [chosen[0][:-1], chosen[1]], softcap=softcap)[0]
    assert not torch.allclose(got.out[0], fewer[0], **TOLERANCE)
    rig.store.close()  # refused while a ticket is out


@given(
    counts=st.lists(st.integers(1, OWN), min_size=1, max_size=3),
    shown=st.floats(0, 1),
    seed=st.integers(0, 99),
    place=st.sampled_from(PLACES),
)
def test_masks_and_many_queries(
    counts: list[int],
    shown: float,
    seed: int,
    place: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rig = Rig([str(tmp_path_factory.mktemp(f"drive{number}")) for number in range(2)], **place)
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(len(counts), STORED, generator=generator) < shown
    entries = [(torch.rand(STORED, generator=generator) < 0.4).nonzero()[:, 0] for _ in counts]
    q = queries(sum(counts), seed)
    got = rig.store.fetch_attend(
        [rig.wanted(chosen) for chosen in entries],
        rig.asking(q, counts, visible=visible.flatten()),
    )
    seen = [chosen[row[chosen]] for chosen, row in zip(entries, visible, strict=True)]
    out, lse = expected(q, counts, seen)
    torch.testing.assert_close(got.out, out, **TOLERANCE)
    torch.testing.assert_close(got.lse, lse, **TOLERANCE)
    # What the mask hides was fetched all the same.
    assert [len(ids) for ids in got.ids] == [len(chosen) for chosen in entries]
    rig.store.close()


@pytest.mark.parametrize("place", PLACES)
def test_many_rounds_and_a_prefetch(place: dict[str, int], drives: list[str]) -> None:
    """More than the staging memory holds at once, a part of it read ahead."""
    rig = Rig(drives, staging_bytes="64KiB", **place)
    everything, q = torch.arange(STORED), queries(1)
    ahead = rig.store.fetch([rig.wanted(everything[20:50])], purpose="prefetch")
    got = rig.store.fetch_attend([rig.wanted(everything)], rig.asking(q, [1]), ahead)
    torch.testing.assert_close(got.out, expected(q, [1], [everything])[0], **TOLERANCE)
    with pytest.raises(StateError, match="became a part of another one"):
        _ = ahead.ticket
    assert rig.store.counters()["prefetch"]["used"] > 0
    rig.store.close()


def test_sinks_count_once(rig: Rig) -> None:
    q, sinks = queries(1), torch.linspace(-1, 2, HEADS)
    chosen = torch.arange(0, STORED, 3)
    got = rig.store.fetch_attend([rig.wanted(chosen)], rig.asking(q, [1], sinks=sinks))
    out, lse = expected(q, [1], [chosen])
    weight = torch.sigmoid(lse - sinks)
    torch.testing.assert_close(got.out, out * weight[..., None], **TOLERANCE)
    torch.testing.assert_close(got.lse, torch.logaddexp(lse, sinks.expand_as(lse)), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, drives: list[str]) -> None:
    store = open_store(drives)
    data, recent = Data.random(STORED, dtype=dtype), Data.random(OWN, seed=1, dtype=dtype)
    segment, slots = data.write(store), store.append(recent.k, recent.v)
    q = queries(1).to(dtype)
    asking = Asking(q, [1], [[slots]], KV_HEADS, SCALE, None, None, None)
    wanted = Wanted((segment,), NOTHING, torch.arange(STORED), STORED)
    got = store.fetch_attend([wanted], asking)
    k, v = (torch.cat(pair, dim=1) for pair in ((data.k, recent.k), (data.v, recent.v)))
    out, _ = dense_attention(q.transpose(0, 1), k, v, scale=SCALE, causal=False, softcap=None)
    assert got.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.out, out.transpose(0, 1).to(got.out.dtype), rtol=2e-3, atol=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "counts that do not sum up": ({"queries": [2]}, "must sum up to the rows of q, 1, got 2"),
    "no query": ({"queries": [0]}, "row 0 has 0 queries and 9 entries of its own"),
    "another number of rows": ({"queries": [1, 1]}, "`limits` names 1 rows"),
    "an own slot outside the pool": (
        {"own": [[torch.tensor([1 << 40])]]},
        "own must hold multiples of 4 within [0, ",
    ),
    "an own slot between two numbers": (
        {"own": [[torch.tensor([6])]]},
        "own must hold multiples of 4 within",
    ),
    "a short mask": (
        {"visible": torch.ones(59, dtype=torch.bool)},
        "visible must have entries below `limits` = 60 in dimension 0, got bool [59]",
    ),
    "heads that do not divide": ({"kv_heads": 4}, "kv_heads = 4 must divide the query heads"),
    "a soft cap of zero": ({"softcap": 0.0}, "softcap must be positive, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_read(name: str, rig: Rig) -> None:
    change, text = REFUSED[name]
    before = rig.store.counters()
    with pytest.raises(ArgumentError, match=re.escape(text)):
        rig.store.fetch_attend([rig.wanted(torch.arange(5))], rig.asking(queries(1), [1], **change))
    assert rig.store.counters() == before
    rig.store.close()


def test_an_entry_that_cannot_be_read_leaves_nothing_behind(drives: list[str]) -> None:
    rig = Rig(drives[:1])
    file = BadFile(drives[0])
    file.corrupt()
    asked = [rig.wanted(torch.arange(STORED))], rig.asking(queries(1), [1])
    with pytest.raises(StorageError, match="entry 0 of layer 0 does not match its checksum"):
        rig.store.fetch_attend(*asked)
    file.mend()
    file.close()
    got = rig.store.fetch_attend(*asked)
    torch.testing.assert_close(got.out, expected(asked[1].q, [1], [torch.arange(STORED)])[0])
    rig.store.close()  # refused while a ticket is out


def test_a_closed_store(rig: Rig) -> None:
    asking, wanted = rig.asking(queries(1), [1]), rig.wanted(NOTHING)
    rig.store.close()
    with pytest.raises(StateError, match="was closed"):
        rig.store.fetch_attend([wanted], asking)
    assert isinstance(rig.store, Store)


def test_attaching_twice_or_to_nothing(drives: list[str]) -> None:
    rig = Rig(drives, hbm_bytes=0)
    with pytest.raises(StateError, match="the store has a device already"):
        attach(rig.store, 0)
    opened = torch.ops.swarm_kv.device_open(NOTHING)
    fresh = [open_store(drives) for _ in range(2)]
    for store in fresh:
        store.set_entry_bytes(DATA.entry_bytes)
    torch.ops.swarm_kv.store_attach(fresh[0]._handle, opened, 0)
    for wrong in (opened, torch.zeros(16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(ArgumentError, match="that no store has taken yet"), converted():
            torch.ops.swarm_kv.store_attach(fresh[1]._handle, wrong, 0)


def test_a_device_needs_staging_memory(drives: list[str]) -> None:
    """All of it is held by a fetch; then there is room."""
    rig = Rig(drives, staging_bytes="64KiB")
    everything = [rig.wanted(torch.arange(STORED))]
    with (
        rig.store.fetch(everything, purpose="stream"),
        rig.store.fetch(everything, purpose="stream"),
        pytest.raises(CapacityError, match="that copies to the device go through"),
    ):
        attach(rig.store, 0)
    attach(rig.store, 0)


def test_what_the_device_keeps_is_not_read_again(drives: list[str]) -> None:
    rig = Rig(drives, hbm_bytes=1 << 20, dram_bytes="1200KiB")
    wanted, asking = [rig.wanted(torch.arange(STORED))], rig.asking(queries(1), [1])
    for _ in range(3):
        got = rig.store.fetch_attend(wanted, asking)
        out, _ = expected(asking.q, [1], [torch.arange(STORED)])
        torch.testing.assert_close(got.out, out, **TOLERANCE)
    counters = rig.store.counters()
    assert counters["hbm"]["hits"] == 2 * STORED
    assert counters["hbm"]["cached_entries"] == STORED
    assert counters["hbm"]["window_entries"] == OWN
    rig.store.release(rig.slots)
    assert rig.store.counters()["hbm"]["window_entries"] == 0
