"""File systems on stand-in drives: as slow as the drive, and nothing is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import benchmarks.drives
from benchmarks.drives import DriveModel, stand_in_drives
from benchmarks.drives.filesystem import file_systems
from benchmarks.harness import Unavailable
from benchmarks.peers.decoding import bytes_read, evict

SIZE = 16 << 20
SLOW = DriveModel("slow", iops=1e4, bytes_per_second=8e6, latency=0)


def loop_devices():
    return subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def folders():
    with stand_in_drives([SLOW, SLOW], SIZE) as drives:
        if not drives.throttled:
            pytest.skip(drives.note)
        with file_systems(drives) as folders:
            yield folders


def test_what_the_page_cache_lacks_comes_at_the_drives_speed(folders):
    data = os.urandom(2 << 20)
    for folder in folders:
        (folder / "file").write_bytes(data)
    evict(folders)

    def read(folder):
        """Seconds, and bytes from the drive."""
        begin, before = time.monotonic(), bytes_read()
        assert (folder / "file").read_bytes() == data
        return time.monotonic() - begin, bytes_read() - before

    for folder in folders:
        seconds, size = read(folder)
        assert size >= len(data)
        assert seconds >= len(data) / SLOW.bytes_per_second
        # The control: what is in the page cache costs the drive nothing.
        assert read(folder)[1] == 0


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_was_ended(folders, ended_by):
    program = textwrap.dedent("""
        import time
        from benchmarks.drives import PM9A3, stand_in_drives
        from benchmarks.drives.filesystem import file_systems
        with stand_in_drives([PM9A3] * 2, 16 << 20) as drives, file_systems(drives) as folders:
            for folder in folders:
                (folder / "file").write_bytes(bytes(1 << 20))
            print(*folders, *drives.files, flush=True)
            time.sleep(60)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    *made, one, other = [pathlib.Path(path) for path in child.stdout.readline().split()]
    assert all(os.path.ismount(folder) for folder in made)
    assert str(one) in loop_devices()
    child.send_signal(ended_by)
    child.wait(60)
    deadline = time.monotonic() + 60
    while any(folder.exists() for folder in made) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(folder.exists() for folder in made)
    assert not {str(one), str(other)} & set(loop_devices().split())


def test_directories_stand_in_where_fuse_cannot(monkeypatch):
    def refuse(size):
        raise Unavailable("no FUSE today")

    monkeypatch.setattr(benchmarks.drives, "simulated_drive", refuse)
    with stand_in_drives([SLOW] * 2, SIZE) as drives, file_systems(drives) as folders:
        assert len(set(folders)) == 2
        assert all(folder.is_dir() and not any(folder.iterdir()) for folder in folders)
    assert not any(folder.exists() for folder in folders)
