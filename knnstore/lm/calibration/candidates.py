"""Comparing every k, T, λ and mixer on held-out text, each judged by what it was not fitted on.

Two-fold cross-fitting: every candidate is fitted on each half of the documents and judged on the other, so
that each token is judged by settings that never saw its document; the one with the lowest perplexity is then
fitted on all of them. Intervals are of the bootstrap over documents, since tokens of one document
are not independent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.calibration.evidence import Evidence, evidence_of_cells, gather_evidence
from knnstore.lm.calibration.fits import (
    DomainEvidence,
    fit_alone,
    fit_beside,
    fit_bins,
    fit_cache,
    fit_domains,
    fit_fixed,
    fit_gate,
    fit_nearness,
    fit_ngrams,
    fit_relative,
    gather_cache_evidence,
    mix_ngrams,
)
from knnstore.lm.calibration.judging import Interval, Judge, check_enough, in_halves
from knnstore.lm.calibration.scored_text import Mixed, ScoredText
from knnstore.lm.calibration.searches import WideEvidence
from knnstore.lm.mixing import RelativeConfidence
from knnstore.lm.settings import CacheSettings, KNNSettings, NGramSettings

_K_STEP = 4
_WORTH_PROBES = 1.002
"""Every cell costs time: the fewest are taken with which perplexity is at most so many times the lowest."""

Fit = Callable[[Evidence], KNNSettings]
Mix = Callable[[KNNSettings, Tensor], Mixed]
"""Judges settings by some tokens, given by their indices."""
E = TypeVar("E", Evidence, DomainEvidence)
P = TypeVar("P", CacheSettings, NGramSettings)

BIN_FITS: dict[str, Fit] = {
    "bins 8": partial(fit_bins, distance_bins=8),
    "bins 32": partial(fit_bins, distance_bins=32),
    "bins 8 + T": partial(fit_bins, distance_bins=8, temperatures=True),
    "bins 32 + T": partial(fit_bins, distance_bins=32, temperatures=True),
    "bins 8x8": partial(fit_bins, distance_bins=8, confidence_bins=8),
    "bins 8x8 + T": partial(fit_bins, distance_bins=8, confidence_bins=8, temperatures=True),
    "bins 16x16 + T": partial(fit_bins, distance_bins=16, confidence_bins=16, temperatures=True),
}
"""Bins of the nearest distance, times bins of the model's confidence, and with T of its own in each where
``+ T``."""

MIXER_FITS: dict[str, Fit] = {"sk-mt": fit_nearness, "relative-confidence": fit_relative, **BIN_FITS}
"""What is fitted beside a fixed λ, at the k that is best for that."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to mix, fitted and judged."""

    name: str
    settings: KNNSettings
    """Fitted on all documents."""
    held_out: Interval
    """Of every token, by settings fitted on the other half of the documents."""
    lam: float
    """Mean λ over the tokens."""
    change: Interval
    """Its perplexity divided by that of the model alone, over the same resamples."""
    log_probs: Tensor = field(repr=False, compare=False)
    """log p of every token, by settings fitted on the other half: float32, shape (n,)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All candidates on one text."""

    documents: int
    tokens: int
    base: Interval
    """The model alone."""
    candidates: tuple[Candidate, ...]
    """A fixed λ with each k, then the other mixers; then a substitute without the store, and below the
    best of some of these; then n-grams without the keys, and on top of the best of these; then a continuous
    cache without the store, and on top of the best of all."""
    current: Candidate | None
    """The settings in force until now, with at most the k of the pass if theirs was not searched; nothing
    was fitted here. None where there are none, or none that can be judged."""

    @property
    def best(self) -> Candidate:
        """The one with the lowest held-out perplexity."""
        return best_of(self.candidates)

    @property
    def beats_base(self) -> bool:
        """Whether the best is better than the model alone, and not by chance."""
        return self.best.change.high < 1


def compare(
    scored: ScoredText,
    current: KNNSettings | None = None,
    *,
    fits: Mapping[str, Fit] = MIXER_FITS,
    wide: Sequence[WideEvidence] = (),
    domains: DomainEvidence | None = None,
    networks: bool = False,
) -> Comparison:
    """Fit every candidate and judge it on documents that it was not fitted on.

    Args:
        scored: held-out text.
        current: settings to compare the candidates with.
        fits: what is fitted beside a fixed λ.
        wide: what the tokens say about settings with larger k; a fixed λ is fitted, and bins where that is
            better than with the k of the pass.
        domains: what they say about weights for each domain, which are fitted too.
        networks: whether a gate is fitted, which takes the longest of all.

    Raises:
        InputError: there is too little text, or nothing was found.
    """
    trial = _Trial(scored)
    if not len(scored.found):
        raise InputError("nothing can be fitted: the search found no neighbor of any token")
    evidence = evidence_of_cells(scored) if scored.visited else gather_evidence(scored, ks_up_to(scored.k))
    fixed = [trial.fitted("fixed", fit_fixed, of) for of in evidence]
    enough = best_of(fixed).held_out.ppl * (_WORTH_PROBES if scored.visited else 1)
    at_best_k = next(of for one, of in zip(fixed, evidence, strict=True) if one.held_out.ppl <= enough)
    if scored.visited:
        fits = {name: fit for name, fit in fits.items() if name != RelativeConfidence.name}
    others = [trial.fitted(name, fit, at_best_k) for name, fit in fits.items()]
    if networks:
        others.append(trial.fitted("gate", partial(fit_gate, scored=scored), at_best_k))
    if wide:
        with_k = [trial.fitted("fixed", fit_fixed, of.evidence, of.log_probs) for of in wide]
        best, widest = min(zip(with_k, wide, strict=True), key=lambda pair: pair[0].held_out.ppl)
        if best.held_out.ppl < best_of(fixed).held_out.ppl:
            others += [
                trial.fitted(name, fit, widest.evidence, widest.log_probs) for name, fit in BIN_FITS.items()
            ]
        fixed += with_k
    candidates = [*fixed, *others]
    if domains is not None:
        candidates.append(trial.fitted("domains", fit_domains, domains, domains.log_probs))
    candidates += trial.with_substitute(candidates, evidence, fits)
    candidates += trial.with_ngrams(candidates)
    candidates += trial.with_cache(candidates)
    before = None
    if current is not None:
        kept, mix = _as_judged(current, scored, wide, domains)
        before = trial.fitted("current", lambda _: kept, at_best_k, mix) if kept else None
    return Comparison(trial.documents, len(scored), trial.judge.base, tuple(candidates), before)


class _Trial:
    """Fits candidates on each half of a text and judges them on the other."""

    def __init__(self, scored: ScoredText) -> None:
        self.documents = int((torch.bincount(scored.documents) > 0).sum())
        check_enough(self.documents, len(scored))
        self.judge = Judge(scored)
        self._scored, self._halves = scored, in_halves(scored.documents)

    def fitted(
        self, name: str, fit: Callable[[E], KNNSettings], evidence: E, mix: Mix | None = None
    ) -> Candidate:
        """A candidate that is fitted on evidence of tokens, judged by `ScoredText.log_probs` or by `mix`."""
        log_probs, lam = torch.empty(len(self._scored)), torch.empty(len(self._scored))
        for half in (self._halves, ~self._halves):
            tokens = (~half).nonzero()[:, 0]
            log_probs[tokens], lam[tokens] = (mix or self._scored.log_probs)(fit(evidence.only(half)), tokens)
        held_out, change = self.judge(log_probs)
        return Candidate(name, fit(evidence), held_out, float(lam.mean()), change, log_probs)

    def with_substitute(
        self, candidates: Sequence[Candidate], evidence: Sequence[Evidence], fits: Mapping[str, Fit]
    ) -> list[Candidate]:
        """The substitute alone and below the best of some candidates, if the text was scored with one."""
        scored, predicted = self._scored, self._scored.substitute
        if predicted is None:
            return []
        fitting = {"fixed": fit_fixed, **fits}
        best = best_of([one for one in candidates if one.name in fitting and one.settings.k <= scored.k])
        at_its_k = next(of for of in evidence if (of.k, of.probes) == (best.settings.k, best.settings.probes))
        alone = partial(fit_alone, scored=scored, predicted=predicted)
        beside = partial(fit_beside, scored=scored, predicted=predicted, fit=fitting[best.name])
        return [
            self.fitted("substitute", alone, at_its_k),
            self.fitted(f"{best.name} + substitute", beside, at_its_k),
        ]

    def with_ngrams(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """N-grams without the keys, and on top of the best candidate, if the text was scored with them."""
        said = self._scored.ngrams
        if said is None:
            return []

        def put(settings: KNNSettings, found: NGramSettings) -> KNNSettings:
            return replace(settings, ngrams=found)

        fit, mix = partial(fit_ngrams, said), partial(mix_ngrams, said)
        return self._on_top(candidates, "n-grams", fit, mix, put)

    def with_cache(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """A continuous cache without the store, and on top of the best candidate, if there are keys."""
        if self._scored.reading is None:
            return []
        cache = gather_cache_evidence(self._scored.reading)

        def put(settings: KNNSettings, found: CacheSettings) -> KNNSettings:
            return replace(settings, cache=found)

        return self._on_top(candidates, "cache", partial(fit_cache, cache), cache.mix, put)

    def _on_top(
        self,
        candidates: Sequence[Candidate],
        name: str,
        fit: Callable[[Tensor, Tensor], P],
        mix: Callable[[Tensor, P], Tensor],
        put: Callable[[KNNSettings, P], KNNSettings],
    ) -> list[Candidate]:
        """A part of settings without the store, and on top of the best candidate.

        Args:
            candidates: those so far.
            name: its name in the table.
            fit: fits it to log p of each token below it, where the second argument is True.
            mix: mixes it into that.
            put: makes it a part of settings.
        """

        def over(name: str, settings: KNNSettings, below: Tensor, lam: float) -> Candidate:
            log_probs = torch.empty(len(below))
            for half in (self._halves, ~self._halves):
                log_probs[~half] = mix(below, fit(below, half))[~half]
            found = fit(below, torch.ones_like(self._halves))
            held_out, change = self.judge(log_probs)
            together = 1 - (1 - lam) * (1 - found.lam)
            return Candidate(name, put(settings, found), held_out, together, change, log_probs)

        best = best_of(candidates)
        return [
            over(name, KNNSettings(k=1, lam=0), self._scored.lm_log_probs, 0.0),
            over(f"{best.name} + {name}", best.settings, best.log_probs, best.lam),
        ]


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the lowest held-out perplexity."""
    return min(candidates, key=lambda candidate: candidate.held_out.ppl)


def _as_judged(
    current: KNNSettings,
    scored: ScoredText,
    wide: Sequence[WideEvidence],
    domains: DomainEvidence | None,
) -> tuple[KNNSettings | None, Mix]:
    """Settings as they can be judged without a search, and by what; None where they cannot."""
    searches = current.mixer.searches(current.selection)
    if any(one is not current.selection for one in searches):
        named = {name for one in searches for name in one.domains or ()}
        in_cells = current.probes is not None
        if domains is None or current.needs_text or not named <= set(domains.domains):
            return None, scored.log_probs
        if in_cells != (domains.probes is not None):
            return None, scored.log_probs
        return current, domains.log_probs
    if scored.visited and current.retrieves:
        return current if current.probes in scored.visited else None, scored.log_probs
    if current.mixer.needs_nearest_only and not current.needs_text:
        for of in wide:
            if of.evidence.k == current.k:
                return current, of.log_probs
    return replace(current, k=min(current.k, scored.k)), scored.log_probs


def ks_up_to(largest: int) -> list[int]:
    """The largest k and what is left when it is divided again and again; ascending."""
    ks = [largest]
    while ks[0] // _K_STEP >= _K_STEP:
        ks.insert(0, ks[0] // _K_STEP)
    return ks
