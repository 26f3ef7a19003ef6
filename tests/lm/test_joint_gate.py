"""One gate over all components: against its definition in numpy, wherever text is read, and when saved."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from knnstore.errors import ConfigError
from knnstore.lm import (
    DomainWeights,
    JointGate,
    KNNSettings,
    NGramSettings,
    TokenTable,
    save_settings,
)
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits import fit_all_components, fit_fixed, fit_joint
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.components import CacheSettings, NGramFitting, RecentFitting, collect_experts, gate
from knnstore.lm.drafts import Drafts
from knnstore.lm.mixing import FixedLambda, Network, compute_mixture_shares, fit_network
from knnstore.lm.mixture import list_components
from knnstore.lm.settings import CalibrationRecord, settings_for
from knnstore.store import EVERYTHING, KNNStore
from tests.lm.phrases import documents, phrases
from tests.lm.scored import with_evidence

K = 8
RNG = np.random.default_rng(5)
PHRASES = phrases(RNG, 20)
TEXTS = documents(RNG, PHRASES, "t", 30, of=5)
FACTORS = (0.5, 1.0, 2.0)
CACHE = CacheSettings(20, 8.0, 0.4, NGramSettings(5, 0.3))
ALL = KNNSettings(K, 4.0, FixedLambda(0.2), ngrams=NGramSettings(3, 0.3), cache=CACHE)


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"phrases": TEXTS[:10]}, max_length=64)


@pytest.fixture(scope="module")
def scored(lm):
    return score_once(lm.store, lm.reader, TEXTS[10:], k=K, selection=EVERYTHING, ngrams=ALL.ngrams)


WIDTHS = {
    "gate": {"n-grams": 6, "own n-grams": 3},
    "gate without the top token": {"n-grams": 5, "own n-grams": 3},
    "gate without the history": {"n-grams": 3},
}
"""Numbers of features of gates of this version and of earlier versions. The earliest do not name them."""


@pytest.fixture(scope="module", params=WIDTHS)
def gated(scored, request) -> KNNSettings:
    """A gate that was not fitted, and weighs each token differently."""
    every, widths = torch.arange(len(scored)), WIDTHS[request.param]
    factors = {"keys": FACTORS, "n-grams": (1.0,), "cache": FACTORS, "own n-grams": (1.0,)}
    assert factors.keys() == ALL.parts.keys()
    features = collect_experts(
        list_components(), ALL.parts, scored.select_evidence(ALL, every), factors, 2.0, widths
    ).features.nan_to_num()
    torch.manual_seed(0)
    network = Network(features.mean(0), features.std(0).clamp(min=1e-6), [0.0] * 9).eval()
    torch.nn.init.normal_(network.layers[-1].weight)
    network.requires_grad_(requires_grad=False)
    listed = [[name, list(of)] for name, of in factors.items()]
    purpose = {**scored.fitted_for, "unit": 2.0, "experts": listed}
    if request.param != "gate without the history":
        purpose["widths"] = widths
    return replace(ALL, gate=JointGate(network.to_weights(purpose)))


def definition(scored, settings) -> np.ndarray:
    """p of every token: softmax over those of the model and the eight experts that say something."""
    evidence, gold = scored.select_evidence(settings, torch.arange(len(scored))), scored.targets
    gate = settings.gate
    features = collect_experts(
        list_components(), settings.parts, evidence, gate.factors, gate.unit, gate.widths
    ).features
    network = Network.from_weights(gate.weights)
    logits = network(features.where(features.isfinite(), network.mean)).double().numpy()
    near, hits = evidence.distances.double().numpy(), evidence.hits.numpy()
    recent = evidence.found["cache"].distances.double().numpy() if settings.cache else None
    probs, there = [scored.lm_log_probs.double().exp().numpy()], [np.ones(len(gold), bool)]
    for factor in FACTORS:
        weights = np.exp((near[:, :1] - near) / (4.0 * factor))
        probs.append((weights * hits).sum(1) / weights.sum(1))
        there.append(np.full(len(gold), settings.retrieves))
    probs.append(scored.ngrams.probs.double().numpy())
    there.append(np.full(len(gold), settings.ngrams is not None))
    for factor in FACTORS:
        if recent is None:
            probs.append(probs[0])
            there.append(np.zeros(len(gold), bool))
            continue
        found = np.isfinite(recent)
        weights = np.exp((recent.min(1, where=found, initial=1e9)[:, None] - recent) / (8.0 * factor)) * found
        probs.append(
            (weights * (evidence.found["cache"].tokens == gold[:, None]).numpy()).sum(1)
            / np.maximum(weights.sum(1), 1e-300)
        )
        there.append(found.any(1))
    own = scored.evidence.found["own n-grams"].probs.double().numpy()
    there.append(np.isfinite(own) & (settings.cache is not None))
    probs.append(np.nan_to_num(own))
    shares = np.exp(logits) * np.stack(there, 1)
    shares = 0.999 * shares / shares.sum(1, keepdims=True)
    shares[:, 0] += 0.001
    return (shares * np.stack(probs, 1)).sum(1)


@pytest.mark.parametrize(
    "without",
    [{}, {"cache": None}, {"ngrams": None}, {"mixer": FixedLambda(0.0)}, {"cache": None, "ngrams": None}],
    ids=["all", "no cache", "no n-grams", "no keys", "keys alone"],
)
def test_it_is_a_softmax_over_the_experts_that_say_something(lm, scored, gated, without) -> None:
    settings = replace(gated, **without)
    expected = definition(scored, settings)
    np.testing.assert_allclose(scored.log_probs(settings).log_probs.exp(), expected, rtol=1e-4, atol=1e-7)
    table = TokenTable()
    found = lm.evaluate(TEXTS[10:], settings, table=table)
    np.testing.assert_allclose([row["p"] for row in table.rows(lm.tokenizer)], expected, rtol=2e-3, atol=1e-6)
    assert found.knn_ppl == pytest.approx(np.exp(-np.log(expected).mean()), rel=1e-3)
    if not without:  # its parts, each without the others, are what they are by themselves
        apart = replace(gated, cache=None, ngrams=None)
        assert found.store_ppl == pytest.approx(np.exp(-np.log(definition(scored, apart)).mean()), rel=1e-3)


def test_forward_generation_and_explain_use_it_as_scoring_does(lm, scored, gated) -> None:
    ids = torch.tensor([[0, *lm.reader.tokenize(TEXTS[10].text).tolist()]])
    with torch.no_grad():
        whole = lm(ids, knn=gated).logits
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(whole.shape[:2]), atol=1e-4, rtol=0)
    first = scored.documents == 0
    expected = torch.from_numpy(definition(scored, gated))[first].float()
    torch.testing.assert_close(
        whole[0, :-1].gather(1, ids[0, 1:, None])[:, 0].exp(), expected, atol=1e-5, rtol=5e-3
    )
    explained = lm.explain(TEXTS[10].text, gated)
    np.testing.assert_allclose([one.p for one in explained], expected, rtol=5e-3, atol=1e-5)
    for one in explained[1:]:
        assert list(one.shares) == ["model", "keys", "n-grams", "cache", "own n-grams"]
        assert sum(one.shares.values()) == pytest.approx(1, abs=1e-5)
        assert one.lam == pytest.approx(1 - one.shares["model"], abs=1e-6)
    for name in ("cache", "own n-grams"):
        assert np.std([one.shares[name] for one in explained]) > 0.01
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2, "num_beams": 2}
    prompts = ids[:, :9]
    alone = lm.generate(prompts, attention_mask=torch.ones_like(prompts), knn=gated, **options)
    rows = torch.cat([torch.nn.functional.pad(ids[:, :7], (2, 0), value=2), prompts])
    together = lm.generate(rows, attention_mask=(rows != 2).long(), knn=gated, **options)
    assert together[1].tolist() == alone[0].tolist()


def test_a_model_can_be_trained_after_inference(lm, gated) -> None:
    tokens = torch.tensor([lm.reader.tokenize("The harbour of the old town").tolist()])
    with torch.inference_mode():
        lm(input_ids=tokens, knn=gated)
    lm(input_ids=tokens, labels=tokens, knn=gated).loss.backward()
    assert all(weights.grad is not None for weights in lm.base.lm_head.parameters())
    lm.base.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(("probes", "sample"), [(None, {}), (4, {"do_sample": True, "temperature": 0.5})])
def test_drafts_and_a_stream_say_what_is_written_without(lm, gated, monkeypatch, probes, sample) -> None:
    class Heard(BaseStreamer):
        def put(self, value) -> None:
            told.append(value.flatten().tolist())

        def end(self) -> None:
            told.append(None)

    made = []
    learn = Drafts.learn
    monkeypatch.setattr(Drafts, "learn", lambda *given: made.append(given[1:]) or learn(*given))
    prompt = lm.reader.tokenize(TEXTS[3].text)[:9].tolist()
    written = []
    for draft in (False, True):
        told = []
        torch.manual_seed(1)
        ids = lm.generate(
            torch.tensor([[0, *prompt]]), max_new_tokens=24, pad_token_id=2, draft=draft,
            knn=replace(gated, probes=probes), streamer=Heard(), **sample,
        )[0].tolist()  # fmt: skip
        assert told == [[0, *prompt], *([token] for token in ids[10:]), None]
        written.append(ids)
    assert written[0] == written[1]
    drafted, accepted = np.sum([passed[:2] for passed in made], axis=0)
    assert 0 < accepted < drafted  # some were right and some wrong


def test_every_row_has_settings_of_its_own(lm, gated) -> None:
    ids = torch.tensor([[0, *lm.reader.tokenize(TEXTS[at].text)[:20].tolist()] for at in (10, 11, 12)])
    each = [gated, replace(gated, cache=None), replace(gated, gate=None)]
    with torch.no_grad():
        together = lm(ids, knn=each).logits
        apart = torch.cat([lm(ids[at : at + 1], knn=one).logits for at, one in enumerate(each)])
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


def test_what_is_said_by_no_other_stays_possible() -> None:
    outputs = torch.tensor([[-90.0, 90.0, 0.0], [0.0, 90.0, 90.0]])
    found = torch.tensor([[True, True], [False, False]])
    np.testing.assert_allclose(
        compute_mixture_shares(outputs, found), [[0.001, 0.999, 0], [1, 0, 0]], atol=1e-6
    )


@pytest.mark.slow
def test_a_gate_finds_which_component_is_right(scored) -> None:
    """Half of the tokens are said by the neighbors and half by the n-grams, as the entropy tells."""
    of_keys = torch.arange(len(scored)) % 2 == 0
    told = with_evidence(
        replace(scored, lm_log_probs=torch.full((len(scored),), 0.01).log()),
        lm_entropy=of_keys.float(),
        hits=of_keys[:, None].expand(-1, K),
        found={"n-grams": scored.ngrams._replace(probs=torch.where(of_keys, 0.0, 0.8))},
    )
    tokens = (scored.documents < 10).nonzero()[:, 0]
    settings = replace(ALL, cache=None)
    fixed = told.log_probs(settings).log_probs
    settings = replace(settings, gate=fit_joint(told, settings, tokens))
    others = scored.documents >= 10
    found = told.log_probs(settings).log_probs[others].exp()
    assert float(found[of_keys[others]].median()) > 0.9
    assert float(found[~of_keys[others]].median()) > 0.7
    assert found.log().mean() > fixed[others].mean() + 0.5
    assert fit_joint(told, settings, tokens) == settings.gate  # the same again


def test_a_gate_learns_from_the_history_in_which_documents_ngrams_are_right(scored) -> None:
    """N-grams give .8 or .001 to all tokens of a document, as to the tokens before."""
    is_right = scored.documents % 2 == 0
    probs = torch.where(is_right, 0.8, 0.001)
    told = with_evidence(
        replace(scored, lm_log_probs=torch.full((len(scored),), 0.1).log()),
        found={
            "n-grams": scored.ngrams._replace(
                probs=probs, history=(probs + 0.01).log()[:, None].expand(-1, 2)
            )
        },
    )
    settings = KNNSettings(k=1, lam=0.0, ngrams=ALL.ngrams)
    settings = replace(settings, gate=fit_joint(told, settings, (scored.documents < 12).nonzero()[:, 0]))
    assert settings.gate.widths == {"n-grams": 6}
    found, others = told.log_probs(settings).log_probs.exp(), scored.documents >= 12
    assert float(found[others & is_right].median()) > 0.7
    assert float(found[others & ~is_right].median()) > 0.09


def test_of_few_long_documents_parts_are_kept_apart_while_it_is_fitted(scored, monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(gate, "fit_network", lambda *given: kept.append(given[2]) or fit_network(*given))
    long = replace(scored, documents=(scored.documents >= 10).long())
    tokens = torch.arange(len(scored))
    assert fit_joint(long, replace(ALL, cache=None), tokens)
    (parts,) = kept
    assert len(parts.unique()) > 2
    of = long.documents[tokens]
    assert all(len(of[parts == part].unique()) == 1 for part in parts.unique()), "none is of two documents"


def test_of_what_it_sees_the_query_alone_is_hidden_while_it_is_fitted(scored, monkeypatch) -> None:
    given = []

    def fit(features, *others):
        given.append(features[:, others[-1]])
        return fit_network(features, *others)

    monkeypatch.setattr(gate, "fit_network", fit)
    fit_joint(scored, replace(ALL, cache=None), torch.arange(40))
    torch.testing.assert_close(given[0], scored.reading.keys[:40])


@pytest.mark.slow
def test_it_is_fitted_on_the_tokens_it_is_given_alone(scored) -> None:
    (evidence,) = gather_evidence(scored, [K])
    half = evidence.select_tokens(scored.documents % 2 == 0)
    others = {"cache": RecentFitting.from_keys(scored.reading, scored.evidence.found["own n-grams"])}
    one = fit_all_components(half, scored, NGramFitting(scored.ngrams), others, fit_fixed)
    assert one.gate is not None
    other = ~torch.isin(torch.arange(len(scored)), half.tokens)
    changed = with_evidence(
        replace(scored, lm_log_probs=scored.lm_log_probs.where(~other, -9.0)),
        lm_entropy=scored.evidence.lm_entropy.where(~other, 7.0),
        found={"n-grams": scored.ngrams._replace(probs=scored.ngrams.probs.where(~other, 1e-6))},
    )
    assert fit_all_components(half, changed, NGramFitting(changed.ngrams), others, fit_fixed) == one


def test_saved_and_loaded_it_weighs_the_same_and_goes_with_its_text(lm, scored, gated) -> None:
    save_settings(lm.store, gated)
    with KNNStore.open(lm.store.home.path) as reader:
        loaded = settings_for(reader)
    assert loaded == gated
    torch.testing.assert_close(scored.log_probs(loaded), scored.log_probs(gated), atol=0, rtol=0)
    file = lm.store.home.path / "weights" / gated.gate.weights.name
    assert file.is_file()
    save_settings(lm.store, replace(gated, gate=None))
    assert not file.exists()
    lm.add([TEXTS[20]], domain="later")
    (later,) = lm.store.documents(domain="later")
    record = CalibrationRecord("", "", 1, 1, "", 1, 1, 1.0, 1.0, (), held_out=(later.content_hash,))
    save_settings(lm.store, gated, calibration=record)
    assert file.is_file()
    lm.store.remove_document(later.id)
    assert not file.exists()
    assert settings_for(lm.store).gate is None


def test_what_does_not_go_together_is_said(scored, gated) -> None:
    with pytest.raises(ConfigError, match="does not work with the mixer 'domains'"):
        replace(gated, mixer=DomainWeights(("phrases",), (0.5,)))
    with pytest.raises(ConfigError, match="'later', which this version does not know"):
        collect_experts(list_components(), ALL.parts, scored.evidence, {"later": (1.0,)}, 2.0)
    wider = with_evidence(scored, keys=scored.evidence.keys.repeat(1, 2))
    with pytest.raises(ConfigError, match="fitted for others"):
        wider.log_probs(gated)
