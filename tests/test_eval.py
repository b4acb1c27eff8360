"""The evaluation must see nothing where nothing differs, and damage where there is damage."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from swarm_kv import compat, texts
from swarm_kv import eval as evaluation

CONTEXT, STEPS = 96, 24


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 128, (1, CONTEXT + STEPS), generator=torch.Generator().manual_seed(1))


class DamagedCache(DynamicCache):
    """Loses the values of one block of the context in every layer; the prefill stays exact."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] == 1:
            values = values.clone()
            values[..., 16:48, :] = 0
        return keys, values


def plain(model, cls=DynamicCache):
    return lambda: cls(config=model.config)


def test_rows_are_those_of_one_forward_pass(model, ids):
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, CONTEXT - 1 : -1]
    want = logits.log_softmax(-1)
    for stride in (1, 7, STEPS):
        got = evaluation.teacher_forced(model, ids, CONTEXT, STEPS, stride=stride)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    shifted = torch.roll(want, 1, 0)  # control: an off-by-one would be seen
    assert not torch.allclose(got, shifted, atol=1e-2)


def test_prefill_in_chunks_changes_nothing(model, ids):
    whole = evaluation.teacher_forced(model, ids, CONTEXT, STEPS)
    parts = evaluation.teacher_forced(model, ids[0], CONTEXT, STEPS, prefill_chunk=25)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


def test_decodes_one_token_at_a_time_after_the_prefill(model, ids):
    lengths = []
    hook = model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    try:
        evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, reference=torch.zeros(STEPS, 128))
    finally:
        hook.remove()
    assert lengths == [CONTEXT - 1] + [1] * STEPS


@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen3_sliding", "llama", "gpt_oss", "gemma3", "qwen3_next"]
)
def test_same_cache_gives_no_divergence(tiny_model, ids, kind):
    model = tiny_model(kind)
    result = evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, plain(model))
    assert result.steps == STEPS
    assert abs(result.mean_kl) < 1e-7
    assert result.ratio == pytest.approx(1.0, abs=1e-5)
    assert result.top1_agreement == 1.0


def test_damaged_cache_is_seen(model, ids):
    result = evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, plain(model, DamagedCache))
    assert result.mean_kl > 0.05
    assert result.top1_agreement < 1.0
    assert result.ppl_sparse != result.ppl_full


def test_streamed_figures_equal_those_of_whole_tensors(model, ids):
    factory = plain(model, DamagedCache)
    reference = evaluation.full_attention(model, ids, CONTEXT, STEPS)
    sparse = evaluation.teacher_forced(model, ids, CONTEXT, STEPS, factory)
    result = evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, factory, reference=reference)
    assert result.ppl_full == pytest.approx(evaluation.perplexity(reference, ids[0, CONTEXT:]))
    assert result.ppl_sparse == pytest.approx(evaluation.perplexity(sparse, ids[0, CONTEXT:]))
    assert result.mean_kl == pytest.approx(
        evaluation.kl_divergence(reference, sparse).mean().item()
    )


def test_perplexity_and_kl_of_known_distributions():
    uniform = torch.full((5, 8), 1 / 8).log()
    assert evaluation.perplexity(uniform, torch.arange(5)) == pytest.approx(8.0)
    p = torch.tensor([[0.5, 0.5]]).log()
    q = torch.tensor([[0.25, 0.75]]).log()
    want = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert evaluation.kl_divergence(p, q).item() == pytest.approx(want)
    assert evaluation.kl_divergence(q, p).item() != pytest.approx(want)  # direction matters
    assert evaluation.kl_divergence(p, p).item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 120).long(), 96, 24), "one sequence"),
        ((torch.ones(119).long(), 96, 24), "119 tokens"),
        ((torch.ones(120).long(), 1, 24), "`context` \\(1\\)"),
        ((torch.ones(120).long(), 96, 0), "`steps` \\(0\\)"),
    ],
)
def test_bad_arguments_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluation.teacher_forced(model, *arguments)


def test_reference_of_other_length_is_refused(model, ids):
    with pytest.raises(ValueError, match="`reference` has shape"):
        evaluation.perplexity_kl(model, ids, CONTEXT, STEPS, reference=torch.zeros(STEPS + 1, 128))


def test_a_patched_model_is_not_its_own_reference(model, ids, monkeypatch):
    monkeypatch.setattr(compat, "attention_name", lambda model: "swarm_kv")
    with pytest.raises(ValueError, match=r"before swarm_kv\.patch"):
        evaluation.full_attention(model, ids, CONTEXT, STEPS)


@pytest.mark.slow
def test_passkey_is_found_by_full_attention_and_not_without_the_context(smollm2):
    model, tokenizer = smollm2

    class Window(DynamicCache):  # sees the last 64 tokens once it decodes
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if key_states.shape[-2] == 1:
                values = values.clone()
                values[..., :-64, :] = 0
            return keys, values

    full = evaluation.passkey(model, tokenizer, 768, depths=(0.35, 0.6), n=2)
    assert full.total == 2
    assert full.found == 2, full.cases
    window = evaluation.passkey(
        model, tokenizer, 768, depths=(0.35,), n=1, cache_factory=plain(model, Window)
    )
    assert window.found == 0, window.cases


def test_passkey_context_has_the_length_asked_for(model, smollm2):
    _, tokenizer = smollm2
    fed = []

    class Recorder:
        """Stands for a model: counts the tokens and always answers token 0."""

        device = torch.device("cpu")

        def forward(self, ids, use_cache, past_key_values=None, logits_to_keep=0):
            fed.append(ids.shape[1])

        def __call__(self, ids, **options):
            self.forward(ids, **options)
            return type(
                "Output", (), {"logits": torch.zeros(1, ids.shape[1], 8), "cache": object()}
            )

    result = evaluation.passkey(Recorder(), tokenizer, 300, n=1)
    assert result.found == 0
    assert sum(fed) == 300 + 7  # the last of the 8 answered tokens is not fed
    assert fed[1:] == [1] * (len(fed) - 1)


def test_passkey_refuses_what_it_cannot_build(model, smollm2):
    _, tokenizer = smollm2
    with pytest.raises(ValueError, match="leaves no room"):
        evaluation.passkey(model, tokenizer, 20)
    with pytest.raises(ValueError, match="between 0 and 1"):
        evaluation.passkey(model, tokenizer, 512, depths=(1.5,))


def test_texts_have_the_length_asked_for(smollm2, tmp_path):
    _, tokenizer = smollm2
    first, second = texts.token_ids(tokenizer, 50), texts.token_ids(tokenizer, 50, start=50)
    assert torch.equal(torch.cat([first, second], 1), texts.token_ids(tokenizer, 100))
    file = tmp_path / "text.txt"
    file.write_text("one two three")
    with pytest.raises(ValueError, match="tokens 0 to 500"):
        texts.token_ids(tokenizer, 500, file)
    assert texts.token_ids(tokenizer, 2, file).shape == (1, 2)


class TestCompat:
    def test_cache_argument_is_taken_and_returned(self, model, ids):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            out = model(ids, use_cache=True, **{compat.cache_arg(model): cache})
        assert compat.cache_of(out) is cache
        assert cache.get_seq_length() == ids.shape[1]

    def test_last_logits_only(self, model, ids):
        with torch.no_grad():
            assert model(ids, **compat.last_logits_only(model)).logits.shape[1] == 1

    @pytest.mark.parametrize("kwargs", [None, {}])
    def test_handle_travels_and_is_removed(self, kwargs):
        keys, layer = torch.zeros(1), object()
        compat.hand_over(layer, keys, kwargs)
        assert compat.take_over(keys, kwargs or {}) is layer
        assert compat.take_over(keys, {}) is None

    @pytest.mark.parametrize(("n", "left"), [(-3, 7), (-10, 0), (4, 4), (12, 10)])
    def test_crop_in_both_conventions(self, n, left):
        assert compat.cropped_length(10, n) == left

    def test_crop_by_or_to_zero(self, model, ids):
        """Nothing to remove, or nothing to keep: as in the transformers that is installed."""
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, use_cache=True, **{compat.cache_arg(model): cache})
        before = cache.get_seq_length()
        cache.crop(0)
        assert compat.cropped_length(before, 0) == cache.get_seq_length()

    def test_attention_name(self, model):
        assert compat.attention_name(model) == "sdpa"
