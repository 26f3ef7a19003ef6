"""What counts in scoring only: found by how written text repeats itself, and left out where it is written."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.lm import (
    CacheSettings,
    CalibrationRecord,
    FixedLambda,
    KNNSettings,
    NGramSettings,
    completed,
    overridden,
    save_settings,
    settings_for,
)
from knnstore.lm.calibration import scoring_only
from knnstore.lm.calibration.scoring_only import Beginnings, Repeated, find_scoring_only
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(3)
PHRASES = phrases(RNG, 30)
STORED, HELD_OUT = documents(RNG, PHRASES, "s", 12), documents(RNG, PHRASES, "h", 12)
LOOPS = [f"w{at} w{at + 1} " * 40 for at in range(4, 60)]
PLAIN = KNNSettings(k=64, temperature=2.0, lam=0.6)
CACHE = CacheSettings(60, 20.0, 0.9)
GREEDY = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 2}


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"phrases": STORED}, max_length=32, stride=16)


def make_repetitive_texts() -> list[str]:
    """Texts that both the stored phrases and a cache predict: each repeats a phrase of its own at its end."""
    own = phrases(RNG, len(HELD_OUT), 60, 100)
    return [" ".join([text.text, *[phrase] * 7]) for text, phrase in zip(HELD_OUT, own, strict=True)]


def repeated(text: list[int], length: int) -> float:
    """The share of n-grams that stood earlier."""
    counts = Counter(tuple(text[at : at + length]) for at in range(len(text) - length + 1))
    return sum(count - 1 for count in counts.values()) / counts.total()


def greedy(lm, prompt: list[int], settings: KNNSettings, new: int) -> list[int]:
    """Continue a text by whole passes, with nothing remembered in between."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            logits = lm(torch.tensor([text]), knn=settings).logits[0, -1]
            logits[1] = -torch.inf  # nothing ends it
            text.append(int(logits.argmax()))
    return text[len(prompt) :]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=30), min_size=2, max_size=5))
def test_repetition_is_counted(texts) -> None:
    found = Repeated.from_texts(texts)
    assert found.bigrams == pytest.approx([repeated(text, 2) for text in texts])
    assert found.four_grams == pytest.approx([repeated(text, 4) for text in texts])
    means = found.mean_shares("all")
    assert (means.distinct_bigrams, means.repeated_4grams, means.continuations) == pytest.approx(
        (1 - found.bigrams.mean(), found.four_grams.mean(), len(texts))
    )
    assert not found.is_clearly_more_than(found)


def test_texts_repeat_themselves_more_if_one_measure_is_larger_beyond_chance() -> None:
    low, noise = np.full(16, 0.5), np.random.default_rng(0).normal(0, 1, 16)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * 0.1  # a standard error of .025
    for shift, is_more in ((0.045, False), (0.055, True), (-0.055, False)):
        other = low + noise + shift
        assert Repeated(other, low).is_clearly_more_than(Repeated(low, low)) is is_more
        assert Repeated(low, other).is_clearly_more_than(Repeated(low, low)) is is_more
        assert Repeated(other, low - 0.2).is_clearly_more_than(Repeated(low, low)) is is_more


def test_beginnings_are_those_of_each_document_first(lm) -> None:
    short = replace(HELD_OUT[2], text=" ".join(HELD_OUT[2].text.split()[:20]))
    begun = Beginnings.from_documents(lm.reader, [*HELD_OUT[:2], short])
    texts = [lm.reader.tokenize(document.text).tolist() for document in HELD_OUT[:3]]
    parts = [(text, 0) for text in texts] + [(text, first) for first in (31, 62, 93) for text in texts[:2]]
    assert begun.prompts.tolist() == [[0, *text[first : first + 8]] for text, first in parts]
    assert begun.ends == [text[first + 8 : first + 31] for text, first in parts if text is not texts[2]][:6]
    assert len(Beginnings.from_documents(lm.reader, HELD_OUT * 3).prompts) == scoring_only.PROMPTS
    settings = replace(PLAIN, ngrams=NGramSettings(3, 0.3))
    for prompt, text in zip(
        begun.prompts[:2].tolist(), begun.generate_continuations(lm, settings), strict=False
    ):
        assert text == greedy(lm, prompt, settings, 23)


def test_a_cache_counts_in_scoring_only_without_generating_with_it(lm, monkeypatch) -> None:
    used = []
    really = Beginnings.generate_continuations

    def recorded(self, lm, settings):
        used.append(settings.components)
        return really(self, lm, settings)

    monkeypatch.setattr(Beginnings, "generate_continuations", recorded)
    left, rows = find_scoring_only(lm, HELD_OUT, replace(PLAIN, cache=CACHE))
    assert left == ("cache",)
    assert used == [(), ("keys",)]
    shares = {one.of: one.repeated_4grams for one in rows}
    assert list(shares) == ["text", "model", "all but cache"]
    assert shares["model"] > shares["text"] > shares["all but cache"]
    assert find_scoring_only(lm, HELD_OUT, KNNSettings(lam=0.0, cache=CACHE)) == (("cache",), ())


@pytest.mark.slow
def test_components_are_left_out_until_text_repeats_itself_no_more_than_the_models_own(make_lm) -> None:
    lm = make_lm({"loops": LOOPS}, max_length=32, stride=16)
    loops = KNNSettings(k=64, temperature=2.0, lam=0.3, ngrams=NGramSettings(3, 0.95))
    left, rows = find_scoring_only(lm, HELD_OUT, loops)
    assert left == ("n-grams",)
    assert [one.of for one in rows] == ["text", "model", "all", "all but n-grams", "all but keys"]
    assert find_scoring_only(lm, HELD_OUT, replace(loops, cache=CACHE))[0] == ("cache", "n-grams")
    alone = replace(loops, lam=0.0)
    assert find_scoring_only(lm, HELD_OUT, alone)[0] == alone.components == ("n-grams",)
    assert replace(alone, scoring_only=("n-grams",)).model_generates_alone
    assert not replace(loops, scoring_only=("n-grams",)).model_generates_alone
    assert not KNNSettings(lam=0.0).model_generates_alone
    assert find_scoring_only(lm, HELD_OUT[:1], replace(loops, cache=CACHE)) == (("cache",), ())
    assert find_scoring_only(lm, HELD_OUT, KNNSettings(lam=0.0)) == ((), ())


def test_without_room_to_write_a_cache_counts_in_scoring_only(make_lm) -> None:
    for window in (3, 5):
        lm = make_lm(max_length=window, stride=2)
        assert find_scoring_only(lm, HELD_OUT, replace(PLAIN, cache=CACHE)) == (("cache",), ())


@pytest.mark.slow
def test_text_is_written_without_it_and_scored_with_it(lm) -> None:
    settings = replace(PLAIN, cache=CACHE, ngrams=NGramSettings(3, 0.3), scoring_only=("cache", "n-grams"))
    assert settings.components == ("cache", "n-grams", "keys")
    assert settings.for_writing == PLAIN
    prompt = torch.tensor([[0, 5, 6, 7, 8]])
    everything, rest = (greedy(lm, prompt[0].tolist(), one, 24) for one in (settings, PLAIN))
    assert everything != rest
    before, lm.knn = lm.knn, settings
    try:
        for options in ({}, {"knn": settings}, {"draft": True}, {"num_beams": 2}):
            expected = lm.generate(prompt, **{**GREEDY, **options, "knn": PLAIN})
            assert lm.generate(prompt, **GREEDY, **options).tolist() == expected.tolist()
        assert lm.generate(prompt, **GREEDY)[0, 5:].tolist() == rest
        # What a caller gives rules.
        given = lm.generate(prompt, knn=replace(settings, scoring_only=()), **GREEDY)
        assert given[0, 5:].tolist() == everything
        plain = replace(settings, scoring_only=())
        assert torch.equal(lm(prompt).logits, lm(prompt, knn=plain).logits)
        assert lm.evaluate(HELD_OUT[:2]).knn_ppl == lm.evaluate(HELD_OUT[:2], plain).knn_ppl
    finally:
        lm.knn = before


@pytest.mark.slow
def test_calibrating_saves_it_with_its_figures(make_lm, monkeypatch) -> None:
    lm = make_lm({"phrases": STORED}, max_length=32, stride=16)
    repetitive = make_repetitive_texts()
    found = lm.calibrate(repetitive, networks=False, ngrams=False, repetition=True)
    settings, record = settings_for(lm.store), CalibrationRecord.for_selection(lm.store)
    assert record is not None
    assert found.record == record
    assert settings == lm.knn
    assert settings.scoring_only == ("cache",)
    assert settings == replace(found.comparison.best.settings, scoring_only=("cache",))
    assert [one.of for one in record.written] == ["text", "model", "all but cache"]
    again = make_lm({"phrases": STORED}, max_length=32, stride=16)
    monkeypatch.setattr(Beginnings, "generate_continuations", lambda *_: pytest.fail("nobody asked for it"))
    assert again.calibrate(repetitive, networks=False, ngrams=False).settings == settings


@pytest.mark.slow
def test_what_was_fitted_is_saved_before_writing_is_measured_and_measured_again_when_it_stays(
    make_lm, monkeypatch
) -> None:
    lm = make_lm({"phrases": STORED}, max_length=32, stride=16)
    repetitive = make_repetitive_texts()
    with monkeypatch.context() as broken:
        broken.setattr(Beginnings, "generate_continuations", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm.calibrate(repetitive, networks=False, ngrams=False, repetition=True)
    settings, record = settings_for(lm.store), CalibrationRecord.for_selection(lm.store)
    assert settings == lm.knn
    assert record is not None
    assert (settings.cache is not None, settings.scoring_only, record.written) == (True, ("cache",), ())
    for options, of in (({}, []), ({"repetition": True}, ["text", "model", "all but cache"])):
        save_settings(lm.store, replace(settings, scoring_only=()), (), record)  # as of an earlier version
        found = lm.calibrate(repetitive[1:], networks=False, ngrams=False, **options)
        assert found.kept
        assert found.settings == lm.knn == settings_for(lm.store) == settings
        assert [one.of for one in CalibrationRecord.for_selection(lm.store).written] == of


@pytest.mark.slow
def test_new_settings_leave_out_of_generation_what_those_in_force_leave_out(make_lm) -> None:
    lm = make_lm({"phrases": STORED}, max_length=32, stride=16)
    weak = KNNSettings(k=4, lam=0.01, ngrams=NGramSettings(3, 0.01), scoring_only=("n-grams",))
    save_settings(lm.store, weak)
    found = lm.calibrate(make_repetitive_texts(), networks=False)
    assert not found.kept
    assert found.settings.scoring_only == ("cache", "n-grams")
    assert found.settings == lm.knn == settings_for(lm.store)


def test_what_is_given_counts_in_writing_too(make_lm) -> None:
    settings = replace(PLAIN, cache=CACHE, scoring_only=("cache", "keys"))
    assert settings.for_writing == replace(PLAIN, mixer=FixedLambda(0.0))
    assert overridden(settings, k=9).for_writing == replace(PLAIN, k=9)
    assert overridden(settings, lam=0.25).for_writing == replace(PLAIN, mixer=FixedLambda(0.25))
    assert overridden(settings) == settings
    store = make_lm({"phrases": STORED[:1]}).store
    save_settings(store, settings)
    assert completed(store, KNNSettings()) == replace(settings, ngrams=None)
    assert completed(store, KNNSettings(k=9)).scoring_only == ("cache",)
    assert completed(store, KNNSettings(cache=CACHE)).scoring_only == ("keys",)
    assert completed(store, KNNSettings(lam=0.25)).scoring_only == ()
    assert completed(store, KNNSettings(scoring_only=())).for_writing.components == ("cache", "keys")
