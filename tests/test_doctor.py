"""`swarm-kv doctor`: it finds what is wrong, says the fix, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swarm_kv import doctor, measure
from swarm_kv.doctor import ALL_DRIVES, MACHINE, Finding, Report, examine
from swarm_kv.errors import ArgumentError, StorageError
from swarm_kv.measure import LARGE, PIECE_BYTES, SMALL, DriveTest, Rate, Speed

from .processes import finished, result_of, start, written
from .store.helpers import left_behind
from .test_cli import run

SIZE = 2 * PIECE_BYTES


def looked_at(*paths: object, size: int = SIZE) -> Report:
    """`examine`, in a hurry."""
    return examine([str(path) for path in paths], size=size, seconds=0.05)


def of(report: Report, subject: str, check: str) -> Finding:
    """The one finding."""
    (found,) = (one for one in report.findings if (one.subject, one.check) == (subject, check))
    return found


@pytest.fixture
def mounted(tmp_path: pathlib.Path) -> Iterator[Callable[..., pathlib.Path]]:
    """`mounted(name, *options)`: a folder that is a small tmpfs; unmounted at the end."""
    folders: list[pathlib.Path] = []

    def mount(name: str, *options: str) -> pathlib.Path:
        if os.geteuid() != 0:
            pytest.skip("only root can mount")
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], timeout=20, check=True)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


# ---- what is well


def test_a_good_drive_passes_every_check(tmp_path: pathlib.Path) -> None:
    report = looked_at(tmp_path)
    assert report.count("error") == 0
    checks = [one.check for one in report.findings if one.subject == str(tmp_path)]
    assert checks == [
        *("file system", "space", "O_DIRECT", "alignment", "page cache", "reads", "writes")
    ]
    assert report.findings[0].subject == MACHINE
    (speed,) = report.drives
    assert speed.iops > 100
    assert speed.bytes_per_second > speed.iops * SMALL / 2
    assert speed.model.seconds(1, SMALL) == pytest.approx(1 / speed.iops, rel=0.5)
    assert report.write_bytes_per_second > 0
    assert left_behind([str(tmp_path)]) == []


def test_without_a_path_it_looks_at_the_machine_alone() -> None:
    report = looked_at()
    assert {one.subject for one in report.findings} == {MACHINE}
    assert report.drives == ()


# ---- drives that cannot be used


def test_a_missing_path_and_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"keep me")
    report = looked_at(tmp_path / "no", file)
    missing = of(report, str(tmp_path / "no"), "directory")
    assert (missing.state, missing.found) == ("error", "does not exist")
    assert f"mkdir -p {tmp_path / 'no'}" in missing.fix
    assert of(report, str(file), "directory").state == "error"
    assert str(tmp_path) in of(report, str(file), "directory").fix
    assert report.drives == ()
    assert file.read_bytes() == b"keep me"


def test_a_bad_path_does_not_keep_a_good_one_from_being_measured(tmp_path: pathlib.Path) -> None:
    report = looked_at(tmp_path / "no", tmp_path)
    assert report.count("error") == 1
    assert [speed.path for speed in report.drives] == [str(tmp_path)]


def test_a_raw_device_is_left_alone(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "device"
    file.write_bytes(bytes(range(256)) * 64)
    report = looked_at(f"raw:{file}")
    assert of(report, f"raw:{file}", "directory").state == "warning"
    assert "overwritten" in of(report, f"raw:{file}", "directory").found
    assert file.read_bytes() == bytes(range(256)) * 64


def test_a_read_only_path(mounted: Callable[..., pathlib.Path]) -> None:
    folder = mounted("read-only", "-o", "size=1m,ro")
    found = of(looked_at(folder), str(folder), "directory")
    assert found.state == "error"
    assert "Read-only" in found.found
    assert found.fix.endswith(f"mount -o remount,rw {folder}")


def test_a_path_of_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")

    def find() -> Any:
        become_nobody()
        return looked_at(theirs, hidden).to_dict()["findings"]

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        theirs, hidden = pathlib.Path(folder, "theirs"), pathlib.Path(folder, "a/hidden")
        theirs.mkdir()
        hidden.mkdir(parents=True)
        os.chmod(folder, 0o755)
        hidden.parent.chmod(0o700)
        findings = result_of(find)
    by_path = {one["subject"]: one for one in findings if one["check"] == "directory"}
    assert {one["state"] for one in by_path.values()} == {"error"}
    assert "Permission denied" in by_path[str(theirs)]["found"]
    assert by_path[str(theirs)]["fix"].endswith(f"chown 65534 {theirs}")
    assert "cannot be reached" in by_path[str(hidden)]["found"]


def test_a_full_drive(mounted: Callable[..., pathlib.Path]) -> None:
    folder = mounted("full", "-o", "size=256k")
    (folder / "filler").write_bytes(bytes(256 << 10))
    report = looked_at(folder)
    assert report.count("error") == 1
    error = next(one for one in report.findings if one.state == "error")
    assert "full" in error.found or "space" in error.found
    assert of(report, str(folder), "space").state == "warning"
    assert report.drives == ()
    assert os.listdir(folder) == ["filler"]


def test_a_nearly_full_drive_is_not_filled_for_a_measurement(
    mounted: Callable[..., pathlib.Path],
) -> None:
    folder = mounted("small", "-o", "size=24m")
    report = looked_at(folder)
    assert report.count("error") == 0
    assert of(report, str(folder), "reads").state == "warning"
    assert "too little is free" in of(report, str(folder), "reads").found
    assert os.listdir(folder) == []


# ---- drives that are not what they seem


def test_memory_is_no_drive(mounted: Callable[..., pathlib.Path]) -> None:
    folder = mounted("memory", "-o", "size=256m")
    report = looked_at(folder)
    assert report.count("error") == 0
    assert of(report, str(folder), "file system").state == "warning"
    assert "tmpfs: memory" in of(report, str(folder), "file system").found
    cached = of(report, str(folder), "page cache")
    assert (cached.state, "100%" in cached.found) == ("warning", True)


def test_two_paths_on_one_drive(tmp_path: pathlib.Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    one.mkdir(), other.mkdir()
    report = looked_at(one, other)
    shared = of(report, ALL_DRIVES, "drives")
    assert shared.state == "warning"
    assert str(one) in shared.found
    assert str(other) in shared.found
    assert "one directory per drive" in shared.fix
    assert len(report.drives) == 2
    assert report.together is not None


def test_two_drives_are_two(tmp_path: pathlib.Path, mounted: Callable[..., pathlib.Path]) -> None:
    """The control of the test before."""
    (shared,) = doctor.shared_drives([str(tmp_path), str(mounted("other"))])
    assert (shared.state, shared.fix) == ("ok", "")


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A /sys in which device 8:1 is a partition of sda, 9:0 a RAID of sda and sdb, 8:16 sdb."""
    root = tmp_path / "sys"
    for disk, model in (("sda", "FASTDISK 1"), ("sdb", "FASTDISK 2")):
        (root / "block" / disk / "device").mkdir(parents=True)
        (root / "block" / disk / "device" / "model").write_text(model + "\n")
    part = root / "block/sda/sda1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    raid = root / "block/md0/slaves"
    raid.mkdir(parents=True)
    (raid / "sda1").symlink_to(part)
    (raid / "sdb").symlink_to(root / "block/sdb")
    numbers = root / "dev/block"
    numbers.mkdir(parents=True)
    for number, place in (("8:1", part), ("8:16", root / "block/sdb"), ("9:0", raid.parent)):
        (numbers / number).symlink_to(place)
    monkeypatch.setattr(doctor, "SYS", root)
    return root


@pytest.mark.parametrize(
    ("major", "minor", "disks"),
    [(8, 1, {"sda"}), (8, 16, {"sdb"}), (9, 0, {"sda", "sdb"}), (7, 7, set())],
)
def test_drives_below_partitions_and_raid(
    system: pathlib.Path, major: int, minor: int, disks: set[str]
) -> None:
    assert doctor.disks_of_device(os.makedev(major, minor)) == disks


def test_names_of_drives(system: pathlib.Path) -> None:
    assert doctor.disk_name("sda") == "sda (FASTDISK 1)"
    for number in (0, 1):
        (system / f"devices/system/node/node{number}").mkdir(parents=True)
    (system / "block/sda/device/numa_node").write_text("1\n")
    assert doctor.disk_name("sda") == "sda (FASTDISK 1, NUMA node 1)"
    assert doctor.disk_name("nvme9n1") == "nvme9n1"
    assert any(one.check == "NUMA" and "numactl" in one.fix for one in doctor.machine())


MOUNTS = """\
21 1 254:0 / / rw - ext4 /dev/vda rw
40 21 0:35 / /mnt rw - tmpfs tmpfs rw
41 40 0:36 / /mnt/with\\040space rw - nfs4 host:/share rw
42 21 0:37 / /data rw - overlay overlay rw
43 21 0:38 / /mnt rw - btrfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "state"),
    [
        ("/home/x", "ext4", "ok"),
        ("/mntx", "ext4", "ok"),
        ("/mnt/with space/kv", "nfs4", "warning"),
        ("/data", "overlay", "warning"),
        ("/mnt/a", "btrfs", "ok"),  # mounted over the tmpfs
    ],
)
def test_file_systems_by_mount(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, state: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(doctor, "PROC", tmp_path)
    monkeypatch.setattr(doctor, "disks_of", lambda path: frozenset())
    assert doctor.mount_of(path).kind == kind
    found = doctor._file_system(path)
    assert found.state == state
    assert bool(found.fix) == (state == "warning")


def test_rates_are_judged() -> None:
    def state(iops: float, rate: float) -> str:
        return doctor._reads(Speed("/a", iops, rate)).state

    assert state(500e3, 6e9) == "ok"
    assert state(900, 0.2e9) == "warning"
    assert state(2e6, 40e9) == "warning"
    drives = [Speed("/a", 5e5, 3e9), Speed("/b", 5e5, 3e9)]

    def together(rate: float, cpu: float) -> Finding:
        return doctor._together(drives, Rate(LARGE, rate / LARGE, rate, cpu))

    assert together(5.9e9, 0.5).state == "ok"
    assert together(3e9, 0.5).state == "warning"
    assert "50% of their sum" in together(3e9, 0.5).found
    assert together(3e9, 0.99).state == "ok"


# ---- io_uring and memory that is refused


def refuse_io_uring(error: int) -> None:
    """Let a seccomp filter answer io_uring_setup, 425 on every architecture, with `error`."""
    load, jump, answer = 0x20, 0x15, 0x06
    rows = [(load, 0, 0, 0), (jump, 0, 1, 425), (answer, 0, 0, 0x50000 | error)]
    rows.append((answer, 0, 0, 0x7FFF0000))  # allow
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HP", len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.c_char_p(program)) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize(("error", "says"), [(1, "seccomp"), (38, "Linux 5.11")])
def test_io_uring_that_is_refused(tmp_path: pathlib.Path, error: int, says: str) -> None:
    def find() -> Any:
        refuse_io_uring(error)
        return looked_at(tmp_path).to_dict()

    found = result_of(find)
    (ring,) = (one for one in found["findings"] if one["check"] == "io_uring")
    assert ring["state"] == "warning"
    assert "threads read instead" in ring["found"]
    assert says in ring["fix"]
    # Threads do the work: the drive passes.
    assert found["errors"] == 0
    assert found["drives"][0]["iops"] > 0


def test_io_uring_that_the_administrator_switched_off(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("2\n")
    monkeypatch.setattr(doctor, "PROC", tmp_path)
    assert "kernel.io_uring_disabled=0" in doctor._no_io_uring(1, "6.1").fix
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("0\n")
    assert "value" not in doctor._no_io_uring(1, "6.1").fix


@pytest.mark.parametrize("limit", [64 << 10, 4 << 20])
def test_too_little_locked_memory(limit: int) -> None:
    def find() -> Any:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        become_nobody()  # root may lock whatever it likes
        tempfile.tempdir = "/tmp"
        return looked_at().to_dict()["findings"]

    by_check = {one["check"]: one for one in result_of(find)}
    if by_check["io_uring"]["state"] != "ok":
        pytest.skip("io_uring is refused here")
    assert by_check["memlock"]["state"] == "warning"
    assert f"{limit >> 10} KiB" in by_check["memlock"]["found"]
    assert "ulimit -l" in by_check["memlock"]["fix"]


def test_enough_locked_memory() -> None:
    """The control of the test before."""
    if os.geteuid() != 0:
        pytest.skip("the limit of this user is not known")
    report = looked_at()
    if of(report, MACHINE, "io_uring").state == "ok":
        assert of(report, MACHINE, "memlock").state == "ok"


# ---- GPUDirect Storage


def test_gpu_direct_is_not_tried_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_cuda_driver", lambda: False)
    assert "no CUDA driver" in of(looked_at(), MACHINE, doctor.GPU_DIRECT).found


def test_gpu_direct_that_does_not_work(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if doctor._has_cuda_driver():
        pytest.skip("it may work here")
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", str(tmp_path / "cufile.log"))
    monkeypatch.setattr(doctor, "_has_cuda_driver", lambda: True)
    found = of(looked_at(tmp_path), str(tmp_path), doctor.GPU_DIRECT)
    assert found.state == "ok"  # nothing is lost: it is for who asks for it
    assert found.found.startswith('not for engine "gds": cuFile')
    assert "reads and writes" not in found.found


# ---- the measurement


def test_reads_have_the_size_that_was_asked_for(drives: list[str]) -> None:
    with DriveTest(drives[:3], PIECE_BYTES) as test:
        for size in measure.DEPTHS:
            for drive in (None, 1):
                before = test._store.counters()["drives"]
                rate = test.read(size, drive)
                after = test._store.counters()["drives"]
                assert rate.bytes_per_second == pytest.approx(size * rate.requests_per_second)
                read = [b["reads"] - a["reads"] for a, b in zip(before, after, strict=True)]
                assert [count > 0 for count in read] == [drive in (None, n) for n in range(3)]
    assert left_behind(drives) == []


def test_other_bytes_than_were_written_are_an_error(drives: list[str]) -> None:
    with DriveTest(drives[:1], PIECE_BYTES) as test:
        os.pwrite(test._files[0].fileno(), bytes(PIECE_BYTES), 0)
        with pytest.raises(StorageError, match=drives[0]):
            test.read(LARGE)


def test_a_test_that_cannot_be_made_is_refused(drives: list[str]) -> None:
    with pytest.raises(ArgumentError, match="at least one drive"):
        DriveTest([], PIECE_BYTES)
    with pytest.raises(ArgumentError, match=f"{PIECE_BYTES} bytes"):
        DriveTest(drives, PIECE_BYTES - 1)
    with pytest.raises(StorageError, match="/no/such"), DriveTest(["/no/such"], PIECE_BYTES):
        pass


def test_what_the_page_cache_holds_is_told(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        assert measure.cached_share(file.fileno(), 1 << 20) == 1.0
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = measure.cached_share(file.fileno(), 1 << 20)
        assert share is not None
        assert share < 1.0


# ---- the command


def test_the_command_tells_and_writes(tmp_path: pathlib.Path) -> None:
    drive, figures = tmp_path / "drive", tmp_path / "doctor.json"
    drive.mkdir()
    result = run("doctor", drive, "--size", "32MiB", "--json", figures)
    assert result.exit_code == 0, result.output
    for text in (MACHINE, "io_uring", "O_DIRECT", "alignment", "reads", str(drive)[:20]):
        assert text in result.output.replace("\n", "")
    written = json.loads(figures.read_text())
    assert written["kind"] == "doctor"
    assert written["errors"] == 0
    assert len(written["drives"]) == 1


def test_the_command_fails_where_a_drive_cannot_be_used(tmp_path: pathlib.Path) -> None:
    result = run("doctor", tmp_path / "no", "--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"] == 1
    assert "mkdir -p" in result.stderr
    assert "1 error" in result.stderr


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_was_ended(
    tmp_path: pathlib.Path, ended_by: signal.Signals
) -> None:
    from swarm_kv.cli import app

    ours, theirs = os.pipe()
    process = start(lambda: app(["doctor", str(tmp_path)]), theirs)
    os.close(theirs)
    inside = pathlib.Path(f"/proc/{process}/fd")
    deadline = time.monotonic() + 60
    # The file of the measurement is there for seconds, those of smaller checks for an instant.
    while not any(
        target.startswith(str(tmp_path)) and os.stat(link).st_size >= PIECE_BYTES
        for link, target in targets(inside)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process, ended_by)
    output, status = written(ours), finished(process)
    assert status not in (0, 1)  # 1: errors were found
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def targets(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Links in a folder, and where they lead to."""
    for link in folder.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield link, os.readlink(link)
