"""What goes wrong raises the right class, says what to do, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from swarm_kv.errors import ArgumentError, CapacityError, StorageError
from swarm_kv.store import NOTHING, Store

from . import another_process
from .helpers import Data, assert_holds, blocks, fetch_all, left_behind, open_store, pack

pytestmark = pytest.mark.timeout(60)

OPS = torch.ops.swarm_kv
DATA = Data.random(10)  # entries of 256 bytes
K, V = DATA.k, DATA.v
NUMBERS = torch.arange(10)


def submit(store: int, segments: list[int], purpose: str, **change: Any) -> Any:
    """`fetch_submit` of one row, all entries one by one."""
    arguments = {
        "segment_rows": [0, len(segments)],
        "clusters": NOTHING,
        "cluster_rows": torch.tensor([0, 0]),
        "entries": NUMBERS,
        "entry_rows": torch.tensor([0, 10]),
        "limits": [10],
        "ahead": 0,
        **change,
    }
    return OPS.fetch_submit(store=store, segments=segments, purpose=purpose, **arguments)


def write(store: Store, offsets: list[int], members: list[int]) -> Any:
    return store.write(
        K,
        V,
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(members, dtype=torch.int32),
        "x",
    )


def write_profiled(store: Store, activations: Any, initial_fill: str = "printed") -> Any:
    return store.write(K, V, *blocks(10), "x", activations, initial_fill, profile_queries=4)


def fetch(store: Store, clusters: Any = NOTHING, entries: Any = NOTHING, **how: Any) -> Any:
    return fetch_all(store, DATA.write(store), DATA, clusters, entries, **how)


CALLS: dict[str, tuple[Callable[[Store], Any], type[RuntimeError], str]] = {
    "keys of integers": (
        lambda s: s.append(K.int(), V.int()),
        ArgumentError,
        "window_append: k must be float16, bfloat16, float32 or float64, got int32 [2, 10, 16]",
    ),
    "values of another dtype": (
        lambda s: s.append(K, V.half()),
        ArgumentError,
        "window_append: v must be float32, got float16 [2, 10, 16]",
    ),
    "values of another shape": (
        lambda s: s.append(K, V[:, :9]),
        ArgumentError,
        "window_append: `k` is float32 [2, 10, 16] but `v` is float32 [2, 9, 16]; both hold "
        "[kv_heads, entries, head_dim]",
    ),
    "two dimensions": (
        lambda s: s.append(K[0], V[0]),
        ArgumentError,
        "window_append: k must have 3 dimensions, got float32 [10, 16]",
    ),
    "entries of no size": (
        lambda s: s.append(K[:, :, :0], V[:, :, :0]),
        ArgumentError,
        "window_append: `k` is float32 [2, 10, 0]; an entry needs at least one head and one",
    ),
    "entries of another size": (
        lambda s: s.append(K.double(), V.double()),
        ArgumentError,
        "entries of 512 bytes do not fit this store, which holds entries of 256 bytes: open",
    ),
    "another size set": (
        lambda s: s.set_entry_bytes(1024),
        ArgumentError,
        "entries of 1024 bytes do not fit this store, which holds entries of 256 bytes: open",
    ),
    "more than the window holds": (
        lambda s: s.append(torch.zeros(2, 70000, 16), torch.zeros(2, 70000, 16)),
        CapacityError,
        "`dram_bytes` (8388608) is too small: window needs",
    ),
    "a slot that is not one": (
        lambda s: s.retain(torch.tensor([5])),
        ArgumentError,
        "slot 5 is not an allocated window slot of this store",
    ),
    "a slot below the pool": (
        lambda s: s.release(torch.tensor([-256])),
        ArgumentError,
        "slot -256 is not an allocated window slot of this store",
    ),
    "a slot above the pool": (
        lambda s: s.release(torch.tensor([1 << 62])),
        ArgumentError,
        f"slot {1 << 62} is not an allocated window slot of this store",
    ),
    "slots of another dtype": (
        lambda s: s.release(torch.tensor([0], dtype=torch.int32)),
        ArgumentError,
        "window_release: slots must be int64, got int32 [1]",
    ),
    "an entry in no cluster": (
        lambda s: write(s, [0, 9], [*range(9)]),
        ArgumentError,
        "entry 9 is in no cluster and not loose",
    ),
    "an entry in a cluster and loose": (
        lambda s: write(s, [0, 9], [*range(9), 9, 3]),
        ArgumentError,
        "loose entry 3 has another copy: it may be in no cluster and loose only once",
    ),
    "a loose entry twice": (
        lambda s: write(s, [0, 9], [*range(9), 9, 9]),
        ArgumentError,
        "loose entry 9 has another copy",
    ),
    "offsets of another dtype": (
        lambda s: s.write(K, V, torch.tensor([0, 10]), torch.arange(10), "x"),
        ArgumentError,
        "segment_write: offsets must be int32, got int64 [2]",
    ),
    "a member that does not exist": (
        lambda s: write(s, [0, 11], [*range(11)]),
        ArgumentError,
        "member 10 of cluster 0 is not in [0, 10)",
    ),
    "a member twice": (
        lambda s: write(s, [0, 11], [*range(10), 0]),
        ArgumentError,
        "cluster 0 holds entry 0 twice",
    ),
    "an empty cluster": (
        lambda s: write(s, [0, 5, 5, 10], [*range(10)]),
        ArgumentError,
        "cluster 1 is empty",
    ),
    "no offsets": (
        lambda s: write(s, [], [*range(10)]),
        ArgumentError,
        "segment_write: `offsets` needs at least one element",
    ),
    "offsets that end too late": (
        lambda s: write(s, [0, 11], [*range(10)]),
        ArgumentError,
        "cluster offsets must ascend from 0 to at most the number of members, 10",
    ),
    "offsets that fall": (
        lambda s: write(s, [0, 8, 4, 10], [*range(10)]),
        ArgumentError,
        "cluster offsets must ascend from 0 to at most the number of members, 10",
    ),
    "activations of another length": (
        lambda s: write_profiled(s, torch.ones(9, dtype=torch.int32)),
        ArgumentError,
        "the profile of a segment counts activations of 9 entries, but 10 are written",
    ),
    "activations of another dtype": (
        lambda s: write_profiled(s, torch.ones(10)),
        ArgumentError,
        "segment_write: activations must be int32, got float32 [10]",
    ),
    "more activations than queries": (
        lambda s: write_profiled(s, torch.full((10,), 5, dtype=torch.int32)),
        ArgumentError,
        "says that entry 0 was activated 5 times by 4 queries",
    ),
    "an unknown initial fill": (
        lambda s: write_profiled(s, None, "best"),
        ArgumentError,
        'unknown `initial_fill` "best"; choose one of: printed, product, none',
    ),
    "a cluster that does not exist": (
        lambda s: fetch(s, clusters=torch.tensor([2])),
        ArgumentError,
        "cluster 2 does not exist in this layer's segments",
    ),
    "a negative cluster": (
        lambda s: fetch(s, clusters=torch.tensor([-1])),
        ArgumentError,
        "cluster -1 does not exist in this layer's segments",
    ),
    "an entry that does not exist": (
        lambda s: fetch(s, entries=torch.tensor([10])),
        ArgumentError,
        "entry 10 is outside [0, 10)",
    ),
    "clusters of another dtype": (
        lambda s: fetch(s, clusters=torch.tensor([0.0])),
        ArgumentError,
        "fetch_submit: clusters must be int64, got float32 [1]",
    ),
    "clusters of no row": (
        lambda s: submit(s._handle, [], "decode", cluster_rows=torch.tensor([0])),
        RuntimeError,
        "`cluster_rows` holds 1 offsets, but `limits` names 1 rows: 2 offsets are needed",
    ),
    "entries beyond the last row": (
        lambda s: submit(s._handle, [], "decode", entry_rows=torch.tensor([0, 9])),
        RuntimeError,
        "`entry_rows` must run from 0 to the length of `entries`, 10",
    ),
    "a segment twice in a row": (
        lambda s: fetch_all(s, (DATA.write(s),) * 2, DATA),
        ArgumentError,
        "a row of a fetch names segment",
    ),
    "an unknown purpose": (
        lambda s: fetch(s, purpose="look"),
        ArgumentError,
        'unknown `purpose` "look"; choose one of: decode, stream, prefetch',
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_changes_nothing(name: str, drives: list[str]) -> None:
    call, kind, text = CALLS[name]
    store = open_store(drives)
    store.set_entry_bytes(256)

    def state() -> tuple[Any, ...]:
        counters = store.counters()
        dram = {use: counters["dram"][use] for use in ("used", "window", "index", "cache")}
        return dram, counters["stored_bytes"], counters["stored_entries"]

    before = state()
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        call(store)
    assert type(caught.value) is kind
    del caught  # its traceback holds a segment
    gc.collect()
    assert state() == before
    assert_holds(fetch(store, entries=NUMBERS), DATA.rows(), range(10))  # and works on
    store.close()
    assert left_behind(drives) == []


def test_release_drops_all_references_or_none(drives: list[str]) -> None:
    store = open_store(drives)
    slots = store.append(K, V)
    for wrong in ([*slots.tolist(), 5], [slots[0].item()] * 2):
        with pytest.raises(ArgumentError, match="is not an allocated window slot"):
            store.release(torch.tensor(wrong))
        assert store.counters()["dram"]["window_entries"] == 10
    store.retain(slots[:1])
    store.release(torch.tensor([slots[0].item()] * 2))
    assert store.counters()["dram"]["window_entries"] == 9
    with pytest.raises(ArgumentError, match="is not an allocated window slot"):
        store.retain(slots[:2])
    store.release(slots[1:])
    assert store.counters()["dram"]["window_entries"] == 0


def test_handles_are_checked(drives: list[str]) -> None:
    store = open_store(drives)
    segment = DATA.write(store)
    handle = store._handle
    with pytest.raises(RuntimeError, match=r"^\[swarm_kv.StateError\] store 987 does not exist"):
        OPS.store_stats(987)
    with pytest.raises(RuntimeError, match=r"StateError\] segment 987 does not exist or was freed"):
        OPS.segment_free(handle, 987)
    with pytest.raises(RuntimeError, match=r"StateError\] segment 987 does not exist or was freed"):
        submit(handle, [segment.handle, 987], "decode")
    with pytest.raises(RuntimeError, match=r"StateError\] ticket 987 does not exist"):
        OPS.fetch_wait(handle, 987)
    other = DATA.write(store)
    freed = other.handle
    del other
    with pytest.raises(RuntimeError, match=rf"StateError\] segment {freed} does not exist or was"):
        submit(handle, [freed], "decode")
    store.close()  # none of these left a fetch behind
    with pytest.raises(RuntimeError, match=rf"StateError\] store {handle} does not exist or was"):
        OPS.store_close(handle)


def test_a_ticket_serves_once(drives: list[str]) -> None:
    store = open_store(drives)
    segment = DATA.write(store)
    ticket, ids, _, rows = submit(store._handle, [segment.handle], "stream")
    assert rows.tolist() == [0, 0]
    assert ids.tolist() == []
    ids, _, _, more = OPS.fetch_wait(store._handle, ticket)
    assert (sorted(ids.tolist()), more) == (list(range(10)), False)
    ids, _, _, more = OPS.fetch_wait(store._handle, ticket)  # nothing is left, which is no error
    assert (ids.tolist(), more) == ([], False)
    OPS.fetch_release(store._handle, ticket)
    for use in (OPS.fetch_wait, OPS.fetch_release):
        with pytest.raises(RuntimeError, match=rf"StateError\] ticket {ticket} does not exist: it"):
            use(store._handle, ticket)


def test_entries_larger_than_staging_are_refused_wherever_they_come_first(
    drives: list[str],
) -> None:
    large = Data.random(3, 8, 128, torch.float64)  # 16 KiB
    text = r"`staging_bytes` \(40960\) does not hold two entries of 16384 bytes"
    uses: list[Callable[[Store], Any]] = [
        large.write,
        lambda store: store.append(large.k, large.v),
        lambda store: store.set_entry_bytes(16384),
    ]
    for use in uses:
        store = open_store(drives[:1], staging_bytes=40 << 10)
        with pytest.raises(ArgumentError, match=text):
            use(store)
        assert_holds(fetch(store, entries=NUMBERS), DATA.rows(), range(10))


def test_disk_bytes_cap_what_is_stored(drives: list[str]) -> None:
    store = open_store(drives, disk_bytes=4 * 4096)
    segment = DATA.write(store)
    with pytest.raises(CapacityError, match=r"would exceed `disk_bytes` \(4096 per drive"):
        Data.random(100).write(store)
    assert store.stats().stored_bytes == 10 * 256
    assert_holds(fetch_all(store, segment, DATA, entries=NUMBERS), DATA.rows(), range(10))


# ---- opening


OPENINGS: dict[str, tuple[dict[str, Any], type[RuntimeError], str]] = {
    "engine": (
        {"engine": "fast"},
        ArgumentError,
        'engine = "fast" is unknown; use one of auto, io_uring, threads, gds, memory, simulated',
    ),
    "placement": (
        {"placement": "fast"},
        ArgumentError,
        'unknown `placement` "fast"; choose one of: round_robin, fixed_start, sequential, weighted',
    ),
    "router": (
        {"router": "fast"},
        ArgumentError,
        'unknown `router` "fast"; choose one of: swarm, static',
    ),
    "cache_policy": (
        {"cache_policy": "fast"},
        ArgumentError,
        'unknown `cache_policy` "fast"; choose one of: swarm, decayed_frequency',
    ),
    "dram_bytes below staging": (
        {"dram_bytes": "512KiB", "staging_bytes": "1MiB"},
        CapacityError,
        # A page more than the staging memory: the cache's last page is held whole.
        f"`dram_bytes` (524288) is too small: staging needs {(1 << 20) + mmap.PAGESIZE} more bytes "
        f"and 0 are held already, so at least {(1 << 20) + mmap.PAGESIZE} are needed",
    ),
    "staging_bytes below the drives' buffers": (
        {"staging_bytes": 4096},
        ArgumentError,
        "`staging_bytes` (4096) is below its minimum of 65536 for 4 drives",
    ),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_store_that_cannot_open_leaves_nothing(name: str, drives: list[str]) -> None:
    settings, kind, text = OPENINGS[name]
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        open_store(drives, **settings)
    assert type(caught.value) is kind
    assert left_behind(drives) == []


@pytest.mark.parametrize("place", [0, 3])
def test_a_path_that_does_not_exist(place: int, drives: list[str]) -> None:
    drives[place] += "/none"
    text = re.escape(f"'{drives[place]}' does not exist; create the directory on the drive to use")
    with pytest.raises(StorageError, match=text):
        open_store(drives)
    assert left_behind([*drives, str(pathlib.Path(drives[place]).parent)]) == []


def test_a_path_that_is_a_file(drives: list[str]) -> None:
    file = pathlib.Path(drives[2]) / "file"
    file.write_bytes(b"kept")
    paths = [*drives[:2], str(file), drives[3]]
    with pytest.raises(StorageError, match="is not a directory; give a directory, or raw:"):
        open_store(paths)
    assert left_behind(drives) == [str(file)]
    assert file.read_bytes() == b"kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_is_not_writable(drives: list[str]) -> None:
    pathlib.Path(drives[1]).chmod(0o500)
    with pytest.raises(StorageError, match=rf"'{drives[1]}' is not writable"):
        open_store(drives)
    assert left_behind(drives) == []


@contextlib.contextmanager
def mounted(path: str, options: str) -> Iterator[None]:
    """A small file system of its own at `path`; skips where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], timeout=30, check=True)


def test_a_read_only_drive(drives: list[str]) -> None:
    with mounted(drives[1], "ro,size=1m"):
        with pytest.raises(StorageError, match=rf"'{drives[1]}' is not writable"):
            open_store(drives)
        assert left_behind(drives) == []


def test_a_full_drive(drives: list[str]) -> None:
    """Full when it opens, or full when it is written to: the second leaves a working store."""
    with mounted(drives[1], "size=1m"):
        with pytest.raises(StorageError, match=rf"'{drives[1]}' is full"):
            open_store(drives, device_model=None)  # measuring needs more than is there
        assert left_behind(drives) == []

        store = open_store(drives)
        segment = DATA.write(store)
        large = Data.random(20000)
        with pytest.raises(StorageError, match=rf"'{drives[1]}' is full: wanted \d+ more bytes"):
            large.write(store)
        assert store.stats().stored_bytes == 10 * 256
        assert_holds(fetch_all(store, segment, DATA, entries=NUMBERS), DATA.rows(), range(10))
        smaller = Data.random(2000)
        clusters = pack([[*range(1000)], [*range(1000, 2000)]])
        got = fetch_all(store, smaller.write(store, clusters), smaller, torch.tensor([1]))
        assert_holds(got, smaller.rows(), range(1000, 2000))
        del segment
        store.close()
        assert left_behind(drives) == []


# ---- io_uring refused


@pytest.mark.timeout(300)
def test_where_io_uring_is_refused_threads_read_the_same_bytes(
    drives: list[str], tmp_path: pathlib.Path
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    log = tmp_path / "strace.log"
    refuse = ["strace", "-f", "-qq", "-o", str(log), "-e", "trace=io_uring_setup"]
    refuse += ["-e", "inject=io_uring_setup:error=EPERM"]
    probe = subprocess.run(
        [*refuse, "true"], capture_output=True, text=True, timeout=30, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"strace cannot inject errors here: {probe.stderr.strip()}")
    plain = another_process.run(drives, {})
    refused = another_process.run(drives, {}, refuse)
    assert "EPERM" in log.read_text()
    assert refused["engine"].startswith("threads")
    assert len(set(refused["warnings"]) - set(plain["warnings"])) == 1
    warning = next(line for line in refused["warnings"] if line not in plain["warnings"])
    assert "io_uring cannot be used here" in warning
    assert "seccomp" in warning
    assert refused["digest"] == plain["digest"]
    if plain["engine"].startswith("io_uring"):  # the machine itself may refuse it
        assert not any("io_uring" in line for line in plain["warnings"])
    assert left_behind(drives) == []


def test_notes_are_warned_of_once(drives: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="swarm_kv"):
        store = open_store(drives)
    assert [record.getMessage() for record in caplog.records] == [
        f"swarm_kv: {note}" for note in store.notes()
    ]
