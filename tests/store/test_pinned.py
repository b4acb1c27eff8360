"""Pinned staging memory against a stand-in for the CUDA runtime, which may refuse."""

from __future__ import annotations

import gc
import logging
import mmap
from typing import Any

import pytest
import torch

from swarm_kv import pinned
from swarm_kv.pinned import Pinned

from .helpers import Data, assert_holds, fetch_all, open_store

MIB = 1 << 20


class FakeRuntime:
    """`torch.cuda.cudart()` that refuses the registration number `refuse`, counted from 0."""

    def __init__(self, refuse: int | None = None) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert address % mmap.PAGESIZE == 0
        if self.refuse == len(self.registered):
            return 2
        self.calls.append(("register", address))
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, result: int) -> str:
        return {2: "out of memory"}[result]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the runtime was made to forget an error."""
    times: list[int] = []
    monkeypatch.setattr(pinned, "_forget_error", lambda: times.append(1))
    return times


def runtime(monkeypatch: pytest.MonkeyPatch, refuse: int | None = None) -> FakeRuntime:
    fake = FakeRuntime(refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_everything_in_chunks_and_back_in_reverse_order(forgotten: list[int]) -> None:
    fake = FakeRuntime()
    memory = Pinned(fake, 8 * MIB, 10 * MIB, chunk=4 * MIB)
    assert fake.registered == {8 * MIB: 4 * MIB, 12 * MIB: 4 * MIB, 16 * MIB: 2 * MIB}
    assert (memory.size, memory.refusal) == (10 * MIB, None)
    memory.release()
    memory.release()
    assert fake.registered == {}
    order = [address for name, address in fake.calls if name == "unregister"]
    assert order == [16 * MIB, 12 * MIB, 8 * MIB]
    assert memory.size == 0
    assert forgotten == []


@pytest.mark.parametrize("refuse", [0, 1, 2])
def test_a_refusal_keeps_what_was_pinned(refuse: int, forgotten: list[int]) -> None:
    fake = FakeRuntime(refuse)
    memory = Pinned(fake, 0, 10 * MIB, chunk=4 * MIB)
    assert memory.size == refuse * 4 * MIB
    assert memory.refusal == "out of memory"
    assert forgotten == [1]  # or the next kernel would be blamed
    memory.release()
    assert fake.registered == {}


def test_without_a_device_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = runtime(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pinned.pin(0, MIB) is None
    assert fake.calls == []


def test_a_refusal_is_one_warning_with_figures(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, refuse=1)
    monkeypatch.setattr(pinned.resource, "getrlimit", lambda _: (65536, 65536))
    with caplog.at_level(logging.WARNING, logger="swarm_kv"):
        memory = pinned.pin(0, 200 * MIB)
    assert memory is not None
    assert memory.size == 64 * MIB
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{64 * MIB} of {200 * MIB} bytes of staging memory are pinned" in text
    assert "out of memory" in text
    assert "(ulimit -l) is 65536 bytes" in text
    assert "`staging_bytes`" in text


def test_a_device_that_cannot_be_used_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch)

    def broken() -> Any:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "cudart", broken)
    with caplog.at_level(logging.WARNING, logger="swarm_kv"):
        assert pinned.pin(0, MIB) is None
    assert "not pinned: CUDA driver initialization failed" in caplog.text


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_store_pins_its_staging_memory_for_as_long_as_it_lives(
    end: str, monkeypatch: pytest.MonkeyPatch, drives: list[str]
) -> None:
    monkeypatch.setattr(pinned, "CHUNK", MIB)
    fake = runtime(monkeypatch)
    store = open_store(drives, staging_bytes="3MiB")
    start = store._pool.data_ptr()
    assert fake.registered == {start + i * MIB: MIB for i in range(3)}
    data = Data.random(50)
    segment = data.write(store)
    got = fetch_all(store, segment, data, entries=torch.arange(50), purpose="stream")
    assert_holds(got, data.rows(), range(50))
    del segment, got
    if end == "close":
        store.close()
    else:
        del store
        gc.collect()
    assert fake.registered == {}


def test_a_store_works_where_pinning_is_refused(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[int], drives: list[str]
) -> None:
    fake = runtime(monkeypatch, refuse=0)
    store = open_store(drives)
    data = Data.random(50)
    got = fetch_all(store, data.write(store), data, entries=torch.arange(50))
    assert_holds(got, data.rows(), range(50))
    store.close()
    assert fake.calls == []
