"""Calibrating on documents of the store itself, each left out of what predicts it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, CorruptWeightsError, InputError
from knnstore.lm import KNNSettings, NGramSettings, settings_for
from knnstore.lm.calibration import calibrating
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.calibration.text import TextToFit, choose_stored
from knnstore.lm.scoring import HeldOut
from knnstore.store import EVERYTHING, Selection
from tests.lm.phrases import documents, phrases, words

RNG = np.random.default_rng(11)
PHRASES = phrases(RNG, 30)
STORED = documents(RNG, PHRASES, "s", 40)
TWIN = TextDocument("twin", f"{STORED[0].text} {words(RNG, 20, 60, 100)}")
LONG = TextDocument("long", words(RNG, 3000))
SHORT = TextDocument("short", "w5  w6  w7")  # too short to be known by its words, and read back otherwise
OTHERS = [TWIN, LONG, SHORT]
NOISE = [words(RNG, 50, 60, 100) for _ in range(4)]
OF_PHRASES = Selection(domains=("phrases",))
KNN = KNNSettings(k=16, temperature=10.0, lam=0.5, ngrams=NGramSettings(lam=0.3))


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with the domains phrases and noise."""
    texts = {"phrases": [*STORED, *OTHERS], "noise": NOISE}
    with make_lm(texts, store="faiss", max_length=32, stride=16).store as store:
        return store.home.path


@pytest.fixture
def chosen(lm):
    """Everything that there is to choose of the domain phrases."""
    return choose_stored(lm.store, lm.reader, OF_PHRASES, 10**6)


def by_text(texts) -> dict[str, TextDocument]:
    return {" ".join(one.text.split()[:50]): one for one in texts}


def test_no_document_is_predicted_by_itself_or_its_twin(chosen) -> None:
    everything = by_text([*STORED, LONG, SHORT])
    read = [TWIN if one.text == TWIN.text else everything[" ".join(one.text.split()[:50])]
            for one in chosen.documents]  # fmt: skip
    assert sorted(one.id for one in read) == sorted(one.id for one in [*STORED, *OTHERS])
    for document, original in zip(chosen.documents, read, strict=True):
        assert original.content_hash in chosen.stored[document.content_hash]
    (twin,) = [one for one in chosen.documents if one.text == STORED[0].text]
    assert {STORED[0].content_hash, TWIN.content_hash} <= chosen.stored[twin.content_hash]


def test_each_is_predicted_by_most_of_the_others(chosen) -> None:
    folds = set(chosen.stored.values())
    assert len(folds) == 16
    assert all(1 <= len(left) <= 6 for left in folds)
    assert frozenset().union(*folds) == {one.content_hash for one in [*STORED, *OTHERS]}


def test_the_same_ones_are_chosen_until_there_are_enough_tokens(lm, chosen) -> None:
    (long,) = [one for one in chosen.documents if len(one.text.split()) > 200]
    assert len(long.text.split()) == 2048
    few = choose_stored(lm.store, lm.reader, OF_PHRASES, 1000)
    assert few.documents == chosen.documents[: len(few.documents)]
    lengths = [len(one.text.split()) for one in few.documents]
    assert sum(lengths) >= 1000 > sum(lengths[:-1])
    numbers = [int(one.id) for one in few.documents]
    assert numbers != sorted(numbers), "in no order of adding"
    total = sum(len(one.text.split()) for one in chosen.documents)
    assert choose_stored(lm.store, lm.reader, OF_PHRASES, total).documents == chosen.documents
    assert not choose_stored(lm.store, lm.reader, Selection(domains=("noise",)), 0).documents


def test_it_is_scored_as_by_a_store_without_what_is_left_out(lm, chosen, make_lm) -> None:
    scored = score_once(
        lm.store, lm.reader, chosen.documents, k=16, selection=OF_PHRASES, left_out=chosen.stored
    )
    found = scored.log_probs(KNN).log_probs
    number = next(at for at, one in enumerate(chosen.documents) if one.text == STORED[3].text)
    left = chosen.stored[chosen.documents[number].content_hash]
    others = [one for one in [*STORED, *OTHERS] if one.content_hash not in left]
    with make_lm({"phrases": others}, store="faiss", max_length=32, stride=16).store as store:
        alone = score_once(store, lm.reader, [STORED[3]], k=16, selection=EVERYTHING)
    torch.testing.assert_close(found[scored.documents == number], alone.log_probs(KNN).log_probs)


@pytest.mark.slow
def test_without_held_out_text_everything_is_fitted_and_goes_with_what_it_was_fitted_on(
    lm, monkeypatch
) -> None:
    writing, reached = type(lm).generate, list[Selection]()

    def watched(lm, *args, knn, **kwargs):
        reached.append(knn.selection)
        return writing(lm, *args, knn=knn, **kwargs)

    monkeypatch.setattr(type(lm), "generate", watched)
    found = lm.calibrate(domains=["phrases"], stored_tokens=3000, max_k=16, repetition=True)
    drawn = choose_stored(lm.store, lm.reader, OF_PHRASES, 3000)
    assert found.in_store == found.comparison.documents == len(drawn.documents)
    assert found.record is not None
    assert set(found.record.held_out) == frozenset().union(*drawn.stored.values())
    assert found.record.written, "how written text repeats itself is measured on stored documents too"
    left = {frozenset(one.exclude) for one in reached if one != EVERYTHING}
    assert left == {drawn.stored[drawn.documents[0].content_hash]}, "without what begins as it does"
    assert {"gate", "gate over all"} <= {one.name for one in found.comparison.candidates}
    honest = lm.evaluate(drawn.documents, settings_for(lm.store, OF_PHRASES), leave_out=True)
    assert found.comparison.base.ppl == pytest.approx(honest.base_ppl, rel=1e-5)
    assert found.comparison.expected.ppl == pytest.approx(honest.knn_ppl, rel=0.2)
    # Fitted to the same again, they are not judged by it.
    found = lm.calibrate(domains=["phrases"], stored_tokens=3000, max_k=16)
    assert found.comparison.current is None
    assert found.record is not None
    unread = next(one for one in lm.store.documents(domain="phrases")
                  if one.content_hash not in found.record.held_out)  # fmt: skip
    lm.store.remove_document(unread.id, domain="phrases")
    assert lm.store.settings(["phrases"]) is not None
    saved = lm.store.settings(["phrases"])
    learned = lm.store.save_weights({"w": np.ones(1, np.float32)}, {})
    lm.store.save_settings(replace(saved, query={**saved.query, "gate": {"weights": learned}}), ["phrases"])
    assert lm.store.load_weights(learned).tensors
    read = next(one for one in lm.store.documents() if one.content_hash in found.record.held_out)
    lm.store.remove_document(read.id, domain=read.domain)
    assert lm.store.settings(["phrases"]) is None
    with pytest.raises(CorruptWeightsError):
        lm.store.load_weights(learned)


@pytest.mark.slow
def test_held_out_text_may_stand_beside(lm) -> None:
    held_out = documents(RNG, PHRASES, "h", 12)
    found = lm.calibrate(held_out, stored_tokens=500, max_k=16, networks=False)
    drawn = choose_stored(lm.store, lm.reader, EVERYTHING, 500)
    assert found.comparison.documents == 12 + len(drawn.documents)
    assert found.record is not None
    assert {one.content_hash for one in held_out} < set(found.record.held_out)
    assert found.in_store == len(drawn.documents)
    with pytest.raises(ConfigError, match="stored_tokens must be at least 0, got -1"):
        lm.calibrate(held_out, stored_tokens=-1)
    again = lm.calibrate([replace(held_out[0], id="x"), *held_out[1:]], max_k=16, networks=False)
    assert again.comparison.current is not None, "fitted to more than this text"


def test_a_usual_heading_makes_no_two_texts_the_same(make_lm) -> None:
    heading = words(RNG, 60)
    lm = make_lm({"d": [f"{heading} {words(RNG, 100)}" for _ in range(20)]})
    drawn = choose_stored(lm.store, lm.reader, EVERYTHING, 10**6)
    assert len(drawn.documents) == 20
    assert max(map(len, drawn.stored.values())) == 2, "those of a fold"


def test_short_documents_are_not_predicted_by_one_that_holds_them(make_lm) -> None:
    shorts = [TextDocument(f"short-{at}", words(RNG, 20)) for at in range(20)]
    digest = TextDocument("digest", " ".join(one.text for one in shorts))
    again = [replace(one, id=f"again-{one.id}") for one in shorts[:5]]
    lm = make_lm({"d": [*shorts, *again], "other": [digest]})
    for selection, tokens in (EVERYTHING, 10**6), (Selection(domains=("d",)), 20 * 20):
        drawn = choose_stored(lm.store, lm.reader, selection, tokens)
        assert len(drawn.documents) == 20, "each once, without the digest, which is all of them"
        assert all(digest.content_hash in left for left in drawn.stored.values())


def test_text_of_parts_of_several_documents_is_not_predicted_by_these(make_lm) -> None:
    parts = [words(RNG, 100) for _ in range(3)]
    whole = [
        TextDocument(f"{at}", f"{words(RNG, 150)} {part} {words(RNG, 150)}") for at, part in enumerate(parts)
    ]
    lm = make_lm({"d": [*whole, words(RNG, 100)]})
    joined = TextDocument("joined", " ".join(parts))
    reached = HeldOut.compare_with_store(lm.store, lm.reader, [joined], EVERYTHING).stored
    assert reached == {joined.content_hash: {one.content_hash for one in whole}}


def test_a_document_is_left_out_though_its_text_be_not_known_again(lm, monkeypatch) -> None:
    monkeypatch.setattr(HeldOut, "compare_with_store", lambda *_: HeldOut([], {}))
    drawn = choose_stored(lm.store, lm.reader, EVERYTHING, 10**6)
    all_left = frozenset().union(*drawn.stored.values())
    assert all_left == {one.content_hash for one in lm.store.documents()}


def test_settings_are_not_judged_by_what_they_know() -> None:
    text = TextToFit([], {}, 0, frozenset("abc"), frozenset("def"))
    known = {of: text.is_known_to(frozenset(of)) for of in ("", "abx", "abc", "abcdx", "abcdef", "abcdefx")}
    assert [of for of, is_known in known.items() if is_known] == ["abcdx", "abcdef"]


@pytest.mark.slow
def test_what_was_fitted_to_a_document_that_is_gone_is_not_saved(lm, monkeypatch) -> None:
    def compare(*args, **options):
        lm.store.remove_domain("phrases")
        return whole(*args, **options)

    whole = calibrating.compare_candidates
    monkeypatch.setattr(calibrating, "compare_candidates", compare)
    with pytest.raises(InputError, match=r"nothing is saved: .* were removed or replaced in the meantime"):
        lm.calibrate(stored_tokens=3000, max_k=16, networks=False)
    assert lm.store.settings() is None


def test_a_store_of_which_nothing_can_be_left_out_is_named(make_lm) -> None:
    with pytest.raises(InputError, match="the store is empty"):
        make_lm().calibrate(stored_tokens=100)
    lm = make_lm({"d": [words(RNG, 3000)]})
    with pytest.raises(InputError, match="no stored document can be predicted by the others"):
        lm.calibrate(stored_tokens=100)
