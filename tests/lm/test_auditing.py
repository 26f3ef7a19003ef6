"""An audit passes what is sound, and finds each thing that would flatter."""

from dataclasses import replace

import numpy as np
import pytest

from knnstore.errors import InputError
from knnstore.lm import CacheSettings, KNNSettings, NGramSettings
from knnstore.lm.components import Recent, RecentText
from knnstore.lm.mixing.interpolation import Contribution
from knnstore.lm.scoring import TokenScores, token_scores
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(11)
PHRASES = phrases(RNG, 30)
STORED, HELD_OUT = documents(RNG, PHRASES, "s", 6), documents(RNG, PHRASES, "h", 4)
KNN = KNNSettings(
    k=8, temperature=8.0, lam=0.4, cache=CacheSettings(50, 8.0, 0.3), ngrams=NGramSettings(4, 0.2)
)


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"d": STORED}, max_length=32, stride=16)


def failed(lm, texts=HELD_OUT, knn=KNN) -> set[str]:
    return {check.name for check in lm.audit(texts, knn).checks if not check.passed}


@pytest.mark.parametrize("knn", [KNN, replace(KNN, cache=None, ngrams=None), KNNSettings(lam=0.0)])
def test_what_is_sound_passes(lm, knn):
    found = lm.audit(HELD_OUT, knn)
    assert found.passed
    assert (found.documents, found.tokens, len(found.checks)) == (4, 4 * 31, 5)
    with pytest.raises(InputError, match="nothing to audit"):
        lm.audit(["w5"])


def test_stored_text_is_named(lm):
    found = lm.audit([*HELD_OUT, f"{STORED[1].text} "], KNN)
    assert [check.name for check in found.checks if not check.passed] == ["no evaluated text in the store"]
    assert "1 of 5 documents" in found.checks[-1].found
    tokens = sum(len(one.text.split()) for one in [*HELD_OUT, STORED[1]])
    assert found.stored_share >= len(STORED[1].text.split()) / tokens > 0


def test_a_cache_that_has_read_the_token_itself_is_found(lm, monkeypatch):
    look_up = RecentText.look_up

    def with_itself(self, *given):
        recent = look_up(self, *given)
        if isinstance(recent, Recent):
            return recent
        return recent._replace(counts=recent.counts + 1, probs=(1 + recent.probs) / 2)

    monkeypatch.setattr(RecentText, "look_up", with_itself)
    assert failed(lm) >= {
        "scores equal the probabilities of the mixture",
        "no token saw itself or a later one",
    }


def test_a_little_on_every_token_is_found(lm, monkeypatch):
    score = token_scores.score_texts

    def flattering(*args, **options):
        for scores in score(*args, **options):
            scores.lm_log_probs.add_(0.015)
            yield scores

    monkeypatch.setattr("knnstore.lm.scoring.auditing.score_texts", flattering)
    assert "scores equal the probabilities of the mixture" in failed(lm, knn=KNNSettings(lam=0.0))


def test_a_token_that_is_told_of_the_next_is_found(lm, monkeypatch):
    mix = Contribution.token_probs

    def ahead(self, gold):
        return (mix(self, gold) + 0.2 * (gold.roll(-1) % 2)).clamp(max=1.0)

    monkeypatch.setattr(Contribution, "token_probs", ahead)
    assert "no token saw itself or a later one" in failed(lm)


def test_probabilities_that_sum_to_more_than_one_are_found(lm, monkeypatch):
    forward = type(lm).forward

    def more(self, *args, **options):
        found = forward(self, *args, **options)
        found.logits = found.logits + 0.01
        return found

    monkeypatch.setattr(type(lm), "forward", more)
    assert "the vocabulary's probabilities sum to 1" in failed(lm)


def test_a_mixture_that_is_judged_by_other_tokens_is_found(lm, monkeypatch):
    score = token_scores.score_texts

    def easy(*args, **options):
        for scores in score(*args, **options):
            kept = scores.lm_log_probs > -5
            yield TokenScores(scores.read.select_rows(kept), scores.evidence.select_rows(kept))

    monkeypatch.setattr("knnstore.lm.scoring.auditing.score_texts", easy)
    assert "model and mixture on the same tokens" in failed(lm)
