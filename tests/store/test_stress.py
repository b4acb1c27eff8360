"""Random decoding steps of several threads through the Python objects, on files that go bad.

The same in C++ over drives with every kind of fault is csrc/tests/stress_test.cpp.
"""

from __future__ import annotations

import collections
import gc
import itertools
import pathlib
import random
import re
import threading
from typing import Any

import pytest
import torch

from swarm_kv.errors import CapacityError, StorageError
from swarm_kv.store import Fetch, IndexCharge, Rows, Segment, Store, Wanted, Window
from swarm_kv.store_ops import gather_entries

from .helpers import BadFile, Data, blocks, left_behind, open_store, pack

pytestmark = pytest.mark.timeout(120)

FAILING = 1
THREADS, STEPS = 3, 300
KV_HEADS, DIM = 2, 32
ELEMENTS = 2 * KV_HEADS * DIM


class Sequence:
    """Entries whose pattern is that of their seed; every third one has a single copy."""

    def __init__(self, store: Store, seed: int, entries: int) -> None:
        self.data = Data.random(entries, KV_HEADS, DIM, seed=seed)
        self.rows = self.data.rows()
        twice = [n for n in range(entries) if n % 3]
        groups = [twice[i::7] for i in range(7)] + [[*range(i, entries, 9)] for i in range(9)]
        self.segment = self.data.write(store, pack(groups), f"sequence {seed}")
        self.charge = IndexCharge(store, 512)
        self.window = Window(store)
        self.window.append(self.data.k[:, :3], self.data.v[:, :3])


class Run:
    """Threads that decode at random in one store, and what they found."""

    def __init__(self, store: Store, steps: int = STEPS) -> None:
        self.store = store
        self.steps = steps
        self.found: collections.Counter[str] = collections.Counter()
        self.messages: list[str] = []
        self.shared = Sequence(store, 0, 180)

    def __call__(self, turn: Any = lambda step: None) -> None:
        """Run; `turn(step)` is called before each step of the first thread."""
        workers = [
            threading.Thread(target=self._work, args=(number, turn)) for number in range(THREADS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, number: int, turn: Any) -> None:
        try:
            self._decode(random.Random(number), number, turn)
        except Exception as error:  # a thread's own would only be printed
            self.messages.append(f"{type(error).__name__}: {error}")

    def _decode(self, rng: random.Random, number: int, turn: Any) -> None:
        live: list[Sequence] = []
        for step in range(self.steps):
            if number == 0:
                turn(step)
            self.found["steps"] += 1
            try:
                if not live or (rng.random() < 0.06 and len(live) < 4):
                    seed = 1 + number + THREADS * step
                    live.append(Sequence(self.store, seed, rng.randint(20, 90)))
                asked = [self.shared, *rng.sample(live, rng.randint(1, len(live)))]
                if rng.random() < 0.06:
                    live.pop(rng.randrange(len(live)))  # while it may be read below
                self._step(rng, asked)
            except StorageError as error:
                self.found["failures"] += 1
                self.messages.append(str(error))
            except CapacityError:
                self.found["refused"] += 1
                del live[:1]

    def _step(self, rng: random.Random, asked: list[Sequence]) -> None:
        wanted, missing = [], []
        for sequence in asked:
            entries = rng.sample(range(sequence.segment.entries), rng.randint(1, 18))
            clusters = rng.sample(range(sequence.segment.clusters), rng.randint(0, 2))
            lists = torch.tensor(clusters, dtype=torch.int64), torch.tensor(entries)
            wanted.append(Wanted((sequence.segment,), *lists, sequence.segment.entries))
            missing.append(set(entries))
        ahead: Fetch | None = None
        if rng.random() < 0.3:
            ahead = self.store.fetch(wanted, purpose="prefetch")
            if rng.random() < 0.3:
                ahead.release()
                ahead = None
        fetch = self.store.fetch(wanted, ahead=ahead)
        del wanted
        with fetch:
            self._check(asked, missing, fetch.resident)
            if rng.random() < 0.15:
                self.found["cancelled"] += 1
                return
            for arrived in fetch.rounds():
                self._check(asked, missing, arrived)
                if rng.random() < 0.05:
                    self.found["cancelled"] += 1
                    return
        self.found["missing"] += sum(map(len, missing))

    def _check(self, asked: list[Sequence], missing: list[set[int]], arrived: Rows) -> None:
        pool = self.store.pool(torch.float32)
        for sequence, left, (ids, slots) in zip(asked, missing, arrived, strict=True):
            rows = gather_entries(pool, slots // 4, ELEMENTS)
            same = (rows == sequence.rows[ids]).all(1)
            self.found["entries"] += len(same)
            self.found["wrong"] += int((~same).sum())
            left.difference_update(ids.tolist())


def held(store: Store) -> dict[str, Any]:
    counters = store.counters()
    dram = counters["dram"]
    return {
        "used": dram["used"] - dram["cache"],
        **{name: dram[name] for name in ("window", "index", "window_entries", "staged_bytes")},
        **{name: counters[name] for name in ("tickets", "stored_bytes")},
        "padding": counters["padding_bytes"],
    }


def files() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def open_one(drives: list[str], **settings: Any) -> Store:
    # Little memory: the cache must not keep every entry from the drives. Through the page cache, as
    # the files are spoiled: Linux fails writes that collide with direct ones.
    small = {"dram_bytes": "768KiB", "staging_bytes": "512KiB", "direct": False}
    return open_store(drives, **small, **settings)


def test_steps_over_drives_that_lose_and_change_data(drives: list[str]) -> None:
    gc.collect()  # what earlier tests left
    descriptors = files()
    store = open_one(drives)
    start = held(store)
    run, file = Run(store), BadFile(drives[FAILING])

    def turn(step: int) -> None:
        phase = step * 10 // STEPS
        if step * 10 % STEPS:
            return
        {2: file.corrupt, 4: file.mend, 5: file.lose, 7: file.mend}.get(phase, lambda: None)()

    run(turn)
    found = run.found
    named = re.compile(rf"drive {drives[FAILING]}: entry (\d+) of sequence \d+ (could|does) not")
    assert [message for message in run.messages if not named.match(message)] == []
    assert (found["wrong"], found["missing"]) == (0, 0)
    assert found["steps"] == THREADS * STEPS
    assert found["entries"] > 10000
    assert min(found["failures"], found["cancelled"], store.stats().repaired) > 10
    del run
    gc.collect()
    assert held(store) == start
    file.close()
    store.close()
    assert left_behind(drives) == []
    del store
    gc.collect()
    assert files() == descriptors


def test_without_checksums_the_change_is_seen(drives: list[str]) -> None:
    store = open_one(drives, verify=False)
    run, file = Run(store, 60), BadFile(drives[FAILING])
    run(lambda step: file.corrupt() if step == 20 else None)
    file.close()
    assert run.found["wrong"] > 10
    assert run.messages == []


def test_whole_drives_repair_nothing_and_a_forgotten_fetch_is_held(drives: list[str]) -> None:
    store = open_one(drives)
    start = held(store)
    run = Run(store, 60)
    run()
    assert (run.found["wrong"], run.found["missing"], run.found["failures"]) == (0, 0, 0)
    assert (store.stats().repaired, run.messages) == (0, [])
    sequence = run.shared
    everything = Wanted((sequence.segment,), torch.tensor([0]), torch.arange(180), 180)
    forgotten = store.fetch([everything], purpose="stream")
    del run, sequence, everything
    gc.collect()
    now = held(store)
    assert now["tickets"] == start["tickets"] + 1
    assert now["staged_bytes"] > 0
    assert now["stored_bytes"] > 0  # what it reads from stays
    forgotten.release()
    del forgotten
    gc.collect()
    assert held(store) == start


def test_more_fetches_than_the_staging_memory_holds(drives: list[str]) -> None:
    store = open_store(drives, staging_bytes="128KiB")
    data = Data.random(900, KV_HEADS, DIM)
    segment: Segment = data.write(store, blocks(900))
    everything = Wanted((segment,), torch.arange(0), torch.arange(900), 900)
    fetches = [store.fetch([everything, everything], purpose="stream") for _ in range(12)]
    with pytest.raises(CapacityError, match=r"held by other fetches\) has no room.*staging_bytes"):
        list(fetches[-1].rounds())
    for fetch in fetches[:-1]:
        fetch.release()
    arrived = [0, 0]
    for rows in fetches[-1].rounds():
        for number, (ids, slots) in enumerate(rows):
            got = gather_entries(store.pool(torch.float32), slots // 4, ELEMENTS)
            assert torch.equal(got, data.rows()[ids])
            arrived[number] += len(ids)
    assert arrived == [900, 900]
    fetches[-1].release()
    assert store.counters()["dram"]["staged_bytes"] == 0


def test_sequences_join_until_memory_is_full_and_again_when_one_leaves(drives: list[str]) -> None:
    store = open_one(drives)
    start = held(store)
    live: list[Sequence] = []
    seeds = itertools.count()
    with pytest.raises(CapacityError, match="`dram_bytes`"):
        live.extend(Sequence(store, seed, 60) for seed in seeds)
    assert len(live) > 3
    gc.collect()  # what the last one had taken
    live.pop()
    gc.collect()
    live.append(Sequence(store, 99, 60))
    for sequence in live:
        wanted = Wanted((sequence.segment,), torch.arange(0), torch.arange(60), 60)
        with store.fetch([wanted]) as fetch:
            for ((ids, slots),) in itertools.chain([fetch.resident], fetch.rounds()):
                got = gather_entries(store.pool(torch.float32), slots // 4, ELEMENTS)
                assert torch.equal(got, sequence.rows[ids])
    del live, sequence, wanted, fetch
    gc.collect()
    assert held(store) == start
