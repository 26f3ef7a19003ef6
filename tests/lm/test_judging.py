"""What is judged was not fitted on it: every candidate, and the choice among them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from knnstore.lm.calibration.candidates import BIN_FITS, Comparison, compare_candidates
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits import fit_fixed
from knnstore.lm.calibration.judging import mask_first_half
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.calibration.trying import Trial
from knnstore.lm.components import CacheSettings, RecentFitting, TargetContinuation
from knnstore.lm.mixing import FixedLambda, count_distinct_tokens
from knnstore.lm.settings import KNNSettings
from tests.lm.scored import scored_text, with_evidence

K, TOKENS, DOCUMENTS = 8, 1200, 12


@pytest.fixture(scope="module")
def scored() -> ScoredText:
    """Tokens with all that settings can be fitted to, each of which knows a part of what comes."""
    rng = np.random.default_rng(0)

    def known(share: float) -> np.ndarray:
        """Probabilities of the token that came, high for a share of tokens."""
        return np.where(rng.random(TOKENS) < share, rng.uniform(0.3, 0.9, TOKENS), 0.003).astype(np.float32)

    documents = torch.arange(TOKENS) // (TOKENS // DOCUMENTS)
    distances = torch.from_numpy(np.sort(rng.exponential(9, (TOKENS, K)).astype(np.float32)) + 1)
    keys = torch.from_numpy(rng.standard_normal((TOKENS, 6)).astype(np.float32))
    targets = torch.from_numpy(rng.integers(0, 5, TOKENS))
    return scored_text(
        torch.from_numpy(known(0.3)).log(),
        torch.from_numpy(-rng.random(TOKENS).astype(np.float32)),
        distances,
        torch.from_numpy(rng.random((TOKENS, K)) < rng.random((TOKENS, 1))),
        documents,
        keys=keys,
        targets=targets,
        lm_entropy=torch.from_numpy(rng.random(TOKENS).astype(np.float32)),
        distinct=count_distinct_tokens(torch.from_numpy(rng.integers(0, 5, (TOKENS, K))), distances),
        fitted_for={},
        found={
            "n-grams": TargetContinuation(
                4, torch.from_numpy(known(0.2)), torch.from_numpy(rng.integers(0, 4, (TOKENS, 3)))
            )
        },
    )


@pytest.fixture(scope="module")
def found(scored) -> Comparison:
    return compare_candidates(scored, fits=BIN_FITS, networks=True)


def without_the_text_of(scored: ScoredText, tokens: torch.Tensor) -> ScoredText:
    """The same, but of some tokens everything is other that the token which came decides."""
    other = scored.lm_log_probs.clone(), scored.ngrams.probs.clone()
    for column in other:
        column[tokens] = column[tokens].flip(0)
    hits, targets = scored.sums.hits.clone(), scored.targets.clone()
    hits[tokens], targets[tokens] = ~hits[tokens], (targets[tokens] + 1) % 5
    changed = replace(
        scored,
        lm_log_probs=other[0],
        targets=targets,
    )
    return with_evidence(changed, hits=hits, found={"n-grams": scored.ngrams._replace(probs=other[1])})


@pytest.mark.slow
def test_no_token_is_judged_by_what_was_fitted_on_its_half(scored, found) -> None:
    first = mask_first_half(scored.documents)
    assert len(first.unique()) == 2
    halves = first, ~first
    changed = [
        compare_candidates(without_the_text_of(scored, ~half), fits=BIN_FITS, networks=True)
        for half in halves
    ]
    compared = set()
    for number, half in enumerate(halves):
        others = {(one.name, one.settings.k): one for one in changed[number].candidates}
        for one in found.candidates:
            settings = one.by_half[number]  # fitted on this half, and judged on the other
            judged = scored.log_probs(settings, (~half).nonzero()[:, 0]).log_probs
            torch.testing.assert_close(judged, one.log_probs[~half], rtol=1e-4, atol=1e-4)
            # What is on top of the best depends on which is the best, and that is chosen on both.
            if " + " not in one.name.replace("+ T", "") or one.name in others:
                same = others[one.name, one.settings.k].by_half[number]
                assert same == settings, one.name
                compared.add(one.name)
            assert one.by_half[0] != one.by_half[1], "one was fitted on all of the text"
    assert {"fixed", "bins 8x8 + T", "gate"} <= compared
    assert {"n-grams", "cache"} <= compared
    assert any(name.endswith("+ cache") for name in {one.name for one in found.candidates})


@pytest.mark.slow
def test_the_best_is_expected_to_be_as_good_as_the_best_of_each_half_is_on_the_other(scored, found) -> None:
    first, total = mask_first_half(scored.documents), 0.0
    for half in (first, ~first):
        best = min(found.candidates, key=lambda one: -float(one.log_probs[~half].double().mean()))
        total -= float(best.log_probs[half].double().sum())
    assert found.expected.ppl == pytest.approx(math.exp(total / TOKENS))
    assert found.change.ppl == pytest.approx(found.expected.ppl / found.base.ppl)


@pytest.mark.slow
def test_the_lowest_of_many_by_luck_is_not_expected_to_be_low(scored, found) -> None:
    trial, rng = Trial(scored), np.random.default_rng(5)
    lucky, expected = [], []
    for _ in range(30):
        # None is better than another.
        noise = torch.from_numpy(rng.normal(-4, 1, (30, TOKENS)).astype(np.float32))
        candidates = [replace(found.best, log_probs=log_probs) for log_probs in noise]
        lucky.append(float(noise.mean(1).max()))
        expected.append(float(trial.compute_nested_log_probs(candidates).mean()))
    assert np.mean(expected) == pytest.approx(-4, abs=0.02)
    assert np.mean(lucky) > -4 + 0.05


def test_what_is_better_by_chance_does_not_beat_the_model(scored) -> None:
    # All of the gain is in one document of twelve.
    hits = torch.zeros_like(scored.sums.hits)
    hits[scored.documents == 3] = True
    alone = with_evidence(scored, hits=hits, found={"n-grams": None})
    alone = replace(alone, targets=None)
    none = KNNSettings(k=K, temperature=5.0, lam=0.0)
    compared = compare_candidates(
        alone, none, fits={"a little": lambda of: of.build_settings(5.0, FixedLambda(0.05))}
    )
    little = compared.candidates[-1]
    assert little.held_out.ppl < compared.base.ppl
    assert compared.change.ppl < 1 < compared.change.high
    assert not compared.beats_base
    assert compared.gain == compared.change, "what is in force was the model alone"
    assert not compared.beats_current


def test_how_many_cells_are_visited_is_judged_by_a_cache_of_the_other_half(scored) -> None:
    (evidence,), first = gather_evidence(scored, [K]), mask_first_half(scored.documents)
    trial, cache = Trial(scored, ngrams=False), RecentFitting.from_keys(scored.reading)
    below = trial.fit_candidate("keys", fit_fixed, evidence).log_probs
    other, own = (
        sum(cache.mix(below, cache.fit(below, half))[judged].double().sum() for half, judged in pairs)
        for pairs in (((first, ~first), (~first, first)), ((first, first), (~first, ~first)))
    )
    assert other < own
    assert trial.judge_with_all_components(fit_fixed, evidence).ppl == pytest.approx(
        math.exp(-other / TOKENS), rel=1e-6
    )


@pytest.mark.slow
def test_without_a_search_all_counts_that_needs_none(scored, found) -> None:
    first, parts = mask_first_half(scored.documents), set()
    for one in found.candidates:
        if one.settings.gate is not None:
            continue
        for settings, judged in zip(one.by_half, (~first, first), strict=True):
            others = replace(settings, k=1, probes=None, mixer=FixedLambda(0.0))
            alone = scored.log_probs(others).log_probs.double().exp()
            p = scored.lm_log_probs.double().exp()
            if settings.ngrams is not None:
                lam = torch.tensor(settings.ngrams.by_length)[scored.ngrams.lengths]
                p = (1 - lam) * p + lam * scored.ngrams.probs
            if settings.cache is not None:
                p = with_cache(scored, p, settings.cache)
            torch.testing.assert_close(alone[judged], p[judged], rtol=1e-4, atol=1e-6)
            in_use = {"n-grams": settings.ngrams, "cache": settings.cache}
            parts |= {name for name, part in in_use.items() if part is not None}
    assert parts == {"n-grams", "cache"}


def with_cache(scored: ScoredText, p: torch.Tensor, cache: CacheSettings) -> torch.Tensor:
    """Mix by the definition: the tokens before each in its document, by the distances of their keys."""
    keys, gold, mixed = scored.reading.keys.double(), scored.targets, p.clone()
    for at in range(TOKENS):
        before = torch.arange(max(0, at - cache.size), at)
        before = before[scored.documents[before] == scored.documents[at]]
        if len(before):
            weights = (-(keys[before] - keys[at]).square().sum(1) / cache.temperature).softmax(0)
            p_cache = weights[gold[before] == gold[at]].sum()
            mixed[at] = (1 - cache.lam) * p[at] + cache.lam * p_cache
    return mixed
