"""Runners as processes of their environments."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.harness import ROOT, Unavailable

ENVIRONMENTS = ROOT / ".venv-peers"
STOP_SECONDS = 10.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Nothing is fetched, and nothing is told to anyone."""


def program(environment: str, name: str = "python") -> pathlib.Path:
    """A program of an environment of `scripts/setup.sh peers`; this Python if that is empty.

    Raises:
        Unavailable: it is not there.
    """
    if not environment:
        return pathlib.Path(sys.executable)
    path = ENVIRONMENTS / environment / "bin" / name
    if not os.access(path, os.X_OK):
        raise Unavailable("not installed: run scripts/setup.sh peers")
    return path


def last_line(text: str) -> str:
    """The last line that names an error, as Python does, else the last that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (errors or lines or ["no message"])[-1]


class Runner:
    """A running runner. It ends when this process does.

    Args:
        module: of benchmarks.peers.runners.
        environment: that it runs in, see `program`.

    Raises:
        Unavailable: the environment is not there.
    """

    def __init__(self, module: str, environment: str = "") -> None:
        python = program(environment)
        self._messages = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in `close`
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.runners.{module}", str(answers)],
            stdin=subprocess.PIPE,
            stdout=self._messages,
            stderr=subprocess.STDOUT,
            pass_fds=[answers],
            cwd=ROOT,
            env=os.environ | QUIET,
            start_new_session=True,
        )
        os.close(answers)

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Unavailable: the runner failed, with its last message, or took longer than `timeout_s`.
        """
        self.send(**request)
        return self.receive(timeout_s)

    def send(self, **request: Any) -> None:
        """Send a request; its answer is to be received before the next one.

        Raises:
            Unavailable: the runner failed, with its last message.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            Unavailable: the runner failed, with its last message, or took longer than `timeout_s`.
        """
        line, deadline = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            readable, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            if not readable:
                raise Unavailable(f"no answer within {timeout_s:g} s")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise self._failure()
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> Unavailable:
        self._process.wait()
        self._messages.seek(0)
        return Unavailable(last_line(self._messages.read()))

    def close(self) -> None:
        assert self._process.stdin is not None
        # It may have ended with a request unread.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._messages.close()
