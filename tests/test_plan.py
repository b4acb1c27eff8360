"""`swarm-kv plan`: sizes are exact, reads those of the planner, and what cannot be is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import swarm_kv
from benchmarks import decoding, harness, workload
from benchmarks import plan as benchmark
from swarm_kv import plan
from swarm_kv.errors import ArgumentError, CapacityError
from swarm_kv.measure import Speed
from swarm_kv.plan import Plan, make, parse_drives, scattered
from swarm_kv.replay import Drive

from .conftest import tiny_config
from .test_cli import run
from .test_figures import layer as synthetic_layer

FOUR = parse_drives("4x pm9a3")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """Sizes of Qwen3-32B."""
    return transformers.Qwen3Config(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        dtype="bfloat16",
    )


# ---- drives


@pytest.mark.parametrize(
    ("text", "count", "iops", "rate"),
    [
        ("pm9a3", 1, 1.1e6, 6.9e9),
        ("4x pm9a3", 4, 1.1e6, 6.9e9),
        ("8 × PM9A3", 8, 1.1e6, 6.9e9),
        ("2x 6.9GB/s,1.1MIOPS", 2, 1.1e6, 6.9e9),
        ("1x 550 MB/s, 90 kIOPS", 1, 90e3, 550e6),
    ],
)
def test_drives_by_name_and_by_rates(text: str, count: int, iops: float, rate: float) -> None:
    drives = parse_drives(text)
    assert len(drives) == count
    model = drives[0].model
    assert model.seconds(1, 4096) == pytest.approx(1 / iops, rel=1e-6)
    assert model.seconds(1, 64 << 20) == pytest.approx((64 << 20) / rate, rel=0.01)


def test_drives_of_two_kinds() -> None:
    drives = parse_drives("4x pm9a3 + 2x 900p")
    assert [drive.name for drive in drives] == ["pm9a3"] * 4 + ["900p"] * 2
    assert drives[0].model != drives[-1].model


def test_directories_are_measured() -> None:
    asked: list[list[str]] = []

    def measured(paths: Any) -> list[Speed]:
        asked.append(list(paths))
        return [Speed(path, 1e5, 1e9) for path in paths]

    drives = parse_drives("/mnt/a, /mnt/b", measured)
    assert asked == [["/mnt/a", "/mnt/b"]]
    assert [drive.name for drive in drives] == ["/mnt/a", "/mnt/b"]


@pytest.mark.parametrize("text", ["", "4x", "floppy", "0x pm9a3", "4x 6.9GB/s", "1x 0GB/s,1MIOPS"])
def test_other_drives_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="drives"):
        parse_drives(text)


# ---- how selected entries lie


@given(st.integers(1, 400), st.data(), st.floats(1, 30), st.integers(0, 5))
def test_scattered_entries_are_as_many_as_wanted(
    entries: int, data: st.DataObject, run: float, seed: int
) -> None:
    wanted = data.draw(st.integers(1, entries))
    chosen = scattered(entries, wanted, run, torch.Generator().manual_seed(seed))
    assert len(chosen) == wanted
    assert bool((chosen.diff() > 0).all())
    assert 0 <= int(chosen[0]) <= int(chosen[-1]) < entries
    runs = int((chosen.diff() > 1).sum()) + 1
    assert runs <= max(1, round(wanted / run))


def test_runs_have_the_length_asked_for() -> None:
    random = torch.Generator().manual_seed(0)
    for length in (1.0, 2.0, 8.0):
        chosen = scattered(100_000, 8000, length, random)
        runs = int((chosen.diff() > 1).sum()) + 1
        assert 8000 / runs == pytest.approx(length, rel=0.15)


# ---- sizes and reads


def test_sizes_of_a_large_model(qwen3: Any) -> None:
    found = make(qwen3, 131072, FOUR)
    assert (found.layers, found.other_layers, found.entry_bytes) == (64, 0, 4096)
    assert found.kv_bytes == 131072 * 64 * 4096
    assert found.stored_entries == 131072 - 260
    assert found.disk_bytes_per_drive == pytest.approx(found.kv_bytes / 4, rel=0.01)
    assert found.selected_entries == 13107
    assert "40960 tokens" in found.notes[0]
    nothing, tenth, quarter, half = found.rows
    assert nothing.bytes_per_step == pytest.approx(found.selected_bytes, rel=0.1)
    assert nothing.dram_bytes < tenth.dram_bytes < quarter.dram_bytes < half.dram_bytes
    assert half.dram_bytes == pytest.approx(nothing.dram_bytes + found.kv_bytes / 2, rel=0.05)
    rates = [row.tokens_per_second for row in found.rows]
    assert rates == sorted(rates)  # type: ignore[type-var]


def test_everything_is_read_at_full_sparsity(qwen3: Any) -> None:
    found = make(qwen3, 8192, FOUR, sparsity=1.0)
    row = found.rows[0]
    assert row.bytes_per_step == found.stored_entries * 64 * 4096
    ideal = row.bytes_per_step / 4 / 6.9e9
    assert ideal <= row.io_seconds <= 1.1 * ideal


def test_a_batch_takes_and_reads_its_multiple(qwen3: Any) -> None:
    one, three = (make(qwen3, 16384, FOUR, batch=batch).rows[1] for batch in (1, 3))
    assert three.bytes_per_step == pytest.approx(3 * one.bytes_per_step, rel=0.05)
    assert three.dram_bytes == pytest.approx(3 * one.dram_bytes, rel=0.1)


def test_twice_the_drives_take_half_the_time(qwen3: Any) -> None:
    four, eight = (make(qwen3, 65536, parse_drives(f"{n}x pm9a3")).rows[0] for n in (4, 8))
    assert eight.io_seconds == pytest.approx(four.io_seconds / 2, rel=0.1)


def test_what_is_cached_is_not_read(qwen3: Any) -> None:
    none, most, every = (make(qwen3, 16384, FOUR, hit_rate=hits).rows[0] for hits in (0, 0.9, 1))
    assert most.bytes_per_step == pytest.approx(0.1 * none.bytes_per_step, rel=0.1)
    assert (every.bytes_per_step, every.io_seconds, every.tokens_per_second) == (0, 0, None)


def test_memory_that_is_given(qwen3: Any) -> None:
    tenth = make(qwen3, 32768, FOUR).rows[1]
    found = make(qwen3, 32768, FOUR, dram_bytes=tenth.dram_bytes)
    (row,) = found.rows
    assert row.cache_share == pytest.approx(0.10, abs=0.002)
    assert row.hit_rate == pytest.approx(tenth.hit_rate, abs=0.02)
    assert found.assumed_hits
    with pytest.raises(CapacityError, match="is below the minimum of") as refused:
        make(qwen3, 32768, FOUR, dram_bytes=1 << 20)
    # That is what a cache asks for before it begins; its codebooks come on top.
    minimum = int(str(refused.value).split("minimum of ")[1].split()[0])
    with pytest.raises(CapacityError, match="does not hold window and index") as refused:
        make(qwen3, 32768, FOUR, dram_bytes=minimum)
    least = int(str(refused.value).split("context: ")[1].split()[0])
    assert minimum < least < 1.2 * minimum
    assert make(qwen3, 32768, FOUR, dram_bytes=least).rows[0].cache_share == 0


def test_expected_hits_follow_the_evidence() -> None:
    for share, hits in plan.HIT_RATES:
        assert plan.expected_hits(share) == pytest.approx(hits)
    assert plan.expected_hits(0.025) == pytest.approx(plan.HIT_RATES[1][1] / 2)


def test_compute_hides_reads_or_does_not(qwen3: Any) -> None:
    row = make(qwen3, 32768, FOUR, hit_rate=0.5, compute_seconds=0.02).rows[0]
    assert row.with_compute is not None
    serial, hidden = row.with_compute
    assert serial == pytest.approx(1 / (row.io_seconds + 0.02))
    assert hidden == pytest.approx(1 / max(row.io_seconds, 0.02))


def test_a_codec_takes_less_of_the_drives(qwen3: Any) -> None:
    plain, coded = (make(qwen3, 16384, FOUR, codec=name) for name in ("none", "int8"))
    assert coded.stored_entry_bytes < 0.6 * plain.stored_entry_bytes
    assert coded.rows[0].io_seconds < 0.7 * plain.rows[0].io_seconds
    assert coded.entry_bytes == plain.entry_bytes


def test_layers_with_a_window_stay_in_memory() -> None:
    found = make(tiny_config("gemma3"), 2048, FOUR)
    assert (found.layers, found.other_layers) == (2, 2)


def test_a_short_context_stays_in_memory(qwen3: Any) -> None:
    found = make(qwen3, 200, FOUR)
    assert found.stored_entries == 0
    assert found.rows[0].bytes_per_step == 0
    assert "nothing goes to the drives" in found.notes[0]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"context": 0}, "`context` \\(0\\)"),
        ({"batch": 0}, "`batch` \\(0\\)"),
        ({"drives": []}, "number of drives \\(0\\)"),
        ({"hit_rate": 1.2}, "`hit_rate` \\(1.2\\)"),
        ({"sparsity": 0}, "`sparsity` \\(0\\)"),
        ({"codec": "zip"}, "unknown `codec`"),
    ],
)
def test_bad_input_is_refused(qwen3: Any, changed: dict[str, Any], says: str) -> None:
    given = {"context": 4096, "drives": FOUR, **changed}
    with pytest.raises(ArgumentError, match=says):
        make(qwen3, given.pop("context"), given.pop("drives"), **given)


# ---- models


def test_weights_of_a_step(tiny_model: Any) -> None:
    model = tiny_model("qwen3", torch.float32)
    table = model.get_input_embeddings().weight.numel()
    every = sum(weight.numel() for weight in model.parameters())
    assert plan.weights_bytes(model, torch.bfloat16) == 2 * (every - table)
    skeleton = plan.skeleton(model.config)
    assert plan.weights_bytes(skeleton, torch.bfloat16) == 2 * (every - table)


def test_weights_of_tied_embeddings_and_of_experts() -> None:
    tied = tiny_config("qwen3")
    tied.tie_word_embeddings = True
    model = plan.skeleton(tied)
    every = sum(weight.numel() for weight in model.parameters())
    assert plan.weights_bytes(model, torch.float32) == 4 * every
    model = plan.skeleton(tiny_config("qwen3_moe"))
    experts = sum(w.numel() for name, w in model.named_parameters() if ".experts." in name)
    every = sum(weight.numel() for weight in model.parameters())
    table = model.get_input_embeddings().weight.numel()
    assert experts > 0
    assert plan.weights_bytes(model, torch.float32) == 4 * (every - table - experts // 2)


def test_models_that_cannot_be_patched_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no causal language model"):
        plan.skeleton(transformers.ViTConfig())
    with pytest.raises(ArgumentError, match="kv_lora_rank"):
        plan.skeleton(transformers.DeepseekV3Config(num_hidden_layers=1, n_routed_experts=4))


def test_a_config_from_a_file_a_folder_and_nowhere(tmp_path: pathlib.Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert plan.load_config(str(name)).model_type == "llama"
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ArgumentError, match="that this transformers knows"):
        plan.load_config(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ArgumentError, match="abacus"):
        plan.load_config(str(tmp_path / "config.json"))


# ---- against runs


def test_sizes_are_those_of_a_run(tiny_model: Any, drives: list[str]) -> None:
    """What a real cache holds, byte for byte where it can be known."""
    model, context = tiny_model("qwen3", torch.float32), 3000
    config = swarm_kv.SwarmConfig(paths=drives, dram_bytes="12MiB", window=64)
    with swarm_kv.patch(model, config) as swarm, torch.no_grad():
        cache = {swarm_kv.compat.cache_arg(model): swarm.new_cache()}
        model(torch.randint(3, 128, (1, context)), **cache)
        model(torch.randint(3, 128, (1, 1)), **cache)
        stats = swarm.stats()
    found = make(model.config, context, FOUR, dtype=torch.float32, dram_bytes=12 << 20, window=64)
    assert stats.plain_bytes == found.layers * found.stored_entries * found.entry_bytes
    assert stats.stored_bytes == 4 * found.disk_bytes_per_drive
    assert found.dram["staging"] == pytest.approx(stats.dram["staging"], rel=0.01)  # pages
    assert found.dram["window"] == pytest.approx(stats.dram["window"], rel=0.3)
    assert found.dram["index"] == pytest.approx(stats.dram["index"], rel=0.05)


TINY = {
    "smollm2": (448,), "gemma3": (), "steps": 4, "warm_up": 4, "caches": (0.0, 0.2), "whole": 0,
}  # fmt: skip


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic layer in place of recorded ones, of a model of its sizes."""

    def recorded(model: str, text: str, *, context: int, steps: int) -> list[Any]:
        return [synthetic_layer(context, steps)]

    monkeypatch.setattr(workload, "recorded", recorded)
    config = tiny_config("qwen3")  # one KV head of 32 in 16 bits, as the synthetic layer
    config.num_key_value_heads, config.head_dim = 1, 32
    monkeypatch.setattr(plan, "load_config", lambda name: config)


@pytest.mark.usefixtures("stand_ins")
def test_the_benchmark_compares_and_is_drawn(tmp_path: pathlib.Path) -> None:
    report, parameters = harness.Report(), benchmark.Parameters(**TINY)
    benchmark.run(parameters, report)
    names = {measured["name"] for measured in report.measurements}
    assert "smollm2, 448 tokens, 20% cached: bytes per step, planned" in names
    assert len(report.checks) == 4  # bytes and I/O time of each cache
    result = harness.result_of("plan", parameters, report, quick=True)
    benchmark.plot(json.loads(json.dumps(result)), tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 0


def test_the_benchmark_tells_a_plan_that_is_off() -> None:
    """The control: its goals fail where a plan is a quarter too low."""
    for share, holds in ((0.85, True), (0.75, False), (1.25, False)):
        report = harness.Report()
        measured = benchmark.Step(1e6, 100.0, 0.01)
        planned = benchmark.Step(share * 1e6, 100.0, share * 0.01)
        benchmark.compare(report, "x", measured, planned)
        assert [check["holds"] for check in report.checks] == [holds] * 2


@pytest.mark.slow
def test_a_plan_of_recorded_layers_is_within_a_fifth(smollm2: Any) -> None:
    """SmolLM2 on drives in virtual time, with the run's own hit rate."""
    parameters = benchmark.Parameters(steps=12, warm_up=12)
    recorded = workload.recorded("smollm2", "stdlib", context=2048, steps=24)
    ready = [decoding.prefilled(layer) for layer in recorded]
    for cache in (0.0, 0.25):
        measured, planned = benchmark.layers("smollm2", ready, cache, parameters)
        assert planned.bytes == pytest.approx(measured.bytes, rel=0.2)
        assert planned.io_seconds == pytest.approx(measured.io_seconds, rel=0.2)


# ---- the command


@pytest.fixture
def config_file(qwen3: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    qwen3.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_the_command_tells_and_writes(config_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    figures = tmp_path / "plan.json"
    result = run(
        "plan", "--model", config_file, "--context", 131072, "--drives", "4x pm9a3",
        "--weights-bandwidth", "3.35TB/s", "--json", figures,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    for text in ("32.0 GiB: 64 layers", "4 x pm9a3, 7.98 GiB on each", "read/token", "assumed"):
        assert text in output, text
    assert all(len(line) <= 80 for line in result.output.splitlines())
    written = json.loads(figures.read_text())
    assert written["kind"] == "plan"
    assert written["kv_bytes"] == 32 << 30
    assert written["compute_seconds"] == pytest.approx(64e9 / 3.35e12, rel=0.1)
    assert len(written["rows"]) == 4


def test_the_command_measures_directories(
    config_file: pathlib.Path, drives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import swarm_kv.cli.plan

    asked: list[list[str]] = []

    def speeds(paths: Any, **_: object) -> list[Speed]:
        asked.append(list(paths))
        return [Speed(path, 2e5, 3e9) for path in paths]

    monkeypatch.setattr(swarm_kv.cli.plan, "speeds", speeds)
    given = ("plan", "--model", config_file, "--context", 32768, "--hit-rate", 0.8)
    result = run(*given, "--drives", ",".join(drives))
    assert result.exit_code == 0, result.output
    assert asked == [drives]
    assert "assumed" not in result.output  # the hit rate was given


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--drives", "floppy"), '`drives` ("floppy") must be a name of'),
        (("--drives", "pm9a3", "--dtype", "int4"), '`dtype` ("int4") must be one of'),
        (("--drives", "pm9a3", "--dram", "1MiB"), "is below the minimum of"),
        (("--drives", "/no/such/place"), "/no/such/place"),
        (("--drives", "pm9a3", "--step-ms", "1", "--weights-bandwidth", "1TB"), "not both"),
    ],
)
def test_bad_arguments_are_one_line_without_a_traceback(
    config_file: pathlib.Path, arguments: tuple[str, ...], says: str
) -> None:
    result = run("plan", "--model", config_file, "--context", 8192, *arguments)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_plan_of_the_command_is_that_of_the_module(
    config_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    figures = tmp_path / "plan.json"
    arguments = ("--context", 16384, "--drives", "2x pm9a3", "--dram", "2GiB", "--json", figures)
    assert run("plan", "--model", config_file, *arguments).exit_code == 0
    found: Plan = make(
        plan.load_config(str(config_file)), 16384, parse_drives("2x pm9a3"), dram_bytes=2 << 30
    )
    written = json.loads(figures.read_text())
    assert written["rows"][0]["io_seconds"] == found.rows[0].io_seconds
    assert Drive(**written["drives"][0]["model"]) == found.drives[0].model
