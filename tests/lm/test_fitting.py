"""Fits against a brute-force search, and the comparison of candidates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnstore.errors import InputError
from knnstore.lm import BinnedLambda, KNNSettings
from knnstore.lm.calibration.candidates import compare_candidates
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits.mixers import fit_bins, fit_fixed
from knnstore.lm.calibration.judging import MIN_TOKENS
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import compute_target_probs_on_grid, find_bins, fit_lambdas
from tests.lm.scored import near_and_far


def knn_probs(scored: ScoredText, k: int, temperature: float) -> np.ndarray:
    distances = scored.distances[:, :k].double().numpy()
    weights = np.exp(-(distances - distances[:, :1]) / temperature)
    return (weights * scored.sums.hits[:, :k].numpy()).sum(1) / weights.sum(1)


def losses(scored: ScoredText, k: int, temperature: float, *lambdas: float) -> list[float]:
    """Mean negative log-probability of the tokens with each weight."""
    lm, knn = scored.lm_log_probs.double().exp().numpy(), knn_probs(scored, k, temperature)
    return [float(-np.log((1 - lam) * lm + lam * knn).mean()) for lam in lambdas]


def test_the_fixed_fit_is_as_good_as_a_fine_grid():
    scored = near_and_far()
    for evidence in gather_evidence(scored, [4, 16]):
        fitted = fit_fixed(evidence)
        assert fitted.k == evidence.k
        grid = min(
            loss
            for temperature in np.geomspace(0.5, 500, 60)
            for loss in losses(scored, evidence.k, temperature, *np.linspace(0.01, 0.99, 50))
        )
        found = -float(scored.log_probs(fitted).log_probs.double().mean())
        (own,) = losses(scored, fitted.k, fitted.temperature, fitted.mixer.lam)
        assert found == pytest.approx(own, abs=1e-5)
        assert found < grid + 1e-4


def test_lambda_is_that_of_expectation_maximization():
    rng = np.random.default_rng(3)
    lm, knn, bins = rng.uniform(0.01, 0.5, 300), rng.beta(0.3, 1, (300, 2)), rng.integers(0, 3, 300)
    tensors = (torch.tensor(lm[:, None]).float(), torch.tensor(knn).float(), torch.tensor(bins))
    lam, _ = fit_lambdas(*tensors, 4, torch.tensor([0.3, 0.6]), 10.0)
    for bin in range(4):
        for column, prior in enumerate((0.3, 0.6)):
            a, b, expected = knn[bins == bin, column], lm[bins == bin], 0.5
            before = 0.0
            while abs(expected - before) > 1e-9:
                share = expected * a / (expected * a + (1 - expected) * b)
                before, expected = expected, (share.sum() + 10 * prior) / (len(a) + 10)
            assert float(lam[bin, column]) == pytest.approx(expected, abs=1e-4)
    free, _ = fit_lambdas(*tensors[:1], torch.zeros(300, 1), torch.zeros(300, dtype=torch.long), 1)
    assert float(free) == 0


def test_bins_give_more_where_neighbors_are_near():
    scored = near_and_far(tokens=4000)
    evidence = gather_evidence(scored, [16])[0]
    for temperatures in (False, True):
        fitted = fit_bins(evidence, 4, temperatures=temperatures)
        lambdas = fitted.mixer.lambdas
        assert list(lambdas) == sorted(lambdas, reverse=True)
        better = scored.log_probs(fitted).log_probs.mean()
        assert better > scored.log_probs(fit_fixed(evidence)).log_probs.mean() + 0.01
    divided = fit_bins(evidence, 4, 4)
    assert (len(divided.mixer.distance_edges), len(divided.mixer.confidence_edges)) == (3, 3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 12), st.booleans())
def test_a_bin_without_tokens_has_the_values_of_all_tokens(seed, bins, temperatures):
    scored = near_and_far(seed, tokens=60)
    # Two distances and two confidences that always come together: half of the cells are empty.
    near = torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.5
    near[0], near[1] = True, False
    scored.distances.copy_(torch.where(near[:, None], 1.0, 50.0) + torch.arange(16.0))
    scored.evidence.lm_max.copy_(torch.where(near, -0.5, -3.0))
    evidence = gather_evidence(scored, [16])[0]
    fitted, fixed = fit_bins(evidence, bins, bins, temperatures=temperatures), fit_fixed(evidence)
    mixer = fitted.mixer
    assert isinstance(mixer, BinnedLambda)
    assert all(0 <= lam <= 1 for lam in mixer.lambdas)
    bins_hit = find_bins(scored.evidence, mixer.distance_edges, mixer.confidence_edges)
    empty = set(range(len(mixer.lambdas))) - set(bins_hit.tolist())
    assert empty
    for bin in empty if temperatures else ():
        assert mixer.lambdas[bin] == pytest.approx(fixed.mixer.lam, abs=1e-3)
        assert mixer.temperature_factors[bin] == pytest.approx(1, abs=1e-3)
        assert fitted.temperature == pytest.approx(fixed.temperature)


def test_tokens_without_neighbors_count_with_the_models_probability():
    scored = near_and_far()
    scored.distances[::3] = torch.inf
    scored.distances[1::3, 5:] = torch.inf
    fitted = fit_bins(gather_evidence(scored, [4, 16])[1], 4, temperatures=True)
    mixed, lam = scored.log_probs(fitted)
    assert torch.equal(mixed[::3], scored.lm_log_probs[::3])
    assert not lam[::3].any()
    assert bool(mixed.isfinite().all())


def test_bins_are_drawn_to_all_tokens_by_32_of_them():
    scored = near_and_far(tokens=150)
    (evidence,) = gather_evidence(scored, [16])
    mixer, overall = fit_bins(evidence, 10).mixer, fit_fixed(evidence).mixer.lam
    found = fit_bins(evidence, 10)
    lm = scored.lm_log_probs.double().exp().numpy()
    knn = knn_probs(scored, 16, found.temperature)
    bins = find_bins(scored.evidence, mixer.distance_edges, ()).numpy()
    prior = _likeliest(lm, knn)
    assert prior == pytest.approx(overall, abs=0.05)
    for bin, lam in enumerate(mixer.lambdas):
        drawn, free = (_likeliest(lm[bins == bin], knn[bins == bin], prior, by) for by in (32, 0))
        assert lam == pytest.approx(drawn, abs=0.03)
        assert abs(lam - prior) <= abs(free - prior) + 0.03


def _likeliest(lm, knn, prior=0.0, strength=0):
    lams = np.linspace(1e-3, 0.999, 999)[:, None]
    found = np.log(lm + lams * (knn - lm)).sum(1)
    found += strength * (prior * np.log(lams) + (1 - prior) * np.log(1 - lams))[:, 0]
    return float(lams[found.argmax(), 0])


def test_each_half_is_judged_by_what_was_fitted_on_the_other():
    scored = near_and_far(documents=8)
    scored.documents.copy_(torch.arange(1200) // 150)  # of one length: every other one is in a half
    found = compare_candidates(scored, KNNSettings(k=1000, temperature=30.0, lam=0.25))
    assert found.beats_base
    assert [c.settings.k for c in found.candidates if c.name == "fixed"] == [4, 16]
    by_name = {candidate.name: candidate for candidate in found.candidates}
    total = 0.0
    for half in (scored.documents % 2 == 0, scored.documents % 2 == 1):
        fitted = fit_bins(gather_evidence(scored, [16])[0].select_tokens(~half), 8, 8)
        total -= float(scored.log_probs(fitted).log_probs[half].double().sum())
    assert by_name["bins 8x8"].held_out.ppl == pytest.approx(math.exp(total / 1200), rel=1e-5)
    for candidate in found.candidates:
        assert candidate.held_out.ppl >= found.best.held_out.ppl
        assert candidate.held_out.low < candidate.held_out.ppl < candidate.held_out.high
        assert candidate.change.ppl == pytest.approx(candidate.held_out.ppl / found.base.ppl)
    assert found.current is not None
    assert found.current.held_out.ppl == pytest.approx(math.exp(losses(scored, 16, 30.0, 0.25)[0]), rel=1e-4)


def test_a_candidate_is_fitted_to_all_documents_only_if_it_is_used():
    fitted = []

    def fit(evidence):
        fitted.append(len(evidence.tokens))
        return fit_fixed(evidence)

    scored = near_and_far()
    found = {one.name: one for one in compare_candidates(scored, fits={"mine": fit}).candidates}
    assert sum(fitted) == len(scored), "each half once"
    settings = found["mine"].settings
    assert fitted[2:] == [len(scored)]
    assert found["mine"].settings is settings
    assert len(fitted) == 3


def test_a_store_that_knows_nothing_does_not_beat_the_model():
    scored = near_and_far()
    scored.sums.hits.zero_()
    found = compare_candidates(scored)
    assert not found.beats_base
    assert next(c for c in found.candidates if c.name == "fixed").lam == pytest.approx(0)


@pytest.mark.parametrize(("tokens", "documents"), [(MIN_TOKENS - 1, 12), (1200, 7)])
def test_too_little_text_is_refused(tokens, documents):
    with pytest.raises(InputError, match="at least 8 documents and 1,000 tokens"):
        compare_candidates(near_and_far(tokens=tokens, documents=documents))


def test_a_text_for_which_nothing_is_found_is_refused():
    scored = near_and_far()
    with pytest.raises(InputError, match="no neighbor of any token"):
        scored.distances.fill_(torch.inf)
        compare_candidates(scored)


def test_only_differences_of_distances_count_however_large_they_are():
    scored, temperatures = near_and_far(), torch.tensor([0.5, 2.0])
    near, far = (
        compute_target_probs_on_grid(scored.distances + shift, scored.sums.hits, [4, 16], temperatures)
        for shift in (0, 4096)
    )
    assert float(near.max()) > 0.5
    assert torch.allclose(near, far, atol=2e-3)
