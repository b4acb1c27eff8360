"""File systems on stand-in drives, for programs that know files only.

An ext4 on a loop device on each simulated SSD. Direct reads and what the page cache lacks are
throttled as on the drive itself; what is in the page cache is not: whoever measures evicts it.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from benchmarks.drives import Drives
from benchmarks.drives.child import kept

START_SECONDS = 60.0
STOP_SECONDS = 20.0

# Waits for its standard input to end, which it does with the process that wants the file system,
# however that ends. Detached at once, the loop device goes with the mount.
SCRIPT = """
set -e
loop=$(losetup --find --show --direct-io=on --sector-size 4096 "$1")
trap 'losetup --detach "$loop"; rmdir "$2"' EXIT
mkfs.ext4 -q -m 0 -O ^has_journal -E nodiscard,lazy_itable_init=0 "$loop"
mount -o noatime "$loop" "$2"
trap 'umount "$2" || umount --lazy "$2"; rmdir "$2"' EXIT
losetup --detach "$loop"
echo ready
read -r _ || true
"""


@contextlib.contextmanager
def file_systems(drives: Drives) -> Iterator[tuple[pathlib.Path, ...]]:
    """Make a file system on each drive, which loses its contents; yields their directories.

    Drives that are files on a disk give directories on that disk.

    They are gone when the context ends, however it ends, and when this process is killed.

    Raises:
        Unavailable: there are no loop devices here, or no ext4.
    """
    with contextlib.ExitStack() as stack:
        if drives.throttled:
            with drives.unthrottled():
                folders = [stack.enter_context(_mounted(file)) for file in drives.files]
        else:
            folders = [
                pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=file.parent)))
                for file in drives.files
            ]
        yield tuple(folders)


@contextlib.contextmanager
def _mounted(drive: pathlib.Path) -> Iterator[pathlib.Path]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="swarm_kv_files_"))
    command = ["sh", "-c", SCRIPT, "sh", drive, folder]
    with kept(command, f"no file system can be made on {drive}", START_SECONDS, STOP_SECONDS):
        yield folder
