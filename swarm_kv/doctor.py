"""Whether a machine and its drives are fit for a store, and what to mend.

    report = examine(["/mnt/nvme0", "/mnt/nvme1"])
    for finding in report.findings:
        print(finding.state, finding.subject, finding.check, finding.found, finding.fix)

What can be tried is tried, by the store's own engine: rings are opened, buffers registered, files
written and read. Nothing is left on the drives.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import platform
import re
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from .config import LARGEST_STAGING, SwarmConfig
from .errors import SwarmError
from .measure import (
    DEFAULT_BYTES,
    LARGE,
    PIECE_BYTES,
    READ_SECONDS,
    DriveTest,
    Rate,
    Speed,
    quiet_store,
)

State = Literal["ok", "warning", "error"]

PROC = pathlib.Path("/proc")
SYS = pathlib.Path("/sys")

MACHINE = "this machine"
GPU_DIRECT = "GPUDirect"
ALL_DRIVES = "all drives"
GIVEN_MODEL = (1e-6, 1e-9)
"""Where nothing is to be measured."""
LEAST_FREE = 1 << 30
"""Bytes below which a drive is called nearly full."""
SLOW_IOPS = 10_000
"""Reads of 4 KiB per second that any SSD of today exceeds."""
FASTEST = 16e9
"""Bytes per second that no single drive reaches: four lanes of PCIe 5."""
CACHED = 0.05
"""Share of a file in the page cache from which on O_DIRECT does not do what it says."""
TOGETHER = 0.75
"""Share of the sum of their rates that drives should reach together."""
BUSY_CPU = 0.8
"""Share of one core from which on reading is bound by it."""

IN_MEMORY = {"tmpfs", "ramfs"}
OVER_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "gpfs"),
    *("glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse"),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: `MACHINE`, `ALL_DRIVES` or a path.
        check: what was looked at.
        state: `ok`; `warning`: it works, but less well; `error`: a store cannot use it.
        found: what was seen.
        fix: what to do about it; empty where nothing is to be done.
    """

    subject: str
    check: str
    state: State
    found: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `examine` found.

    Attributes:
        findings: machine first, then path by path, then all drives together.
        drives: what each that could be measured delivers alone.
        together: what they deliver at once in large reads; None unless there are several.
        write_bytes_per_second: of all drives together; 0 where none was measured.
    """

    findings: tuple[Finding, ...]
    drives: tuple[Speed, ...] = ()
    together: Rate | None = None
    write_bytes_per_second: float = 0.0

    def count(self, state: State) -> int:
        """How many findings have this state."""
        return sum(finding.state == state for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **dataclasses.asdict(self),
            "drives": [
                {**dataclasses.asdict(drive), **dataclasses.asdict(drive.model)}
                for drive in self.drives
            ],
            "errors": self.count("error"),
            "warnings": self.count("warning"),
        }


def examine(
    paths: Sequence[str],
    *,
    size: int = DEFAULT_BYTES,
    seconds: float = READ_SECONDS,
    on_step: Callable[[str], object] = lambda what: None,
) -> Report:
    """Look at the machine and at each drive, some seconds per drive.

    Args:
        paths: one directory per drive, as for `SwarmConfig`; none looks at the machine alone.
        size: bytes to write to each drive at most; less where little is free.
        seconds: that each rate is measured.
        on_step: called with words when something takes time.
    """
    findings = list(machine())
    usable = []
    for path in paths:
        own = list(drive(path))
        findings += own
        if not any(finding.state == "error" or finding.check == "directory" for finding in own):
            usable.append(path)
    on_step("looked at the drives")
    report = Report(tuple(findings))
    free = min((free_bytes(path) for path in usable), default=0)
    size = min(size, free // (4 * max(1, len(usable))))  # they may lie on one drive
    if usable and size < PIECE_BYTES:
        full = min(usable, key=free_bytes)
        skipped = Finding(
            full, "reads", "warning", "not measured: too little is free", "free some space there"
        )
        report = dataclasses.replace(report, findings=(*findings, skipped))
    elif usable:
        report = _measured(findings, DriveTest(usable, size, seconds, on_step))
    return dataclasses.replace(
        report, findings=_in_order((*report.findings, *shared_drives(usable)), paths)
    )


def _in_order(findings: Sequence[Finding], paths: Sequence[str]) -> tuple[Finding, ...]:
    subjects = [MACHINE, *paths, ALL_DRIVES]
    return tuple(sorted(findings, key=lambda finding: subjects.index(finding.subject)))


# ---- the machine


def machine() -> Iterator[Finding]:
    """io_uring and locked memory, tried by opening a store; GPUDirect Storage; NUMA nodes."""
    try:
        with tempfile.TemporaryDirectory(prefix="swarm_kv_doctor_") as folder:
            notes, engine = _tried(folder)
    except (SwarmError, OSError) as error:
        fix = "set TMPDIR to a directory that can be written to"
        yield Finding(MACHINE, "io_uring", "warning", f"not tried: {error}", fix)
        return
    refused = next((note for note in notes if "io_uring cannot be used" in note), None)
    release = platform.release()
    if refused is None and engine == "io_uring":
        yield Finding(MACHINE, "io_uring", "ok", f"works (Linux {release})")
        yield _memlock(notes)
    else:
        number = re.search(r"errno (\d+)", refused or "")
        yield _no_io_uring(int(number[1]) if number else 0, release)
    if not _has_cuda_driver():
        yield Finding(MACHINE, GPU_DIRECT, "ok", "not tried: no CUDA driver is here")
    nodes = list((SYS / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        fix = "numactl --cpunodebind=N --membind=N, N the node of the drives, saves a detour"
        yield Finding(MACHINE, "NUMA", "ok", f"{len(nodes)} nodes", fix)


def _tried(folder: str) -> tuple[list[str], str]:
    """Notes and engine of a store that registers as much memory as one does by default."""
    config = SwarmConfig(
        paths=[folder],
        dram_bytes=LARGEST_STAGING + (1 << 20),
        staging_bytes=LARGEST_STAGING,
        device_model=GIVEN_MODEL,
    )
    with quiet_store(config) as store:
        return store.notes(), store.counters()["drives"][0]["engine"]


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _no_io_uring(error: int, release: str) -> Finding:
    """Why, and what brings it back; reads go through threads meanwhile."""
    reason = os.strerror(error) if error else "the engine does not offer it"
    found = f"cannot be used ({reason}; Linux {release}): threads read instead, slower"
    disabled = _text(PROC / "sys/kernel/io_uring_disabled")
    filtered = "Seccomp:\t2" in _text(PROC / "self/status")
    if error == 38:  # ENOSYS
        fix = "use Linux 5.11 or newer, built with CONFIG_IO_URING"
    elif disabled in ("1", "2"):
        fix = f"it is switched off (value {disabled}): sysctl -w kernel.io_uring_disabled=0"
    elif filtered:
        fix = (
            "a seccomp filter forbids it, as Docker's does: allow io_uring_setup, io_uring_enter "
            "and io_uring_register in a profile of your own (docker run --security-opt "
            "seccomp=profile.json)"
        )
    else:
        fix = "sysctl kernel.io_uring_disabled must be 0, and no seccomp filter forbid io_uring"
    return Finding(MACHINE, "io_uring", "warning", found, fix)


def _memlock(notes: Sequence[str]) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    staging = f"{LARGEST_STAGING >> 20} MiB"
    if any("buffers are not registered" in note for note in notes):
        found = f"limit of {text}: {staging} of buffers cannot be registered, reads cost more CPU"
        fix = (
            "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd) or docker run --ulimit memlock=-1"
        )
        return Finding(MACHINE, "memlock", "warning", found, fix)
    found = f"{staging} of buffers can be registered (limit {text})"
    return Finding(MACHINE, "memlock", "ok", found)


# ---- one drive


def drive(path: str) -> Iterator[Finding]:
    """What can be said of a path without reading much: it ends with the first error."""
    unfit = _directory(path)
    if unfit is not None:
        yield unfit
        return
    yield _file_system(path)
    yield _space(path)
    config = SwarmConfig(paths=[path], dram_bytes="8MiB", staging_bytes="4MiB")
    try:
        with quiet_store(config) as store:
            (one,), notes = store.counters()["drives"], store.notes()
    except SwarmError as error:
        # The store's errors name what was found and the way out.
        yield Finding(path, "store", "error", str(error))
        return
    yield _direct(path, one["direct"], notes)
    yield _alignment(path, one["block"])
    if _has_cuda_driver():
        yield _gpu_direct(path)


def _directory(path: str) -> Finding | None:
    """Why nothing more can be tried there; None for a directory in which files can be made."""
    if path.startswith("raw:"):
        found = "not looked at: a raw device is overwritten from its first byte on when used"
        return Finding(path, "directory", "warning", found, "give a directory on the same drive")
    place = pathlib.Path(path)
    try:
        place.stat()
    except FileNotFoundError:
        fix = f"make it, on the drive to use: mkdir -p {path}"
        return Finding(path, "directory", "error", "does not exist", fix)
    except OSError as error:
        fix = "let this user pass through the directories above it (chmod +x)"
        return Finding(path, "directory", "error", f"cannot be reached: {error.strerror}", fix)
    if not place.is_dir():
        fix = f"give the directory it lies in: {place.parent}"
        return Finding(path, "directory", "error", "is not a directory", fix)
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        reason = error.strerror or str(error)
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            fix = f"mount it for writing: mount -o remount,rw {mount_of(path).point}"
        elif isinstance(error, PermissionError):
            fix = f"give this user the right to write: chown {os.getuid()} {path}"
        else:
            fix = "free some space there, or use another drive"
        return Finding(path, "directory", "error", f"cannot hold a file: {reason}", fix)
    return None


def _file_system(path: str) -> Finding:
    mount = mount_of(path)
    kind, disks = mount.kind, disks_of(path)
    names = ", ".join(map(disk_name, sorted(disks)))
    found = f"{kind} on {names}" if disks else kind
    if kind in IN_MEMORY:
        found = f"{kind}: memory, not a drive; KV there takes the memory it should save"
        return Finding(path, "file system", "warning", found, "give a directory on a drive")
    if kind == "overlay":
        found = "overlay: a container's own layer, slow and shared"
        fix = "mount a drive into the container: docker run -v /mnt/nvme0:/nvme0"
        return Finding(path, "file system", "warning", found, fix)
    if kind in OVER_NETWORK:
        found = f"{kind}: over a network, with its latency at every step"
        return Finding(path, "file system", "warning", found, "use drives of this machine")
    return Finding(path, "file system", "ok", found)


def free_bytes(path: str) -> int:
    """Bytes that this user may still write there."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _space(path: str) -> Finding:
    free = free_bytes(path)
    found = f"{free / 2**30:.1f} GiB free"
    if free < LEAST_FREE:
        fix = "free some there; `swarm-kv plan` tells what a context takes"
        return Finding(path, "space", "warning", found, fix)
    return Finding(path, "space", "ok", found)


def _direct(path: str, direct: bool, notes: Sequence[str]) -> Finding:
    if direct:
        return Finding(path, "O_DIRECT", "ok", "a block was written and read back")
    reason = re.search(r"direct I/O does not work here \((.+?) \(errno", "\n".join(notes))
    why = f" ({reason[1]})" if reason else ""
    found = f"does not work here{why}: reads and writes go through the page cache"
    fix = "use a local ext4 or xfs file system"
    return Finding(path, "O_DIRECT", "warning", found, fix)


def _alignment(path: str, block: int) -> Finding:
    found = f"requests of whole blocks of {block} bytes"
    align = dio_alignment(path)
    if align is not None:
        found += f" (the file system asks for {align[1]}, in memory {align[0]})"
    if block > 512:
        found += f"; entries below {block} bytes are read in whole blocks"
    return Finding(path, "alignment", "ok", found)


def gpu_direct_obstacle(path: str) -> str:
    """Why engine "gds" does not work on a directory; empty where it moves a block."""
    config = SwarmConfig(
        paths=[path],
        engine="gds",
        dram_bytes="8MiB",
        staging_bytes="4MiB",
        device_model=GIVEN_MODEL,
    )
    with quiet_store(config) as store:
        notes = "\n".join(store.notes())
    reason = re.search(r"GPUDirect Storage cannot be used here: (.+); engine", notes)
    return reason[1] if reason else ""


def _gpu_direct(path: str) -> Finding:
    """It is for who asks for it, so that what does not work is no warning."""
    obstacle = gpu_direct_obstacle(path)
    if obstacle:
        return Finding(path, GPU_DIRECT, "ok", f'not for engine "gds": {obstacle}')
    found = 'engine "gds" wrote a block and read it back'
    if not (PROC / "driver/nvidia-fs").exists():
        found += "; nvidia-fs is not loaded, so that data may pass through host memory"
    return Finding(path, GPU_DIRECT, "ok", found)


# ---- all drives together


def _measured(findings: list[Finding], test: DriveTest) -> Report:
    """What the drives deliver, and whether the page cache had a hand in it."""
    found, paths = list(findings), test.paths
    try:
        with test:
            speeds = [test.speed(number) for number in range(len(paths))]
            together = test.read(LARGE) if len(paths) > 1 else None
            cached = [test.cached_share(number) for number in range(len(paths))]
    except SwarmError as error:
        subject = paths[0] if len(paths) == 1 else ALL_DRIVES
        return Report((*found, Finding(subject, "reads", "error", str(error))))
    for speed, share in zip(speeds, cached, strict=True):
        found.append(_page_cache(speed.path, share))
        found.append(_reads(speed))
    written = test.write_bytes_per_second
    if together is None:
        found.append(Finding(paths[0], "writes", "ok", f"{written / 1e9:.2f} GB/s"))
    else:
        found.append(_together(speeds, together))
        found.append(Finding(ALL_DRIVES, "writes", "ok", f"{written / 1e9:.2f} GB/s together"))
    return Report(tuple(found), tuple(speeds), together, written)


def _page_cache(path: str, share: float | None) -> Finding:
    if share is None:
        return Finding(path, "page cache", "ok", "not known: files there cannot be mapped")
    if share <= CACHED:
        return Finding(path, "page cache", "ok", "bypassed: nothing of the test file is in it")
    found = f"holds {share:.0%} of the test file: rates below are those of memory"
    fix = "use a local ext4 or xfs file system on the drive itself"
    return Finding(path, "page cache", "warning", found, fix)


def _reads(speed: Speed) -> Finding:
    found = (
        f"{speed.iops / 1e3:.1f} K of 4 KiB per second, {speed.bytes_per_second / 1e9:.2f} GB/s in "
        "256 KiB"
    )
    if speed.bytes_per_second > FASTEST:
        fix = "a cache of the host or in the drive's place answers: sizes above it will be slower"
        return Finding(speed.path, "reads", "warning", f"{found}: faster than any drive", fix)
    if speed.iops < SLOW_IOPS:
        fix = "use an SSD; of a cloud volume raise the provisioned operations per second"
        return Finding(speed.path, "reads", "warning", f"{found}: few for an SSD", fix)
    return Finding(speed.path, "reads", "ok", found)


def _together(speeds: Sequence[Speed], together: Rate) -> Finding:
    total = sum(speed.bytes_per_second for speed in speeds)
    share = together.bytes_per_second / total
    found = f"{together.bytes_per_second / 1e9:.2f} GB/s together, {share:.0%} of their sum"
    if share >= TOGETHER:
        return Finding(ALL_DRIVES, "reads", "ok", found)
    if together.cpu_share >= BUSY_CPU:
        return Finding(ALL_DRIVES, "reads", "ok", f"{found}: the CPU that reads is busy")
    fix = "they share a device, a link or a limit: look at slots, switches, RAID, volume limits"
    return Finding(ALL_DRIVES, "reads", "warning", found, fix)


def shared_drives(paths: Sequence[str]) -> Iterator[Finding]:
    """Whether each path has a drive of its own."""
    if len(paths) < 2:
        return
    fix = "give one directory per drive: a second one on the same drive adds nothing"
    shared = False
    for one, other in itertools.combinations(paths, 2):
        both = disks_of(one) & disks_of(other)
        if both:
            where = "the same drive " + ", ".join(map(disk_name, sorted(both)))
        elif os.stat(one).st_dev == os.stat(other).st_dev:
            where = "the same file system"
        else:
            continue
        shared = True
        found = f"{one} and {other} are on {where}"
        yield Finding(ALL_DRIVES, "drives", "warning", found, fix)
    if not shared:
        yield Finding(ALL_DRIVES, "drives", "ok", f"{len(paths)} paths on as many drives")


# ---- what the system tells


@dataclasses.dataclass(frozen=True)
class Mount:
    """A mounted file system: where, of which kind, and from what."""

    point: str
    kind: str
    source: str


def mount_of(path: str) -> Mount:
    """The mount that holds a path: of those that lead to it the longest, and of equals the last."""
    real = os.path.realpath(path)
    found = Mount("/", "unknown", "")
    for line in _text(PROC / "self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        inside = os.path.commonpath([point, real]) == point
        if inside and len(point) >= len(found.point):
            kind, source = rest.split()[:2]
            found = Mount(point, kind, source)
    return found


def disks_of(path: str) -> frozenset[str]:
    """Names of the whole drives under a path, such as nvme0n1; empty where the system tells none.

    Goes through partitions, RAID, logical volumes and loop devices.
    """
    device = os.stat(path).st_dev
    if os.major(device) == 0:  # btrfs and others have numbers of their own
        source = mount_of(path).source
        if not source.startswith("/") or not os.path.exists(source):
            return frozenset()
        device = os.stat(source).st_rdev
    return disks_of_device(device)


def disks_of_device(device: int) -> frozenset[str]:
    """The same of a block device, by its number."""
    node = SYS / f"dev/block/{os.major(device)}:{os.minor(device)}"
    return frozenset(_leaves(node.resolve())) if node.exists() else frozenset()


def _leaves(node: pathlib.Path) -> Iterator[str]:
    """Whole drives below a block device of sysfs."""
    if (node / "partition").exists():
        node = node.parent
    below = list((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    backing = _text(node / "loop/backing_file")
    if below:
        for slave in below:
            yield from _leaves(slave.resolve())
    elif backing and os.path.exists(backing):
        yield from disks_of(backing)
    else:
        yield node.name


def disk_name(disk: str) -> str:
    """With its model where the system tells it, and its NUMA node where there are several."""
    device = SYS / "block" / disk / "device"
    model = _text(device / "model")
    node = _text(device / "numa_node") or _text(device / "device/numa_node")
    several = len(list((SYS / "devices/system/node").glob("node[0-9]*"))) > 1
    told = [model] if model else []
    if several and node not in ("", "-1"):
        told.append(f"NUMA node {node}")
    return f"{disk} ({', '.join(told)})" if told else disk


def dio_alignment(path: str) -> tuple[int, int] | None:
    """Bytes that O_DIRECT asks addresses in memory and offsets in a file there to be multiples of.

    None where the kernel does not tell (statx before Linux 6.1).
    """
    dioalign, empty_path, memory_at, offset_at = 0x2000, 0x1000, 152, 156
    buffer = ctypes.create_string_buffer(256)
    with contextlib.suppress(OSError, AttributeError), tempfile.TemporaryFile(dir=path) as file:
        statx = ctypes.CDLL(None).statx
        if statx(file.fileno(), b"", empty_path, dioalign, buffer) == 0:
            mask = int.from_bytes(buffer.raw[0:4], "little")
            memory = int.from_bytes(buffer.raw[memory_at : memory_at + 4], "little")
            offset = int.from_bytes(buffer.raw[offset_at : offset_at + 4], "little")
            if mask & dioalign and offset:
                return memory, offset
    return None


def _text(path: pathlib.Path) -> str:
    """What a small file of the system says, or nothing where it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
