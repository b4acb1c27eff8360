"""All benchmarks in one run, and the page about them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

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


def test_a_result_tells_its_time_and_older_ones_lack_it(result):
    assert 0 <= result["seconds"] < 60
    harness.validate({name: value for name, value in result.items() if name != "seconds"})
    with pytest.raises(harness.jsonschema.ValidationError):
        harness.validate({**result, "seconds": "long"})


def test_a_run_replaces_old_results_and_tells_failures(monkeypatch, tmp_path, capfd, result):
    for name in suite.NAMES:
        (tmp_path / f"{name}.json").write_text("old")

    def apart(arguments):
        name = arguments[0]
        assert not (tmp_path / f"{name}.json").exists()
        if name in ("store", "rings"):
            return {"store": None, "rings": 1}[name]
        assert "--quick" in arguments
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(suite, "apart", apart)
    assert command.main(["all", "--quick", "--out", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert f"{len(suite.NAMES) - 2} of {len(suite.NAMES)} benchmarks measured in " in shown.out
    timed = {line.split()[0] for line in shown.out.splitlines() if line.endswith(" s")}
    assert timed >= set(suite.NAMES)
    assert "store took longer than 1800 s" in shown.err
    missing = shown.err.splitlines()[-1].removeprefix("not measured: ").split(", ")
    assert set(missing) == {"store", "rings"}
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("| not measured |") == 2


def test_a_benchmark_has_a_process_of_its_own_which_may_hang_or_crash(monkeypatch):
    def measure(given):
        if given == ["hangs"]:
            time.sleep(600)
        if given == ["crashes"]:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(given == ["fails"]))

    monkeypatch.setattr(suite, "measure", measure)
    assert suite.apart(["hangs"], 0.1) is None
    assert suite.apart(["crashes"]) == -signal.SIGKILL
    assert suite.apart(["fails"]) == 1
    assert suite.apart(["works"]) == 0


def test_paths_reach_every_benchmark(tmp_path):
    given = suite.arguments("store", tmp_path, False, ["/a", "/b"])
    assert given[given.index("--paths") + 1] == "/a,/b"
    assert "--paths" not in suite.arguments("store", tmp_path, True, [])


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
