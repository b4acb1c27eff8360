"""The store as Python uses it: what is written comes back, is counted, and is given back."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv.errors import CapacityError, StateError
from swarm_kv.store import NOTHING, Fetch, IndexCharge, Segment, Store, Wanted, Window
from swarm_kv.store_ops import gather_entries

from .helpers import (
    Data,
    assert_holds,
    blocks,
    fetch_all,
    left_behind,
    open_store,
    overlapping,
    pack,
    receive,
    receive_rows,
)

pytestmark = pytest.mark.timeout(60)

ENGINES = ("auto", "threads", "memory")
# Entries of 64 bytes to 7.5 KiB; most are neither a multiple of a block nor a divisor of one.
SHAPES = ((1, 16), (3, 24), (2, 40), (1, 80), (3, 80))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def window_rows(store: Store, slots: Tensor, data: Data) -> Tensor:
    pool = store.pool(data.k.dtype)
    elements = data.entry_bytes // data.k.itemsize
    return gather_entries(pool, slots // data.k.itemsize, elements)


# ---- what is written comes back


@pytest.mark.parametrize(("kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_round_trip(
    engine: str, dtype: torch.dtype, kv_heads: int, dim: int, drives: list[str]
) -> None:
    data = Data.random(150, kv_heads, dim, dtype)
    clusters = overlapping(150)
    store = open_store(drives, engine=engine)
    segment = data.write(store, pack(clusters))
    everything = torch.arange(len(clusters))
    got = fetch_all(store, segment, data, clusters=everything)
    assert_holds(got, data.rows(), range(150))
    got = fetch_all(store, segment, data, entries=torch.tensor([149, 3, 3, 77]), purpose="stream")
    assert_holds(got, data.rows(), [3, 77, 149])
    with pytest.raises(AssertionError, match="other bytes"):  # what the comparison is worth
        assert_holds(got, data.rows().roll(1, 0), [3, 77, 149])


def test_the_drives_hold_the_bytes(drives: list[str]) -> None:
    """The test above would pass if reads never left memory; here the engine counts them."""
    data = Data.random(200)
    store = open_store(drives)
    segment = data.write(store)
    fetch_all(store, segment, data, entries=torch.arange(200))
    stats = store.stats()
    assert sum(drive.write_bytes for drive in stats.drives) >= 200 * data.entry_bytes
    assert sum(drive.read_bytes for drive in stats.drives) >= 200 * data.entry_bytes
    assert all(drive.read_bytes > 0 for drive in stats.drives)
    assert all(drive.errors == 0 for drive in stats.drives)


@pytest.mark.parametrize("name", ["transposed", "sliced", "last_axis"])
def test_any_strides(name: str, drives: list[str]) -> None:
    plain = Data.random(60, 2, 24)
    views = {
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": lambda t: torch.cat([t, t + 1, t], dim=2)[:, :, 24:48] - 1,
        "last_axis": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    }
    data = Data(views[name](plain.k), views[name](plain.v))
    store = open_store(drives)
    segment = data.write(store)
    assert_holds(fetch_all(store, segment, data, torch.arange(8)), data.rows(), range(60))
    slots = store.append(data.k, data.v)
    assert torch.equal(window_rows(store, slots, data), data.rows())


def test_segments_are_numbered_through_and_limited(drives: list[str]) -> None:
    parts = [Data.random(size, seed=size) for size in (20, 13, 30)]
    rows = torch.cat([part.rows() for part in parts])
    store = open_store(drives)
    segments = tuple(part.write(store) for part in parts)
    # 3 + 2 + 4 clusters of 8: number 3 begins the second segment, number 5 the third.
    got = fetch_all(store, segments, parts[0], torch.tensor([3, 5]), torch.tensor([0, 62]))
    assert_holds(got, rows, [0, *range(20, 28), *range(33, 41), 62])
    got = fetch_all(
        store, segments, parts[0], torch.tensor([3, 5]), torch.tensor([0, 62]), limit=35
    )
    assert_holds(got, rows, [0, *range(20, 28), 33, 34])


@pytest.mark.parametrize("placement", ["round_robin", "fixed_start", "sequential", "weighted"])
@pytest.mark.parametrize("router", ["swarm", "static", "dedup_only", "balance_only"])
def test_strategies_change_where_not_what(placement: str, router: str, drives: list[str]) -> None:
    data = Data.random(90)
    clusters = overlapping(70, seed=3)
    store = open_store(drives, placement=placement, router=router)
    segment = data.write(store, pack(clusters, range(70, 90)))
    assert (segment.entries, segment.clusters) == (90, len(clusters))
    got = fetch_all(store, segment, data, torch.arange(len(clusters)), torch.arange(60, 90))
    assert_holds(got, data.rows(), range(90))


def test_replicas_are_counted_but_come_once(drives: list[str]) -> None:
    data = Data.random(100)
    clusters = overlapping(100)
    copies = sum(len(cluster) for cluster in clusters)
    assert copies > 130
    store = open_store(drives)
    segment = data.write(store, pack(clusters))
    stats = store.stats()
    assert stats.stored_bytes == copies * data.entry_bytes
    assert stats.plain_bytes == 100 * data.entry_bytes
    assert segment.copies == copies
    assert stats.overhead == copies / 100
    taken = stats.stored_bytes + stats.padding_bytes  # whole blocks of each drive
    assert taken % 512 == 0
    assert stats.stored_bytes <= taken < stats.stored_bytes + 4096 * len(drives)
    got = fetch_all(store, segment, data, torch.arange(len(clusters)), torch.arange(100))
    assert_holds(got, data.rows(), range(100))
    assert store.counters()["decode"]["wanted"] == 100


def test_an_empty_selection_and_an_empty_segment(drives: list[str]) -> None:
    data = Data.random(10)
    store = open_store(drives)
    segments = (data.write(store), Data.random(0).write(store, pack([])))
    assert fetch_all(store, segments, data) == {}
    got = fetch_all(store, segments, data, entries=torch.tensor([9]))
    assert_holds(got, data.rows(), [9])


# ---- batches


@dataclasses.dataclass
class Forks:
    """Two sequences that share their first 20 entries, and have 10 of their own each."""

    store: Store
    drives: list[str]

    def __post_init__(self) -> None:
        self.parts = [Data.random(size, seed=size) for size in (20, 10, 11)]
        shared, *own = (part.write(self.store) for part in self.parts)
        self.segments = [(shared, segment) for segment in own]
        self.rows = [torch.cat([self.parts[0].rows(), part.rows()]) for part in self.parts[1:]]

    def wanted(self, entries: Tensor) -> list[Wanted]:
        return [Wanted(segments, NOTHING, entries, 30) for segments in self.segments]

    def check(self, fetch: Fetch, numbers: range) -> None:
        for got, rows in zip(
            receive_rows(self.store, fetch, torch.float32, 64), self.rows, strict=True
        ):
            assert_holds(got, rows, numbers)


def test_forks_share_the_reads_of_what_they_share(drives: list[str]) -> None:
    store = open_store(drives)
    forks = Forks(store, drives)
    with store.fetch(forks.wanted(torch.arange(10, 25)), purpose="stream") as fetch:
        forks.check(fetch, range(10, 25))
    assert store.counters()["stream"]["read"] == 10 + 2 * 5


def test_a_fetch_rides_on_a_prefetch(drives: list[str]) -> None:
    store = open_store(drives)
    forks = Forks(store, drives)
    early = store.fetch(forks.wanted(torch.arange(20)), purpose="prefetch")
    with store.fetch(forks.wanted(torch.arange(5, 30)), ahead=early) as fetch:
        early.release()  # it is a part of the other one: nothing happens
        with pytest.raises(StateError, match="became a part of another one"):
            next(early.rounds())
        forks.check(fetch, range(5, 30))
    counters = store.counters()
    assert counters["decode"]["read"] == counters["prefetch"]["late"] == 20
    assert (counters["prefetch"]["used"], counters["prefetch"]["wasted"]) == (15, 5)
    with pytest.raises(StateError, match="the prefetch was released"):
        store.fetch(forks.wanted(NOTHING), ahead=early)
    store.close()


def test_a_fetch_that_is_forgotten_ends(drives: list[str]) -> None:
    store = open_store(drives)
    forks = Forks(store, drives)
    fetch: Fetch | None = store.fetch(forks.wanted(torch.arange(20)), purpose="prefetch")
    with pytest.raises(StateError, match="1 fetches are outstanding"):
        store.close()
    del fetch
    gc.collect()
    store.close()


# ---- rounds and staging memory


def count_rounds(store: Store, segment: Segment, data: Data) -> tuple[int, int]:
    """Rounds of a pass over everything, and the largest one's bytes."""
    sizes = []
    everything = torch.arange(segment.entries)
    with store.fetch(
        [Wanted((segment,), NOTHING, everything, segment.entries)], purpose="stream"
    ) as fetch:
        for ((ids, slots),) in fetch.rounds():
            sizes.append(ids.numel() * data.entry_bytes)
            pool = store.pool(data.k.dtype)
            elements = data.entry_bytes // data.k.itemsize
            rows = gather_entries(pool, slots // data.k.itemsize, elements)
            assert torch.equal(rows, data.rows()[ids])
    assert sum(sizes) == segment.entries * data.entry_bytes
    return len(sizes), max(sizes)


def test_a_small_arena_takes_rounds(drives: list[str]) -> None:
    data = Data.random(1000, 2, 40)  # 640 bytes each
    small = open_store(drives, staging_bytes=64 << 10)
    rounds, largest = count_rounds(small, data.write(small), data)
    assert rounds >= 10
    assert largest <= 64 << 10
    large = open_store(drives, staging_bytes=4 << 20)
    assert count_rounds(large, data.write(large), data)[0] == 1


def test_fetches_that_hold_the_arena_make_others_wait_their_turn(drives: list[str]) -> None:
    data = Data.random(1000, 2, 40)
    store = open_store(drives, staging_bytes=64 << 10)
    segment = data.write(store)
    everything = torch.arange(1000)
    with store.fetch([Wanted((segment,), NOTHING, everything, 1000)]) as later:
        ((ids, slots),) = next(
            rounds := later.rounds()
        )  # one round in hand, the next one under way
        with store.fetch([Wanted((segment,), NOTHING, everything, 1000)]) as fetch:
            with pytest.raises(CapacityError, match=r"the staging arena \(\d+ bytes, \d+ held"):
                receive(store, fetch, data.k.dtype, 160)
            rows = gather_entries(store.pool(data.k.dtype), slots // 4, 160)
            assert torch.equal(rows, data.rows()[ids])
            seen = ids.numel() + sum(more.numel() for ((more, _),) in rounds)
            later.release()
            assert_holds(receive(store, fetch, data.k.dtype, 160), data.rows(), range(1000))
    assert seen == 1000
    store.close()  # refused while a ticket is out


def test_a_fetch_given_up_half_way_returns_its_memory(drives: list[str]) -> None:
    data = Data.random(1000, 2, 40)
    store = open_store(drives, staging_bytes=64 << 10)
    segment = data.write(store)
    for _ in range(50):  # more than the arena holds, if any of them kept its part
        with store.fetch(
            [Wanted((segment,), NOTHING, torch.arange(1000), 1000)], purpose="stream"
        ) as fetch:
            next(fetch.rounds())
    got = fetch_all(store, segment, data, entries=torch.arange(1000), purpose="stream")
    assert_holds(got, data.rows(), range(1000))
    store.close()


# ---- the cluster cache


def test_what_was_read_is_resident_next_time(drives: list[str]) -> None:
    data = Data.random(50)
    store = open_store(drives)
    segment = data.write(store)
    wanted = torch.arange(10, 30)
    elements = data.entry_bytes // 4
    for resident in (0, 20):
        with store.fetch([Wanted((segment,), NOTHING, wanted, 50)]) as fetch:
            assert fetch.resident[0][0].numel() == resident
            assert_holds(receive(store, fetch, data.k.dtype, elements), data.rows(), range(10, 30))
    assert store.stats().hit_rate == 0.5
    assert store.stats().dram["cache"] >= 20 * data.entry_bytes


def test_a_pass_over_everything_leaves_the_cache_alone(drives: list[str]) -> None:
    data = Data.random(50)
    store = open_store(drives)
    segment = data.write(store)
    fetch_all(store, segment, data, entries=torch.arange(50), purpose="stream")
    assert store.counters()["dram"]["cached_entries"] == 0
    fetch_all(store, segment, data, entries=torch.arange(50))
    assert store.counters()["dram"]["cached_entries"] == 50


@pytest.mark.parametrize("initial_fill", ["printed", "product", "none"])
def test_the_cache_begins_with_what_the_profile_activated_most(
    initial_fill: str, drives: list[str]
) -> None:
    data = Data.random(400, 2, 64)  # 1 KiB each
    activations = torch.zeros(400, dtype=torch.int32)
    activations[torch.arange(1, 400, 4)] = 30
    clusters = [[*range(first, 400, 4)] for first in range(4)]  # number 1 is the hot one
    store = open_store(drives, dram_bytes=416 << 10, staging_bytes=256 << 10)
    segment = store.write(
        data.k, data.v, *pack(clusters), "layer 0", activations, initial_fill, profile_queries=30
    )
    reads = store.counters()["drives"]
    cached = store.counters()["dram"]["cached_entries"]
    assert store.stats().dram_peak_bytes <= 416 << 10
    with store.fetch([Wanted((segment,), torch.tensor([1]), NOTHING, 400)]) as fetch:
        hits = fetch.resident[0][0].numel()
        assert_holds(receive(store, fetch, data.k.dtype, 256), data.rows(), clusters[1])
    if initial_fill == "none":
        assert cached == hits == 0
    else:
        assert hits == min(100, cached) > 50
        assert all(drive["reads"] == 0 for drive in reads)  # filled from memory


def test_warm_entries_outlast_the_first_steps(drives: list[str]) -> None:
    """Cold reads do not push out what the profile activated at every second query."""
    data = Data.random(400, 2, 64)
    activations = torch.full((400,), 1, dtype=torch.int32)
    activations[:60] = 15
    survivors = {}
    for initial_fill in ("printed", "none"):
        store = open_store(drives, dram_bytes=416 << 10, staging_bytes=256 << 10)
        segment = store.write(
            data.k, data.v, *blocks(400, 1), "layer 0", activations, initial_fill, 30
        )
        for first in (100, 200, 300):
            fetch_all(store, segment, data, entries=torch.arange(first, first + 100))
        with store.fetch([Wanted((segment,), NOTHING, torch.arange(60), 400)]) as fetch:
            survivors[initial_fill] = fetch.resident[0][0].numel()
    assert survivors == {"printed": 60, "none": 0}


# ---- the window


def test_window_keeps_order_and_gives_slots_back(drives: list[str]) -> None:
    data = Data.random(40, 3, 24)
    store = open_store(drives)
    before = store.stats().dram_used_bytes
    window = Window(store)
    window.append(data.k[:, :0], data.v[:, :0])
    assert len(window) == 0
    window.append(data.k[:, :25], data.v[:, :25])
    window.append(data.k[:, 25:], data.v[:, 25:])
    assert torch.equal(window_rows(store, window.slots, data), data.rows())
    window.drop_oldest(5)
    window.drop_newest(4)
    assert torch.equal(window_rows(store, window.slots, data), data.rows()[5:36])
    assert store.counters()["dram"]["window_entries"] == len(window) == 31
    window.drop_newest(100)
    assert len(window) == 0
    assert store.counters()["dram"]["window_entries"] == 0
    assert store.stats().dram_used_bytes == before


def test_forks_share_entries_until_the_last_one_drops_them(drives: list[str]) -> None:
    data = Data.random(12)
    store = open_store(drives)

    def held() -> int:
        return store.counters()["dram"]["window_entries"]

    window = Window(store)
    window.append(data.k[:, :8], data.v[:, :8])
    fork = window.fork()
    assert fork.slots.tolist() == window.slots.tolist()
    assert held() == 8  # nothing was copied
    fork.append(data.k[:, 8:10], data.v[:, 8:10])
    window.append(data.k[:, 10:], data.v[:, 10:])
    window.drop_oldest(3)
    assert held() == 12  # the fork still has the three
    assert torch.equal(window_rows(store, fork.slots, data), data.rows()[:10])
    assert torch.equal(window_rows(store, window.slots, data), data.rows()[[3, 4, 5, 6, 7, 10, 11]])
    del fork
    gc.collect()
    assert held() == 7
    del window
    gc.collect()
    assert held() == 0


def test_retain_and_release_count_references(drives: list[str]) -> None:
    data = Data.random(4)
    store = open_store(drives)
    slots = store.append(data.k, data.v)
    store.retain(slots[:2])
    store.release(slots)
    assert store.counters()["dram"]["window_entries"] == 2
    assert torch.equal(window_rows(store, slots[:2], data), data.rows()[:2])
    store.release(slots[:2])
    assert store.counters()["dram"]["window_entries"] == 0


# ---- accounting


def test_index_charge_counts_until_the_last_reference_goes(drives: list[str]) -> None:
    store = open_store(drives)

    def charged() -> int:
        return store.stats().dram["index"]

    first, second = IndexCharge(store, 1000), IndexCharge(store, 500)
    assert charged() == 1500
    first.release()
    first.release()
    assert charged() == 500
    del second
    gc.collect()
    assert charged() == 0
    with pytest.raises(
        CapacityError, match=r"`dram_bytes` \(8388608\) is too small: index needs 8388608 more"
    ):
        IndexCharge(store, 8 << 20)
    assert charged() == 0
    late = IndexCharge(store, 1)
    store.close()
    late.release()


def test_a_dropped_segment_frees_its_space(drives: list[str]) -> None:
    data = Data.random(100)
    store = open_store(drives, disk_bytes=4 * 8192)
    before = store.stats().dram_used_bytes
    for _ in range(20):  # the cap holds one of them at a time
        segment: Segment | None = data.write(store)
        assert store.stats().stored_bytes == 100 * data.entry_bytes
        del segment
        gc.collect()
        assert store.stats().stored_bytes == 0
    assert store.stats().dram_used_bytes == before
    assert store.stats().written_bytes == 20 * 100 * data.entry_bytes


def test_a_segment_is_freed_after_its_last_reader(drives: list[str]) -> None:
    data = Data.random(100)
    store = open_store(drives)
    segment = data.write(store)
    with store.fetch([Wanted((segment,), NOTHING, torch.arange(100), 100)]) as fetch:
        del segment
        gc.collect()
        assert store.stats().stored_bytes == 100 * data.entry_bytes
        assert_holds(receive(store, fetch, data.k.dtype, 64), data.rows(), range(100))
    del fetch
    gc.collect()
    assert store.stats().stored_bytes == 0


def test_memory_stays_below_the_budget_as_the_cache_yields(drives: list[str]) -> None:
    data = Data.random(600, 2, 64)  # 1 KiB each
    store = open_store(drives, dram_bytes=512 << 10, staging_bytes=64 << 10)
    segment = data.write(store)
    for start in itertools.cycle(range(0, 600, 100)):
        fetch_all(store, segment, data, entries=torch.arange(start, start + 100))
        if start == 500:
            break
    cached = store.counters()["dram"]["cached_entries"]
    assert cached > 200
    window = Window(store)
    window.append(data.k[:, :250], data.v[:, :250])
    stats = store.stats()
    assert store.counters()["dram"]["cached_entries"] < cached
    assert stats.dram_used_bytes <= stats.dram_peak_bytes <= 512 << 10
    with pytest.raises(CapacityError, match="window needs"):
        window.append(data.k, data.v)
    assert len(window) == 250
    assert torch.equal(window_rows(store, window.slots, data), data.rows()[:250])


# ---- closing


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_close_leaves_nothing(engine: str, drives: list[str]) -> None:
    data = Data.random(30)
    store = open_store(drives, engine=engine, device_model=None)
    assert left_behind(drives) != []  # so the check can tell
    segment = data.write(store)
    window = Window(store)
    window.append(data.k, data.v)
    pool = store.pool(torch.float32)
    rows = window_rows(store, window.slots, data)
    store.close()
    store.close()
    assert store.closed
    assert left_behind(drives) == []
    assert torch.equal(gather_entries(pool, window.slots // 4, 64), rows)  # a view outlives it
    window.drop_oldest(3)  # what is left over may still be dropped
    del segment, window
    gc.collect()


def test_a_store_that_is_forgotten_closes(drives: list[str]) -> None:
    store = open_store(drives)
    segment = Data.random(30).write(store)
    del store
    gc.collect()
    assert left_behind(drives) != []  # the segment still needs it
    del segment
    gc.collect()
    assert left_behind(drives) == []


def test_an_open_fetch_keeps_the_store_open(drives: list[str]) -> None:
    data = Data.random(30)
    store = open_store(drives)
    segment = data.write(store)
    with store.fetch([Wanted((segment,), NOTHING, torch.arange(30), 30)]) as fetch:
        with pytest.raises(StateError, match="cannot close: 1 fetches are outstanding"):
            store.close()
        assert not store.closed
        assert_holds(receive(store, fetch, data.k.dtype, 64), data.rows(), range(30))
    store.close()


def test_a_closed_store_says_so(drives: list[str]) -> None:
    data = Data.random(30)
    store = open_store(drives)
    segment = data.write(store)
    store.close()
    calls: list[Any] = [
        lambda: store.append(data.k, data.v),
        lambda: data.write(store),
        lambda: fetch_all(store, segment, data, entries=torch.arange(3)),
        lambda: store.set_entry_bytes(256),
        lambda: store.pool(torch.float32),
        lambda: store.charge(1),
        lambda: store.retain(torch.tensor([0])),
        store.stats,
        store.notes,
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"closed: open another one"):
            call()


def test_stores_are_apart(drives: list[str]) -> None:
    a, b = Data.random(30, seed=1), Data.random(30, seed=2)
    first, second = open_store(drives), open_store(drives)
    segments = a.write(first), b.write(second)
    slots = first.append(a.k, a.v), second.append(b.k, b.v)
    for store, data, segment, own in zip((first, second), (a, b), segments, slots, strict=True):
        assert_holds(fetch_all(store, segment, data, torch.arange(4)), data.rows(), range(30))
        assert torch.equal(window_rows(store, own, data), data.rows())
    first.close()
    assert_holds(fetch_all(second, segments[1], b, torch.arange(4)), b.rows(), range(30))


def test_helpers_covers_every_entry() -> None:
    offsets, members = blocks(20)
    assert offsets.tolist() == [0, 8, 16, 20]
    assert members.tolist() == list(range(20))
    clusters = overlapping(50)
    assert {entry for cluster in clusters for entry in cluster} == set(range(50))
    assert all(len(set(cluster)) == len(cluster) for cluster in clusters)
