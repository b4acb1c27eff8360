"""The peers: what runs is compared, what cannot run is a reason and never a number."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Report, Unavailable
from benchmarks.peers import models, process, stores
from benchmarks.peers.process import Runner, last_line, program
from benchmarks.peers.registry import PEERS, REFERENCE, Peer
from benchmarks.peers.table import Parameters


def shown(table):
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def finished(peer, rate=2.0):
    row = models.Row(peer, seconds=[1 / rate] * 2, read=[1024.0] * 2, memory=2**20, peak=2**21)
    row.difference, row.kl, row.same = 0.0, 0.0, 1.0
    return row


def valid(report):
    result = harness.result_of("peers", Parameters(), report, quick=False)
    return [m["name"] for m in result["measurements"]], result["notes"]


def test_every_peer_has_a_runner():
    for name, peer in PEERS.items():
        runner = harness.ROOT / "benchmarks" / "peers" / "runners" / f"{peer.runner}.py"
        assert runner.exists(), name
        assert peer.drives in ("none", "one", "all")


def test_a_row_without_figures_is_a_reason_and_never_a_number():
    rows = {
        REFERENCE: finished(PEERS[REFERENCE]),
        "able": finished(Peer("torch_save"), rate=1.0),
        "unable": models.Row(Peer("ollm", "ollm"), reason="no such luck"),
    }
    report = Report()
    models.report_rows(rows, report)
    names, notes = valid(report)
    assert "able: tokens per second" in names
    assert not [name for name in names if name.startswith("unable")]
    assert notes == ["unable: cannot run here: no such luck"]
    ratio = next(
        m for m in report.measurements if "/ DynamicCache" in m["name"] and "able" in m["name"]
    )
    assert ratio["raw"] == [0.5, 0.5]
    (line,) = [line for line in shown(models.table(rows)).splitlines() if "unable" in line]
    assert "cannot run here" in line


def test_stores_without_figures_too():
    rows = [
        stores.Row("able", 65536, drives=4e6, rates=[2e6, 3e6]),
        stores.Row("unable", 65536, drives=4e6, reason="no such luck"),
    ]
    report = Report()
    stores.report_rows(rows, report)
    names, notes = valid(report)
    assert names == ["able, 64 KiB: read", "able, 64 KiB: of its drives' sum"]
    assert report.measurements[1]["raw"] == [0.5, 0.75]
    assert notes == ["unable, 64 KiB: cannot run here: no such luck"]
    assert "cannot run here" in shown(stores.table(rows))


def test_a_missing_environment_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    with pytest.raises(Unavailable, match=r"run scripts/setup\.sh peers"):
        program("ollm")
    binary = tmp_path / "ollm" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    binary.touch(mode=0o755)
    assert program("ollm") == binary


def test_a_runner_that_fails_says_why():
    runner = Runner("none_of_that_name")
    try:
        with pytest.raises(Unavailable, match=r"No module named .*none_of_that_name"):
            runner.ask(60, any=1)
    finally:
        runner.close()
    assert last_line("Traceback:\n  here\nValueError: 3\n\n") == "ValueError: 3"
    assert last_line("a.B.CError: 4\nmore about it\n") == "a.B.CError: 4"
    assert last_line("one\ntwo\n") == "two"
    assert last_line("") == "no message"


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Runners are this program, in Python."""

    def use(text):
        file = tmp_path / "stand_in"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        monkeypatch.setattr(process, "program", lambda environment: file)
        return Runner("any")

    return use


def test_a_runner_answers_until_it_is_closed(stand_in):
    runner = stand_in('while read -r line; do echo "$line" >"/dev/fd/$3"; done')
    assert runner.ask(10, steps=3) == {"steps": 3}
    assert runner.ask(10, evict=True) == {"evict": True}
    runner.close()


def test_a_runner_that_hangs_is_given_up(stand_in, monkeypatch):
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)
    runner = stand_in("exec sleep 60")
    with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
        runner.ask(0.2, steps=1)
    runner.close()


def test_other_logits_show(tmp_path):
    full = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    contestant = models.Contestant("any", PEERS[REFERENCE], tmp_path / "logits")
    (row,) = contestant.rows.values()

    def compared(own):
        own.numpy().tofile(contestant.logits)
        contestant.compare(full)
        return row.difference, row.kl, row.same

    assert compared(full) == (0, pytest.approx(0, abs=1e-6), 1)
    # Fewer steps are compared with as many of full attention.
    assert compared(full[:2])[0] == 0
    other = full.clone()
    other[1, full[1].argmax()] -= 10
    difference, kl, same = compared(other)
    assert difference == pytest.approx(10)
    assert kl > 0.1
    assert same == 0.75


@pytest.fixture
def task(tiny_model, tmp_path):
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "model")
    folders = [tmp_path / "drive0", tmp_path / "drive1"]
    for folder in folders:
        folder.mkdir()
    ids = torch.randint(model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(1))
    task = models.Task(
        tmp_path / "model", ids.tolist(), 48, 1, 2, 8, folders=folders, dram_share=1.0
    )
    return task, model.config.vocab_size


@pytest.mark.slow
def test_a_peer_from_end_to_end(task):
    task, vocabulary = task
    peers = {
        REFERENCE: PEERS[REFERENCE],
        "saved": PEERS["torch.save per layer"],
        "missing": Peer("none_of_that_name"),
    }
    rows = models.run(task, peers, vocabulary)
    assert list(rows) == [REFERENCE, "saved", "saved" + models.WARM, "missing"]
    for name in (REFERENCE, "saved", "saved" + models.WARM):
        assert rows[name].reason == ""
        assert rows[name].difference < 1e-5
        assert rows[name].same == 1
        assert len(rows[name].seconds) == task.repeats
    assert rows["saved"].read[0] > rows["saved" + models.WARM].read[0] == 0
    assert rows["saved"].read[0] > 0
    assert "none_of_that_name" in rows["missing"].reason
    assert rows["missing"].seconds == []
