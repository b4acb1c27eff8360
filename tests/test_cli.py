"""`swarm-kv` as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import time
from typing import Any

import pytest
import torch

import swarm_kv
from swarm_kv import bench, cache, doctor, plots
from swarm_kv.errors import ArgumentError
from swarm_kv.measure import PIECE_BYTES, Rate, Speed
from swarm_kv.meter import Stats
from swarm_kv.plan import make, parse_drives
from swarm_kv.replay import Evaluation

from .conftest import tiny_config
from .processes import finished, output_of, start, terminal, written
from .store.helpers import left_behind

COMMANDS = ("bench", "demo", "doctor", "eval", "plan", "plot", "profile", "record", "stats", "tune")

typer_testing = pytest.importorskip("typer.testing")


def run(*arguments: str) -> Any:
    from swarm_kv.cli import app

    return typer_testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_demo_reports_what_it_did(smollm2: Any, tmp_path: pathlib.Path, drives: list[str]) -> None:
    figures = tmp_path / "demo.json"
    where = [option for path in drives for option in ("--path", path)]
    result = run(
        "demo",
        "--context",
        1024,
        "--tokens",
        20,
        "--dram-bytes",
        "48MiB",
        "--json",
        figures,
        *where,
    )
    assert result.exit_code == 0, result.output
    for row in ("KV on SSD", "DRAM for KV", "read per step", "hit rate", "recall", "DynamicCache"):
        assert row in result.output, row
    data = json.loads(figures.read_text())
    stats = data["stats"]
    assert data["context_tokens"] == 1024
    assert data["new_tokens"] == 20
    assert len(stats["drives"]) == 4
    assert all(drive["decode_bytes"] > 0 for drive in stats["drives"])
    assert 0.5 < stats["recall"] <= 1.05
    # Sinks and window stay in memory, the rest is on the drives, with at most three copies.
    stored = (1024 - 260 - 64) * 30 * 1536
    assert stored <= stats["plain_bytes"] <= stats["stored_bytes"] <= 3 * 1024 * 30 * 1536
    assert stats["dram_peak_bytes"] <= stats["dram_bytes"] == 48 << 20
    assert all(not list(pathlib.Path(path).iterdir()) for path in drives)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sparsity", "1.5"), "`sparsity` (1.5) must be in (0, 1]"),
        (("--dram-bytes", "2MiB"), "is below the minimum of"),
        (("--dram-bytes", "much"), "is not a size"),
        (("--path", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--tokens", "1"), "`tokens` (1) must be at least 2"),
    ],
)
def test_bad_input_is_one_line_without_a_traceback(
    smollm2: Any, arguments: tuple[str, ...], says: str
) -> None:
    result = run("demo", "--context", 512, *arguments)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_every_command_has_help_that_fits() -> None:
    shown = run("--help")
    for command in COMMANDS:
        assert command in shown.output
        own = run(command, "--help")
        assert own.exit_code == 0
        assert all(len(line) <= 80 for line in own.output.splitlines()), command


# ---- progress, only for people and only when it takes long


def work_with_bar(long: float) -> None:
    from rich.console import Console

    from swarm_kv.cli import common

    common.LONG = long
    with common.progress_bar(Console(), 3) as step:
        for _ in range(3):
            time.sleep(0.15)
            step("working hard")
    print("done")


def test_a_bar_shows_on_a_terminal_when_work_takes_long() -> None:
    assert "working hard" in output_of(lambda: work_with_bar(0.1), terminal)
    # The control: quick work has none.
    assert output_of(lambda: work_with_bar(60), terminal).split() == ["done"]


def test_no_bar_shows_elsewhere() -> None:
    assert output_of(lambda: work_with_bar(0)).split() == ["done"]


def test_the_bar_of_a_prefill_shows_on_terminals_only(tiny_model: Any) -> None:
    model = tiny_model("qwen3", torch.float32)

    def prefill(seconds: float) -> None:
        cache.PROGRESS_SECONDS, cache.PROGRESS_TOKENS = seconds, 256
        config = swarm_kv.SwarmConfig(paths=["/0"], engine="memory", dram_bytes="8MiB", window=32)
        with swarm_kv.patch(model, config), torch.no_grad():
            model(torch.randint(3, 128, (1, 1024)))

    assert "prefill and clustering" in output_of(lambda: prefill(0), terminal)
    assert "prefill" not in output_of(lambda: prefill(60), terminal)
    assert "prefill" not in output_of(lambda: prefill(0))


# ---- stats


@pytest.fixture(scope="module")
def stats(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Stats:
    """Of a tiny model that decoded a little."""
    model = tiny_model("qwen3", torch.float32)
    paths = [str(tmp_path_factory.mktemp("drive")) for _ in range(2)]
    config = swarm_kv.SwarmConfig(paths=paths, dram_bytes="6MiB", window=32, recall_every=1)
    with swarm_kv.patch(model, config) as swarm, torch.no_grad():
        model.generate(torch.randint(3, 128, (1, 800)), max_new_tokens=6, do_sample=False)
        given = {swarm_kv.compat.cache_arg(model): swarm.new_cache()}
        model(torch.randint(3, 128, (1, 700)), **given)
        return swarm.stats()


def test_stats_come_back_from_their_file(stats: Stats, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "stats.json"
    stats.save(file)
    assert Stats.from_dict(json.loads(file.read_text())) == stats
    assert list(tmp_path.iterdir()) == [file]
    values = stats.to_dict()
    del values["steps"]
    with pytest.raises(ArgumentError, match="steps"):
        Stats.from_dict(values)
    with pytest.raises(ArgumentError, match="odd"):
        Stats.from_dict({**stats.to_dict(), "prefetch": {"odd": 1}})


def test_stats_are_shown(stats: Stats, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "stats.json"
    stats.save(file)
    result = run("stats", file)
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    for text in ("decoding steps │ 5", "KV on SSD", "requests, p50", "of the attention", "engine"):
        assert text in output, text
    demo = {"kind": "demo", "stats": stats.to_dict()}
    file.write_text(json.dumps(demo))
    assert "KV on SSD" in run("stats", file).output


def test_stats_are_watched(stats: Stats, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "stats.json"
    dataclasses.replace(stats, steps=4711).save(file)
    from swarm_kv.cli import app

    ours, theirs = terminal()
    process = start(lambda: app(["stats", str(file), "--watch", "0.1"]), theirs)
    os.close(theirs)
    wait_for(ours, "4711")
    dataclasses.replace(stats, steps=815).save(file)
    wait_for(ours, "815")
    os.kill(process, signal.SIGINT)
    assert "Traceback" not in written(ours)
    assert finished(process) == 0


def wait_for(descriptor: int, text: str) -> None:
    """Read until `text` comes; the child ends itself at last."""
    seen = ""
    while text not in seen:
        try:
            seen += os.read(descriptor, 4096).decode(errors="replace")
        except OSError:  # the child has ended
            pytest.fail(f"`{text}` is not in {seen}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no JSON file"),
        ("[]", "has no `kind`"),
        ('{"kind": 3}', "has no `kind`"),
        ('{"kind": "tune"}', "of kind tune and holds no stats"),
        ('{"kind": "stats"}', "no stats of this version"),
    ],
)
def test_other_files_are_no_stats(tmp_path: pathlib.Path, content: str, says: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    result = run("stats", file)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


# ---- pictures

DRIVES = (Speed("/mnt/a/very/long/path/to/a/drive", 4e5, 5e9), Speed("/mnt/b", 5e5, 6e9))


def figures_of(kind: str, stats: Stats) -> dict[str, Any]:
    """As a command writes them."""
    if kind == "stats":
        return stats.to_dict()
    if kind == "demo":
        rates = {"tokens_per_second": 4.0, "dense_tokens_per_second": 3.0, "kv_bytes": 1 << 28}
        return {"kind": kind, "model": "m", "context_tokens": 9, "stats": stats.to_dict(), **rates}
    if kind == "doctor":
        together = Rate(1 << 18, 4e4, 1e10, 0.5)
        report = doctor.Report((), DRIVES, together, 2e9)
        return {"kind": kind, **report.to_dict()}
    if kind == "plan":
        found = make(tiny_config("llama"), 4096, parse_drives("2x pm9a3"), compute_seconds=0.01)
        return {"kind": kind, "model": "m", **found.to_dict()}
    if kind == "bench":
        sizes = [bench.SizeRate("all", Rate(4096 << i, 1e5, 4e8 * 2**i, 0.9), 1.0) for i in (0, 4)]
        steps = (bench.StepTime(8192, 819, 400.0, 3.3e6, (0.002, 0.001), 0.0009),)
        models = tuple(drive.model for drive in DRIVES)
        result = bench.Result(("/a", "/b"), models, "io_uring, O_DIRECT", tuple(sizes), steps)
        return {"kind": kind, **result.to_dict()}
    names = [field.name for field in dataclasses.fields(Evaluation)]
    evaluation = dict.fromkeys(names, 1.0)
    point = {"tau": 0.5, "max_size": 16, "layers": {"3": evaluation}}
    return {"kind": kind, "title": "t", "points": [point]}


@pytest.mark.parametrize("kind", ["bench", "demo", "doctor", "plan", "stats", "tune"])
def test_figures_are_drawn(kind: str, stats: Stats, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "figures.json"
    figures = json.loads(json.dumps(figures_of(kind, stats)))
    file.write_text(json.dumps(figures))
    result = run("plot", file)
    assert result.exit_code == 0, result.output
    assert file.with_suffix(".svg").read_text().count('id="axes_') >= 2
    # The control: half of the figures are none.
    with pytest.raises(ArgumentError, match=f"of kind {kind} are of another version|no stats of"):
        plots.draw({"kind": kind}, tmp_path / "none.svg")


def test_pictures_have_the_form_of_their_name(stats: Stats, tmp_path: pathlib.Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "other.png"
    figures = figures_of("doctor", stats)
    file.write_text(json.dumps(figures))
    assert run("plot", file, "-o", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="cannot draw"):
        plots.draw(figures, tmp_path / "picture.doc")


def test_every_kind_is_tested() -> None:
    assert set(plots.kinds()) >= {"bench", "demo", "doctor", "plan", "stats", "tune"}


@pytest.mark.parametrize(
    ("figures", "output", "says"),
    [
        ({"kind": "dance"}, "x.svg", "no picture is known"),
        ({"figures": 1}, "x.svg", "has no `kind`"),
        ({"kind": "tune", "title": "t", "points": []}, "/no/where/x.svg", "does not exist"),
        ({"kind": "doctor", "drives": []}, "x.svg", "no drive that was measured"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: pathlib.Path, figures: dict[str, Any], output: str, says: str
) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(figures))
    result = run("plot", file, "-o", tmp_path / output)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


# ---- bench


def test_bench_measures_given_drives(drives: list[str], tmp_path: pathlib.Path) -> None:
    figures = tmp_path / "bench.json"
    where = [option for path in drives[:2] for option in ("--path", path)]
    result = run("bench", *where, "--size", "64MiB", "--seconds", "0.05", "--json", figures)
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    for text in ("Reads of 2 drives", "of model", "planned", "8192"):
        assert text in result.output, text
    written = json.loads(figures.read_text())
    assert written["kind"] == "bench"
    assert len(written["rates"]) == 4 * 3
    by_size = {one["rate"]["request_bytes"]: one["of_model"] for one in written["rates"]}
    assert set(by_size) == {4096, 16384, 65536, 262144}
    # The model is fitted to the smallest and the largest reads of each drive.
    for one in written["rates"]:
        if one["drive"] != "all" and one["rate"]["request_bytes"] in (4096, 262144):
            assert one["of_model"] == pytest.approx(1, rel=0.1)
    assert [step["context"] for step in written["steps"]] == [8192, 32768, 131072]
    assert all(step["planned"] > 0 for step in written["steps"])
    assert left_behind(drives) == []


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 2, "--path"),
        (("--path", "/no/such"), 1, "/no/such"),
        (("--path", ".", "--size", "1KiB"), 1, f"{PIECE_BYTES} bytes on each"),
    ],
)
def test_bench_refuses(arguments: tuple[str, ...], status: int, says: str) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == status
    assert says in " ".join((result.output + result.stderr).split())
    assert "Traceback" not in result.output
