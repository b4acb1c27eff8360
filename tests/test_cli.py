"""`swarm-kv` as a user runs it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

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
