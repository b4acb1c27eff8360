"""The recall meter: its estimate against the exact mass, and what it does where it cannot read."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_kv import recall, selectors
from swarm_kv.errors import StorageError
from swarm_kv.meter import Mass, Meter, make_stats
from swarm_kv.recall import Attended
from swarm_kv.sequence import Geometry, Sequence

from .helpers import open_store

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 16, 2000
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)


def sequence_of(keys: Tensor, **changes: Any) -> Sequence:
    small: dict[str, Any] = {"window": 16, "sinks": 2, "flush": 8, "layout": "sequence"}
    small |= {"code_bytes": 4, "code_bits": 8}  # random keys need good codes, unlike a model's
    store = open_store(["/a"], **{"engine": "memory", **small, **changes})
    sequence = Sequence(store, GEOMETRY, "layer 3", selectors.resolve("codes"))
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(HEADS, keys.shape[1], DIM, generator=generator)
    sequence.ingest(keys, torch.zeros_like(keys), queries)
    return sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence, a step of two queries, and the masses by brute force."""

    sequence: Sequence
    attended: Attended
    shares: Tensor  # [limit], mean over heads and queries of the softmax over all entries

    @classmethod
    def make(cls, softcap: float | None = None, fetched: int = 200, **changes: Any) -> Case:
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(KV_HEADS, TOKENS, DIM, generator=generator)
        query = 2.5 * torch.randn(HEADS, 2, DIM, generator=generator) * GEOMETRY.scale
        sequence = sequence_of(keys, **changes)
        index = sequence.index()
        assert index is not None
        scores = query.double() @ keys.double().repeat_interleave(2, 0).mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        stored = slice(2, 2 + sequence.limit)
        chosen = index.probabilities(query).topk(fetched).indices
        resident = scores.clone()
        resident[..., stored] = -torch.inf
        attended = resident.clone()
        attended[..., 2 + chosen] = scores[..., 2 + chosen]
        lses = [part.logsumexp(-1).T.float() for part in (attended, resident)]
        shares = scores.softmax(-1).mean((0, 1))[stored]
        return cls(sequence, Attended(query, chosen, lses[0], lses[1], softcap), shares)

    @property
    def share(self) -> float:
        return float(self.shares[self.attended.fetched].sum() / self.shares.sum())

    def measure(self, sample: int, seed: int = 0, budget: int = 200) -> Mass | None:
        index = self.sequence.index()
        assert index is not None
        return recall.measure(self.sequence, index, self.attended, budget, sample, seed)

    def masses(self, sample: int, count: int) -> list[Mass]:
        found = [self.measure(sample, seed) for seed in range(count)]
        return [mass for mass in found if mass is not None]


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_reading_all_keys_is_exact(softcap: float | None) -> None:
    case = Case.make(softcap)
    best = float(case.shares.topk(200).values.sum())
    fetched = float(case.shares[case.attended.fetched].sum())
    mass = case.measure(0)
    assert mass is not None
    assert mass.share == pytest.approx(case.share, rel=1e-5)
    assert mass.exact == pytest.approx((fetched, best), rel=1e-5)
    assert mass.error == 0
    whole = case.measure(TOKENS)  # a sample that holds everything
    assert whole is not None
    assert (whole.share, whole.error, whole.exact) == (pytest.approx(case.share, rel=1e-5), 0, None)
    uncapped = dataclasses.replace(
        case, attended=dataclasses.replace(case.attended, softcap=None)
    ).measure(0)
    assert uncapped is not None
    assert softcap is None or uncapped.share != pytest.approx(case.share, rel=1e-2)


def test_a_sample_estimates_it_without_bias_and_knows_its_error() -> None:
    case = Case.make()
    masses = case.masses(64, 200)
    deviations = [mass.share - case.share for mass in masses]
    spread = statistics.pstdev(deviations)
    assert 0.002 < spread < 0.05
    assert abs(statistics.mean(deviations)) < 4 * spread / math.sqrt(200)
    assert statistics.mean(mass.error for mass in masses) == pytest.approx(spread, rel=0.4)
    larger = [mass.share - case.share for mass in case.masses(256, 50)]
    assert statistics.pstdev(larger) < 0.7 * spread


def test_codes_say_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the error grows; with chances that were not drawn by, the estimate is wrong."""
    case = Case.make()
    by_codes = statistics.pstdev(mass.share for mass in case.masses(64, 240))
    monkeypatch.setattr(recall, "UNIFORM", 1.0)
    assert statistics.pstdev(mass.share for mass in case.masses(64, 240)) > 1.5 * by_codes
    monkeypatch.setattr(recall, "UNIFORM", 0.1)
    true = recall.draw
    monkeypatch.setattr(recall, "draw", lambda weights, *how: true(torch.ones_like(weights), *how))
    off = statistics.mean(mass.share for mass in case.masses(64, 60)) - case.share
    assert abs(off) > 6 * by_codes / math.sqrt(60)


def test_what_is_fetched_decides() -> None:
    good, poor = Case.make(), Case.make(fetched=20)
    found = good.measure(128), poor.measure(128)
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].share - found[1].share == pytest.approx(good.share - poor.share, abs=0.06)
    assert good.share - poor.share > 0.2


def test_equal_seeds_read_the_same(drives: list[str]) -> None:
    case = Case.make()
    assert case.measure(64, seed=3) == case.measure(64, seed=3)
    assert case.measure(64, seed=3) != case.measure(64, seed=4)


def test_it_reads_little_and_leaves_the_cache_alone() -> None:
    case = Case.make()
    before = case.sequence.store.counters()
    case.measure(64)
    after = case.sequence.store.counters()
    assert 0 < after["stream"]["wanted"] - before["stream"]["wanted"] <= 64
    assert after["decode"] == before["decode"]
    assert after["dram"]["cache"] == before["dram"]["cache"]


def test_scores_that_are_not_numbers_are_not_measured() -> None:
    case = Case.make()
    for number in (math.nan, math.inf):
        query = case.attended.query.clone()
        query[1, 0, 3] = number
        lse = torch.full_like(case.attended.lse, math.nan)
        asked = dataclasses.replace(case.attended, query=query, lse=lse, resident_lse=lse)
        for sample in (0, 64):
            assert dataclasses.replace(case, attended=asked).measure(sample) is None


def test_what_the_meter_alone_cannot_read_does_not_stop_decoding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case.make()

    def fail(*_: Any) -> Any:
        raise StorageError("drive1: entry 7 of layer 3 could not be read")

    monkeypatch.setattr(case.sequence, "stream", fail)
    with caplog.at_level(logging.WARNING, logger="swarm_kv"):
        assert case.measure(64) is None
    assert "recall of layer 3 was not measured: drive1: entry 7" in caplog.text
    monkeypatch.setattr(case.sequence, "stream", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # only what drives do is forgiven
        case.measure(64)


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0])
    counts = torch.bincount(recall.draw(weights, 8000, 0), minlength=6)
    assert counts.tolist() == pytest.approx([0, 1000, 0, 2000, 5000, 0], abs=1)
    drawn = collections.Counter(
        number for seed in range(2000) for number in recall.draw(weights, 2, seed).tolist()
    )
    assert drawn[4] / 4000 == pytest.approx(5 / 8, abs=0.02)
    assert not {0, 2, 5} & set(drawn)


@pytest.mark.parametrize(("every", "layers"), [(64, 30), (1, 4), (4, 6)])
def test_layers_take_turns(every: int, layers: int) -> None:
    due = [
        sum(recall.due(step, layer, every) for layer in range(layers)) for step in range(5 * every)
    ]
    assert sum(due) == 5 * layers
    assert max(due) == -(-layers // every)
    assert not any(recall.due(step, layer, 0) for step in range(9) for layer in range(9))


def test_stats_tell_masses_per_layer_and_how_they_move(drives: list[str]) -> None:
    store = open_store(drives)
    assert (store.stats().mass, store.stats().mass_by_layer) == (None, ())
    meter = Meter()
    for _ in range(20):
        meter.add_mass(0, Mass(0.8, 0.03))
    for share in [0.9] * 10 + [0.5] * 10:
        meter.add_mass(7, Mass(share, 0.04))
    stats = make_stats(store.counters(), meter)
    first, second = stats.mass_by_layer
    assert (first.layer, first.samples, second.layer) == (0, 20, 7)
    assert (first.mass, first.recent) == pytest.approx((0.8, 0.8))
    assert first.error == pytest.approx(0.03 / math.sqrt(20))
    assert second.mass == pytest.approx(0.7)
    assert 0.5 < second.recent < 0.65  # the fall shows there sooner
    assert stats.mass == pytest.approx(0.75)
    assert stats.mass_error == pytest.approx(0.05 / math.sqrt(20) / 2)
    assert stats.recall is None
    meter.add_mass(0, Mass(0.8, exact=(0.4, 0.45)))
    stats = make_stats(store.counters(), meter)
    assert (stats.recall, stats.recall_samples) == (pytest.approx(0.4 / 0.45), 1)
    assert stats.to_dict()["mass_by_layer"][1]["layer"] == 7
