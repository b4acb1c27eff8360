"""All benchmarks in one run, and the page about them."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import __main__ as command
from benchmarks import harness, page, suite
from benchmarks.registry import BENCHMARKS


@pytest.fixture
def result():
    report = harness.Report()
    report.measure("time", "s", [1.0, 2.0])
    report.at_most("time", 1.5, 2.0)
    report.at_least("rate", 1.0, 3.0)
    report.note("a note")
    return harness.result_of("rings", BENCHMARKS["rings"].load().Parameters(), report, quick=False)


def test_what_was_not_measured_shows_as_such(result, tmp_path):
    (tmp_path / "rings.json").write_text(json.dumps(result))
    (tmp_path / "stress.json").write_text(json.dumps({**result, "unavailable": "no such drive"}))
    (tmp_path / "scale.json").write_text("{")
    text = page.write(tmp_path).read_text()
    overview = dict(line.split("|")[1:4:2] for line in text.splitlines() if line.startswith("| ["))
    states = {name.split("]")[0].strip(" ["): state.strip() for name, state in overview.items()}
    assert states["rings"] == "1 of 2"
    assert states["stress"] == states["scale"] == states["store"] == "not measured"
    assert "no such drive" in text
    assert "| rate | 1 | >= 3 | **no** |" in text
    assert "a note" in text


def test_a_run_replaces_old_results_and_tells_failures(monkeypatch, tmp_path, capfd, result):
    for name in BENCHMARKS:
        (tmp_path / f"{name}.json").write_text("old")

    def run(arguments, **_):
        name = arguments[arguments.index("benchmarks") + 1]
        assert not (tmp_path / f"{name}.json").exists()
        if name == "store":
            raise subprocess.TimeoutExpired(arguments, 1)
        if name == "rings":
            return subprocess.CompletedProcess(arguments, 1)
        assert "--quick" in arguments
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    assert command.main(["all", "--quick", "--out", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert f"{len(BENCHMARKS) - 2} of {len(BENCHMARKS)} benchmarks measured" in shown.out
    missing = shown.err.splitlines()[-1].removeprefix("not measured: ").split(", ")
    assert set(missing) == {"store", "rings"}
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("| not measured |") == 2


def test_paths_reach_every_benchmark(tmp_path):
    given = suite.command("store", tmp_path, False, ["/a", "/b"])
    assert given[given.index("--paths") + 1] == "/a,/b"
    assert "--paths" not in suite.command("store", tmp_path, True, [])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_fits_the_page(name, result):
    text = page.text({name: {**result, "name": name}}, page.pathlib.Path("results"))
    assert f"## {name}" in text


def test_the_stored_page_is_that_of_the_stored_results(tmp_path):
    if not any((suite.RESULTS / f"{name}.json").exists() for name in BENCHMARKS):
        pytest.skip("no results are stored")
    kept = page.HERE / "RESULTS.md"
    results = {name: page.load(suite.RESULTS / f"{name}.json") for name in BENCHMARKS}
    assert kept.read_text() == page.text(results, page.pathlib.Path("results"))
