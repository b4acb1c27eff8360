"""The check of a GPU where there is none: its steps run on the CPU, and it says what is not."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import harness, page
from benchmarks.gpu import check, model, timing
from benchmarks.registry import BENCHMARKS

ROOT = pathlib.Path(__file__).parents[1]
SMALL = check.Parameters(
    device="cpu",
    repeats=2,
    context=1024,
    copy_bytes=1 << 20,
    link_bytes=1 << 20,
    width=64,
    model="random",
    prompt=300,
    tokens=4,
)
UNTIMED = ("layout", "tests", "model", "storage")
"""Steps whose goals say something on a CPU too."""


@pytest.mark.parametrize("name", check.STEPS)
def test_each_step_runs_on_the_cpu(name, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", str(tmp_path / "cufile.log"))
    passing = tmp_path / "test_passing.py"
    passing.write_text("def test_it():\n    assert True\n")
    parameters = dataclasses.replace(SMALL, tests=str(passing))
    report = harness.Report()
    check.STEPS[name].load().run(parameters, report)
    assert report.measurements or report.checks
    assert all(one["name"].startswith(f"{name}: ") for one in report.measurements + report.checks)
    harness.result_of("gpu_check", parameters, report, quick=False)  # its form is right
    missed = {one["name"] for one in report.checks if not one["holds"]}
    assert missed == set() or name not in UNTIMED
    assert "kernels: attention: distance from SDPA" not in missed


def test_steps_fit_into_eight_minutes():
    assert sum(step.seconds for step in check.STEPS.values()) < check.Parameters.seconds <= 470
    late = harness.Report()
    late._began -= 1000
    check.run(dataclasses.replace(SMALL, steps=("layout",)), late)
    assert late.notes == ["layout: not finished: took longer than 0 s"]


def test_a_step_that_is_cut_or_fails_stops_no_other(monkeypatch, tmp_path):
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", str(tmp_path / "cufile.log"))
    for name, step in check.STEPS.items():
        seconds = 0.2 if name == "kernels" else 200  # for a machine that is busy
        monkeypatch.setitem(check.STEPS, name, dataclasses.replace(step, seconds=seconds))
    parameters = dataclasses.replace(
        SMALL, steps=("kernels", "layout", "storage"), device="no_such"
    )
    report = harness.Report()
    check.run(parameters, report)
    finished = {one["name"]: one["holds"] for one in report.checks}
    assert finished == {
        "kernels: finished": False,
        "layout: finished": False,
        "storage: finished": True,
    }
    assert "kernels: not finished: took longer than 0.2 s" in report.notes
    assert any("layout: not finished: " in note and "no_such" in note for note in report.notes)
    assert [one["name"] for one in report.measurements] == ["storage: GPUDirect Storage works"]
    harness.result_of("gpu_check", parameters, report, quick=False)


def test_unknown_steps_and_a_missing_gpu_are_refused(monkeypatch):
    with pytest.raises(harness.Unavailable, match="choose among layout"):
        check.run(dataclasses.replace(SMALL, steps=("dance",)), harness.Report())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(harness.Unavailable, match="no GPU here"):
        check.run(check.Parameters(), harness.Report())
    assert command.main(["gpu_check"]) == 1


def test_failed_tests_are_told(tmp_path):
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_it():\n    assert 1 == 2\n")
    report = harness.Report()
    check.STEPS["tests"].load().run(dataclasses.replace(SMALL, tests=str(failing)), report)
    assert [(one["name"], one["value"]) for one in report.checks] == [("tests: failed", 1)]
    assert "failed: test_it: assert 1 == 2" in report.notes[0]


def test_texts_are_compared_as_far_as_they_are_the_same():
    log_probs = torch.randn(4, 9).log_softmax(-1)
    one = model.Text(torch.tensor([1, 2, 3, 4]), log_probs, 0.0)
    other = model.Text(torch.tensor([1, 7, 3, 4]), log_probs.flip(0), 0.0)
    assert len(one.kl(one)) == 4
    assert one.kl(one).abs().max() == 0
    assert len(one.kl(other)) == 2
    assert one.kl(other).max() > 0


def test_the_clock_counts_the_call():
    clock = timing.Clock("cpu")
    taken = clock.in_turn({"wait": lambda: timing.time.sleep(0.02), "none": lambda: None}, 3)
    assert len(taken["wait"]) == len(taken["none"]) == 3
    assert min(taken["wait"]) >= 0.02
    assert min(taken["none"]) < 0.02


def test_the_page_says_that_it_was_not_run():
    text = page.text({"gpu_check": None}, pathlib.Path("results"))
    assert "| not run: no GPU here |" in text
    assert "Not run: no GPU here." in text
    assert BENCHMARKS["gpu_check"].elsewhere


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not (ROOT / "scripts").exists():
        pytest.skip("the scripts are not here")
    return subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_script_refuses_with_a_status_of_its_own(tmp_path):
    wheel = tmp_path / "swarm_kv-0-py3-none-any.whl"
    assert run_script().returncode == 2
    absent = run_script(str(wheel))
    assert (absent.returncode, "there is no wheel" in absent.stderr) == (2, True)
    wheel.touch()
    result = tmp_path / "result.json"
    refused = run_script(str(wheel), sys.executable, str(result))
    assert refused.returncode == 3
    assert "no GPU is here" in refused.stderr
    assert not result.exists()


@pytest.mark.slow
def test_the_script_runs_a_wheel(tmp_path):
    """All of it but the GPU, which a Python that says there is one stands in for."""
    wheel = tmp_path / "swarm_kv-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (ROOT / "swarm_kv").rglob("*"):
            if path.suffix in (".py", ".so") and path.name != "_C_cuda.so":
                archive.write(path, path.relative_to(ROOT))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *is_available*) exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    result = tmp_path / "result.json"
    options = ["--set", "device=cpu", "--set", "steps=layout"]
    done = run_script(str(wheel), str(python), str(result), *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    harness.validate(found)
    assert found["unavailable"] is None
    assert all(one["holds"] for one in found["checks"])
    assert result.with_suffix(".svg").exists()


def test_a_fragment_is_what_the_parent_takes(tmp_path):
    found = tmp_path / "report.json"
    given = json.dumps({**dataclasses.asdict(SMALL), "paths": []})
    check.main(["layout", given, str(found)])
    assert set(json.loads(found.read_text())) == {"measurements", "checks", "notes"}
