"""Which layout a layer gets: clusters or token order, as held-out queries judge."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_kv import codes, layout, selectors
from swarm_kv.config import SwarmConfig
from swarm_kv.errors import ArgumentError
from swarm_kv.index import build, sequence_blocks
from swarm_kv.layout import Judge, Layout, Problem, Queries, Verdict, choose

HEADS, KV_HEADS, DIM = 4, 2, 32
SINKS, WINDOW = 2, 16
GROUP = 24  # about what a step reads
NOTHING = torch.empty(0, dtype=torch.int64)


def config_of(**changes: Any) -> SwarmConfig:
    small = {"sparsity": 0.1, "window": WINDOW, "sinks": SINKS, "block": 8, "min_activation": 2}
    return SwarmConfig(paths=["/a"], **{**small, **changes})


def problem_of(
    keys: Tensor, queries: Queries, config: SwarmConfig, stored_bytes: int = 4096
) -> Problem:
    """The problem as a sequence poses it after a prefill."""
    entries = keys.shape[1] - SINKS - WINDOW
    stored = keys[:, SINKS : SINKS + entries]
    book = codes.train(stored, 8, queries.q, config.code_bits)
    cost = config.entry_request_cost(stored_bytes)
    by_codes = build(book, stored, *sequence_blocks(entries, 8), request_cost=cost)
    return Problem(
        keys=keys,
        sinks=SINKS,
        entries=entries,
        queries=queries,
        scale=1.0,
        stored_bytes=stored_bytes,
        index=lambda made: by_codes.laid_out(made.offsets, made.members, None),
        selector=selectors.resolve(config.selector),
    )


def topics(
    topic_of: Tensor, config: SwarmConfig, count: int = 64, strength: float = 6.0, seed: int = 0
) -> Problem:
    """Stored entry i is of topic `topic_of[i]`; each of the last queries asks for one topic."""
    generator = torch.Generator().manual_seed(seed)
    number = int(topic_of.max()) + 1
    wants = torch.nn.functional.normalize(torch.randn(number, DIM, generator=generator), dim=1)
    entries = len(topic_of)
    tokens = SINKS + entries + WINDOW
    keys = 0.3 * torch.randn(KV_HEADS, tokens, DIM, generator=generator)
    keys[:, SINKS : SINKS + entries] += strength * wants[topic_of]
    q = 0.1 * torch.randn(HEADS, count, DIM, generator=generator)
    q += strength * wants[torch.arange(count) % number]
    # All of them behind the last entry, as if the window had no room for their keys.
    positions = torch.full((count,), tokens - 1)
    return problem_of(keys, Queries(q, positions), config)


def scattered(entries: int = 240, seed: int = 0) -> Tensor:
    order = torch.randperm(entries, generator=torch.Generator().manual_seed(seed))
    return torch.arange(entries)[order] // GROUP


class Recorded(Judge):
    """Keeps what was judged."""

    verdicts: list[tuple[Layout, Verdict]]

    def __call__(self, made: Layout) -> Verdict:
        verdict = super().__call__(made)
        self.verdicts.append((made, verdict))
        return verdict


def chosen(problem: Problem, config: SwarmConfig) -> tuple[Layout, list[tuple[Layout, Verdict]]]:
    """What `choose` chooses, and what it judged on the way."""
    Recorded.verdicts = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "Judge", Recorded)
        made = choose(problem, config)
    assert sorted(set(made.members.tolist())) == list(range(problem.entries))
    return made, Recorded.verdicts


def by_name(verdicts: list[tuple[Layout, Verdict]], name: str) -> list[Verdict]:
    return [verdict for made, verdict in verdicts if made.name == name]


@pytest.mark.parametrize(
    ("clusterer", "selector"),
    [("hypergraph", "interval"), ("swarm", "interval"), ("swarm", "two_level")],
)
def test_what_is_wanted_together_is_stored_together(clusterer: str, selector: str) -> None:
    config = config_of(clusterer=clusterer, selector=selector, max_overhead=3.0, max_size=64)
    topic_of = scattered()
    made, verdicts = chosen(topics(topic_of, config), config)
    assert made.name == "clusters"
    (token_order,) = by_name(verdicts, "sequence")
    best = min(by_name(verdicts, "clusters"), key=lambda verdict: verdict.cost)
    assert best.cost < token_order.cost
    assert best.recall / best.cost > 1.4 * token_order.recall / token_order.cost
    # A topic's entries lie side by side.
    places = topic_of[made.members.long()]
    assert (places.diff() == 0).float().mean() > 0.8
    assert (topic_of.diff() == 0).float().mean() < 0.2


@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm"])
def test_what_follows_the_sequence_stays_as_cheap(clusterer: str) -> None:
    config = config_of(clusterer=clusterer)
    made, verdicts = chosen(topics(torch.arange(240) // GROUP, config), config)
    (token_order,) = by_name(verdicts, "sequence")
    ours = next(verdict for judged, verdict in verdicts if judged is made)
    assert ours.cost <= token_order.cost
    # Token order of the scattered topics, by contrast, costs far more.
    _, others = chosen(topics(scattered(), config), config)
    assert by_name(others, "sequence")[0].cost > 1.4 * token_order.cost


def test_noise_stays_in_token_order() -> None:
    """Nothing is activated together, and clusters of it only cost: ties are token order's, too."""
    config = config_of(clusterer="swarm", max_overhead=3.0)
    problem = topics(torch.arange(240), config, count=96, strength=1.0)
    made, verdicts = chosen(problem, config)
    (token_order,) = by_name(verdicts, "sequence")
    ours = next(verdict for judged, verdict in verdicts if judged is made)
    assert ours.cost <= token_order.cost


@given(
    entries=st.integers(1, 90),
    group=st.integers(1, 15),
    count=st.integers(2, 40),
    strength=st.sampled_from([0.0, 1.0, 4.0, 30.0]),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
    selector=st.sampled_from(["interval", "two_level", "codes"]),
    clusterer=st.sampled_from(["hypergraph", "swarm", "kmeans_keys"]),
    cold=st.sampled_from(["coded", "packed", "single"]),
    tau=st.sampled_from(["auto", 0.5]),
    sparsity=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    request_cost=st.sampled_from([None, 0.0, 6.0]),
)
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_never_worse_than_token_order(
    entries: int, group: int, count: int, strength: float, shuffled: bool, seed: int, **choices: Any
) -> None:
    config = config_of(**choices)
    topic_of = torch.arange(entries) // group
    if shuffled:
        topic_of = topic_of[torch.randperm(entries, generator=torch.Generator().manual_seed(seed))]
    problem = topics(topic_of, config, count, strength, seed)
    made, verdicts = chosen(problem, config)
    if not verdicts:  # every clustering took too much
        assert made.name == "sequence"
        return
    (token_order,) = by_name(verdicts, "sequence")
    ours = next(verdict for judged, verdict in verdicts if judged is made)
    best = max(verdict.recall for _, verdict in verdicts)
    assert 0 <= best <= 1 + 1e-5
    assert ours.recall >= layout.LEAST_RECALL * best
    if token_order.recall >= layout.LEAST_RECALL * best:
        assert ours.cost <= token_order.cost
    assert made.overhead <= config.max_overhead


# ---- the judge


def reads(*numbers: int) -> Any:
    """A selector that always takes these entries."""
    return lambda *_: (NOTHING, torch.tensor(numbers, dtype=torch.int64))


@pytest.mark.parametrize(
    ("entries", "cost"),
    [
        ((4, 5, 6, 7), 1.5 + 4),
        ((0, 50, 100, 150), 4 * (1.5 + 1)),
        ((), 0.0),
    ],
)
def test_cost_is_that_of_the_reads(entries: tuple[int, ...], cost: float) -> None:
    config = config_of()
    problem = topics(scattered(), config)
    problem = dataclasses.replace(problem, selector=reads(*entries))
    verdict = Judge(problem, problem.queries, config)(layout.in_sequence(240, 8))
    assert verdict.cost == pytest.approx(cost)


def test_the_busiest_drive_counts() -> None:
    config = dataclasses.replace(config_of(), paths=["/a", "/b"], placement="round_robin")
    problem = topics(scattered(), config)
    # Whole clusters of eight, one on each drive.
    problem = dataclasses.replace(problem, selector=lambda *_: (torch.arange(2), NOTHING))
    verdict = Judge(problem, problem.queries, config)(layout.in_sequence(240, 8))
    assert verdict.cost == pytest.approx(1.5 + 8)


def test_recall_is_the_share_of_attention() -> None:
    config = config_of()
    problem = topics(scattered(), config)
    stored = problem.keys[:, SINKS : SINKS + 240]
    scores = problem.queries.q.view(KV_HEADS, 2, 64, DIM) @ stored[:, None].mT
    expected = scores.softmax(-1)[..., :30].sum(-1).mean()
    problem = dataclasses.replace(problem, selector=reads(*range(30)))
    verdict = Judge(problem, problem.queries, config)(layout.in_sequence(240, 8))
    assert verdict.recall == pytest.approx(float(expected), rel=1e-4)


def test_a_selector_that_does_not_look_has_less() -> None:
    config = config_of()
    problem = topics(scattered(), config)
    blind = dataclasses.replace(
        problem, selector=lambda _, index, budget, __: (NOTHING, torch.arange(budget))
    )
    made = layout.in_sequence(240, 8)
    seeing, not_looking = (Judge(p, p.queries, config)(made).recall for p in (problem, blind))
    assert seeing > 0.9
    assert not_looking < 0.5


def test_a_query_chooses_from_what_is_not_in_memory() -> None:
    """An entry that is in the query's own window, or comes after it, is neither read nor missed."""
    config = config_of()
    problem = topics(scattered(), config)
    limits = []

    def remember(query: Tensor, index: Any, budget: int, config: SwarmConfig) -> Any:
        limits.append(index.limit)
        return NOTHING, torch.arange(index.limit)

    early = Queries(problem.queries.q[:, :4], torch.tensor([0, 16, 17, 116]))
    problem = dataclasses.replace(problem, selector=remember)
    verdict = Judge(problem, early, config)(layout.in_sequence(240, 8))
    assert limits == [116 - SINKS - WINDOW + 1]
    assert verdict.recall == pytest.approx(1.0)


def test_attention_that_is_all_elsewhere_tells_nothing() -> None:
    """In float32 nothing was left of it, and nothing could be chosen."""
    config = config_of()
    problem = topics(scattered(), config)
    problem.keys[:, -WINDOW - 10 :] = 100 * problem.queries.q[0, 0]
    early = dataclasses.replace(problem.queries, positions=torch.full((64,), 200))
    judge = Judge(problem, early.pick(torch.tensor([0])), config)
    assert judge(layout.in_sequence(240, 8)) == Verdict(1.0, 0.0)
    assert choose(dataclasses.replace(problem, queries=early), config).members.numel() >= 240


# ---- settings


@pytest.fixture
def overlapping() -> tuple[Problem, SwarmConfig]:
    """Queries of three topics each, so that entries belong to several clusters."""
    config = config_of(clusterer="swarm", layout="clusters", max_overhead=3.0)
    problem = topics(scattered(), config)
    q = problem.queries.q
    mixed = (q + q.roll(7, dims=1) + q.roll(20, dims=1)) / 2
    return dataclasses.replace(problem, queries=Queries(mixed, problem.queries.positions)), config


def test_no_candidate_is_above_max_overhead(overlapping: tuple[Problem, SwarmConfig]) -> None:
    problem, config = overlapping
    made, verdicts = chosen(problem, config)
    overheads = sorted(judged.overhead for judged, _ in verdicts)
    assert [judged.tau for judged, _ in verdicts] == list(layout.TAUS)
    assert overheads[-1] > overheads[0] > 1
    between = dataclasses.replace(config, max_overhead=(overheads[0] + overheads[-1]) / 2)
    made, verdicts = chosen(problem, between)
    assert made.overhead <= between.max_overhead
    assert all(judged.overhead <= between.max_overhead for judged, _ in verdicts)
    assert len(verdicts) < len(layout.TAUS)


def test_clusters_that_are_always_too_large(overlapping: tuple[Problem, SwarmConfig]) -> None:
    problem, config = overlapping
    config = dataclasses.replace(config, max_overhead=1.0)
    with pytest.raises(
        ArgumentError,
        match=r"clusters take 1\.\d\d times the plain KV, above `max_overhead` \(1.0\): raise it, "
        r'lower `max_replicas`, or use layout="auto"',
    ):
        choose(problem, config)
    made, verdicts = chosen(problem, dataclasses.replace(config, layout="auto"))
    assert made.name == "sequence"
    assert verdicts == []
    assert choose(problem, dataclasses.replace(config, max_replicas=1)).overhead == 1.0


def test_one_radius_and_no_choice_is_not_judged(overlapping: tuple[Problem, SwarmConfig]) -> None:
    problem, config = overlapping
    for changes in ({"tau": 0.5}, {"clusterer": "hypergraph"}):
        made, verdicts = chosen(problem, dataclasses.replace(config, **changes))
        assert (made.name, made.tau) == ("clusters", changes.get("tau"))
        assert made.queries == len(problem.queries)
        assert verdicts == []


def test_token_order_as_asked_for() -> None:
    config = config_of(layout="sequence")
    made, verdicts = chosen(topics(scattered(), config), config)
    assert (made.name, made.overhead, made.activations) == ("sequence", 1.0, None)
    assert made.members.tolist() == list(range(240))
    assert verdicts == []


def test_activations_count_the_queries_that_were_not_held_out() -> None:
    config = config_of()
    made, _ = chosen(topics(scattered(), config), config)
    assert made.queries == 64 - layout.HELD_OUT
    assert made.activations is not None
    # Each activates its share of all tokens, or as much as has any attention.
    assert made.activations.sum() == made.queries * round(0.1 * (240 + SINKS + WINDOW))
    assert made.activations.max() <= made.queries


@pytest.mark.parametrize("layout_name", ["auto", "clusters"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm"])
def test_hardly_any_query(layout_name: str, count: int, clusterer: str) -> None:
    """With one, none can be held out; with none, nothing is known."""
    config = config_of(layout=layout_name, clusterer=clusterer)
    problem = topics(scattered(), config)
    problem = dataclasses.replace(problem, queries=problem.queries.pick(torch.arange(count)))
    made, verdicts = chosen(problem, config)
    if count == 0 or (count == 1 and layout_name == "auto"):
        assert made.name == "sequence"
    elif layout_name == "clusters":
        assert made.name == "clusters"
    if count < 2:
        assert verdicts == []


@pytest.mark.parametrize("cold", ["coded", "packed", "single"])
@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm"])
def test_nothing_is_activated_often_enough(cold: str, clusterer: str) -> None:
    config = config_of(min_activation=1000, cold=cold, clusterer=clusterer, layout="clusters")
    made, _ = chosen(topics(scattered(), config), config)
    assert made.overhead == 1.0
    if cold != "single" and clusterer == "swarm":
        assert made.members.tolist() == list(range(240))
    made, verdicts = chosen(topics(scattered(), config), dataclasses.replace(config, layout="auto"))
    ours = next(verdict for judged, verdict in verdicts if judged is made)
    assert ours.cost <= by_name(verdicts, "sequence")[0].cost


@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm", "kmeans_keys"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_every_key_is_the_same(value: float, clusterer: str) -> None:
    config = config_of(clusterer=clusterer)
    problem = topics(scattered(), config)
    keys = torch.full_like(problem.keys, value)
    made, verdicts = chosen(problem_of(keys, problem.queries, config), config)
    assert all(0 <= verdict.recall <= 1 + 1e-5 for _, verdict in verdicts)
    assert made.overhead <= config.max_overhead


@pytest.mark.parametrize("clusterer", ["hypergraph", "swarm"])
def test_an_index_cap_that_leaves_no_room(clusterer: str) -> None:
    """No cluster fits, and every entry is loose."""
    config = config_of(clusterer=clusterer, layout="clusters", max_index_bytes=8)
    problem = topics(scattered(), config)
    made, _ = chosen(problem, config)
    assert made.offsets.tolist() == [0]
    assert sorted(made.members.tolist()) == list(range(240))
    # Without the cap there are clusters.
    free, _ = chosen(problem, dataclasses.replace(config, max_index_bytes=0))
    assert free.offsets[-1] >= 240


def test_no_entries() -> None:
    config = config_of()
    problem = dataclasses.replace(topics(scattered(), config), entries=0)
    made, _ = chosen(problem, config)
    assert (made.name, made.offsets.tolist(), made.members.tolist()) == ("sequence", [0], [])


def test_a_clusterer_of_ones_own_and_its_radius() -> None:
    """It is asked with each radius, and its answers are judged like the others."""
    asked = []

    def halves(bits: Tensor, keys: Tensor, config: SwarmConfig) -> tuple[Tensor, Tensor]:
        asked.append(config.tau)
        order = torch.argsort(scattered(), stable=True) if config.tau == 0.6 else torch.arange(240)
        return torch.tensor([0, 120, 240]).int(), order.int()

    config = config_of(clusterer=halves)
    made, _ = chosen(topics(scattered(), config), config)
    assert asked == list(layout.TAUS)
    assert (made.name, made.tau) == ("clusters", 0.6)


@pytest.mark.parametrize(("selector", "loose"), [("interval", True), ("medoid", False)])
def test_a_selector_by_medoids_finds_cold_entries_too(selector: str, loose: bool) -> None:
    config = config_of(
        layout="clusters", clusterer="swarm", tau=0.6, min_activation=1000, selector=selector
    )
    made = choose(topics(scattered(), config), config)
    assert (int(made.offsets[-1]) < made.members.numel()) == loose
