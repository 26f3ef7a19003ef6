"""N-grams of the stored text: against dictionaries, in every way of reading, and in the settings."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from knnstore.documents import TextDocument
from knnstore.errors import ConfigError
from knnstore.lm import (
    FixedLambda,
    KNNSettings,
    NGramSettings,
    TokenTable,
    save_settings,
    settings_for,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits import fit_fixed, fit_with_ngrams
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.components import CacheSettings, Form, NGramFitting, NGrams, OwnNGrams, Question, ngrams
from knnstore.lm.components.ngrams import Continuation, compute_history
from knnstore.lm.contexts import Contexts
from knnstore.lm.settings import ReadingParts
from knnstore.store import EVERYTHING, Selection
from tests.kneser_ney import KneserNey
from tests.lm.phrases import documents, phrases, words
from tests.lm.written import batch_of

V = 101
NGRAMS = NGramSettings(order=4, lam=0.4)
ALONE = KNNSettings(k=1000, temperature=20.0, lam=0, ngrams=NGRAMS)
BY_LENGTH = replace(ALONE, ngrams=replace(NGRAMS, by_length=(0.1, 0.9, 0.5)))
BOTH = replace(ALONE, mixer=FixedLambda(0.3))
IDS = torch.tensor([[2, 2, 2, 2, 0, 5, 6, 7], [0, 9, 8, 7, 9, 8, 6, 9], [2, 5, 6, 7, 8, 20, 21, 22]])
MASK = (IDS != 2).long()


def padded(mask):
    """What a forward pass must be told of padding on the left."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    made = phrases(rng, 8, 4, 30, length=5)
    return {name: documents(rng, made, name, 12, of=5) for name in ("news", "mail")}


@pytest.fixture(scope="module")
def lm(make_lm, texts):
    return make_lm(texts, max_length=24, stride=12)


def counted(lm, texts, order=NGRAMS.order):
    return KneserNey([lm.reader.tokenize(one.text) for one in texts], order)


def definition(lm, expected, row, knn):
    """The mixture after each token of a text, `BOS` first or not at all."""
    with torch.no_grad():
        below = lm(torch.tensor([row]), knn=replace(knn, ngrams=None)).logits[0].softmax(-1).numpy()
    context = [-1 if token == 0 else token for token in row]
    said = np.array([expected.probs(context[: at + 1], V) for at in range(len(row))])
    longest = np.array([expected.longest(context[: at + 1]) for at in range(len(row))])
    lam = np.array(knn.ngrams.by_length or [NGRAMS.lam])[:, None]
    lam = lam[np.minimum(longest, len(lam) - 1)]
    return lam * said + (1 - lam) * below


@pytest.mark.parametrize("knn", [BOTH, ALONE, BY_LENGTH], ids=["with keys", "alone", "by length"])
def test_every_row_of_a_forward_pass_is_a_text_of_its_own(lm, texts, knn):
    expected = counted(lm, [one for of in texts.values() for one in of])
    with torch.no_grad():
        logits = lm(IDS, **padded(MASK), knn=knn).logits
        kept = lm(IDS, **padded(MASK), knn=knn, logits_to_keep=torch.tensor([7, 0, 5])).logits
    torch.testing.assert_close(kept, logits[:, [7, 0, 5]], atol=1e-5, rtol=1e-5)
    for row, mask, found in zip(IDS, MASK.bool(), logits, strict=True):
        rows = found[mask].exp().numpy()
        np.testing.assert_allclose(rows, definition(lm, expected, row[mask].tolist(), knn), atol=1e-5)
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-5)


def test_they_are_of_the_selected_documents_alone(lm, texts):
    row = [0, *lm.reader.tokenize(texts["news"][0].text)[:15].tolist()]
    chosen = replace(
        ALONE, selection=Selection(domains=("mail",)).without_content(texts["mail"][3].content_hash)
    )
    expected = counted(lm, texts["mail"][:3] + texts["mail"][4:])
    with torch.no_grad():
        found = lm(torch.tensor([row]), knn=chosen).logits[0].exp().numpy()
    np.testing.assert_allclose(found, definition(lm, expected, row, chosen), atol=1e-5)


def test_with_a_weight_of_zero_the_model_is_alone(lm):
    with torch.no_grad():
        base = lm.base(IDS[1:2]).logits.float().log_softmax(-1)
        none = replace(ALONE, ngrams=replace(NGRAMS, lam=0.0))
        assert torch.equal(lm(IDS[1:2], knn=none).logits, base)


def test_in_an_empty_store_the_model_is_alone(make_lm):
    lm = make_lm()
    with torch.no_grad():
        assert torch.equal(lm(IDS[1:2], knn=ALONE).logits, lm.base(IDS[1:2]).logits)
        both = replace(ALONE, cache=CacheSettings(5, 10.0, 0.3))
        without = replace(both, ngrams=None)
        assert torch.equal(lm(IDS[1:2], knn=both).logits, lm(IDS[1:2], knn=without).logits)
    found = lm.evaluate(["w5 w6 w7 w8"], ALONE)
    assert found.ngram_ppl == found.knn_ppl == found.base_ppl


def test_without_a_prefix_every_text_is_the_beginning_of_a_document(lm):
    def after(ids, prefix):
        contexts = Contexts.from_pass(batch_of(torch.tensor([ids]), 1), prefix, np.array([0]))
        question = Question(lm.store, EVERYTHING, ALONE.ngrams, contexts, V)
        found = NGrams().look_up(question, Form.DISTRIBUTION)
        rows = found.rest[:, None] * found.unigrams
        return rows.scatter_add_(1, found.tokens, found.weights)

    first = int(lm.reader.tokenize("w22")[0])
    torch.testing.assert_close(after([first], []), after([0, first], [0]))
    assert (after([first], []) - after([first], [0])).abs().max() > 0.01  # which is in the middle of a text


def test_a_prefix_of_several_tokens_is_no_part_of_the_text(lm):
    """A position that predicts a token of the prefix counts as padding."""
    first = int(lm.reader.tokenize("w22")[0])

    def contexts_at(ids, at):
        return Contexts.from_pass(batch_of(torch.tensor([ids]), len(ids)), [0, 9], np.array([at]))

    whole = [0, 9, first]
    for ids, at, owner, length in (([0], 0, -1, 0), (whole, 0, -1, 0), (whole, 1, 0, 0), (whole, 2, 0, 1)):
        found = contexts_at(ids, at)
        assert found.texts[0].tolist() == [first] * (len(ids) // 3)
        assert (found.owners.tolist(), found.lengths.tolist()) == ([owner], [length])
        assert found.is_whole == [True]
    assert contexts_at([0, first], 1).is_whole == [False]
    assert contexts_at([0, first], 1).texts[0].tolist() == [0, first]


def take_step(lm, contexts, order) -> Continuation:
    """Look up n-grams as a step of generation does, with all inputs of a gate."""
    question = Question(
        lm.store, EVERYTHING, NGramSettings(order), contexts, V, (1.0,), NGrams.width, torch.zeros(0)
    )
    return NGrams().look_up(question, Form.DISTRIBUTION)


@pytest.mark.parametrize("order", [2, 4, 7, 8])
def test_the_history_is_the_mean_log_probability_of_the_last_tokens(lm, texts, order, monkeypatch):
    """For many positions at once, and step by step, in texts of all lengths, whole and from the middle.

    A step extends the step before, if that was kept.
    """
    monkeypatch.setattr(ngrams, "_KEPT_STEPS", 150)
    counts = lm.store.ngrams()
    expected = counted(lm, [one for of in texts.values() for one in of], order)
    every = [
        np.concatenate([lm.reader.tokenize(one.text) for one in texts["news"][:4]])[:length]
        for length in (0, 1, 5, 90, 90)
    ]
    is_whole = [True, False, True, True, False]
    owners = np.repeat(np.arange(5), [len(text) + 1 for text in every])
    lengths = np.concatenate([np.arange(len(text) + 1) for text in every])
    owners[3] = -1  # padding
    contexts = replace(Contexts.from_documents(every), is_whole=is_whole).with_positions(owners, lengths)

    def definition(owner, length):
        if owner < 0:
            return [0.0, 0.0]
        begin = [-1] if is_whole[owner] else []
        symbols = [*begin, *every[owner][:length].tolist()]
        log_probs = [
            np.log(expected.probs(symbols[:at], V)[symbols[at]] + 0.01) for at in range(1, len(symbols))
        ]
        return [sum(log_probs[-window:]) / (len(log_probs[-window:]) + 4) for window in (8, 64)]

    wanted = np.array([definition(*at) for at in zip(owners.tolist(), lengths.tolist(), strict=True)])
    np.testing.assert_allclose(compute_history(counts, contexts, order), wanted, atol=1e-5)
    computed, compute = [], ngrams._compute_last_log_probs
    monkeypatch.setattr(
        ngrams, "_compute_last_log_probs", lambda *text: computed.append(text[3]) or compute(*text)
    )
    in_any_order = np.array_split(np.random.default_rng(0).permutation(len(owners)), 20)
    for steps in (in_any_order, np.array_split(np.arange(len(owners)), 60), [np.array([3])]):
        computed.clear()
        for rows in steps:
            history = take_step(lm, contexts.select_rows(rows), order).history
            np.testing.assert_allclose(history, wanted[rows], atol=1e-5)
            assert len(counts.kept_steps) <= 150
    assert computed == []  # at padding


def test_a_step_of_generation_computes_only_the_last_tokens_probability(lm, texts, monkeypatch):
    """Also if several tokens were added, all of which are predicted; and if tokens were taken back."""
    text = np.concatenate([lm.reader.tokenize(one.text) for one in texts["news"][:4]])[:100]
    contexts = Contexts.from_documents([text])
    computed, compute = [], ngrams._compute_last_log_probs
    monkeypatch.setattr(
        ngrams, "_compute_last_log_probs", lambda *text: computed.append(text[3]) or compute(*text)
    )
    lm.store.ngrams().kept_steps.clear()
    for lengths in ([80], [81], [82, 83, 84, 85], [84], [85, 86], [90], [91]):
        at = np.array(lengths)
        history = take_step(lm, contexts.with_positions(np.zeros_like(at), at), 7).history
        whole = compute_history(lm.store.ngrams(), contexts.with_positions(np.zeros_like(at), at), 7)
        assert torch.equal(history, whole)  # whatever is kept, no digit differs
    assert computed == [80, 90]


def test_kept_steps_count_as_memory_of_the_counts(lm, texts):
    """Otherwise counts of many small selections are kept far beyond the limit of their cache."""
    counts = lm.store.ngrams()
    text = np.concatenate([lm.reader.tokenize(one.text) for one in texts["news"]])[:200]
    contexts = Contexts.from_documents([text])
    counts.kept_steps.clear()
    before = counts.nbytes
    tracemalloc.start()
    for length in range(70, len(text)):
        take_step(lm, contexts.with_positions(np.zeros(1, np.int64), np.array([length])), 7)
    counts.ranges_of_ends.clear()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * taken < counts.nbytes - before < 1.5 * taken


@pytest.mark.parametrize(("component", "widths"), [(NGrams(), (3, 5, 6)), (OwnNGrams(), (3,))])
@pytest.mark.parametrize("order", [2, 4, 8])
def test_scored_and_generated_text_give_a_gate_the_same_inputs(lm, texts, component, widths, order):
    """Also to gates of earlier versions, which take the first inputs."""
    every = [np.concatenate([lm.reader.tokenize(one.text) for one in texts["news"][:3]]), np.arange(90, 96)]
    owners = np.repeat(np.arange(2), [len(text) for text in every])
    lengths = np.concatenate([np.arange(len(text)) for text in every])
    owners[3] = -1  # padding
    contexts = Contexts.from_documents(every).with_positions(owners, lengths)

    def compute_inputs(contexts, form, width):
        question = Question(
            lm.store, EVERYTHING, NGramSettings(order), contexts, V, (1.0,), width, torch.zeros(0)
        )
        return component.features(component.look_up(question, form), 1.0)[:, :width]

    whole = compute_inputs(contexts, Form.TARGET, component.width)
    assert whole.shape == (len(owners), component.width)
    assert (whole.isfinite().all(), whole.std(0).min() > 0.01) == (True, True)
    for width in widths:
        for rows in (np.arange(len(owners)), np.array([3, 40, 41])):
            some = contexts.select_rows(rows)
            for form in (Form.TARGET, Form.DISTRIBUTION):
                torch.testing.assert_close(compute_inputs(some, form, width), whole[rows, :width])


# -- generation


def test_generation_scores_each_step_as_the_whole_text_does(lm):
    out = lm.generate(
        IDS, attention_mask=MASK, max_new_tokens=9, min_new_tokens=9, pad_token_id=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True, knn=BOTH,
    )  # fmt: skip
    read = padded(torch.cat([MASK, torch.ones(3, 8, dtype=torch.long)], 1))
    with torch.no_grad():
        whole = lm(out.sequences[:, :-1], **read, knn=BOTH).logits[:, IDS.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}])
def test_beams_samples_and_guesses_are_those_of_generation_without_kept_state(lm, options):
    rows = slice(1, 2) if "prompt_lookup_num_tokens" in options else slice(None)  # for one text only

    def generate(**options):
        torch.manual_seed(3)
        return lm.generate(
            IDS[rows], attention_mask=MASK[rows], max_new_tokens=9, min_new_tokens=9, pad_token_id=2,
            knn=BOTH, **options,
        )  # fmt: skip

    without = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(generate(**options), generate(use_cache=False, **without))


def test_what_they_cannot_know_is_said(lm):
    with torch.no_grad(), pytest.raises(ConfigError, match="input_ids"):
        lm(inputs_embeds=lm.get_input_embeddings()(IDS[1:2]), knn=ALONE)


# -- scoring


@pytest.mark.parametrize("batch_tokens", [30, 4096])
def test_documents_longer_than_the_window_match_dictionaries(lm, texts, batch_tokens):
    held_out = [
        TextDocument(one.id, one.text + " w90 w91") for one in (*texts["news"][:5], TextDocument("x", "w5"))
    ]
    every = [one for of in texts.values() for one in of]
    expected = counted(lm, every)
    parts = ReadingParts(lm.store, replace(lm.reader, batch_tokens=batch_tokens), BOTH)
    table, below = TokenTable(), TokenTable()
    found = type(lm).evaluate(parts, held_out, BOTH, table=table)
    type(lm).evaluate(parts, held_out, replace(BOTH, ngrams=None), table=below)
    base, probs = [], []
    for document in held_out:
        tokens = lm.reader.tokenize(document.text).tolist()
        probs += [expected.probs([-1, *tokens[:at]], V)[token] for at, token in enumerate(tokens)]
    mixed = [
        NGRAMS.lam * p + (1 - NGRAMS.lam) * row["p"]
        for p, row in zip(probs, below.rows(lm.tokenizer), strict=True)
    ]
    base = [
        NGRAMS.lam * p + (1 - NGRAMS.lam) * row["p_lm"]
        for p, row in zip(probs, below.rows(lm.tokenizer), strict=True)
    ]
    np.testing.assert_allclose([row["p"] for row in table.rows(lm.tokenizer)], mixed, atol=1e-5)
    assert found.knn_ppl == pytest.approx(np.exp(-np.log(mixed).mean()), rel=1e-4)
    assert found.ngram_ppl == pytest.approx(np.exp(-np.log(base).mean()), rel=1e-4)
    assert found.store_ppl == pytest.approx(
        type(lm).evaluate(parts, held_out, replace(BOTH, ngrams=None)).knn_ppl
    )


def test_a_document_that_is_left_out_does_not_count_for_itself(lm, texts):
    one = texts["news"][4]
    others = [other for of in texts.values() for other in of if other is not one]
    tokens = lm.reader.tokenize(one.text).tolist()
    said = [counted(lm, others).probs([-1, *tokens[:at]], V)[token] for at, token in enumerate(tokens)]
    table = TokenTable()
    lm.evaluate([one], replace(ALONE, ngrams=replace(NGRAMS, lam=1.0)), leave_out=True, table=table)
    np.testing.assert_allclose([row["p"] for row in table.rows(lm.tokenizer)], said, atol=1e-5)


# -- explaining


def test_the_places_of_an_n_gram_are_named_with_what_they_gave(lm, texts):
    text = texts["news"][2].text
    explained = lm.explain(text, ALONE, neighbors=1000)
    tokens = lm.reader.tokenize(text).tolist()
    every = {
        (domain, one.id): lm.reader.tokenize(one.text).tolist() for domain, of in texts.items() for one in of
    }
    expected = KneserNey(every.values(), NGRAMS.order)
    for token in explained:
        said = expected.probs([-1, *tokens[: token.position]], V)[token.token]
        assert token.p_knn == pytest.approx(said, abs=1e-5)
        assert said - 0.05 < sum(source.share for source in token.neighbors) <= said + 1e-5
        for source in token.neighbors:
            there = [-1, *every[source.domain, source.document]]
            here = [-1, *tokens]
            assert source.distance is None
            assert there[source.position + 1] == token.token
            matched = here[: token.position + 1][-source.matched :]
            assert there[: source.position + 1][-source.matched :] == matched
    assert max(source.matched for source in explained[9].neighbors) == NGRAMS.order - 1


# -- settings


@pytest.mark.slow
def test_calibrating_fits_their_weight_and_saves_it(make_lm, texts):
    lm = make_lm(texts, max_length=24, stride=12)
    rng = np.random.default_rng(1)
    held_out = documents(rng, [one.text for one in texts["news"]], "held-out", 12, of=4)
    held_out = [TextDocument(one.id, one.text + " " + words(rng, 12)) for one in held_out]
    found = lm.calibrate(held_out, networks=False)
    by_name = {one.name: one for one in found.comparison.candidates}
    alone = by_name["n-grams"]
    assert alone.settings.ngrams.order == 7
    fitted = alone.settings.ngrams.by_length
    others = [np.clip(np.add(fitted, change), 0, 1) for change in (-0.05, 0.05, np.linspace(0.1, -0.1, 7))]
    others += [[lam] for lam in np.linspace(0, 1, 11)]
    losses = [
        lm.evaluate(held_out, replace(alone.settings, ngrams=NGramSettings(7, by_length=tuple(lams)))).knn_ppl
        for lams in (fitted, *others)
    ]
    assert min(losses) == losses[0]
    best = found.comparison.best
    assert "n-grams" in best.name
    assert settings_for(lm.store) == best.settings == lm.knn
    save_settings(lm.store, best.settings)  # chosen by whom is not known
    again = lm.calibrate(held_out, networks=False).comparison.current
    assert again.held_out.ppl == pytest.approx(lm.evaluate(held_out, best.settings).knn_ppl, rel=1e-4)


def test_their_weight_and_that_of_the_keys_are_fitted_together(lm, texts):
    """The weights are better than those fitted one after the other, and than those of EM without lengths."""
    rng = np.random.default_rng(2)
    held_out = documents(rng, [one.text for one in texts["news"]] + [words(rng, 9)], "held-out", 12, of=4)
    scored = score_once(lm.store, lm.reader, held_out, k=64, selection=EVERYTHING)
    evidence = gather_evidence(scored, [64])[0]
    found = fit_with_ngrams(evidence, scored, NGramFitting(scored.ngrams), fit_fixed)
    alone = fit_fixed(evidence)
    every = torch.ones(len(scored), dtype=torch.bool)
    after = replace(alone, ngrams=NGramFitting(scored.ngrams).fit(scored.log_probs(alone).log_probs, every))

    def loss(knn):
        return -float(scored.log_probs(knn).log_probs.double().mean())

    only = [
        scored.log_probs(replace(found, mixer=FixedLambda(lam), ngrams=None)).log_probs for lam in (0.0, 1.0)
    ]
    parts = torch.stack([*(one.exp() for one in only), scored.ngrams.probs], 1).double()
    weights = torch.ones(3, dtype=torch.float64) / 3
    for _ in range(500):
        shares = parts * weights
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    lowest = -float((parts @ weights).log().mean())
    assert loss(found) < min(loss(after), lowest)  # which has one weight for n-grams of all lengths


def test_they_are_saved_with_the_settings_and_values_out_of_range_refused(lm):
    for knn in (BOTH, BY_LENGTH):
        assert settings_from_dict(json.loads(json.dumps(settings_to_dict(knn)))) == knn
    save_settings(lm.store, BOTH, ["mail"])
    assert settings_for(lm.store, Selection(domains=("mail",))).ngrams == NGRAMS
    for order in (1, 9, 3.0, True):
        with pytest.raises(ConfigError, match="order"):
            NGramSettings(order=order)
    for lam in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            NGramSettings(lam=lam)
        with pytest.raises(ConfigError, match="between 0 and 1"):
            NGramSettings(by_length=(0.5, lam))
