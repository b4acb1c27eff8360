"""The benchmark harness: what it writes is complete, valid and says so when a goal is missed."""

from __future__ import annotations

import dataclasses
import json
import types

import jsonschema
import pytest

from benchmarks import __main__ as command
from benchmarks import harness, rings
from benchmarks.registry import BENCHMARKS


@dataclasses.dataclass(frozen=True)
class Parameters:
    size: int = 8
    share: float = 0.5
    paths: tuple[str, ...] = ()
    text: str = ""
    seed: int = 3


def run(parameters, report):
    report.measure("time", "s", [2.0, 1.0, 4.0])
    report.measure("size", "B", parameters.size)
    report.at_most("time", 2.0, 1.0)
    report.at_least("size", parameters.size, 8)
    report.note("made up")


@pytest.fixture
def fake(monkeypatch):
    module = types.SimpleNamespace(Parameters=Parameters, QUICK={"size": 4}, run=run)
    entry = types.SimpleNamespace(summary="a fake", load=lambda: module)
    monkeypatch.setitem(BENCHMARKS, "fake", entry)
    return module


def test_result_file_and_picture(fake, tmp_path, capsys):
    file, picture = tmp_path / "result.json", tmp_path / "result.png"
    status = command.main(["fake", "--json", str(file), "--plot", str(picture)])
    assert status == 0  # although a goal is missed
    result = json.loads(file.read_text())
    harness.validate(result)
    time, size = result["measurements"]
    assert time == {
        "name": "time",
        "unit": "s",
        "raw": [2.0, 1.0, 4.0],
        "median": 2.0,
        "spread": 1.5,
    }
    assert size["median"] == 8
    assert [c["holds"] for c in result["checks"]] == [False, True]
    assert result["seed"] == 3
    assert result["parameters"]["size"] == 8
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["torch"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "1 of 2 goals do not hold: time" in shown
    assert "made up" in shown


def test_quick_and_set_change_parameters(fake, tmp_path):
    file = tmp_path / "result.json"
    command.main(
        ["fake", "--quick", "--set", "share=1", "--set", "paths=/a,/b", "--json", str(file)]
    )
    result = json.loads(file.read_text())
    assert result["quick"] is True
    assert result["parameters"] == {
        "size": 4,
        "share": 1.0,
        "paths": ["/a", "/b"],
        "text": "",
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nothing=1", "name one of size"),
        ("size", "write name=value"),
        ("size=big", "`size` is a int"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        harness.override(Parameters(), [setting])


def test_text_settings_stay_text():
    assert harness.override(Parameters(), ["text=12"]).text == "12"
    assert harness.override(Parameters(), ["paths="]).paths == ()


def test_incomplete_results_are_invalid(fake):
    report = harness.Report()
    run(Parameters(), report)
    result = harness.result_of("fake", Parameters(), report, quick=False)
    for key in result.keys() - {"seconds"}:  # which older ones lack
        with pytest.raises(jsonschema.ValidationError):
            harness.validate({k: v for k, v in result.items() if k != key})
    with pytest.raises(jsonschema.ValidationError):
        harness.validate({**result, "checks": [{**result["checks"][0], "holds": "yes"}]})


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match="no repetitions"):
        harness.Report().measure("time", "s", [])


def test_unavailable_says_why(fake, capsys):
    def unavailable(parameters, report):
        raise harness.Unavailable("needs a moon")

    fake.run = unavailable
    assert command.main(["fake"]) == 1
    assert "needs a moon" in capsys.readouterr().err


def test_list_and_unknown_names(capsys):
    assert command.main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in BENCHMARKS:
        assert name in shown
    with pytest.raises(SystemExit, match="2"):
        command.main(["no_such_benchmark"])


ROW = {"drives": 4, "bytes": 4096, "batch": 16}


@pytest.fixture
def rings_program(tmp_path):
    """A stand-in for rings_bench: one ring takes half the CPU and gives a tenth of the rate."""
    row = {
        **ROW,
        "shared_kiops": 10,
        "per_drive_kiops": 100,
        "shared_cpu_us": 2,
        "per_drive_cpu_us": 4,
    }
    program = tmp_path / "rings_bench"
    program.write_text(
        f"#!/bin/sh\ntest -d \"$1\" || exit 3\ncat <<'END'\n[{json.dumps(row)}]\nEND\n"
    )
    program.chmod(0o700)
    return str(program)


def test_rings_takes_over_the_figures_of_its_program(rings_program):
    report = harness.Report()
    rings.run(rings.Parameters(program=rings_program, repeats=2), report)
    rate = report.measurements[0]
    assert rate["name"] == "4 x 4 KiB, batch 16: rate, one ring"
    assert rate["raw"] == [10.0, 10.0]
    assert len({m["name"] for m in report.measurements}) == 4
    assert [(c["value"], c["holds"]) for c in report.checks] == [
        (pytest.approx(0.1), False),
        (pytest.approx(0.5), True),
    ]


def test_rings_says_what_went_wrong(rings_program, tmp_path):
    with pytest.raises(harness.Unavailable, match="failed"):
        rings.run(rings.Parameters(program=rings_program, paths=("/no/such",)), harness.Report())
    with pytest.raises(harness.Unavailable, match="absent` is not a program: leave it out to have"):
        rings.run(rings.Parameters(program=str(tmp_path / "absent")), harness.Report())


def test_a_program_that_cannot_be_built_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "BUILD", tmp_path)
    with pytest.raises(harness.Unavailable, match=r"(?s)no_such_bench could not be built .*target"):
        harness.Program("no_such_bench", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(harness.Unavailable, match=r"needs cmake: bash scripts/setup\.sh test"):
        harness.Program("no_such_bench", "")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_registered_benchmark_is_complete(name):
    module = BENCHMARKS[name].load()
    fields = {field.name for field in dataclasses.fields(module.Parameters)}
    assert set(module.QUICK) <= fields
    module.Parameters(**module.QUICK)
    assert callable(module.run)
