"""Calibrating a real store: what is saved, for what, when nothing is, and what uses it."""

import json
import math
import shutil
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch

import knnstore
from knnstore.errors import InputError, ReadOnlyError
from knnstore.lm import (
    CalibrationRecord,
    KNNSettings,
    TokenTable,
    default_settings,
    save_settings,
    settings_for,
)
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.mixing import Evidence, NeighborSums
from knnstore.progress import Progress
from knnstore.store import EVERYTHING, Selection
from tests.lm.phrases import documents, phrases, words

RNG = np.random.default_rng(7)
PHRASES = phrases(RNG, 30)
STORED, HELD_OUT = documents(RNG, PHRASES, "s", 12), documents(RNG, PHRASES, "h", 12)
NOISE = [words(RNG, 50, 60, 100) for _ in range(4)]


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with the domains phrases and noise."""
    with make_lm({"phrases": STORED, "noise": NOISE}, store="faiss", max_length=32, stride=16).store as store:
        return store.home.path


@pytest.mark.slow
def test_the_winner_is_saved_for_its_domains_and_used(lm):
    before = lm.evaluate(HELD_OUT, settings_for(lm.store, Selection(domains=("phrases",))))
    found = lm.calibrate(HELD_OUT, domains=["phrases"], max_k=64)
    record = found.record
    assert record is not None
    assert (record.documents, record.tokens, record.domains) == (12, 12 * 108, ("phrases",))
    assert record.records == 12 * 108
    assert record.knn_ppl < record.base_ppl == pytest.approx(before.base_ppl, rel=1e-5)
    used = settings_for(lm.store, Selection(domains=("phrases",)))
    assert used == replace(
        found.comparison.best.settings, selection=Selection(domains=("phrases",)), scoring_only=("cache",)
    )
    assert lm.evaluate(HELD_OUT, used).knn_ppl < before.knn_ppl
    assert CalibrationRecord.for_selection(lm.store, Selection(domains=("phrases",))) == record
    # Other domains keep theirs.
    assert CalibrationRecord.for_selection(lm.store) is None
    assert CalibrationRecord.for_selection(lm.store, Selection(domains=("noise",))) is None
    assert not record.is_stale(lm.store)
    lm.add(documents(RNG, PHRASES, "s", 3), domain="phrases")  # in place of the first three
    assert (record.removed_share(lm.store), record.record_growth(lm.store)) == (0.25, 1)
    assert record.is_stale(lm.store)
    lm.add(documents(RNG, PHRASES, "more", 4), domain="phrases")
    assert record.record_growth(lm.store) == pytest.approx(16 / 12)


class Interrupted(Progress):
    """Counts units, and is interrupted when the phase with a number begins."""

    def __init__(self, phase: int) -> None:
        self.phase, self.titles, self.total, self.done = phase, [], 0, 0

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        if len(self.titles) == self.phase:
            raise KeyboardInterrupt
        self.titles.append(title)
        self.total, self.done = total, 0

    def advance(self, amount: int) -> None:
        self.done += amount


def test_ctrl_c_keeps_the_settings_in_force(lm):
    save_settings(lm.store, KNNSettings(k=4, temperature=2.0, lam=0.125))
    before, saved = lm.knn, lm.store.settings()
    options = {"max_k": 16, "networks": False}
    shown = Interrupted(-1)
    copy = shutil.copytree(lm.store.home.path, lm.store.home.path.with_name("copy"))
    with knnstore.load(copy, "a") as whole:
        for one in whole.calibrate(HELD_OUT, progress=shown, **options).comparison.candidates:
            assert one.settings.parts.keys() == one.by_half[0].parts.keys() == one.by_half[1].parts.keys()
    assert shown.titles[0] == "scoring"
    assert shown.titles[-1] == "fitting"
    assert abs(shown.done - shown.total) <= 3, "mixers of other packages are not counted"
    for phase in range(len(shown.titles)):
        with pytest.raises(KeyboardInterrupt):
            lm.calibrate(HELD_OUT, progress=Interrupted(phase), **options)
        assert (lm.knn, lm.store.settings()) == (before, saved)


@pytest.mark.slow
def test_what_is_saved_for_the_whole_store_is_used_from_then_on(lm):
    found = lm.calibrate(HELD_OUT, max_k=16)
    assert lm.knn == replace(found.comparison.best.settings, scoring_only=("cache",))
    home = lm.store.home.path
    lm.store.close()
    again = knnstore.load(home)
    assert again.knn == lm.knn
    with pytest.raises(ReadOnlyError, match="open it for writing"):
        again.calibrate(HELD_OUT)
    again.store.close()


@pytest.mark.slow
def test_settings_that_were_chosen_stay_until_they_are_beaten_beyond_chance(lm):
    first = lm.calibrate(HELD_OUT, max_k=16)
    assert not first.kept, "the defaults were derived, and chosen by nobody"
    assert first.record.knn_ppl == first.comparison.expected.ppl >= first.comparison.best.held_out.ppl
    lm.add(documents(RNG, PHRASES, "more", 6), domain="phrases")
    assert CalibrationRecord.for_selection(lm.store).is_stale(lm.store)
    again = lm.calibrate(documents(RNG, PHRASES, "g", 12), max_k=16, networks=False, ngrams=False)
    assert (again.kept, again.record) == (True, None)
    for found, with_own in ((first, True), (again, False)):
        assert any("own n-grams" in one.settings.parts for one in found.comparison.candidates) == with_own
    assert again.comparison.gain.high > 1
    assert again.settings == first.settings == settings_for(lm.store) == lm.knn
    renewed = CalibrationRecord.for_selection(lm.store)
    assert not renewed.is_stale(lm.store), "they were compared on what is stored now"
    changed = {"records": 0, "stored": None, "written": ()}
    assert replace(renewed, **changed) == replace(first.record, **changed)
    worse = KNNSettings(k=4, temperature=0.1, lam=0.1)
    save_settings(lm.store, worse)
    beaten = lm.calibrate(HELD_OUT, max_k=16)
    assert beaten.comparison.gain.high < 1
    assert beaten.comparison.current.settings == worse
    best = replace(beaten.comparison.best.settings, scoring_only=("cache",))
    assert settings_for(lm.store) == beaten.settings == best


@pytest.mark.slow
def test_settings_are_not_judged_by_the_text_that_they_were_fitted_to(lm):
    def calibrate(texts):
        return lm.calibrate(texts, max_k=16, networks=False)

    first = calibrate(HELD_OUT)
    fewer = calibrate(HELD_OUT[1:])
    assert fewer.comparison.current.settings == first.settings, "they know more than these can tell"
    lm.add(documents(RNG, PHRASES, "more", 6), domain="phrases")
    for texts in (HELD_OUT, [*HELD_OUT, *documents(RNG, PHRASES, "g", 1)]):
        again = calibrate(texts)
        assert (again.kept, again.comparison.current, again.comparison.gain) == (False, None, None)
        assert again.record == CalibrationRecord.for_selection(lm.store)
        assert (again.record.documents, again.record.records) == (len(texts), lm.store.record_count())


@pytest.mark.slow
def test_one_long_file_is_enough(lm):
    text = " ".join(document.text for document in documents(RNG, PHRASES, "part", 24))
    with pytest.raises(InputError, match="or 2,000 tokens in fewer documents"):
        lm.calibrate([text[: len(text) // 2]])
    found = lm.calibrate([text], max_k=16)
    assert (found.record.documents, found.record.tokens) == (1, 24 * 108)
    assert found.comparison.base.low < found.comparison.base.ppl < found.comparison.base.high < math.inf
    # A document that outweighs the rest, which alone is in a half.
    uneven = lm.calibrate([text, *HELD_OUT[:8]], max_k=16)
    assert "gate" in {one.name for one in uneven.comparison.candidates}


@pytest.mark.slow
def test_nothing_is_saved_that_does_not_beat_the_model(lm):
    before = lm.store.settings()
    # No word twice in a document, so that a cache is of no use either.
    other = [" ".join(f"w{i}" for i in 4 + RNG.permutation(56)) for _ in range(20)]
    found = lm.calibrate(other, domains=["noise"], max_k=16)
    assert found.record is None
    assert lm.store.settings(["noise"]) is None
    assert lm.store.settings() == before


@pytest.mark.slow
def test_documents_of_the_store_are_refused_or_left_out(lm):
    with pytest.raises(InputError, match=r"2 of the held-out documents \(for example 's0'\)"):
        lm.calibrate([*HELD_OUT, *STORED[:2]])
    elsewhere = lm.calibrate(STORED, domains=["noise"], max_k=4)
    assert (elsewhere.comparison.documents, elsewhere.in_store) == (12, 12)
    left_out = lm.calibrate(STORED, max_k=16, leave_out=True)
    assert left_out.in_store == len(STORED)
    honest = lm.evaluate(STORED, left_out.comparison.best.settings, leave_out=True)
    assert left_out.comparison.base.ppl == pytest.approx(honest.base_ppl, rel=1e-5)
    assert left_out.comparison.best.held_out.ppl == pytest.approx(honest.knn_ppl, rel=0.2)


@pytest.mark.slow
def test_stored_text_is_recognized_by_its_tokens(lm):
    spaced = [replace(one, text=f"{one.text} ") for one in STORED]
    part = " ".join(STORED[3].text.split()[20:90])
    around = f"{NOISE[0]} {part} {NOISE[1]}"
    for disguised in (spaced[0], part, around):
        with pytest.raises(InputError, match=r"1 of the held-out documents \("):
            lm.calibrate([*HELD_OUT, disguised])
    apart = lm.evaluate([HELD_OUT[0]], leave_out=True)
    assert apart.stored == ()
    left_out, honest = (lm.evaluate(texts, leave_out=True) for texts in (spaced, STORED))
    assert left_out.stored == honest.stored
    assert left_out.knn_ppl == honest.knn_ppl > 2 * lm.evaluate(spaced).knn_ppl
    elsewhere = lm.calibrate(spaced, domains=["noise"], max_k=4)
    assert elsewhere.in_store == len(STORED)
    # A few words in common are no document.
    common = " ".join([*HELD_OUT[0].text.split(), *STORED[0].text.split()[:40]])
    assert lm.evaluate([common]).stored == ()


@pytest.mark.parametrize("held_out", [HELD_OUT[:7], [f"w5 w{at}" for at in range(6, 20)], []])
def test_too_little_text_is_refused_before_the_pass(lm, held_out):
    with pytest.raises(
        InputError, match="give at least 8 documents and 1,000 tokens, or 2,000 tokens in fewer documents"
    ):
        lm.calibrate(held_out)


@pytest.mark.slow
def test_the_cached_pass_agrees_with_the_evaluation(lm):
    scored = score_once(lm.store, lm.reader, HELD_OUT, k=64, selection=EVERYTHING)
    fitted = lm.calibrate(HELD_OUT, max_k=64).comparison.candidates
    for settings in [
        KNNSettings(k=20, temperature=3.0, lam=0.4),
        *(candidate.settings for candidate in fitted if "domains" not in candidate.name),
    ]:
        evaluated = lm.evaluate(HELD_OUT, settings)
        mixed, lam = scored.log_probs(settings)
        # Of records at equal distances, a search for fewer neighbors may choose others.
        tolerance = 1e-4 if settings.k == 64 else 1e-2
        assert math.exp(-mixed.double().mean()) == pytest.approx(evaluated.knn_ppl, rel=tolerance)
        assert float(lam.mean()) == pytest.approx(evaluated.lam, rel=1e-3, abs=1e-6)


def test_every_token_has_a_row_that_adds_up(lm):
    texts = [{"id": "b", "text": "w5 w6 w7\tw8"}, {"id": "a", "text": " ".join(["w9 w10"] * 30)}]
    table, knn = TokenTable(), KNNSettings(k=5, temperature=4.0, lam=0.25)
    found = lm.evaluate(texts, knn, table=table)
    rows = list(table.rows(lm.tokenizer))
    assert [(row["document"], row["position"]) for row in rows] == [
        *(("b", at) for at in range(4)), *(("a", at) for at in range(60)),
    ]  # fmt: skip
    assert [row["text"] for row in rows[:4]] == ["w5", " w6", " w7", " w8"]
    losses = -np.log([row["p"] for row in rows])
    assert math.exp(losses.mean()) == pytest.approx(found.knn_ppl, rel=1e-5)
    assert found.helped == np.mean([row["p_knn"] > row["p_lm"] for row in rows])
    for row in rows:
        assert row["p"] == pytest.approx(0.75 * row["p_lm"] + 0.25 * row["p_knn"], rel=1e-4)
        assert row["distance"] >= 0
        texts_stored = [*(document.text for document in STORED), *NOISE]
        assert row["frequency"] == sum(text.split().count(row["text"].strip()) for text in texts_stored)
    never = [part.tokens for part in found.by_frequency if part.high == 0]
    assert sum(never) == sum(row["frequency"] == 0 for row in rows)
    assert sum(part.tokens for part in found.by_distance) == len(rows)
    words, in_bytes = 64, sum(len(row["text"].encode()) for row in texts)
    assert (found.words, found.bytes) == (words, in_bytes)
    assert found.knn_word_ppl == pytest.approx(math.exp(losses.sum() / words), rel=1e-5)
    assert found.knn_byte_ppl == pytest.approx(math.exp(losses.sum() / in_bytes), rel=1e-5)
    lines, values = StringIO(), StringIO()
    table.write(lines, lm.tokenizer, as_json=True)
    table.write(values, lm.tokenizer, as_json=False)
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == rows
    heading, *cells = (line.split("\t") for line in values.getvalue().splitlines())
    assert [dict(zip(heading, map(json.loads, row), strict=True)) for row in cells] == rows


def test_words_and_bytes_share_the_loss_of_tokens_of_the_model_alone_too(lm):
    # What Python takes for white space and the tokenizer does not: half as many tokens as words.
    text = " ".join(["w5\x1cw6 w7\x1cw8 w9\x1cé"] * 5)
    table, knn = TokenTable(), KNNSettings(k=5, temperature=4.0, lam=0.25)
    found = lm.evaluate([text], knn, table=table)
    assert (found.tokens, found.words, found.bytes) == (15, 30, len(text.encode()))
    rows = list(table.rows(lm.tokenizer))
    base, mixed = (-sum(math.log(row[name]) for row in rows) for name in ("p_lm", "p"))
    assert found.base_ppl != pytest.approx(found.knn_ppl, rel=1e-2)
    expected = [math.exp(total / units) for units in (30, found.bytes) for total in (base, mixed)]
    assert expected == pytest.approx(
        [found.base_word_ppl, found.knn_word_ppl, found.base_byte_ppl, found.knn_byte_ppl], rel=1e-5
    )


@pytest.mark.slow
def test_settings_fitted_on_a_text_go_when_it_was_stored_and_is_removed(lm):
    phrases_only = Selection(domains=("phrases",))
    before = settings_for(lm.store, phrases_only)
    assert lm.calibrate(HELD_OUT, domains=["phrases"], max_k=16).record
    assert settings_for(lm.store, phrases_only) != before
    lm.add(HELD_OUT[:2], domain="later")
    id = next(one.id for one in lm.store.documents(domain="later"))
    assert CalibrationRecord.for_selection(lm.store, phrases_only)
    lm.store.remove_document(id)
    assert CalibrationRecord.for_selection(lm.store, phrases_only) is None
    assert settings_for(lm.store, phrases_only) == before


def test_by_default_records_count_less_the_farther_the_nearest_is(lm):
    keys = np.concatenate([batch.keys for batch in lm.store.records()]).astype(np.float64)
    between_two = 2 * float(keys.var(axis=0).sum())
    asked = Evidence(torch.zeros(3), [NeighborSums(torch.tensor([[0.0], [0.2], [1.0]]) * between_two)])
    near, within, far = default_settings(lm.store).mixer(asked, 1.0).lam.tolist()
    assert near == pytest.approx(0.9)
    assert near > within > 0.1 > 0.01 > far > 0


def test_the_default_temperature_follows_the_documents_that_are_there(lm):
    first = settings_for(lm.store).temperature
    lm.add(documents(RNG, PHRASES, "added", 3), domain="later")
    assert settings_for(lm.store).temperature == first
    lm.store.remove_domain("noise")  # which came later too
    assert settings_for(lm.store).temperature == first
    lm.store.remove_domain("phrases")
    settled = settings_for(lm.store)
    assert settled == default_settings(lm.store)
    assert settled.temperature != first
    lm.add(NOISE[:2], domain="noise")
    kept = settings_for(lm.store)
    lm.add(NOISE[2:], domain="noise")
    assert settings_for(lm.store) == kept  # of the documents that were there when some were added again
