"""A store in a process of its own: what it says, and what it reads."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ENTRIES = 500


def run(
    drives: list[str], settings: dict[str, Any], prefix: Sequence[str] = (), **environment: str
) -> dict[str, Any]:
    """The store's `engine` and `warnings`, a `digest` of the entries that it wrote and read back,
    and `reads`, those that a stand-in of cuFile counted, None without one.

    Args:
        drives, settings: of the store.
        prefix: of the command, such as a program that runs it.
        environment: beside this process's.
    """
    done = subprocess.run(
        [*prefix, sys.executable, "-m", __name__, json.dumps(settings), *drives],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Collect(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def stand_in_reads() -> int | None:
    try:
        return ctypes.c_uint64.in_dll(ctypes.CDLL("libcufile.so.0"), "stand_in_reads").value
    except (OSError, ValueError):
        return None


def main(settings: dict[str, Any], drives: list[str]) -> None:
    collected = Collect()
    logging.getLogger("swarm_kv").addHandler(collected)  # before it is imported

    import torch

    from swarm_kv.config import SwarmConfig
    from swarm_kv.store import Store

    from .helpers import Data, fetch_all

    store = Store(SwarmConfig(paths=drives, dram_bytes="8MiB", **settings))
    data = Data.random(ENTRIES, 2, 40)
    segment = data.write(store)
    got = fetch_all(store, segment, data, entries=torch.arange(ENTRIES))
    digest = hashlib.sha256()
    for number in range(ENTRIES):
        digest.update(got[number].numpy().tobytes())
    result = {"engine": store.stats().engine, "warnings": collected.lines}
    print(json.dumps({**result, "digest": digest.hexdigest(), "reads": stand_in_reads()}))
    store.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
