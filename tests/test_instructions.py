"""The guard on instruction counts fails when a path takes more, and only then."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import instructions
from benchmarks.harness import BUILD
from benchmarks.instructions import Counts, Incomparable, compare

BUILT = {"compiler": "gcc 1", "level": "x86-64-v3"}


def counts(**paths: int) -> Counts:
    return Counts(BUILT, paths)


def test_equal_counts_pass():
    assert compare(counts(a=1000, b=500), counts(a=1000, b=500)) == ([], [])


def test_a_path_above_the_limit_fails_with_its_numbers():
    stored = counts(a=100_000, b=100_000)
    assert compare(counts(a=103_000, b=100_000), stored) == ([], [])
    (failure,), remarks = compare(counts(a=103_100, b=100_000), stored)
    assert failure.startswith("a: 103,100 instructions, 3.1% more than the 100,000 stored")
    assert "103,000" in failure
    assert "--update" in failure
    assert remarks == []


def test_a_path_that_takes_fewer_invites_to_store_it():
    failures, (remark,) = compare(counts(a=90_000), counts(a=100_000))
    assert failures == []
    assert "10.0% fewer" in remark
    assert "--update" in remark


def test_paths_must_be_the_stored_ones():
    failures, _ = compare(counts(a=1, b=1), counts(a=1, c=1))
    assert [f.split(";")[0] for f in failures] == [
        "b: only in the program",
        "c: only in instructions.json",
    ]


def test_what_was_built_otherwise_is_not_compared(monkeypatch, capsys):
    with pytest.raises(Incomparable, match=r"compiler is gcc 2, .* of gcc 1"):
        compare(Counts({**BUILT, "compiler": "gcc 2"}, {"a": 9}), counts(a=1))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert instructions.main([]) == 0
    assert "apt-get install valgrind" in capsys.readouterr().out


def test_more_than_the_stored_count_fails_the_command(monkeypatch, capsys):
    stored = instructions.load()
    more = {name: 2 * number for name, number in stored.instructions.items()}
    monkeypatch.setattr(instructions, "build", lambda name: None)
    monkeypatch.setattr(instructions, "count", lambda program: Counts(stored.built, more))
    assert instructions.main([]) == 1
    assert "100.0% more" in capsys.readouterr().out
    monkeypatch.setattr(instructions, "count", lambda program: stored)
    assert instructions.main([]) == 0


@pytest.mark.skipif(
    shutil.which("valgrind") is None or not (BUILD / "hot_paths").exists(),
    reason="needs valgrind and build/bench/hot_paths, which scripts/test.sh builds",
)
def test_counts_repeat_and_show_more_work():
    once = instructions.count(BUILD / "hot_paths")
    twice = instructions.count(BUILD / "hot_paths", ["--twice", "select"])
    assert len(once.instructions) == 5
    (failure,), remarks = compare(twice, once)
    assert failure.startswith("select: ")
    assert remarks == []
