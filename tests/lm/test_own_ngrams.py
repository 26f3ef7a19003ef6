"""The own n-grams of a text: against their definition in dictionaries, wherever text is read."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.documents import TextDocument
from knnstore.lm import TokenTable, save_settings
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.components import (
    CacheSettings,
    Form,
    NGramFitting,
    NGramSettings,
    OwnNGrams,
    Question,
    RecentFitting,
)
from knnstore.lm.contexts import Contexts
from knnstore.lm.explanation.token_explanations import THIS_TEXT
from knnstore.lm.settings import KNNSettings, settings_for, settings_from_dict
from knnstore.store import EVERYTHING
from tests.lm.phrases import words
from tests.lm.written import batch_of

DISCOUNT = 0.6
NGRAMS = NGramSettings(4, 0.3, (0.9, 0.2, 0.4, 0.6))
OWN = KNNSettings(lam=0.0, cache=CacheSettings(20, 15.0, 0.0, NGRAMS))
"""With a cache of no weight."""
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=4)


def definition(before: list[int], order: int) -> tuple[dict[int, float], tuple[int, int, int]]:
    """p of what may come next; and the longest end: its length, how often it stood here, its successors."""
    counts = defaultdict(Counter)
    for at in range(len(before)):
        for length in range(1, min(order - 1, at) + 1):
            counts[tuple(before[at - length : at])][before[at]] += 1
    probs, left, suffix = dict.fromkeys(before, 0.0), 1.0, (0, 0, 0)
    for length in reversed(range(1, min(order - 1, len(before)) + 1)):
        seen = counts.get(tuple(before[-length:]))
        if seen:
            total = sum(seen.values())
            for token, count in seen.items():
                probs[token] += left * (count - DISCOUNT) / total
            left *= DISCOUNT * len(seen) / total
            suffix = max(suffix, (length, total, len(seen)))
    return {token: p / (1 - left) for token, p in probs.items()} if suffix[0] else {}, suffix


@given(texts=TEXTS, order=st.integers(2, 6))
def test_scored_text_has_the_probabilities_of_the_definition(texts, order) -> None:
    whole = Contexts.from_documents([np.array(text, np.uint32) for text in texts])
    every = np.arange(len(texts[0]) if texts else 0)
    if len(every):
        first = whole.with_positions(np.zeros_like(every), every)
        question = Question(None, EVERYTHING, NGramSettings(order), first, 10)
        weights = torch.ones(len(every), 1)
        found, best = (OwnNGrams().cite(question, None, weights, most).causes for most in (len(every), 2))
    for number, text in enumerate(texts):
        at = whole.with_positions(np.full(len(text), number), np.arange(len(text)))
        _, probs, suffixes, *_ = OwnNGrams().look_up_targets(at, order)
        for at, token in enumerate(text):
            expected, suffix = definition(text[:at], order)
            assert tuple(suffixes[at].tolist()) == suffix
            if not expected:
                assert probs[at].isnan()
                continue
            assert float(probs[at]) == pytest.approx(expected.get(token, 0.0), abs=1e-6)
            if number == 0:
                places = found[at]
                assert sum(one.share for one in places) == pytest.approx(float(probs[at]), abs=1e-6)
                assert all(text[one.position] == token and one.position < at for one in places)
                shares = sorted((one.share for one in places), reverse=True)
                assert [one.share for one in best[at]] == shares[:2]
                for one in places:
                    assert text[one.position - one.matched : one.position] == text[at - one.matched : at]


def test_texts_are_cut_between_the_first_context_and_the_last_target():
    texts = [np.arange(10), np.arange(20, 25), np.arange(30, 33)]
    contexts = Contexts.from_documents(texts).with_positions(np.array([0, 0, -1, 2]), np.array([4, 6, 0, 3]))
    cut = contexts.cut_to_positions(2)
    assert [text.tolist() for text in cut.texts] == [[2, 3, 4, 5, 6], [31, 32]]
    assert (cut.is_whole, cut.rows.tolist()) == ([False, False], [0, 1, 3])
    assert (cut.owners.tolist(), cut.lengths.tolist()) == ([0, 0, 1], [2, 4, 2])
    assert contexts.cut_to_positions(3).is_whole == [False, True]


@given(texts=TEXTS, order=st.integers(2, 6), new=st.integers(1, 40), prefix=st.sampled_from([[], [9]]))
def test_written_text_has_the_distributions_of_the_definition(texts, order, new, prefix) -> None:
    """Rows of a padded batch, of which any number of tokens is new."""
    texts = texts or [[]]
    rows = [prefix + text for text in texts]
    width = max(1, *map(len, rows))
    ids, new = torch.tensor([[-1] * (width - len(row)) + row for row in rows]), min(new, width)
    kept = torch.randperm(len(rows) * new).numpy()
    contexts = Contexts.from_pass(batch_of(ids, new), prefix, kept)
    question = Question(None, EVERYTHING, NGramSettings(order), contexts, 10)
    said = OwnNGrams().look_up(question, Form.DISTRIBUTION)
    for at, position in enumerate(kept.tolist()):
        row, column = divmod(position, new)
        text = ids[row, : width - new + column + 1].tolist()
        is_text = text[-1] >= 0
        text = [token for token in text if token >= 0 and token not in prefix]
        expected, suffix = definition(text, order) if is_text else ({}, (0, 0, 0))
        probs = torch.zeros(10).index_add_(0, said.tokens[at], said.weights[at])
        np.testing.assert_allclose(probs, [expected.get(token, 0.0) for token in range(10)], atol=1e-6)
        assert tuple(said.suffixes[at].tolist()) == suffix


# -- in a model


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(4)
    return [TextDocument(str(at), words(rng, size, 4, 9)) for at, size in enumerate((50, 7, 64, 1, 30))]


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"stored": ["w5 w6 w7 w8 w9 w10"]}, max_length=12, stride=6)


def mixed(lm, texts) -> list[float]:
    """p of every token: λ by the longest end over what the model gives."""
    table = TokenTable()
    lm.evaluate(texts, KNNSettings(lam=0.0), table=table)
    below, found = iter([row["p"] for row in table.rows(lm.tokenizer)]), []
    for text in texts:
        tokens = lm.reader.tokenize(text.text).tolist()
        for at, token in enumerate(tokens):
            expected, (length, *_) = definition(tokens[:at], NGRAMS.order)
            lam = NGRAMS.by_length[length] if length else 0.0
            found.append((1 - lam) * next(below) + lam * expected.get(token, 0.0))
    return found


def test_evaluated_text_is_mixed_as_defined_across_windows(lm, texts) -> None:
    expected, table = mixed(lm, texts), TokenTable()
    found = lm.evaluate(texts, OWN, table=table)
    np.testing.assert_allclose([row["p"] for row in table.rows(lm.tokenizer)], expected, atol=1e-6)
    assert found.cache_ppl == found.knn_ppl < 0.99 * found.base_ppl == pytest.approx(0.99 * found.store_ppl)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_rows_beams_and_drafts_are_written_as_whole_texts_are_scored(lm, options) -> None:
    ids = torch.tensor([[2, 2, 0, 40, 41, 40], [0, 9, 8, 9, 8, 6]])
    given = {"attention_mask": (ids != 2).long(), "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 2}

    def written(**more):
        torch.manual_seed(3)
        return lm.generate(ids, knn=OWN, **given, **{"do_sample": False, **options, **more})

    found = written()
    assert torch.equal(found, written(use_cache=False))
    if not options:
        alone = lm.generate(ids[1:], knn=OWN, max_new_tokens=6, min_new_tokens=6, pad_token_id=2, draft=True)
        assert alone[0].tolist() == found[1].tolist()
        with torch.no_grad():
            (p,) = lm(alone, knn=OWN).logits.exp()
            (below,) = lm(alone, knn=KNNSettings(lam=0.0)).logits.softmax(-1)
        for at in range(1, alone.shape[1]):
            expected, (length, *_) = definition(alone[0, 1 : at + 1].tolist(), NGRAMS.order)
            lam = NGRAMS.by_length[length] if length else 0.0
            probs = (1 - lam) * below[at]
            for token, one in expected.items():
                probs[token] += lam * one
            torch.testing.assert_close(p[at], probs, atol=1e-6, rtol=1e-4)


def test_this_text_is_named_as_their_source(lm) -> None:
    last = lm.explain("w20 w21 w22 w23 w20 w21 w22", OWN)[-1]
    assert last.shares["own n-grams"] == pytest.approx(0.4)
    (cause,) = last.causes
    assert (cause.document, cause.position, cause.matched, cause.part) == (THIS_TEXT, 2, 2, "own n-grams")
    assert (cause.context, cause.text, cause.continuation) == ("w20 w21", " w22", " w23 w20 w21")
    assert last.store_share == 0


def test_a_fit_takes_them_with_the_cache_and_saved_settings_have_them_only_then(lm, texts) -> None:
    scored = score_once(lm.store, lm.reader, texts, k=2, selection=EVERYTHING)
    every = torch.ones(len(scored), dtype=torch.bool)
    own = scored.evidence.found["own n-grams"]
    evidence = RecentFitting.from_keys(scored.reading, own)
    cache = evidence.fit(scored.lm_log_probs, every)
    below = evidence.mix(scored.lm_log_probs, replace(cache, ngrams=None))
    assert cache.ngrams == NGramFitting(own).fit(below, every), "over the cache"
    settings = KNNSettings(k=1, lam=0.0, cache=cache)
    found = scored.log_probs(settings).log_probs
    torch.testing.assert_close(evidence.mix(scored.lm_log_probs, cache), found, atol=1e-5, rtol=0)
    without = scored.log_probs(replace(settings, cache=replace(cache, ngrams=None))).log_probs
    assert float(found.mean()) > float(without.mean())
    assert lm.evaluate(texts, settings).knn_ppl == pytest.approx(float((-found.mean()).exp()), rel=1e-4)
    save_settings(lm.store, settings)
    assert settings_for(lm.store).cache == cache
    earlier = {"mixer": {"name": "fixed", "lam": 0.0}, "cache": {"size": 5, "temperature": 2.0, "lam": 0.1}}
    assert "own n-grams" not in settings_from_dict(earlier).parts
    assert "own n-grams" not in replace(settings, cache=None).parts
