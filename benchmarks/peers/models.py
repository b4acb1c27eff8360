"""Model-level peers: one model, one text, one token at a time, the peers in turn.

All peers decode the true continuation of the text (teacher-forced), so that all see the same
tokens. Each is a process of its own that stays alive: every repetition is a few steps of each peer
in turn, and a busy moment of the machine meets all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table
from tqdm import tqdm

from benchmarks.harness import Report, Unavailable
from benchmarks.peers.process import Runner
from benchmarks.peers.registry import REFERENCE, Peer
from swarm_kv.eval import kl_divergence

WARM = " (page cache warm)"
LOAD_SECONDS = 300.0
STEP_SECONDS = 30.0
"""Time limits: to load and prefill, and per step."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What all peers do.

    Attributes:
        model: directory with weights.
        ids: the text; `tokens` says how long.
        context: tokens before the first decoded one.
        repeats, steps: repetitions, and steps in each.
        compared: steps over which lossy peers are compared with full attention, at least.
        folders: one on each drive.
        dram_share: memory of swarm_kv, as a share of the KV of `context` tokens.
    """

    model: pathlib.Path
    ids: Sequence[int]
    context: int
    repeats: int
    steps: int
    compared: int
    folders: Sequence[pathlib.Path]
    dram_share: float

    @staticmethod
    def tokens(context: int, repeats: int, steps: int, compared: int) -> int:
        """Tokens that the text must have: a warm-up, and two rows with one more for the second."""
        return context + max(compared, 1 + repeats * (2 * steps + 1))


@dataclasses.dataclass
class Row:
    """Figures of one peer, or why there are none.

    Attributes:
        seconds, read: of each repetition, per step; read from drives, in bytes.
        memory, peak: by which the process grew, in bytes.
        prefill: seconds; for a peer on files those of `REFERENCE` and its own.
        difference: largest |logit - logit of full attention|.
        kl: mean KL(full || this), in nats. same: share of steps with the same first token.
    """

    peer: Peer
    reason: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    read: list[float] = dataclasses.field(default_factory=list)
    memory: float = 0.0
    peak: float = 0.0
    prefill: float = 0.0
    difference: float = math.nan
    kl: float = math.nan
    same: float = math.nan

    @property
    def rates(self) -> list[float]:
        """Tokens per second."""
        return [1 / seconds for seconds in self.seconds]


class Contestant:
    """One peer at work, and its rows."""

    def __init__(self, name: str, peer: Peer, logits: pathlib.Path) -> None:
        self.name, self.peer, self.logits = name, peer, logits
        # Evicted first: what a warm repetition reads is then in the page cache, from the first one
        # on after one step that is not counted.
        self.rows = {name: Row(peer)}
        if peer.buffered:
            self.rows[name + WARM] = Row(peer)
        self.steps = 0
        self._runner: Runner | None = None

    @property
    def failed(self) -> bool:
        return any(row.reason for row in self.rows.values())

    def start(self, task: Task) -> None:
        """Begin to load; `wait` returns when that is done."""
        count = {"none": 0, "one": 1, "all": len(task.folders)}[self.peer.drives]
        folders = [folder / f"{self.logits.stem}" for folder in task.folders[:count]]
        for folder in folders:
            folder.mkdir()
        options = dict(self.peer.options)
        if self.peer.runner == "swarm":
            options["dram_share"] = task.dram_share
        with self._reporting():
            self._runner = Runner(self.peer.runner, self.peer.environment)
            self._runner.send(
                model=str(task.model),
                ids=list(task.ids),
                context=task.context,
                folders=[str(folder) for folder in folders],
                options=options,
                logits=str(self.logits),
            )

    def wait(self) -> None:
        """Until it has loaded."""
        if not self.failed:
            with self._reporting():
                assert self._runner is not None
                self._runner.receive(LOAD_SECONDS)

    def prefill(self, computed: pathlib.Path, reference: Contestant) -> None:
        """Feed the context. Peers on files are given what `reference`, the first, has computed.

        Args:
            computed: file with the context's keys and values.
            reference: whose cache they come from.
        """
        shared = {}
        if self is reference:
            shared["keep"] = str(computed)
        elif self.peer.buffered:
            shared["given"] = str(computed)
        done = self._ask(LOAD_SECONDS, **shared)
        for row in self.rows.values() if done else ():
            row.prefill, row.memory = done["seconds"], done["memory"]
            if self.peer.buffered:
                row.prefill += reference.rows[REFERENCE].prefill

    def repeat(self, steps: int) -> None:
        """One repetition for each row."""
        for number, row in enumerate(self.rows.values()):
            if number:
                self.step(1, evict=False)  # fills the page cache
            done = self.step(steps, evict=self.peer.buffered and not number)
            if done:
                row.seconds.append(done["seconds"] / steps)
                row.read.append(done["read_bytes"] / steps)
                row.memory = max(row.memory, done["memory"])
                row.peak = max(row.peak, done["peak"])

    def step(self, steps: int, *, evict: bool) -> dict[str, Any]:
        """Decode; empty when the peer has failed."""
        done = self._ask(STEP_SECONDS * steps, steps=steps, evict=evict)
        self.steps += steps
        return done

    def _ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if not self.failed:
            with self._reporting():
                assert self._runner is not None
                answer = self._runner.ask(timeout_s, **request)
        return answer

    def compare(self, full: torch.Tensor) -> None:
        """Set how close the rows are to full attention, float32 `[steps, vocabulary]`."""
        own = rows_of(self.logits, full.shape[1])
        full = full[: len(own)]
        kl = kl_divergence(full.log_softmax(-1), own.log_softmax(-1)).mean().item()
        for row in self.rows.values():
            row.difference = (full - own).abs().max().item()
            row.kl = kl
            row.same = (full.argmax(-1) == own.argmax(-1)).float().mean().item()

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """What fails is the reason why this peer has no figures."""
        try:
            yield
        except Unavailable as error:
            self.rows = {name: Row(self.peer, reason=str(error)) for name in self.rows}


def rows_of(file: pathlib.Path, vocabulary: int) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(file, dtype=np.float32)).view(-1, vocabulary)


def run(task: Task, peers: Mapping[str, Peer], vocabulary: int) -> dict[str, Row]:
    """Let the peers, of which `REFERENCE` is one, decode in turn.

    Raises:
        Unavailable: full attention itself failed.
    """
    with tempfile.TemporaryDirectory(prefix="swarm_kv_peers_") as scratch:
        contestants = {
            name: Contestant(name, peer, pathlib.Path(scratch) / f"peer{number}.f32")
            for number, (name, peer) in enumerate(peers.items())
        }
        try:
            for each in contestants.values():
                each.start(task)
            for each in contestants.values():
                each.wait()
            reference = contestants[REFERENCE]
            computed = pathlib.Path(scratch) / "context.pt"
            for each in tqdm(contestants.values(), desc="peers prefill", disable=None):
                each.prefill(computed, reference)
            for each in contestants.values():
                each.step(1, evict=False)  # warms up
            order = list(contestants.values())
            for _ in tqdm(range(task.repeats), desc="peers decode", disable=None):
                for each in order:
                    each.repeat(task.steps)
                order = order[1:] + order[:1]
            # Lossy peers are compared over more tokens; those with two rows have had more.
            most = max(task.compared, *(each.steps for each in contestants.values()))
            for each in contestants.values():
                if each is reference or not each.peer.exact:
                    each.step(most - each.steps, evict=False)
            if reference.failed:
                raise Unavailable(f"{REFERENCE}: {reference.rows[REFERENCE].reason}")
            full = rows_of(reference.logits, vocabulary)
            for each in contestants.values():
                if not each.failed:
                    each.compare(full)
        finally:
            for each in contestants.values():
                each.close()
        return {name: row for each in contestants.values() for name, row in each.rows.items()}


def report_rows(rows: Mapping[str, Row], report: Report) -> None:
    """Every figure; a row without figures is a note with the reason."""
    base = rows[REFERENCE].rates
    for name, row in rows.items():
        if row.reason:
            report.note(f"{name}: cannot run here: {row.reason}")
            continue
        report.measure(f"{name}: tokens per second", "token/s", row.rates)
        ratios = [own / full for own, full in zip(row.rates, base, strict=True)]
        report.measure(f"{name}: tokens per second / DynamicCache", "ratio", ratios)
        report.measure(f"{name}: read per token", "B", row.read)
        report.measure(f"{name}: memory for KV", "B", row.memory)
        report.measure(f"{name}: memory, peak", "B", row.peak)
        report.measure(f"{name}: time to prefill", "s", row.prefill)
        report.measure(f"{name}: max |logit - full|", "", row.difference)
        report.measure(f"{name}: mean KL(full || this)", "nats", row.kl)
        report.measure(f"{name}: same first token", "share", row.same)


def table(rows: Mapping[str, Row]) -> Table:
    """One line per row, also for those that could not run."""
    shown = Table(title="peers: decoding, teacher-forced")
    shown.add_column("peer")
    for heading in (
        "drives",
        "tokens/s",
        "/ memory",
        "read/token",
        "KV held",
        "peak",
        "max |Δ logit|",
        "KL",
        "same token",
        "prefill",
    ):
        shown.add_column(heading, justify="right")
    base = statistics.median(rows[REFERENCE].rates)
    for name, row in rows.items():
        if row.reason:
            shown.add_row(name, row.peer.drives, "cannot run here")
            continue
        rate = statistics.median(row.rates)
        shown.add_row(
            name,
            row.peer.drives,
            f"{rate:.2f}",
            f"{rate / base:.2f}",
            mib(statistics.median(row.read)),
            mib(row.memory),
            mib(row.peak),
            f"{row.difference:.1e}",
            f"{row.kl:.1e}",
            f"{row.same:.0%}",
            f"{row.prefill:.1f} s",
        )
    return shown


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
