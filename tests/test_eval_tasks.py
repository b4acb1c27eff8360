"""Things hidden in a text: where they are, who finds them, and that who forgets them does not."""

from __future__ import annotations

import dataclasses
import json
import random
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import swarm_kv
from swarm_kv import SwarmConfig, baselines, compat, selectors
from swarm_kv import eval as evaluation
from swarm_kv.eval import answers as asking
from swarm_kv.eval import multi_key, single_key, variable_tracking
from tests.letters import Letters

TASKS = ("passkey", "multikey", "tracking")
TOKENIZER = Letters()


def words(ids):
    return TOKENIZER.decode(list(ids))


# ---- what is hidden


@settings(max_examples=20, deadline=None)
@given(
    context=st.integers(3000, 5000),
    tasks=st.lists(st.sampled_from(TASKS), unique=True, max_size=3),
    questions=st.integers(1, 4),
    following=st.integers(0, 50),
    seed=st.integers(0, 2**31),
)
def test_a_trial_is_a_text_with_everything_in_it(context, tasks, questions, following, seed):
    trial = evaluation.make_trial(
        TOKENIZER, context, tasks, questions=questions, following=following, seed=seed
    )
    assert trial.context.shape == (1, context)
    assert trial.following.shape == (1, following)
    assert list(trial.questions) == tasks
    text = words(trial.context[0].tolist())
    for asked in trial.questions.values():
        assert len(asked) == questions
        for question in asked:
            said = words(question.ids)
            assert words(question.ids[at] for at in question.asked) == question.answer.replace(
                " ", ""
            )
            assert " " not in words(question.ids[at] for at in question.asked)
            assert list(question.depths) == sorted(question.depths)
            assert all(0.03 < depth < 0.9 for depth in question.depths)
            for depth in question.depths:
                at = round(depth * context)
                assert text[at : at + 2] == "\n\n"
            if len(question.depths) == 1:  # its sentence stands there, once
                assert text[at + 2 :].startswith(said.strip())
                assert text.count(said.strip()) == 1


def test_equal_seeds_give_equal_trials_and_others_do_not():
    def made(seed):
        return evaluation.make_trial(TOKENIZER, 3000, TASKS, questions=2, seed=seed)

    one, same, other = made(1), made(1), made(2)
    assert torch.equal(one.context, same.context)
    assert one.questions == same.questions
    assert not torch.equal(one.context, other.context)
    assert one.questions != other.questions


def test_chains_lead_to_their_value():
    riddle, _ = evaluation.TASKS["tracking"](random.Random(0), 2)
    assigned = dict(needle.removeprefix("VAR ").split(" = ") for needle in riddle.needles)
    said = "".join(text for text, _ in riddle.pieces).split("\n\n")[1:]
    assert len(said) == len(assigned) == variable_tracking.HOPS + 1
    last = said[0].removeprefix("VAR ").split(" = ")[0]
    for sentence in said:
        assert sentence == f"VAR {last} = {assigned[last]}"
        last = assigned[last]
    assert last.isdigit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3000, ["nothing"]), r"unknown `task` \('nothing'\); choose one of \['multikey'"),
        ((300, ["tracking"]), r"`context` \(300\) must be at least \d+ tokens"),
        ((10**9, ["passkey"]), "the Python topics has"),
    ],
)
def test_trials_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(swarm_kv.ArgumentError, match=message):
        evaluation.make_trial(TOKENIZER, *arguments)


@pytest.mark.parametrize("task", TASKS)
def test_more_questions_than_a_task_has_are_refused(task):
    most = {
        "passkey": len(single_key.KINDS),
        "multikey": len(multi_key.NAMES),
        "tracking": len(variable_tracking.VARIABLES) // (variable_tracking.HOPS + 1),
    }[task]
    for count in (0, most + 1):
        with pytest.raises(swarm_kv.ArgumentError, match=f"{count} .* can be 1 to {most}"):
            evaluation.make_trial(TOKENIZER, 10**5, [task], questions=count)
    words = (single_key.KINDS, multi_key.NAMES, variable_tracking.VARIABLES)
    assert all(len(set(some)) == len(some) for some in words)


# ---- who finds it


class Tokens:
    """A cache that is the tokens themselves."""

    def __init__(self):
        self.rows = None

    def batch_repeat_interleave(self, count):
        self.rows = [list(row) for row in self.rows for _ in range(count)]


class Copier:
    """Stands for a model: says what followed the longest repetition of what it has just seen.

    `sees` limits it to its last tokens. `fed` has the shapes of its calls.
    """

    device = torch.device("cpu")

    def __init__(self, sees=None):
        self.sees, self.fed = sees, []

    def forward(self, ids, use_cache, past_key_values=None, logits_to_keep=0):
        pass

    def __call__(self, ids, use_cache, past_key_values=None, logits_to_keep=0):
        self.fed.append(tuple(ids.shape))
        cache = Tokens() if past_key_values is None else past_key_values
        if cache.rows is None:
            cache.rows = [[] for _ in ids]
        count = logits_to_keep or ids.shape[1]
        logits = torch.zeros(ids.shape[0], count, 128)
        for number, (row, new) in enumerate(zip(cache.rows, ids.tolist(), strict=True)):
            before = len(row)
            row += new
            for place in range(count):
                seen = words(row[: before + len(new) - count + place + 1])
                logits[number, place, self.next(seen)] = 9
        return types.SimpleNamespace(logits=logits, cache=cache)

    def next(self, seen):
        seen = seen if self.sees is None else seen[-self.sees :]
        for length in range(min(24, len(seen) - 1), 2, -1):
            at = seen.rfind(seen[-length:], 0, -1)
            if at >= 0:
                return ord(seen[at + length])
        return ord("?")


@pytest.mark.parametrize("task", TASKS)
def test_who_copies_finds_everything_and_who_forgets_nothing(task):
    found = evaluation.retrieval(Copier(), TOKENIZER, task, 4000, 6)
    assert found.score == 1
    assert found.exact == len(found.cases) == 6
    assert found.log_prob > -0.05
    forgets = evaluation.retrieval(Copier(sees=400), TOKENIZER, task, 4000, 6)
    assert forgets.score < 0.35  # some letters can be guessed
    assert forgets.exact == 0
    assert forgets.log_prob < -5


def test_questions_are_asked_on_forks_and_decoded_token_by_token():
    trial = evaluation.make_trial(TOKENIZER, 3000, ["multikey"], questions=5)
    questions = trial.questions["multikey"]
    model = Copier()
    session = evaluation.Session(model)
    session.prefill(trial.context, 1100)
    assert model.fed == [(1, 1100), (1, 1100), (1, 800)]
    one_by_one = evaluation.ask(session, questions)
    assert set(model.fed[3:]) == {(1, 1)}
    # The common beginning is fed once; the last token of an answer is not fed.
    shared = len("\n\nThe magic number of ")
    steps = shared + sum(len(one.ids) - shared - 1 for one in questions)
    assert len(model.fed) == 3 + steps
    assert len(session._cache.rows[0]) == 3000
    model.fed.clear()
    assert evaluation.ask(session, questions, rows=3) == one_by_one
    assert len(model.fed) < steps
    assert {rows for rows, _ in model.fed} <= {1, 2, 3}
    assert evaluation.ask(session, questions, stride=1000) == one_by_one


def test_answers_are_judged_by_their_own_rows():
    question = evaluation.Question((7, 8, 1, 2, 3), (2, 4), "1 3", (0.5,))
    rows = torch.full((4, 10), -5.0)
    rows[1, 1], rows[2, 9], rows[3, 3] = -0.5, 0.0, -0.25
    found = evaluation.mark(question, rows)
    assert (found.tokens, found.first, found.exact) == (2, 2, True)
    assert found.log_prob == pytest.approx(-0.75)
    assert evaluation.mark(question, rows[1:]) == found
    rows[3, 4] = 0.0
    worse = evaluation.mark(question, rows)
    assert (worse.first, worse.exact) == (1, False)
    both = evaluation.Answers((found, worse))
    assert both.score == 0.75
    assert both.exact == 1
    assert both.to_dict()["cases"][1]["first"] == 1


def test_questions_side_by_side_are_of_equal_length():
    def question(length):
        return evaluation.Question(tuple(range(length)), (length - 1,), "", ())

    questions = [question(length) for length in (4, 5, 4, 4, 5)]
    assert asking._groups(questions, 2) == [[0, 2], [3], [1, 4]]
    assert asking._groups(questions, 1) == [[0], [2], [3], [1], [4]]


# ---- methods


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", torch.float32)


SMALL = {"context": 1536, "steps": 12, "questions": 2}


@pytest.fixture
def config(drives):
    return SwarmConfig(drives, dram_bytes="48MiB", window=32, sinks=4)


def test_reading_everything_is_full_attention_and_reading_nothing_is_not(model, config):
    stages = []
    methods = {"everything": {"sparsity": 1.0}, "nothing": {"sparsity": 1e-4}}
    results = evaluation.compare(
        model, TOKENIZER, methods, config=config, on_stage=stages.append, rows=2, **SMALL
    )
    everything, nothing = results["everything"], results["nothing"]
    assert everything.predictions.mean_kl < 1e-4
    assert everything.predictions.ratio == pytest.approx(1, abs=1e-3)
    assert nothing.predictions.mean_kl > 0.05
    for task in TASKS:
        assert everything.answers[task].log_prob == pytest.approx(
            results.full.answers[task].log_prob, abs=1e-2
        )
        assert results.points_lost(everything, task) == 0
    apart = [
        abs(one.log_prob - other.log_prob)
        for one, other in zip(
            nothing.answers["passkey"].cases, results.full.answers["passkey"].cases, strict=True
        )
    ]
    assert max(apart) > 0.1
    assert results.full.predictions.ratio == 1
    assert len(stages) == 3 * 5
    assert stages[0] == "full attention: prefill"
    assert stages[-1] == "nothing: tracking"
    assert compat.attention_name(model) == "sdpa"


def test_results_as_text_table_json_and_picture(model, config, tmp_path):
    pytest.importorskip("rich")
    results = evaluation.compare(
        model, TOKENIZER, ["default", "streaming"], config=config, model_name="tiny", **SMALL
    )
    names = ["full attention", "default", "streaming"]
    lines = results.text().splitlines()
    assert lines[0] == "tiny, 1536 tokens of topics, 10% of them read per step"
    assert [line.split("  ")[0] for line in lines[2:]] == names
    for heading in ("ratio", "mean KL", *TASKS, "recall"):
        assert heading in lines[1]
    assert results.table().row_count == 3
    figures = json.loads(json.dumps(results.to_dict()))
    assert [one["name"] for one in figures["methods"]] == names[1:]
    assert figures["full"]["answers"]["tracking"]["total"] == 2
    assert figures["methods"][0]["predictions"]["steps"] == SMALL["steps"]
    results.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(swarm_kv.ArgumentError, match="cannot draw"):
        results.plot(tmp_path / "picture.nothing")


def test_some_tasks_only(model, config, tmp_path):
    results = evaluation.compare(model, TOKENIZER, config=config, tasks=["multikey"], **SMALL)
    assert results.full.predictions is None
    assert list(results["default"].answers) == ["multikey"]
    assert "perplexity" not in results.text()
    results.plot(tmp_path / "picture.svg")
    results = evaluation.compare(model, TOKENIZER, config=config, tasks=["perplexity"], **SMALL)
    assert results["default"].answers == {}
    assert results["default"].predictions.steps == SMALL["steps"]
    results.plot(tmp_path / "picture.svg")


def test_every_method_is_known_and_runs(model, drives):
    assert evaluation.methods.names()[0] == "default"
    assert set(evaluation.methods.names()) >= {*baselines.names(), "codes", "two_level", "medoid"}
    assert set(evaluation.methods.names()) <= {"default", *selectors.names()}
    assert evaluation.methods.settings("quest") == baselines.settings("quest")
    assert evaluation.methods.settings("codes") == {"selector": "codes"}
    with evaluation.scratch_config(model, 1600, paths=drives) as config:
        config = dataclasses.replace(config, window=32)
        results = evaluation.compare(
            model,
            TOKENIZER,
            ["default", "codes", "two_level", "medoid", *baselines.names()],
            config=config,
            tasks=["perplexity"],
            **SMALL,
        )
    assert results["full"].predictions.mean_kl < 1e-4
    assert results["oracle"].predictions.mean_kl < results["streaming"].predictions.mean_kl


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["none"]}, r"unknown method \('none'\); choose one of \['default'"),
        ({"tasks": ["none"]}, r"unknown tasks \['none'\]; choose from \['perplexity'"),
        ({"steps": 0}, r"`steps` \(0\) must be at least 1"),
        ({"context": 4090}, "this model knows 4096 positions"),
    ],
)
def test_comparisons_that_cannot_be_are_refused(model, config, options, message):
    options = {**SMALL, **options}
    with pytest.raises(swarm_kv.ArgumentError, match=message):
        evaluation.compare(model, TOKENIZER, config=config, **options)


def test_too_little_memory_is_refused_before_anything_runs(model, drives):
    config = SwarmConfig(drives, dram_bytes="1200KiB", window=32)
    stages = []
    with pytest.raises(swarm_kv.CapacityError, match="raise it"):
        evaluation.compare(model, TOKENIZER, config=config, on_stage=stages.append, **SMALL)
    assert stages == []


def test_a_patched_model_is_refused(model, config):
    with (
        swarm_kv.patch(model, config),
        pytest.raises(swarm_kv.ArgumentError, match=r"before swarm_kv\.patch"),
    ):
        evaluation.compare(model, TOKENIZER, config=config, **SMALL)


# ---- a real model


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_and_streaming_does_not(smollm2, drives):
    model, tokenizer = smollm2
    with evaluation.scratch_config(model, 2500, paths=drives) as config:
        results = evaluation.compare(
            model,
            tokenizer,
            ["default", "oracle", "streaming"],
            config=config,
            context=2304,
            steps=16,
            questions=6,
        )
    print(results.text())
    for task in TASKS:
        assert results.full.answers[task].score > 0.4, task
        # Some tokens need more than a tenth of the context, however it is chosen: pass keys lose 7
        # points by exact selection too, none by all entries.
        lost = results.points_lost(results["default"], task)
        assert lost <= 5 + max(0, results.points_lost(results["oracle"], task)), task
        assert lost <= 10, task
        assert results.points_lost(results["streaming"], task) > 30, task
    assert results["default"].predictions.mean_kl < 0.03
