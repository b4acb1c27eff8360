"""`python -m benchmarks tasks`: what it reports, with and without peers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import harness, page, tasks
from benchmarks.harness import Report
from benchmarks.peers import answers as peers
from benchmarks.peers.registry import PEERS, REFERENCE, Peer
from swarm_kv import eval as evaluation
from tests.letters import Letters


@pytest.fixture
def tiny(tiny_model, monkeypatch, tmp_path):
    """A random model in place of the real one, also in the folder that peers load."""
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(tasks.models, "load", lambda name: (model, Letters()))
    monkeypatch.setattr(tasks.models, "converted", lambda name: tmp_path / "model")
    return model


SMALL = tasks.Parameters(context=1024, steps=6, questions=1, methods=("quest",), peers=("missing",))


def test_every_figure_is_reported_and_a_peer_that_cannot_run_is_a_note(
    tiny, monkeypatch, tmp_path, capfd
):
    monkeypatch.setitem(tasks.PEERS, "missing", Peer("none_of_that_name", "no_such_environment"))
    report = Report()
    tasks.run(SMALL, report)
    result = harness.result_of("tasks", SMALL, report, quick=False)
    names = {m["name"] for m in result["measurements"]}
    for method in ("full attention", "swarm_kv", "Quest", "StreamingLLM"):
        for task in evaluation.TASKS:
            assert f"{method}: {task}" in names
        assert f"{method}: mean KL(full || this)" in names
    assert not [name for name in names if name.startswith("missing")]
    assert any(
        note.startswith("missing: cannot run here: not installed") for note in result["notes"]
    )
    goals = [check["name"] for check in result["checks"]]
    assert "mean KL(full || sparse)" in goals
    assert "|perplexity / full attention - 1|" in goals
    for task in evaluation.TASKS:
        assert f"{task}: points below full attention" in goals
        assert f"{task}: points that StreamingLLM loses" in goals
    lines = tasks.table(result).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "full attention",
        "swarm_kv",
        "Quest",
        "StreamingLLM",
    ]
    assert len({line.count("|") for line in lines}) == 1
    tasks.plot(json.loads(json.dumps(result)), tmp_path / "picture.svg")
    assert "Quest" in (tmp_path / "picture.svg").read_text()
    assert "Quest" in page.text({"tasks": result}, page.pathlib.Path("results"))
    assert "Quest" in capfd.readouterr().err


def test_goals_are_missed_where_answers_are_lost():
    def method(name, first, kl):
        found = evaluation.Comparison(8, 10.0, 10.0 * (1 + kl), 1 + kl, kl, 0.9)
        case = evaluation.Answer("12345", (0.5,), 50, first, -1.0)
        answers = {task: evaluation.Answers((case,)) for task in evaluation.TASKS}
        return evaluation.MethodResult(name, found, answers, 1.0)

    def failed(default, control):
        report = Report()
        full = method("full attention", 50, 0.0)
        results = evaluation.Results("any", 1, 0.1, "any", 0, full, (default, control))
        tasks.report_checks(results, default, control, report)
        return {check["name"] for check in report.checks if not check["holds"]}

    good, bad = method("default", 49, 0.01), method("StreamingLLM", 5, 2.0)
    assert failed(good, bad) == set()
    assert failed(method("default", 48, 0.01), bad) == {
        f"{task}: points below full attention" for task in evaluation.TASKS
    }
    assert failed(method("default", 50, 0.02), bad) == {
        "|perplexity / full attention - 1|",
        "mean KL(full || sparse)",
    }
    assert failed(good, method("StreamingLLM", 49, 2.0)) == {
        f"{task}: points that StreamingLLM loses" for task in evaluation.TASKS
    }


@pytest.mark.slow
def test_a_peer_that_keeps_everything_is_full_attention(tiny, tmp_path):
    trial = evaluation.make_trial(Letters(), 1536, list(evaluation.TASKS), questions=2, following=9)
    reference = evaluation.measure_full(tiny, trial)
    found = peers.measure("same", PEERS[REFERENCE], tmp_path / "model", trial, reference, 128)
    assert found.predictions.mean_kl == pytest.approx(0, abs=1e-5)
    for task, answers in found.answers.items():
        assert answers.log_prob == pytest.approx(reference.result.answers[task].log_prob, abs=1e-3)
    # Control: another context gives other answers.
    other = dataclasses.replace(trial, context=trial.context.flip(1))
    different = peers.measure("other", PEERS[REFERENCE], tmp_path / "model", other, reference, 128)
    assert different.predictions.mean_kl > 0.05
