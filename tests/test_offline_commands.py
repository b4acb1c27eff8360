"""`swarm-kv record`, `profile` and `tune` as a user runs them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm_kv import models
from swarm_kv.profile import Profile
from swarm_kv.replay import evaluate_tokens
from swarm_kv.trace import Trace

from .test_cli import run
from .test_texts import ByteTokenizer


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3", torch.float32)
    monkeypatch.setattr(models, "load", lambda name: (model, ByteTokenizer()))


def check(result: Any, *says: str) -> None:
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    for text in says:
        assert text in output, text


@pytest.mark.usefixtures("tiny")
def test_record_then_tune(tmp_path: pathlib.Path) -> None:
    file, figures, plot = (tmp_path / name for name in ("t.st", "t.json", "t.svg"))
    small = ("--context", 400, "--tokens", 520, "--window", 32, "--layers", "1,3")
    check(run("record", "tiny", *small, "-o", file), "oracle recall", "│ 3 │ 8 / 2 of 16 │")
    trace = Trace.load(file)
    assert list(trace.layers) == [1, 3]
    assert (trace.model, trace.settings.context, trace.settings.window) == ("tiny", 400, 32)
    grid = ("--tau", "0.4,0.8", "--max-size", "16")
    result = run("tune", file, *grid, "--json", figures, "--plot", plot)
    check(result, "recall", "copies", "mean")
    points = json.loads(figures.read_text())["points"]
    assert [point["tau"] for point in points] == [0.4, 0.8]
    assert set(points[0]["layers"]) == {"1", "3"}
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.usefixtures("tiny")
def test_profile_then_add_to_it(tmp_path: pathlib.Path) -> None:
    probe, other, file, both = (tmp_path / name for name in ("a.txt", "b.txt", "p.st", "both.st"))
    probe.write_text("What is a generator?")
    other.write_text("And a closure?")
    context = ("--text", "stdlib", "--context", 300, "--window", 32)
    result = run("profile", "tiny", *context, "--probe", probe, "-o", file)
    check(result, "20 probe queries over 300 entries in 4 layers")
    check(run("profile", "tiny", *context, "--probe", other, "--add-to", file, "-o", both), "34")
    assert Profile.load(both).queries == 34
    # Control: another text is another context.
    result = run(
        "profile", "tiny", "--context", 300, "--window", 32, "--probe", other, "--add-to", file,
        "-o", both,
    )  # fmt: skip
    assert result.exit_code == 1
    assert "differ in `tokens`" in result.output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("record", "m", "--layers", "1,x", "-o", "f"), '`layers` ("1,x") must be numbers'),
        (("record", "m", "--layers", "9", "-o", "f"), "must name full-attention layers"),
        (("record", "m", "--tokens", "500", "-o", "f"), "leave no test query"),
        (("record", "m", "--text", "/nowhere.txt", "-o", "f"), "/nowhere.txt"),
        (("profile", "m", "--probe", "/nowhere.txt", "-o", "f"), "/nowhere.txt"),
        (("record", "m", "-o", "/no/where/f"), "the folder of `/no/where/f` does not exist"),
        (("profile", "m", "--probe", "x", "-o", "/no/where/f"), "`/no/where/f` does not exist"),
        (("tune", "/nowhere.st"), "/nowhere.st"),
        (("tune", __file__), "is no swarm_kv trace file"),
        (("tune", __file__, "--tau", "a"), '`tau` ("a") must be numbers'),
        (("tune", __file__, "--drives", "0"), "`drives` (0)"),
    ],
)
def test_bad_input_is_one_line_without_a_traceback(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not pathlib.Path("f").exists()


@pytest.mark.slow
def test_a_real_model_attends_to_little_of_its_context(
    smollm2: Any, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "smollm2.st"
    small = ("--context", 1536, "--tokens", 2048, "--layers", "2,18")
    check(run("record", "smollm2", *small, "-o", file), "oracle recall")
    trace = Trace.load(file)
    for layer in trace.layers.values():
        taken = iter(layer.selections.long())
        oracle = evaluate_tokens(layer, lambda q, taken=taken: next(taken))
        first = torch.arange(layer.settings.budget)
        beginning = evaluate_tokens(layer, lambda q, first=first: first)
        assert oracle.recall > 0.6
        assert beginning.recall < 0.3
