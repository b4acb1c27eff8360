"""opcheck of the operators that reach the drives, fake kernels, compilation, and the gather."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from swarm_kv import reference
from swarm_kv.errors import ArgumentError
from swarm_kv.store import NOTHING, IndexCharge, Segment, Store, Window
from swarm_kv.store_ops import gather_entries

from .helpers import MODEL, Data, blocks, left_behind, open_store

pytestmark = pytest.mark.timeout(120)

OPS = torch.ops.swarm_kv
# Calling these twice gives two answers (slots, handles, counters), which the remaining check of
# opcheck, compiled against eager, takes for an error.
STATEFUL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
DATA = Data.random(10)


class Rig:
    """A store with something in it, and fresh handles for operators that use theirs up."""

    def __init__(self, drives: list[str]) -> None:
        self.drives = drives
        self.store = open_store(drives)
        self.handle = self.store._handle
        self.slots = self.store.append(DATA.k, DATA.v)
        for _ in range(10):
            self.store.retain(self.slots)
        self.opened: list[int] = []

    def segment(self) -> int:
        return OPS.segment_write(self.handle, DATA.k, DATA.v, *blocks(10), "layer 0")

    def ticket(self) -> int:
        return OPS.fetch_submit(*self.fetch())[0]

    def fetch(self, purpose: str = "decode", ahead: int = 0) -> tuple[Any, ...]:
        """Two rows: the first two segments, and the first of them again."""
        shared, own = self.segment(), self.segment()
        clusters = torch.tensor([1]), torch.tensor([0, 1, 1])
        entries = torch.tensor([0, 13, 3]), torch.tensor([0, 2, 3])
        rows = [shared, own, shared], [0, 2, 3], *clusters, *entries, [20, 10]
        return self.handle, *rows, purpose, ahead

    def attending(self) -> tuple[Any, ...]:
        *wanted, _, _ = self.fetch()
        own = torch.cat([self.slots, self.slots[:1]])
        ahead = OPS.fetch_submit(*self.fetch("prefetch"))[0]
        q, visible = torch.randn(3, 4, 16), torch.arange(30) % 3 > 0
        return *wanted, ahead, q, [2, 1], own, [0, 10, 11], 2, 0.25, torch.zeros(4), 2.0, visible

    def riding(self) -> tuple[Any, ...]:
        ahead = OPS.fetch_submit(*self.fetch("prefetch"))[0]
        return self.fetch(ahead=ahead)

    def attaching(self) -> tuple[Any, ...]:
        handle = self.second()
        OPS.store_set_entry_bytes(handle, DATA.entry_bytes)
        return handle, OPS.device_open(DATA.k), 1 << 16

    @property
    def settings(self) -> tuple[Any, ...]:
        strategies = ("round_robin", "swarm", "decayed_frequency")
        sizes = (1 << 24, 1 << 20, 0)
        return self.drives, "threads", True, True, 30.0, *sizes, *strategies, True, *MODEL

    def second(self) -> int:
        self.opened.append(OPS.store_open(*self.settings))
        return self.opened[-1]


SAMPLES: dict[str, Callable[[Rig], tuple[Any, ...]]] = {
    "store_open": lambda rig: rig.settings,
    "store_close": lambda rig: (rig.second(),),
    "store_set_entry_bytes": lambda rig: (rig.handle, DATA.entry_bytes),
    "store_pool": lambda rig: (rig.handle,),
    "device_open": lambda rig: (DATA.k,),
    "store_attach": lambda rig: rig.attaching(),
    "store_charge": lambda rig: (rig.handle, 100),
    "store_stats": lambda rig: (rig.handle,),
    "store_notes": lambda rig: (rig.handle,),
    "window_append": lambda rig: (rig.handle, DATA.k, DATA.v),
    "window_retain": lambda rig: (rig.handle, rig.slots),
    "window_release": lambda rig: (rig.handle, rig.slots),
    "segment_write": lambda rig: (
        *(rig.handle, DATA.k, DATA.v, *blocks(10), "layer 0"),
        *(torch.ones(10, dtype=torch.int32), "printed", 4, "int8"),
        torch.full((2,), -1, dtype=torch.int32),
    ),
    "segment_clusters": lambda rig: (rig.handle, rig.segment()),
    "segment_drives": lambda rig: (rig.handle, rig.segment()),
    "stored_entry_bytes": lambda rig: (DATA.k, "int8"),
    "segment_free": lambda rig: (rig.handle, rig.segment()),
    "fetch_submit": lambda rig: rig.riding(),
    "fetch_wait": lambda rig: (rig.handle, rig.ticket()),
    "fetch_release": lambda rig: (rig.handle, rig.ticket()),
    "fetch_attend": lambda rig: rig.attending(),
}


@pytest.fixture
def rig(drives: list[str]) -> Rig:
    return Rig(drives)


def tracing() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def registered() -> set[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return {name.split("::")[1] for name in names if name.startswith("swarm_kv::")}


def test_every_store_operator_has_a_sample() -> None:
    prefixes = ("device_", "store_", "stored_", "window_", "segment_", "fetch_")
    assert set(SAMPLES) == {name for name in registered() if name.startswith(prefixes)}


@pytest.mark.parametrize("check", STATEFUL_CHECKS)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, check: str, rig: Rig) -> None:
    torch.library.opcheck(getattr(OPS, name).default, SAMPLES[name](rig), test_utils=check)


@pytest.mark.parametrize("name", SAMPLES)
def test_fake_kernels_leave_the_store_alone(name: str, rig: Rig) -> None:
    """Without a fake kernel, tracing would run the operator: open drives, use handles up."""
    args = SAMPLES[name](rig)
    before, files = OPS.store_stats(rig.handle), sorted(left_behind(rig.drives))
    with tracing():
        for _ in range(2):
            getattr(OPS, name)(*args)
    assert OPS.store_stats(rig.handle) == before
    assert sorted(left_behind(rig.drives)) == files
    getattr(OPS, name)(*args)  # the handle is as good as it was


@pytest.mark.parametrize("name", ["window_append", "segment_write"])
def test_fake_kernels_check_shapes(name: str, rig: Rig) -> None:
    handle, k, v, *rest = SAMPLES[name](rig)
    for wrong, text in (((k[0], v[0]), "3 dimensions"), ((k, v[:, 1:]), "but v is")):
        with (
            tracing(),
            pytest.raises(RuntimeError, match=f"{name}: .*{text}"),
        ):
            getattr(OPS, name)(handle, *wrong, *rest)


def test_compiled_code_keeps_calls_without_results(rig: Rig) -> None:
    """The compiler drops calls whose results are not used unless it knows what they do."""

    def held(store: Store) -> int:
        return store.counters()["dram"]["window_entries"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        OPS.window_append(rig.handle, k, k)
        OPS.window_retain(rig.handle, slots)
        return k + 1

    store = open_store(rig.drives)
    rig.handle = store._handle
    slots = store.append(DATA.k, DATA.v)
    torch.testing.assert_close(step(DATA.k, slots), DATA.k + 1)
    assert held(store) == 20
    store.release(slots)
    assert held(store) == 20  # the compiled call's reference is left
    store.release(slots)
    assert held(store) == 10


def test_what_is_collected_while_tracing_is_given_back(rig: Rig) -> None:
    store = open_store(rig.drives)
    segment: Segment | None = DATA.write(store)
    window: Window | None = Window(store)
    charge: IndexCharge | None = IndexCharge(store, 1 << 16)
    window.append(DATA.k, DATA.v)
    assert store.stats().stored_bytes > 0
    with tracing():
        del segment, window, charge
        gc.collect()
    assert store.stats().stored_bytes == 0
    assert store.stats().dram["index"] == store.stats().dram["window"] == 0
    del rig.store
    with tracing():
        del store
        gc.collect()
    assert left_behind(rig.drives) == []


def test_compiled_code_may_fetch(rig: Rig) -> None:
    @torch.compile(backend="aot_eager")
    def step(handle: int, segment: int, entries: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(2, dtype=torch.int64)
        rows = torch.tensor([0, 3])
        ticket, _, _, _ = OPS.fetch_submit(
            handle, [segment], [0, 1], NOTHING, nothing, entries, rows, [10], "stream", 0
        )
        ids, slots, _, _ = OPS.fetch_wait(handle, ticket)
        rows = OPS.gather_entries(OPS.store_pool(handle).view(torch.float32), slots // 4, 64)
        OPS.fetch_release(handle, ticket)
        return rows[ids.argsort()] + 0

    entries = torch.tensor([7, 2, 5])
    for _ in range(2):
        got = step(rig.handle, rig.segment(), entries)
        assert torch.equal(got, DATA.rows()[[2, 5, 7]])
    rig.store.close()  # refused while a ticket is out


# ---- gather_entries


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "elements"), [(0, 5), (1, 100), (7, 1), (300, 33)])
def test_gather_entries(dtype: torch.dtype, count: int, elements: int) -> None:
    pool = torch.randn(1000).to(dtype)
    slots = torch.randint(0, 1000 - elements + 1, (count,))
    if count > 1:
        slots[0], slots[1] = 0, 1000 - elements  # both ends
    got = gather_entries(pool, slots, elements)
    assert got.shape == (count, elements)
    assert torch.equal(got, reference.gather_entries(pool, slots, elements))
    if count > 1:
        moved = gather_entries(pool, (slots + 1).clamp(max=1000 - elements), elements)
        assert not torch.equal(got, moved)
    torch.library.opcheck(OPS.gather_entries.default, (pool, slots, elements))


def test_gather_entries_takes_strided_slots_and_copies() -> None:
    pool = torch.arange(20.0)
    slots = torch.tensor([[0, 9], [4, 9], [8, 9]])[:, 0]
    got = gather_entries(pool, slots, 2)
    assert got.tolist() == [[0, 1], [4, 5], [8, 9]]
    pool.zero_()
    assert got.tolist() == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pool": torch.zeros(10, 2)}, "pool must have 1 dimensions, got float32 [10, 2]"),
        (
            {"pool": torch.zeros(20, dtype=torch.int32)},
            "pool must be float16, bfloat16, float32 or float64, got int32 [20]",
        ),
        ({"pool": torch.zeros(40)[::2]}, "`pool` must be contiguous"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots must be int64, got int32 [2]"),
        ({"slots": torch.zeros(2, 1).long()}, "slots must have 1 dimensions, got int64 [2, 1]"),
        ({"slots": torch.tensor([0, 17])}, "slot 17 is outside [0, 16]"),
        ({"slots": torch.tensor([-1])}, "slot -1 is outside [0, 16]"),
        ({"entry_elements": 0}, "`entry_elements` must be positive, got 0"),
        ({"entry_elements": 21}, "slot 0 is outside [0, -1]"),
    ],
)
def test_gather_entries_errors(change: dict[str, Any], text: str) -> None:
    good = {"pool": torch.zeros(20), "slots": torch.tensor([0, 16]), "entry_elements": 4}
    gather_entries(**good)
    with pytest.raises(ArgumentError) as caught:
        gather_entries(**{**good, **change})
    assert str(caught.value) == f"gather_entries: {text}"
