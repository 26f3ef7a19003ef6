"""The model with a store: equal to its base without retrieval, and to the definition with it."""

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GPT2LMHeadModel

from knnstore.datastore import tokens_from_ids
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm import Chosen, KNNLMForCausalLM, KNNSettings, SimpleMixer
from knnstore.lm.reading import as_cache_argument
from knnstore.store import Selection

SEQUENCE = [0, 40, 41, 42, 50, 51, 52, 40, 41, 60, 70, 71, 72, 90, 33, 44, 40, 13, 14, 15]
OTHER = [0, 7, 5, 3, 40, 41, 99, 98, 97, 40]

# Two prompts of different length, padded on the left.
IDS = torch.tensor([[2, 2, 2, 0, 40, 41], [0, 9, 8, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
NOTHING = Selection(domains=("empty",))
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam-sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
}


def generate(model, ids=IDS, mask=MASK, **options):
    torch.manual_seed(7)
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, pad_token_id=2, **options
    )


def definition(base, store, ids, settings, mask=None):
    """The mixture in float64, one position after another; base logits and keys come from plain hooks."""
    seen = []
    path, _, side = store.identity.key.rpartition(":")
    assert side == "input"
    handle = base.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        lm = base(ids, attention_mask=mask).logits.double().softmax(-1).numpy()
    handle.remove()
    keys = seen[0].reshape(*ids.shape, -1).float().numpy()
    mixed = np.empty_like(lm)
    for row in range(ids.shape[0]):
        for column in range(ids.shape[1]):
            squares = ((store.keys.astype(np.float64) - keys[row, column]) ** 2).sum(1)
            nearest = np.argsort(squares, kind="stable")[: settings.k]
            knn = np.zeros(lm.shape[-1])
            weights = np.exp(-(squares[nearest] - squares[nearest][0]) / settings.temperature)
            np.add.at(knn, tokens_from_ids(store.ids[nearest]), weights / weights.sum())
            lam = settings.mixer.lam
            mixed[row, column] = lam * knn + (1 - lam) * lm[row, column]
    return mixed


SETTINGS = KNNSettings(k=5, temperature=20.0, lam=0.4)


@pytest.fixture
def store(model, make_store):
    return make_store(model, [SEQUENCE, OTHER])


@pytest.fixture
def knn_model(model, store):
    return KNNLMForCausalLM.from_base(model, store, SETTINGS)


@pytest.fixture
def gpt2(make_model):
    return make_model("gpt2")


@pytest.fixture
def knn_gpt2(gpt2, make_store):
    return KNNLMForCausalLM.from_base(gpt2, make_store(gpt2, [SEQUENCE, OTHER]), SETTINGS)


# -- without retrieval: the base model, bit for bit


@pytest.mark.parametrize("knn", [KNNSettings(lam=0), KNNSettings(lam=1, selection=NOTHING)])
def test_without_retrieval_logits_are_the_base_models(model, knn_model, knn):
    with torch.no_grad():
        assert torch.equal(
            knn_model(IDS, attention_mask=MASK, knn=knn).logits, model(IDS, attention_mask=MASK).logits
        )


@pytest.mark.parametrize(
    ("mode", "use_cache"), [*((mode, True) for mode in MODES), ("greedy", False)], ids=str
)
def test_without_retrieval_generation_is_the_base_models(model, knn_model, mode, use_cache):
    expected = generate(model, use_cache=use_cache, **MODES[mode])
    knn = KNNSettings(lam=0) if mode != "sampling" else KNNSettings(selection=NOTHING)
    assert torch.equal(generate(knn_model, use_cache=use_cache, knn=knn, **MODES[mode]), expected)


def test_lambda_zero_never_searches(knn_model):
    knn_model(IDS, knn=KNNSettings(lam=0))
    assert knn_model.store.searched == 0


# -- with retrieval


def test_every_position_holds_the_mixture(model, store, knn_model):
    with torch.no_grad():
        logits = knn_model(IDS).logits
    assert logits.dtype == torch.float32
    expected = definition(model, store, IDS, SETTINGS)
    np.testing.assert_allclose(logits.exp().numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(logits.exp().sum(-1), 1.0, atol=1e-5)
    base = definition(model, store, IDS, KNNSettings(lam=0))
    assert np.abs(expected - base).max() > 0.1  # else retrieval would have shown nothing


def test_the_mixture_does_not_depend_on_the_chunk(knn_gpt2, monkeypatch):
    with torch.no_grad():
        whole = knn_gpt2(IDS).logits
        monkeypatch.setattr("knnstore.lm.row_mixer._CHUNK_VALUES", 5 * 101)
        assert torch.equal(knn_gpt2(IDS).logits, whole)


def test_a_stored_sequence_continues_as_stored(model, make_store):
    store = make_store(model, [SEQUENCE])
    found = store.search(store.keys[:1], 1)
    assert found.distances[0, 0] == 0
    knn_model = KNNLMForCausalLM(model, store, KNNSettings(k=4, temperature=0.01, lam=0.999))
    prompt = torch.tensor([SEQUENCE[:4]])
    out = knn_model.generate(prompt, max_new_tokens=len(SEQUENCE) - 4, do_sample=False, pad_token_id=2)
    assert out[0].tolist() == SEQUENCE


@pytest.mark.parametrize("key", ["final_hidden", "transformer.h.0.mlp:output"])
def test_other_key_locations(gpt2, make_store, key):
    store = make_store(gpt2, [SEQUENCE], key)
    knn_model = KNNLMForCausalLM(gpt2, store, KNNSettings(k=1, lam=1))
    with torch.no_grad():
        assert knn_model(torch.tensor([SEQUENCE[:-1]])).logits[0].argmax(-1).tolist() == SEQUENCE[1:]


def test_incremental_logits_are_those_of_the_whole(knn_model):
    with torch.no_grad():
        whole = knn_model(torch.tensor([SEQUENCE])).logits
        cache, steps = None, []
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 20)):
            out = knn_model(torch.tensor([SEQUENCE[start:stop]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-4, rtol=1e-4)


class CacheIsCache(GPT2LMHeadModel):
    """Takes its cache as `cache`, as models do since transformers 5.24."""

    def forward(self, input_ids=None, cache=None, **inputs):
        return super().forward(input_ids, **as_cache_argument(super(), cache), **inputs)


class CacheIsPast(GPT2LMHeadModel):
    """Takes its cache as `past_key_values`, as models did before."""

    def forward(self, input_ids=None, past_key_values=None, **inputs):
        return super().forward(input_ids, **as_cache_argument(super(), past_key_values), **inputs)


class NoCache(GPT2LMHeadModel):
    """Takes no cache."""

    def forward(self, input_ids=None, logits_to_keep=0, return_dict=None):
        return super().forward(input_ids, logits_to_keep=logits_to_keep, use_cache=False)


@pytest.mark.parametrize("given", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", [CacheIsCache, CacheIsPast])
def test_a_cache_reaches_the_model_under_the_name_that_it_takes(gpt2, make_store, kind, given):
    renamed = kind(gpt2.config).eval()
    renamed.load_state_dict(gpt2.state_dict())
    lm = KNNLMForCausalLM(renamed, make_store(gpt2, [SEQUENCE]), KNNSettings(k=4, lam=0.5))
    cache, text = DynamicCache(), torch.tensor([SEQUENCE])
    with torch.no_grad():
        whole = lm(text).logits
        lm(text[:, :6], **{given: cache}, use_cache=True)
        step = lm(text[:, 6:], **{given: cache}, use_cache=True).logits
    torch.testing.assert_close(step, whole[:, 6:], atol=2e-4, rtol=1e-4)


def test_a_model_that_takes_no_cache_is_not_given_a_part_of_a_text(gpt2, make_store):
    model = NoCache(gpt2.config).eval()
    model.load_state_dict(gpt2.state_dict())
    lm = KNNLMForCausalLM(model, make_store(gpt2, [SEQUENCE]), KNNSettings(k=4, lam=0.5))
    with torch.no_grad():
        assert lm(torch.tensor([SEQUENCE])).logits.shape[1] == len(SEQUENCE)
        with pytest.raises(ConfigError, match="NoCache accepts no cache of earlier tokens"):
            lm(torch.tensor([SEQUENCE[:6]]), cache=DynamicCache())


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_padding_does_not_change_what_a_prompt_generates(knn_model, mode):
    together = generate(knn_model, **MODES[mode])
    alone = generate(knn_model, IDS[:1, 3:], MASK[:1, 3:], **MODES[mode])
    assert torch.equal(together[0, 6:], alone[0, 3:])
    assert not torch.equal(together, generate(knn_model, knn=KNNSettings(lam=0), **MODES[mode]))


def test_padding_is_not_searched_and_keeps_the_models_prediction(gpt2, knn_gpt2):
    with torch.no_grad():
        logits = knn_gpt2(IDS, attention_mask=MASK).logits
        base = gpt2(IDS, attention_mask=MASK).logits.log_softmax(-1)
    assert knn_gpt2.store.searched == MASK.sum()
    assert torch.equal(logits[MASK == 0], base[MASK == 0])
    assert not torch.isclose(logits[MASK == 1], base[MASK == 1]).all(-1).any()


def test_generation_searches_one_query_a_step_and_row(knn_gpt2):
    generate(knn_gpt2, do_sample=False)
    assert knn_gpt2.store.searched == 8 * 2


@pytest.mark.parametrize(
    "keep",
    [
        1,
        3,
        torch.tensor([0, 5, 2]),
        torch.tensor([[1, 3], [0, 5]]),
        torch.tensor([[True, False, True, False, False, False], [False] * 5 + [True]]),
    ],
)
def test_only_the_positions_asked_for_are_predicted(knn_model, keep):
    with torch.no_grad():
        whole = knn_model(IDS).logits
        searched = knn_model.store.searched
        kept = knn_model(IDS, logits_to_keep=keep).logits
    if isinstance(keep, int):
        expected = whole[:, -keep:]
    elif keep.ndim == 1:
        expected = whole[:, keep]
    elif keep.dtype == torch.bool:
        expected = whole[keep]
    else:
        expected = torch.stack([whole[0, keep[0]], whole[1, keep[1]]])
    torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)
    assert knn_model.store.searched - searched == expected[..., 0].numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_mix_in_float32(make_model, make_store, dtype):
    model = make_model("llama").to(dtype)
    store = make_store(model, [SEQUENCE, OTHER])
    knn_model = KNNLMForCausalLM(model, store, SETTINGS)
    assert knn_model.dtype == dtype
    with torch.no_grad():
        logits = knn_model(IDS).logits
    assert logits.dtype == torch.float32
    np.testing.assert_allclose(logits.exp(), definition(model, store, IDS, SETTINGS), atol=1e-5)
    assert generate(knn_model).shape == (2, 14)


def test_logits_changed_after_the_head_are_respected(make_model, make_store):
    model = make_model("gemma2")
    store = make_store(model, [SEQUENCE, OTHER])
    with torch.no_grad():
        logits = KNNLMForCausalLM(model, store, SETTINGS)(IDS).logits
    np.testing.assert_allclose(logits.exp(), definition(model, store, IDS, SETTINGS), atol=1e-5)


def test_a_mixer_sees_the_query_and_chooses_for_each(gpt2, make_store):
    class First(SimpleMixer):
        """Trusts retrieval at the first position only."""

        name = "first"

        def __call__(self, retrieved, temperature):
            assert retrieved.keys.shape == (6, 32)
            torch.testing.assert_close(retrieved.lm_max, base[0].amax(-1))
            return Chosen(torch.tensor([1.0, 0, 0, 0, 0, 0]), temperature)

    store = make_store(gpt2, [SEQUENCE])
    ids = torch.tensor([SEQUENCE[:6]])
    with torch.no_grad():
        base = gpt2(ids).logits.log_softmax(-1)
        logits = KNNLMForCausalLM(gpt2, store)(ids, knn=KNNSettings(k=1, mixer=First())).logits
    assert logits[0, 0].argmax() == SEQUENCE[1]
    assert logits[0, 0].max() == 0
    assert torch.equal(logits[0, 1:], base[0, 1:])


# -- loss


def test_loss_is_the_negative_log_likelihood_of_the_mixture(model, store, knn_model):
    labels = IDS.clone()
    labels[0, :4] = -100
    mixed = definition(model, store, IDS, SETTINGS, MASK)
    terms = [
        -np.log(mixed[row, column - 1, labels[row, column]])
        for row in range(2)
        for column in range(1, 6)
        if labels[row, column] != -100
    ]
    with torch.no_grad():
        mean = knn_model(IDS, attention_mask=MASK, labels=labels).loss
        total = knn_model(IDS, attention_mask=MASK, labels=labels, num_items_in_batch=10).loss
    assert mean.item() == pytest.approx(np.mean(terms), rel=1e-5)
    assert total.item() == pytest.approx(np.sum(terms) / 10, rel=1e-5)


def test_the_output_may_be_a_tuple(knn_gpt2):
    with torch.no_grad():
        loss, logits, *_ = knn_gpt2(IDS, labels=IDS, return_dict=False)
        named = knn_gpt2(IDS, labels=IDS)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert list(named)[:2] == ["loss", "logits"]


# -- making, saving and refusing


def test_it_shares_what_the_base_model_has(knn_gpt2, gpt2):
    assert knn_gpt2.config is gpt2.config
    assert knn_gpt2.generation_config is gpt2.generation_config
    assert knn_gpt2.get_input_embeddings() is gpt2.transformer.wte
    assert knn_gpt2.get_output_embeddings() is gpt2.lm_head
    assert knn_gpt2.device == gpt2.device
    assert not knn_gpt2.training


def test_inputs_embeds_generate_as_ids_do(knn_gpt2):
    embeds = knn_gpt2.get_input_embeddings()(IDS)
    expected = generate(knn_gpt2, do_sample=False)
    found = knn_gpt2.generate(
        inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=8, min_new_tokens=8, pad_token_id=2
    )
    assert torch.equal(found, expected[:, 6:])


def test_misspelled_arguments_are_refused(knn_gpt2):
    with pytest.raises(ValueError, match="kn_n"):
        generate(knn_gpt2, kn_n=SETTINGS)


def test_a_store_of_another_model_is_refused_and_both_are_named(make_model, make_store, gpt2, tokenizer):
    store = make_store(gpt2, [SEQUENCE])
    other = make_model("gpt2")
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    with pytest.raises(FingerprintMismatchError, match=r"tiny .* GPT2LMHeadModel"):
        KNNLMForCausalLM(other, store)
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["w999"])
    with pytest.raises(FingerprintMismatchError, match="tokenizer"):
        KNNLMForCausalLM(gpt2, store, tokenizer=changed)


def test_tokens_outside_the_vocabulary_are_refused(knn_gpt2):
    knn_gpt2.store.ids |= 1 << 19
    with pytest.raises(ConfigError, match="vocabulary"):
        knn_gpt2(IDS)


def test_a_model_that_was_never_saved_cannot_be_named(knn_gpt2, tmp_path):
    with pytest.raises(ConfigError, match="save it"):
        knn_gpt2.save_pretrained(tmp_path)


def test_save_and_load_without_weights(make_store, model_path, tmp_path):
    base = GPT2LMHeadModel.from_pretrained(model_path)
    store = make_store(base, [SEQUENCE, OTHER])
    saved = KNNLMForCausalLM(base, store, SETTINGS)
    saved.save_pretrained(tmp_path / "knn")
    assert {path.name for path in (tmp_path / "knn").iterdir()} == {"config.json", "knn_config.json"}
    loaded = KNNLMForCausalLM.from_pretrained(tmp_path / "knn", store=store)
    assert loaded.knn == SETTINGS
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, saved(IDS).logits)
    half = KNNLMForCausalLM.from_pretrained(tmp_path / "knn", store=store, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"knn_config\.json"):
        KNNLMForCausalLM.from_pretrained(model_path, store=store)
