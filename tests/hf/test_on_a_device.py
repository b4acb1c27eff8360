"""Steps on a device, whose memory is the host's here: equal to those on the host.

Copies to it happen as late as their order allows (`csrc/core/host_device.h`), so that a missing
one shows. `csrc/tests/cuda_device_test.cpp` has the same steps on streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import swarm_kv
from swarm_kv import compat, device
from swarm_kv.codes import Codebook
from swarm_kv.store import Store
from tests.hf import table
from tests.hf.helpers import PROMPT, left_padded, settings, teacher_forced

SPARSE = {"sparsity": 0.1, "prefetch": "off", "recall_every": 4}
HBM = (0, "6KiB", "256KiB", "4MiB")
"""Nothing, a part of the windows, all of them and some entries, everything."""


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "KINDS", ("cuda", "cpu"))


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
@pytest.mark.parametrize(
    ("kind", "hbm"), [*(("qwen3", hbm) for hbm in HBM), ("gpt_oss", "256KiB"), ("gemma3", 0)]
)
def test_logits_equal_stock_attention(
    kind: str, padded: bool, hbm: int | str, ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model, mask = tiny_model(kind), torch.ones_like(ids)
    if padded:
        ids, mask = left_padded(ids)
    expected = teacher_forced(model, ids, mask)
    with swarm_kv.patch(model, settings(drives, hbm_bytes=hbm, staging_bytes="64KiB")) as swarm:
        got = teacher_forced(model, ids, mask)
        stats = swarm.stats()
    assert (got - expected).abs().max() < 1e-9
    assert (stats.hbm["hits"] > 0) == (hbm in HBM[2:])
    assert (stats.hbm["window"] > 0) == (hbm != 0)
    assert stats.hbm["peak"] <= stats.hbm["limit"]


@pytest.mark.parametrize("hbm", HBM)
@pytest.mark.parametrize("several", [False, True], ids=["one token", "chunks of 8"])
def test_sparse_steps_equal_those_on_the_host(
    several: bool,
    hbm: int | str,
    ids: Tensor,
    drives: list[str],
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("qwen3")
    ids, mask = left_padded(ids)
    chunk = 8 if several else None
    found = []
    for kinds in (("cuda",), ("cuda", "cpu")):
        monkeypatch.setattr(device, "KINDS", kinds)
        with swarm_kv.patch(model, settings(drives, **SPARSE, hbm_bytes=hbm)) as swarm:
            found.append(teacher_forced(model, ids, mask, chunk))
            mass, limit = swarm.stats().mass, swarm.stats().hbm["limit"]
        assert mass is not None
        assert (limit > 0) == (hbm != 0 and "cpu" in kinds)
    assert (found[0] - found[1]).abs().max() < 1e-9
    assert (found[0] - teacher_forced(model, ids, mask)).abs().max() > 1e-3


def test_entries_in_16_bits(
    ids: Tensor, drives: list[str], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mask = tiny_model("qwen3", torch.float32), torch.ones_like(ids)
    found = []
    for kinds in (("cuda",), ("cuda", "cpu")):
        monkeypatch.setattr(device, "KINDS", kinds)
        config = settings(drives, **SPARSE, hbm_bytes="256KiB", kv_dtype="float16")
        with swarm_kv.patch(model, config) as swarm:
            found.append(teacher_forced(model, ids, mask))
            assert (swarm.stats().hbm["hits"] > 0) == ("cpu" in kinds)
    assert (found[0] - found[1]).abs().max() < 1e-3  # which way a number is rounded may differ


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("prompt", [6, PROMPT], ids=["reads nothing", "reads"])
def test_a_step_asks_once_where_it_attends(
    prompt: int, ids: Tensor, drives: list[str], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    attends_on = Store.attends_on

    def counted(store: Store, query: Tensor) -> bool:
        asked.append(attends_on(store, query))
        return asked[-1]

    monkeypatch.setattr(Store, "attends_on", counted)
    model, steps = tiny_model("qwen3", layers=2), 3
    ids = ids[:, : prompt + steps]
    expected = teacher_forced(model, ids, torch.ones_like(ids), prompt=prompt)
    with swarm_kv.patch(model, settings(drives, hbm_bytes="4MiB")) as swarm:
        got = teacher_forced(model, ids, torch.ones_like(ids), prompt=prompt)
        assert (swarm.stats().written_bytes > 0) == (prompt == PROMPT)
        assert swarm.stats().hbm["peak"] > 0  # it was there
    assert asked == [True] * 2 * steps
    assert (got - expected).abs().max() < 1e-9


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[table.Pair]:
    paths = [str(tmp_path_factory.mktemp(f"drive{number}")) for number in range(4)]
    with pytest.MonkeyPatch.context() as patch, table.pair("gpt_oss", paths) as pair:
        patch.setattr(device, "KINDS", ("cuda", "cpu"))
        yield pair


@pytest.mark.parametrize("call", table.CALLS)
def test_every_call_of_the_table(pair: table.Pair, call: str) -> None:
    found = table.outcome(pair, call)
    assert found == "equal" or found.startswith("refused: ")


@pytest.mark.usefixtures("on_a_device")
def test_prefetched_and_estimated(ids: Tensor, drives: list[str], tiny_model: Any) -> None:
    model, mask = tiny_model("qwen3"), torch.ones_like(ids)
    expected = teacher_forced(model, ids, mask)
    how = {"prefetch": "post_attention", "estimate_unfetched": True, "hbm_bytes": "16KiB"}
    with swarm_kv.patch(model, settings(drives, **how)) as swarm:
        assert (teacher_forced(model, ids, mask) - expected).abs().max() < 1e-9
        assert swarm.stats().prefetch.used_entries > 0


@pytest.mark.usefixtures("on_a_device")
def test_forks_and_beams_share_what_is_kept(
    ids: Tensor, drives: list[str], tiny_model: Any
) -> None:
    model = tiny_model("qwen3")
    how = {"max_new_tokens": 24, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids[:2], **how, eos_token_id=-1)
    with swarm_kv.patch(model, settings(drives, hbm_bytes="4MiB")) as swarm:
        cache = swarm.new_cache()
        got = model.generate(ids[:2], **how, eos_token_id=-1, **{compat.cache_arg(model): cache})
        assert torch.equal(got, expected)
        assert swarm.stats().hbm["window_entries"] > 0
        cache.reset()
        assert swarm.stats().hbm["window_entries"] == swarm.stats().hbm["cached_entries"] == 0


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(("hbm", "there"), [("4MiB", True), ("8KiB", False), (0, False)])
def test_codes_are_scored_where_they_have_room(
    hbm: int | str,
    there: bool,
    ids: Tensor,
    drives: list[str],
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[Tensor] = []
    score = Codebook.score

    def note(self: Codebook, query: Tensor, codes: Tensor) -> Tensor:
        scored.append(codes)
        return score(self, query, codes)

    monkeypatch.setattr(Codebook, "score", note)
    model = tiny_model("qwen3")
    with swarm_kv.patch(model, settings(drives, **SPARSE, hbm_bytes=hbm)) as swarm:
        cache = swarm.new_cache()
        name = compat.cache_arg(model)
        with torch.no_grad():
            model(ids[:1, :PROMPT], **{name: cache})
            scored.clear()
            for at in range(PROMPT, PROMPT + 3):
                model(ids[:1, at : at + 1], **{name: cache})
        index = cache.layers[0].rows[0].index()
        held = swarm.stats().hbm["index"]
        assert scored
        # What is scored there are copies, which go with their originals.
        assert any(codes is index.codes for codes in scored) != there
        assert (held >= 4 * index.codes.nbytes) == there
        cache.reset()
        del index, scored[:]
        assert swarm.stats().hbm["index"] == 0
