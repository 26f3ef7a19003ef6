"""Encoder-decoder models with a store: against the definition, in every way of generating."""

import numpy as np
import pytest
import torch

import knnstore
from knnstore.lm import FixedLambda, KNNLMForSeq2SeqLM, KNNSettings
from knnstore.lm.keys import FINAL_PLACES, LAYER_PLACES, Source, locate, run_without_head
from tests.lm.seq2seq import EOS, FAMILIES, Definition, make_model, make_pairs, make_tokenizer

KNN = KNNSettings(k=8, mixer=FixedLambda(0.4), temperature=8.0)
PAIRS = make_pairs(40)
HELD_OUT = make_pairs(4, seed=1)
NEW = 8


QUICK = ("marian", "m2m_100", "t5")  # the beginnings and ends of the others are among theirs


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def lm(request, tmp_path_factory):
    """A model with the pairs of a store that searches exactly."""
    model, home = make_model(request.param), tmp_path_factory.mktemp("seq2seq") / "home"
    made = knnstore.create(home, model, tokenizer=make_tokenizer(), store="faiss", max_length=32)
    with made.store:
        made.add(PAIRS, domain="pairs")
        made.family = FAMILIES[request.param]
        yield made


@pytest.fixture(scope="module")
def definition(lm):
    return Definition(lm.base, lm.family, make_tokenizer(), PAIRS, k=8, lam=0.4, temperature=8.0)


def sources_of(pairs, **options):
    """The sources as a batch, which is padded."""
    batch = make_tokenizer(**options)([pair["source"] for pair in pairs], padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    return batch


def cut(row):
    """The tokens of a row without the padding after EOS. The first token may be EOS too."""
    tokens = row.tolist()
    return tokens[: tokens.index(EOS, 1) + 1] if EOS in tokens[1:] else tokens


def test_keys_are_the_input_of_the_last_feed_forward_part_of_the_decoder(lm) -> None:
    assert isinstance(lm, KNNLMForSeq2SeqLM)
    assert lm.store.identity.key == f"{lm.family.ffn}:input +0.5 +0.35"
    assert lm.reader.prefix == tuple(lm.family.prefix)


def test_every_place_of_keys_is_in_the_decoder(lm) -> None:
    """One vector for each token of the text, and not for each token of the source."""
    source = Source(torch.tensor([[5, 6, 7, EOS]]), torch.ones(1, 4, dtype=torch.long))
    for place in (*LAYER_PLACES, *FINAL_PLACES):
        location = locate(lm.base, place)
        assert "decoder" in location.path
        assert run_without_head(lm.base, location, torch.tensor([[8, 9]]), source)[0].shape == (1, 2, 32)


def test_forward_is_the_definition(lm, definition) -> None:
    texts = [[*lm.family.prefix, *(int(word[1:]) for word in one["text"].split())] for one in HELD_OUT]
    longest = max(map(len, texts))
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    ids = torch.tensor([text + [5] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        output = lm(**sources_of(HELD_OUT), decoder_input_ids=ids, decoder_attention_mask=mask, knn=KNN)
    for pair, text, logits in zip(HELD_OUT, texts, output.logits, strict=True):
        expected = definition.log_probs(pair["source"], text)
        np.testing.assert_allclose(logits[: len(text)].exp(), np.exp(expected), atol=2e-5)


def test_scores_are_the_definition(lm, definition) -> None:
    found = lm.evaluate(HELD_OUT, KNN)
    log_probs = []
    for pair in HELD_OUT:
        text = [*(int(word[1:]) for word in pair["text"].split()), EOS]
        rows = definition.log_probs(pair["source"], [*lm.family.prefix, *text[:-1]])[-len(text) :]
        log_probs += rows[np.arange(len(text)), text].tolist()
    assert found.tokens == len(log_probs)
    assert found.knn_ppl == pytest.approx(np.exp(-np.mean(log_probs)), rel=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_greedy_text_of_unequal_sources_is_the_definition(lm, definition, side) -> None:
    """Padding on the left changes what some models predict: their positions are absolute."""
    batch, expected = sources_of(HELD_OUT, padding_side=side), []
    for pair, mask in zip(HELD_OUT, batch["attention_mask"], strict=True):
        definition.padding = int((mask == 0).sum()) if side == "left" else 0
        expected.append(definition.greedy(pair["source"], NEW))
    definition.padding = 0
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        rows = lm.generate(**batch, knn=KNN, max_new_tokens=NEW, **options)
        assert [cut(row) for row in rows] == [cut(np.array(tokens)) for tokens in expected]


def test_beams_are_the_definition(lm, definition) -> None:
    expected = [definition.beams(pair["source"], NEW, 3) for pair in HELD_OUT]
    beams = {"num_beams": 3, "early_stopping": True, "max_new_tokens": NEW}
    for options in ({}, {"use_cache": False}):
        rows = lm.generate(**sources_of(HELD_OUT), knn=KNN, **beams, **options)
        assert [cut(row) for row in rows] == [cut(np.array(tokens)) for tokens in expected]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_with_weight_0_the_model_is_the_base_model_to_the_bit(lm, options) -> None:
    batch = sources_of(HELD_OUT)
    alone = {**batch, "max_new_tokens": NEW, **options}
    torch.manual_seed(3)
    expected = lm.base.generate(**alone)
    torch.manual_seed(3)
    assert torch.equal(lm.generate(**alone, knn=KNNSettings(lam=0.0)), expected)
    with torch.no_grad():
        inputs = {**batch, "decoder_input_ids": expected[: len(HELD_OUT)]}
        assert torch.equal(lm(**inputs, knn=KNNSettings(lam=0.0)).logits, lm.base(**inputs).logits)


def test_sampled_text_is_the_same_with_and_without_a_cache(lm) -> None:
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        options = {"do_sample": True, "use_cache": use_cache, "max_new_tokens": NEW}
        texts.append(lm.generate(**sources_of(HELD_OUT), knn=KNN, **options))
    assert torch.equal(*texts)


def test_the_loss_is_that_of_the_mixture(lm) -> None:
    """Labels are not shifted, and the decoder reads them after its first token."""
    (pair,) = HELD_OUT[:1]
    source = make_tokenizer()(pair["source"], return_tensors="pt")
    labels = torch.tensor([[*lm.family.prefix[1:], *lm.reader.tokenize(pair["text"]).tolist()]])
    lm.base.config.decoder_start_token_id = lm.family.start  # as a checkpoint has it
    with torch.no_grad():
        output = lm(**source, labels=labels, knn=KNN)
        whole = torch.tensor([[lm.family.start, *labels[0, :-1].tolist()]])
        if lm.family.config.model_type == "mbart":  # its first token is the last label
            whole[0, 0] = EOS
        rows = lm(**source, decoder_input_ids=whole, knn=KNN).logits[0].log_softmax(-1)
    expected = -rows[torch.arange(labels.shape[1]), labels[0]].mean()
    torch.testing.assert_close(output.loss, expected)
