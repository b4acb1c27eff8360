"""Work in a forked child: what changes a process for good, is ended, or wants a terminal.

A fork, because a new interpreter takes many seconds to import everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
import traceback
from collections.abc import Callable
from typing import Any

LIMIT = 120
"""Seconds after which a child ends itself."""


def start(work: Callable[[], object], output: int) -> int:
    """Start a child that writes to the descriptor `output`; returns its process.

    It exits with 0, with the code of a SystemExit, or with 1 and a traceback.
    """
    sys.stdout.flush(), sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.alarm(LIMIT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def terminal() -> tuple[int, int]:
    """Both sides of a terminal of 80 columns: what is written to the second comes to the first."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return ours, theirs


def written(descriptor: int) -> str:
    """All that comes through a pipe or a terminal until its other side closes."""
    pieces = []
    with contextlib.suppress(OSError):  # how a terminal says that
        while piece := os.read(descriptor, 65536):
            pieces.append(piece)
    os.close(descriptor)
    return b"".join(pieces).decode()


def finished(process: int) -> int:
    """Exit status of a child, minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def output_of(work: Callable[[], object], to: Callable[[], tuple[int, int]] = os.pipe) -> str:
    """What `work` writes to a pipe or a `terminal`; fails where it does."""
    ours, theirs = to()
    process = start(work, theirs)
    os.close(theirs)
    text = written(ours)
    assert finished(process) == 0, text
    return text


def result_of(work: Callable[[], Any]) -> Any:
    """What `work` returns, by way of JSON."""
    return json.loads(output_of(lambda: print("\n" + json.dumps(work()))).splitlines()[-1])
