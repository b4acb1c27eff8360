"""Stand-in drives: they deliver their model, fail on command, and leave nothing behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import benchmarks.drives
from benchmarks.drives import PM9A3, DriveModel, checked_drives, stand_in_drives
from benchmarks.harness import Report, Unavailable

SIZE = 4 << 20
SLOW = DriveModel("slow", iops=1000, bytes_per_second=16e6, latency=1e-3)


@pytest.fixture
def drives():
    with stand_in_drives([SLOW, SLOW.slower(2)], SIZE) as drives:
        if not drives.throttled:
            pytest.skip(drives.note)
        yield drives


def read(file, offset=0, size=4096):
    """One direct read."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, size)  # aligned
    try:
        return buffer[: os.preadv(descriptor, [buffer], offset)]
    finally:
        os.close(descriptor)


def test_rates_of_a_model():
    assert SLOW.rate(4096) == 1000
    assert SLOW.rate(64000) == 250
    assert SLOW.slower(4).rate(4096) == 250


def test_contents_stay_and_each_drive_has_its_own(drives):
    for number, file in enumerate(drives.files):
        with open(file, "r+b", buffering=0) as opened:
            assert os.pwrite(opened.fileno(), bytes([number + 1]) * 4096, 8192) == 4096
            with pytest.raises(OSError, match="No space left"):
                os.pwrite(opened.fileno(), bytes(4096), SIZE)
    assert [read(file, 8192) for file in drives.files] == [b"\1" * 4096, b"\2" * 4096]
    assert read(drives.files[0]) == bytes(4096)


def test_requests_take_at_least_what_the_model_says(drives):
    def seconds(file):
        begin = time.monotonic()
        for _ in range(20):
            read(file)
        return time.monotonic() - begin

    # 20 reads, one at a time: 1 ms of service and 1 ms of latency each.
    assert seconds(drives.files[0]) >= 20 * 2e-3
    assert seconds(drives.files[1]) >= 20 * 3e-3
    drives.slow_down(0, 10)
    assert seconds(drives.files[0]) >= 20 * 11e-3


def test_faults_strike_where_and_as_often_as_told(drives):
    file = drives.files[0]
    drives.control(0, f"fail r 4096 4096 {errno.EIO} 1")
    assert read(file) == bytes(4096)
    with pytest.raises(OSError, match="Input/output"):
        read(file, 4096)
    assert read(file, 4096) == bytes(4096)
    drives.control(0, "corrupt r 0 4096\nshort r 8192 4096 512")
    assert sum(read(file)) == 1
    assert read(file, 8192) == bytes(512)
    drives.control(0, "clear")
    assert read(file) == read(file, 8192) == bytes(4096)
    with pytest.raises(OSError, match="Invalid argument"):
        drives.control(0, "explode r 0 4096")


def test_a_read_that_hangs_ends_with_its_drive():
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor() as threads:
        drives = stack.enter_context(stand_in_drives([SLOW], SIZE))
        if not drives.throttled:
            pytest.skip(drives.note)
        drives.control(0, "hang r 0 4096")
        hanging = threads.submit(read, drives.files[0])
        assert not concurrent.futures.wait([hanging], timeout=0.2).done
        stack.close()
        assert isinstance(hanging.exception(60), OSError)


def test_a_drive_that_does_not_deliver_its_model_is_refused(drives, monkeypatch):
    delivered = [model.rate(4096) for model in drives.models]
    monkeypatch.setattr(benchmarks.drives.fio, "rates", lambda *_, **__: list(delivered))
    drives.check(sizes=[4096])
    delivered[1] *= 0.9
    with pytest.raises(Unavailable, match="drive 1 of 2"):
        drives.check(sizes=[4096])


def test_results_say_which_drives_and_are_refused_when_those_drift(monkeypatch):
    delivered = [SLOW.rate(4096)]
    monkeypatch.setattr(benchmarks.drives.fio, "rates", lambda *_, **__: list(delivered))
    report = Report()
    with checked_drives([SLOW], SIZE, report, checked=[4096]) as drives:
        if not drives.throttled:
            pytest.skip(drives.note)
    (used,) = report.drives
    assert (used["kind"], used["model"], used["count"]) == ("simulated", "slow", 1)
    with (
        pytest.raises(Unavailable, match="drive 0 of 1"),
        checked_drives([SLOW], SIZE, report, checked=[4096]),
    ):
        delivered[0] /= 2


def test_real_paths_take_the_place_of_simulated_drives(tmp_path, monkeypatch):
    rates = {4 << 10: [5000.0], 256 << 10: [400.0]}
    monkeypatch.setattr(benchmarks.drives.fio, "rates", lambda files, *, block, **_: rates[block])
    report = Report([str(tmp_path)])
    with checked_drives([SLOW], SIZE, report, checked=[4096]) as drives:
        (file,) = drives.files
        assert file.parent.parent == tmp_path
        assert file.stat().st_size == SIZE
        assert drives.models[0].bytes_per_second == 400 * (256 << 10)
    assert not file.exists()
    assert report.drives[0]["kind"] == "real"
    with (
        pytest.raises(Unavailable, match="2 drives are needed, --paths names 1"),
        checked_drives([SLOW] * 2, SIZE, report),
    ):
        pass


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_was_ended(drives, tmp_path, ended_by):
    program = textwrap.dedent("""
        import time
        from benchmarks.drives import PM9A3, stand_in_drives
        with stand_in_drives([PM9A3] * 2, 1 << 20) as drives:
            print(*drives.files, flush=True)
            time.sleep(60)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    files = [pathlib.Path(file) for file in child.stdout.readline().split()]
    assert len(files) == 2
    assert all(file.exists() for file in files)
    child.send_signal(ended_by)
    child.wait(60)
    deadline = time.monotonic() + 60
    while any(file.parent.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(file.parent.exists() for file in files)


def test_files_stand_in_where_fuse_cannot(monkeypatch):
    def refuse(size):
        raise Unavailable("no FUSE today")

    monkeypatch.setattr(benchmarks.drives, "simulated_drive", refuse)
    with stand_in_drives([PM9A3] * 2, SIZE) as drives:
        assert not drives.throttled
        assert "no FUSE today" in drives.note
        assert [file.stat().st_size for file in drives.files] == [SIZE, SIZE]
        drives.check()
        with drives.unthrottled():
            pass
        with pytest.raises(Unavailable, match="no FUSE today"):
            drives.control(0, "clear")
    assert not any(file.exists() for file in drives.files)
