"""Larger k and weights of domains in `calibrate`: against the evaluation that searches for real."""

import math

import numpy as np
import pytest
import torch

from knnstore.lm import BinnedLambda, DomainWeights, KNNSettings
from knnstore.lm.calibration.candidates import compare_candidates
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.calibration.searches import FurtherSearches
from knnstore.lm.mixing import interpolate_on_grid
from knnstore.store import EVERYTHING
from tests.lm.phrases import documents, phrases, words

RNG = np.random.default_rng(3)
OF_A, OF_B = phrases(RNG, 20, 4, 100), phrases(RNG, 20, 4, 100)
HELD_OUT = [*documents(RNG, OF_A, "x", 6), *documents(RNG, OF_B, "y", 6)]


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with the domains a and b, which know other phrases, and noise."""
    stored = {
        "a": documents(RNG, OF_A, "a", 4),
        "b": documents(RNG, OF_B, "b", 2),
        "noise": [words(RNG, 150) for _ in range(2)],
    }
    with make_lm(stored, store="faiss", max_length=32, stride=16).store as store:
        return store.home.path


@pytest.fixture
def further(lm):
    scored = score_once(lm.store, lm.reader, HELD_OUT, k=16, selection=EVERYTHING)
    return FurtherSearches(lm.store, scored, HELD_OUT, EVERYTHING)


def ppl(log_probs: torch.Tensor) -> float:
    return math.exp(-float(log_probs.double().mean()))


@pytest.mark.slow
def test_larger_k_agrees_with_the_evaluation(lm, further):
    every = torch.arange(len(further.scored))
    wide = further.search_with_k([64, 300])
    assert [of.evidence.k for of in wide] == [64, 300]
    bins = BinnedLambda((20.0,), (0.7, 0.3), (1.0, 2.0))
    point = float(wide[0].evidence.temperatures[8])
    for of in wide:
        for given in (
            KNNSettings(of.evidence.k, point, lam=0.4),
            KNNSettings(of.evidence.k, point * 1.2, lam=0.4),
            KNNSettings(of.evidence.k, point, bins),
        ):
            mixed, lam = of.log_probs(given, every)
            found = lm.evaluate(HELD_OUT, given)
            assert ppl(mixed) == pytest.approx(
                found.knn_ppl, rel=1e-4 if given.temperature == point else 2e-3
            )
            assert float(lam.mean()) == pytest.approx(found.lam)


def test_domains_searched_apart_agree_with_the_evaluation(lm, further):
    evidence = further.search_each_domain(["a", "b", "noise"], 16)
    temperature = float(evidence.temperatures[8])
    given = KNNSettings(16, temperature, DomainWeights(("b", "a"), (0.2, 0.5), (2.0, 1.0)))
    mixed, lam = evidence.log_probs(given, torch.arange(len(further.scored)))
    found = lm.evaluate(HELD_OUT, given)
    assert ppl(mixed) == pytest.approx(found.knn_ppl, rel=1e-4)
    assert float(lam.mean()) == pytest.approx(found.lam) == pytest.approx(0.7)


def test_documents_that_are_left_out_do_not_find_themselves(lm):
    held_out = [*HELD_OUT[:2], *HELD_OUT[6:8]]
    lm.add(held_out[1:3], domain="b")
    duplicates = {one.content_hash: {one.content_hash} for one in held_out[1:3]}
    scored = score_once(lm.store, lm.reader, held_out, k=16, selection=EVERYTHING, left_out=duplicates)
    further = FurtherSearches(lm.store, scored, held_out, EVERYTHING, duplicates)
    of = further.search_with_k([64])[0]
    given = KNNSettings(64, float(of.evidence.temperatures[8]), lam=0.4)
    honest = lm.evaluate(held_out, given, leave_out=True).knn_ppl
    assert ppl(of.log_probs(given, torch.arange(len(scored))).log_probs) == pytest.approx(honest, rel=1e-4)
    assert honest > lm.evaluate(held_out, given).knn_ppl * 1.1


@pytest.mark.slow
def test_calibrate_tries_larger_k_and_weights_of_domains(lm, monkeypatch):
    monkeypatch.setattr("knnstore.lm.calibration.calibrating.PASS_K", 32)
    found = lm.calibrate(HELD_OUT, max_k=512)
    assert [one.settings.k for one in found.comparison.candidates if one.name == "fixed"] == [8, 32, 128, 512]
    apart = next(one for one in found.comparison.candidates if one.name == "domains")
    mixer = apart.settings.mixer
    assert mixer.domains == ("a", "b", "noise")
    assert 2 * mixer.lambdas[2] < min(mixer.lambdas[:2])
    evaluated = lm.evaluate(HELD_OUT, apart.settings)
    assert evaluated.knn_ppl == pytest.approx(apart.held_out.ppl, rel=0.1)


@pytest.mark.slow
def test_what_is_in_force_is_judged_with_its_own_weights_or_its_own_k(lm, further):
    evidence = {"wide": further.search_with_k([300]), "domains": further.search_each_domain(["a", "b"], 16)}
    temperature = 1.1 * float(evidence["domains"].temperatures[8])
    for current in (
        KNNSettings(16, temperature, DomainWeights(("b", "a"), (0.3, 0.4))),
        KNNSettings(300, temperature, lam=0.5),
    ):
        found = compare_candidates(further.scored, current, fits={}, **evidence).current
        assert found.settings == current
        assert found.held_out.ppl == pytest.approx(lm.evaluate(HELD_OUT, current).knn_ppl, rel=2e-3)
    gone = KNNSettings(16, temperature, DomainWeights(("gone",), (0.3,)))
    assert compare_candidates(further.scored, gone, fits={}, domains=evidence["domains"]).current is None


def test_all_records_are_the_largest_k(lm):
    """More neighbors than there are records change nothing: p_kNN is then over every record."""
    held_out, records = HELD_OUT[:2], lm.store.datastore.count()
    ids, keys, _ = (np.concatenate(part) for part in zip(*lm.store.datastore.iterate(), strict=True))
    given = KNNSettings(records, 10.0, lam=0.5)
    found = lm.evaluate(held_out, given)
    assert lm.evaluate(held_out, KNNSettings(records + 50, 10.0, lam=0.5)).knn_ppl == pytest.approx(
        found.knn_ppl
    )
    scored = score_once(lm.store, lm.reader, held_out, k=1, selection=EVERYTHING)
    distances = ((scored.reading.keys.numpy()[:, None].astype(np.float64) - keys) ** 2).sum(2)
    masses = np.exp(-(distances - distances.min(1, keepdims=True)) / 10)
    hits = (ids & (2**20 - 1)) == scored.targets.numpy()[:, None]
    p = 0.5 * scored.lm_log_probs.exp().numpy() + 0.5 * (masses * hits).sum(1) / masses.sum(1)
    assert math.exp(-np.log(p).mean()) == pytest.approx(found.knn_ppl, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_interpolation_is_exact_on_the_grid(count):
    knn, temperatures = torch.rand(count, count), 2.0 ** torch.arange(count)
    for column, temperature in enumerate(temperatures):
        assert torch.allclose(interpolate_on_grid(knn, temperatures, float(temperature)), knn[:, column])
    assert torch.allclose(interpolate_on_grid(knn, temperatures, temperatures), knn.diagonal())
    assert torch.allclose(interpolate_on_grid(knn, temperatures, 1e6), knn[:, -1])


@pytest.mark.slow
def test_one_neighbor_of_each_domain_is_enough_to_calibrate(lm):
    found = lm.calibrate(HELD_OUT, max_k=1, networks=False, ngrams=False)
    assert "domains" in {one.name for one in found.comparison.candidates}
