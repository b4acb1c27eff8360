"""A process that holds something until its standard input ends, which it does with this one."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.harness import Unavailable


@contextlib.contextmanager
def kept(
    command: Sequence[str | os.PathLike[str]],
    refused: str,
    start_seconds: float,
    stop_seconds: float,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that prints `ready`; when the context ends, it has ended.

    Args:
        command: what to run.
        refused: what the error says when it does not get ready, before its own words.
        start_seconds: that it may take to get ready. stop_seconds: to end before it is killed.

    Raises:
        Unavailable: it did not get ready.
    """
    with tempfile.TemporaryFile("w+") as messages:
        # In a session of its own: Ctrl-C is for the benchmark, which still has files to close.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            readable, _, _ = select.select([process.stdout], [], [], start_seconds)
            if not readable or process.stdout.readline() != b"ready\n":
                messages.seek(0)
                raise Unavailable(f"{refused}: {messages.read().strip() or 'no answer'}")
            yield process
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(stop_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
