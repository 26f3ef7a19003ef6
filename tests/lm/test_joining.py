"""Keys of several states: against numpy in every window, and the same key in storing, scoring and writing."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import knnstore
from knnstore.datastore import positions_from_ids, tokens_from_ids
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm import CacheSettings, KNNLMForCausalLM, KNNSettings
from knnstore.lm.keys import Joining, locate
from knnstore.lm.reading import Encoder, TextReader
from knnstore.store import KNNStore
from tests.lm.conftest import FAMILIES
from tests.lm.phrases import words

RNG = np.random.default_rng(5)
SEQUENCES = [[0, 40, 41, 42, 50, 51, 52, 40, 41, 60, 70, 71], [0, 7, 5, 3, 40, 41, 99, 98, 97, 40]]
# The first text begins in this pass, the second is one token long.
IDS = torch.tensor([[2, 2, 2, 0, 40, 41], [2, 2, 2, 2, 2, 7], [0, 9, 8, 7, 6, 5]])
MASK = (IDS != 2).long()
JOINING = Joining.from_state_count(3)
KNN = KNNSettings(k=6, temperature=30.0, lam=0.5)
CACHED = replace(KNN, cache=CacheSettings(size=5, temperature=20.0, lam=0.3))


def states_of(base, path, tokens):
    """The states and the predictions of one text, by a plain hook."""
    seen = []
    handle = base.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        probs = base(torch.tensor([tokens])).logits[0].double().softmax(-1).numpy()
    handle.remove()
    return seen[0].reshape(len(tokens), -1).double().numpy(), probs


def joined(states, discounts):
    """The definition, one token after another: P as a matrix."""
    moved = np.eye(states.shape[1])[:, [-1, *range(states.shape[1] - 1)]]
    keys = states.copy()
    for at in range(len(states)):
        for back, a in enumerate(discounts[:at], 1):
            keys[at] += a * np.linalg.matrix_power(moved.T, back) @ states[at - back]
    return keys


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    window=st.tuples(st.integers(2, 20), st.integers(1, 19)).filter(lambda pair: pair[1] < pair[0]),
    discounts=st.lists(st.sampled_from([0.2, 0.5, 1.0, 1.5]), max_size=4),
    seed=st.integers(0, 9),
)
def test_every_token_of_every_window_has_the_states_before_it(
    make_model, tokenizer, lengths, window, discounts, seed
):
    base, (length, stride) = make_model("gpt2"), window
    encoder = Encoder(base, locate(base), Joining(tuple(discounts)))
    texts = [np.random.default_rng(seed).integers(4, 100, n).astype(np.uint32) for n in lengths]
    reader = TextReader(encoder, tokenizer, length, stride, batch_tokens=48)
    seen = 0
    for batch in reader.batch_windows(texts):
        keys, also = (
            encoder.compute_keys(batch.input_ids, batch.at),
            encoder.encode(batch.input_ids, batch.at).keys,
        )
        torch.testing.assert_close(keys, also, atol=1e-5, rtol=1e-5)
        for document, position, key in zip(batch.documents, batch.positions, keys, strict=True):
            tokens = [0, *texts[document].tolist()]
            end = length  # of the first window that has the token, which stands one further with the prefix
            while end <= position + 1:
                end += stride
            end = min(end, len(tokens))
            start = max(0, end - length)
            states, _ = states_of(base, "transformer.h.1.mlp", tokens[start:end])
            expected = joined(states, discounts)[position - start]
            np.testing.assert_allclose(key, expected, atol=1e-4)
            seen += 1
    assert seen == sum(lengths)


# -- in `forward` and in generation


@pytest.fixture
def knn_model(model, make_store):
    store = make_store(model, SEQUENCES, joining=JOINING)
    return KNNLMForCausalLM.from_base(model, store, KNN)


@pytest.fixture
def knn_gpt2(make_model, make_store):
    base = make_model("gpt2")
    return KNNLMForCausalLM.from_base(base, make_store(base, SEQUENCES, joining=JOINING), KNN)


def padded(ids, mask):
    """What a forward pass must be told of padding on the left."""
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def test_forward_is_the_definition_in_every_row(knn_model, family):
    path = FAMILIES[family].ffn
    stored = [joined(states_of(knn_model.base, path, row[:-1])[0], [0.5, 0.35]) for row in SEQUENCES]
    keys, gold = np.concatenate(stored), np.concatenate([row[1:] for row in SEQUENCES])
    np.testing.assert_allclose(knn_model.store.keys, keys, atol=1e-4)
    with torch.no_grad():
        logits = knn_model(**padded(IDS, MASK)).logits
    for row, mask, found in zip(IDS, MASK.bool(), logits, strict=True):
        states, mixed = states_of(knn_model.base, path, row[mask].tolist())
        for key, probs in zip(joined(states, [0.5, 0.35]), mixed, strict=True):
            squares = ((keys - key) ** 2).sum(1)
            nearest = np.argsort(squares, kind="stable")[: KNN.k]
            weights = np.exp(-(squares[nearest] - squares.min()) / KNN.temperature)
            knn = np.zeros(101)
            np.add.at(knn, gold[nearest], weights / weights.sum())
            probs[:] = 0.5 * knn + 0.5 * probs
        np.testing.assert_allclose(found[mask].exp(), mixed, atol=1e-4)


@pytest.mark.parametrize("knn", [KNN, CACHED], ids=["store", "cache"])
def test_generation_scores_each_step_as_the_whole_text_does(knn_model, knn):
    out = knn_model.generate(
        IDS, attention_mask=MASK, max_new_tokens=9, min_new_tokens=9, pad_token_id=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True, knn=knn,
    )  # fmt: skip
    mask = torch.cat([MASK, torch.ones(3, 8, dtype=torch.long)], 1)
    with torch.no_grad():
        whole = knn_model(**padded(out.sequences[:, :-1], mask), knn=knn).logits[:, IDS.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, atol=1e-4, rtol=1e-4)


def test_states_follow_the_beams(knn_gpt2, monkeypatch):
    monkeypatch.setattr(
        knn_gpt2.key_encoder, "compute_key_states", lambda _: pytest.fail("a text was read again")
    )
    found = knn_gpt2.generate(
        IDS, attention_mask=MASK, max_new_tokens=9, min_new_tokens=9, pad_token_id=2, num_beams=4,
        num_return_sequences=4, length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    parents = found.beam_indices[:, 1:9] % 4
    assert (parents != parents[:, :1]).any(), "no beam changed its row"
    mask = torch.cat([MASK.repeat_interleave(4, 0), torch.ones(12, 9, dtype=torch.long)], 1)
    with torch.no_grad():
        logits = knn_gpt2(**padded(found.sequences, mask)).logits[:, IDS.shape[1] - 1 : -1]
    written = found.sequences[:, IDS.shape[1] :, None]
    scores = logits.log_softmax(-1).gather(2, written)[..., 0].sum(1)
    torch.testing.assert_close(found.sequences_scores, scores, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_without_kept_state_the_same_is_written(knn_gpt2, options):
    rows = slice(2, 3) if "prompt_lookup_num_tokens" in options else slice(None)  # for one text only

    def generate(**options):
        torch.manual_seed(3)
        return knn_gpt2.generate(
            IDS[rows], attention_mask=MASK[rows], max_new_tokens=9, min_new_tokens=9, pad_token_id=2,
            **options,
        )  # fmt: skip

    without = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(generate(**options), generate(use_cache=False, **without))


def test_padding_anywhere_is_no_state(knn_gpt2):
    ids = torch.tensor([[0, 2, 9, 8, 2, 2, 7, 6]])
    mask = (ids != 2).long()
    with torch.no_grad():
        found = knn_gpt2(**padded(ids, mask)).logits[mask.bool()]
        expected = knn_gpt2(ids[mask.bool()][None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("split", [2, 4, 5])
def test_a_prompt_read_in_parts_has_the_keys_of_the_whole(knn_gpt2, split, monkeypatch):
    """Some rows begin in the first part, others in the second, one with a single token behind it."""
    monkeypatch.setattr(
        knn_gpt2.key_encoder, "compute_key_states", lambda _: pytest.fail("a text was read again")
    )
    given = padded(IDS, MASK)
    with torch.no_grad():
        whole, found, past = knn_gpt2(**given).logits, [], None
        for part in (slice(0, split), slice(split, 6)):
            output = knn_gpt2(
                IDS[:, part], MASK[:, : part.stop], given["position_ids"][:, part], past, use_cache=True,
            )  # fmt: skip
            past = output.past_key_values
            found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1)[MASK.bool()], whole[MASK.bool()], atol=1e-4, rtol=1e-4)


def test_what_came_before_must_be_known(knn_gpt2):
    with torch.no_grad():
        whole = knn_gpt2(IDS[2:]).logits
        others = knn_gpt2.base(IDS[2:, :4]).past_key_values
        with pytest.raises(ConfigError, match="4 tokens that the model with a store has not read"):
            knn_gpt2(IDS[2:, 4:], past_key_values=others)
        knn_gpt2(IDS[2:, 4:], past_key_values=others, knn=KNNSettings(lam=0.0))  # needs no key
        past = knn_gpt2(IDS[2:, :4]).past_key_values
        knn_gpt2(IDS[2:, 4:], past_key_values=past, knn=KNNSettings(lam=0.0))
        past.crop(-2)
        step = knn_gpt2(IDS[2:, 4:], past_key_values=past).logits
        torch.testing.assert_close(step, whole[:, 4:], atol=1e-4, rtol=1e-4)
        embeds = knn_gpt2.get_input_embeddings()(IDS)
        inputs = padded(IDS, MASK)
        found = knn_gpt2(**inputs).logits[MASK.bool()]
        del inputs["input_ids"]
        as_embeds = knn_gpt2(inputs_embeds=embeds, **inputs).logits[MASK.bool()]
        torch.testing.assert_close(as_embeds, found, atol=1e-4, rtol=1e-4)


# -- a store whose keys remember

TEXTS = [words(RNG, n, 4, 40) for n in (60, 47, 33, 90, 61, 28)]
SAMPLE = [words(RNG, 60, 4, 60) for _ in range(20)]


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with keys of three states, as a new one has them, in half as many components."""
    options = {
        "dim": 16,
        "sample": SAMPLE,
        "max_length": 24,
        "stride": 9,
        "store": "faiss",
        "params": {"index": "exact"},
    }
    with make_lm({"d": TEXTS}, **options).store as store:
        return store.home.path


def test_what_is_stored_is_searched_for(filled):
    lm = knnstore.load(filled)
    with lm.store as store:
        assert store.identity.key == "transformer.h.1.mlp:input +0.5 +0.35"
        assert (store.identity.dim, store.datastore.dim, store.verify()) == (16, 16, [])
        assert store.info()["key"] == store.identity.key
        projection = lm.key_encoder.projection
        kept = {}
        for ids, keys, _ in store.datastore.iterate():
            kept.update(
                zip(
                    positions_from_ids(ids).tolist(),
                    zip(tokens_from_ids(ids), keys, strict=True),
                    strict=True,
                )
            )
        tokens = lm.reader.tokenize(TEXTS[0]).tolist()
        states, _ = states_of(lm.base, "transformer.h.1.mlp", [0, *tokens[:22]])
        expected = joined(states, [0.5, 0.35]) - projection.mean.numpy()
        for position, key in enumerate(expected @ projection.matrix.numpy()):
            token, stored = kept[position]
            assert token == tokens[position]
            np.testing.assert_allclose(stored, key, atol=0.01)
        # `forward`, evaluation and explanations search for the same.
        text = " ".join(TEXTS[3].split()[40:63])
        ids = torch.tensor([[0, *lm.reader.tokenize(text).tolist()]])
        knn = KNNSettings(k=20, temperature=10.0, lam=0.5)
        with torch.no_grad():
            losses = -lm(ids, knn=knn).logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        evaluation = lm.evaluate([text], knn)
        assert losses.mean().exp() == pytest.approx(evaluation.knn_ppl, rel=1e-4)
        explained = [token.p for token in lm.explain(text, knn)]
        np.testing.assert_allclose(explained, (-losses).exp(), rtol=1e-3)


def test_a_text_that_is_stored_finds_itself_by_every_way_of_reading(filled):
    """The nearest record of each token is its own, in every window and in writing."""
    lm = knnstore.load(filled)
    with lm.store:
        near = KNNSettings(k=1, temperature=1.0, lam=0.999)
        assert all(token.p > 0.99 for token in lm.explain(TEXTS[3], near)[1:])
        prompt = [0, *lm.reader.tokenize(TEXTS[3]).tolist()[:2]]
        written = lm.generate(
            torch.tensor([prompt]), knn=near, max_new_tokens=20, do_sample=False, pad_token_id=2
        )
        assert written[0, 3:].tolist() == lm.reader.tokenize(TEXTS[3]).tolist()[2:22]


def test_a_moved_store_has_the_same_keys(filled, tmp_path):
    shutil.copytree(filled, tmp_path / "home")
    lm = knnstore.load(tmp_path / "home", "a")
    with lm.store:
        text = " ".join(TEXTS[3].split()[40:63])
        before = lm.evaluate([text], KNN).knn_ppl
        lm.store.move("hnswlib", "keys-2")
        assert lm.evaluate([text], KNN).knn_ppl == pytest.approx(before, rel=1e-4)


def test_keys_of_other_states_are_refused(filled, make_lm, tmp_path):
    with make_lm(states=2, dim=16, sample=SAMPLE).store as other, KNNStore.open(filled) as store:
        foreign, identity = other.load_weights(other.identity.projection), store.identity
    KNNStore.create(tmp_path / "mixed", identity, projection=foreign).close()
    with pytest.raises(FingerprintMismatchError, match=r"input \+0.5'"):
        knnstore.load(tmp_path / "mixed")


@pytest.mark.slow
def test_a_key_is_of_three_states_where_nothing_else_is_said_and_as_wide_as_one(make_lm):
    place = "transformer.h.1.mlp:input"
    for options, joined in (
        ({}, " +0.5 +0.35"),
        ({"states": 1}, ""),
        ({"states": 2, "discounts": [1], "metric": "ip"}, " +1.0"),
    ):
        made = make_lm({"d": TEXTS}, **options)
        identity = made.store.identity
        assert (identity.key, identity.dim, made.store.datastore.dim) == (place + joined, 32, 32)
        assert made.evaluate([SAMPLE[0]]).knn_ppl > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": 0}, "at least 1 state"),
        ({"states": 3, "discounts": [0.5]}, "for each state before the last: 2, got 1"),
        ({"discounts": [0.5]}, "before the last: 2, got 1"),
        ({"states": 2, "discounts": [-1.0]}, "above 0, got -1.0"),
        ({"states": 2, "discounts": [float("nan")]}, "above 0, got nan"),
        ({"sample": SAMPLE}, "belong together"),
        ({"dim": 8}, "belong together"),
        ({"states": 2, "dim": 33, "sample": SAMPLE}, "between 1 and 32, got 33"),
        ({"states": 2, "dim": 0, "sample": SAMPLE}, "between 1 and 32, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused(model_path, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        knnstore.create(tmp_path / "home", model_path, **options)
    assert not (tmp_path / "home").exists()


@given(st.lists(st.floats(1e-6, 1e6), max_size=5), st.text("abc.:0", min_size=1))
def test_a_joining_is_read_from_the_name_of_a_key(discounts, place):
    joining = Joining.from_state_count(len(discounts) + 1, discounts)
    assert Joining.parse(f"{place}{joining}") == (place, joining)
    assert Joining.from_state_count(4).discounts == (0.5, 0.35, 0.245)


@pytest.mark.parametrize(
    "key", ["mlp [1, 0.5]", "mlp 0.5", "mlp +", "mlp +x", "mlp +0.5 ", "mlp +-1", "mlp +nan"]
)
def test_a_key_of_another_version_is_refused(key):
    with pytest.raises(ConfigError):
        Joining.parse(key)
