"""Comparing every k, T, λ and mixer on held-out text, each judged by what it was not fitted on.

Documents are divided in two halves. Every candidate is fitted on each half and judged on the other, so
that each token is judged by settings that never saw its document; the one with the lowest perplexity is then
fitted on all of them. Intervals are of the bootstrap over documents, since tokens of one document
are not independent.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.cache_fitting import fit_cache, gather_cache_evidence
from knnstore.lm.fitting import Evidence, fit_bins, fit_fixed, fit_nearness, fit_relative, gather_evidence
from knnstore.lm.scored_text import ScoredText
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute_fitting import fit_alone, fit_beside

MIN_DOCUMENTS = 8
MIN_TOKENS = 1_000
RESAMPLES = 1_000
"""Of the documents, for an interval of 95 %."""

_K_STEP = 4

Fit = Callable[[Evidence], KNNSettings]

MIXER_FITS: dict[str, Fit] = {
    "sk-mt": fit_nearness,
    "relative-confidence": fit_relative,
    "bins 8": partial(fit_bins, distance_bins=8),
    "bins 32": partial(fit_bins, distance_bins=32),
    "bins 8 + T": partial(fit_bins, distance_bins=8, temperatures=True),
    "bins 32 + T": partial(fit_bins, distance_bins=32, temperatures=True),
    "bins 8x8": partial(fit_bins, distance_bins=8, confidence_bins=8),
    "bins 8x8 + T": partial(fit_bins, distance_bins=8, confidence_bins=8, temperatures=True),
    "bins 16x16 + T": partial(fit_bins, distance_bins=16, confidence_bins=16, temperatures=True),
}
"""What is fitted beside a fixed λ, at the k that is best for that: bins of the nearest distance, times
bins of the model's confidence, and with T of its own in each where ``+ T``."""


class Interval(NamedTuple):
    """A perplexity, with the bounds between which it is in 95 % of the resamples."""

    ppl: float
    low: float
    high: float


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
    best of some of these; then a continuous cache without the store, and
    on top of the best of these."""
    current: Candidate | None
    """The settings in force until now, with at most the k of the pass; nothing was fitted here."""

    @property
    def best(self) -> Candidate:
        """The one with the lowest held-out perplexity."""
        return min(self.candidates, key=lambda candidate: candidate.held_out.ppl)

    @property
    def beats_base(self) -> bool:
        """Whether the best is better than the model alone, and not by chance."""
        return self.best.change.high < 1


def compare(
    scored: ScoredText, current: KNNSettings | None = None, *, fits: Mapping[str, Fit] = MIXER_FITS
) -> Comparison:
    """Fit every candidate and judge it on documents that it was not fitted on.

    Args:
        scored: held-out text.
        current: settings to compare the candidates with.
        fits: what is fitted beside a fixed λ.

    Raises:
        InputError: there is too little text.
    """
    lengths = torch.bincount(scored.documents).numpy()
    lengths = lengths[lengths > 0]
    check_enough(len(lengths), len(scored))
    halves = _halves(scored.documents)
    judged = _Judged(scored)
    evidence = gather_evidence(scored, _ks(scored.k))
    if not len(evidence[0].tokens):
        raise InputError("nothing can be fitted: the search found no neighbour of any token")

    def judge(name: str, fit: Fit, of: Evidence) -> Candidate:
        log_probs, lam = torch.empty(len(scored)), torch.empty(len(scored))
        for half in (halves, ~halves):
            tokens = (~half).nonzero()[:, 0]
            log_probs[tokens], lam[tokens] = scored.log_probs(fit(of.only(half)), tokens)
        held_out, change = judged(log_probs)
        return Candidate(name, fit(of), held_out, float(lam.mean()), change, log_probs)

    fixed = [judge("fixed", fit_fixed, of) for of in evidence]
    at = min(range(len(fixed)), key=lambda index: fixed[index].held_out.ppl)
    others = [judge(name, fit, evidence[at]) for name, fit in fits.items()]
    candidates = [*fixed, *others]
    if scored.substitute is not None:
        known = [candidate for candidate in candidates if candidate.name in {"fixed", *fits}]
        known = [candidate for candidate in known if candidate.settings.k <= scored.k]
        best = min(known, key=lambda candidate: candidate.held_out.ppl)
        at_its_k = next(of for of in evidence if of.k == best.settings.k)
        alone = partial(fit_alone, scored=scored, predicted=scored.substitute)
        beside = partial(
            fit_beside, scored=scored, predicted=scored.substitute, fit=fits.get(best.name, fit_fixed)
        )
        candidates += [
            judge("substitute", alone, at_its_k),
            judge(f"{best.name} + substitute", beside, at_its_k),
        ]
    if scored.reading is not None:
        cache = gather_cache_evidence(scored.reading)

        def with_cache(name: str, settings: KNNSettings, below: Tensor, lam: float) -> Candidate:
            log_probs = torch.empty(len(scored))
            for half in (halves, ~halves):
                log_probs[~half] = cache.mix(below, fit_cache(cache, below, half))[~half]
            found = fit_cache(cache, below, torch.ones_like(halves))
            held_out, change = judged(log_probs)
            together = 1 - (1 - lam) * (1 - found.lam)
            return Candidate(name, replace(settings, cache=found), held_out, together, change, log_probs)

        best = min(candidates, key=lambda candidate: candidate.held_out.ppl)
        candidates += [
            with_cache("cache", KNNSettings(k=1, lam=0), scored.lm_log_probs, 0.0),
            with_cache(f"{best.name} + cache", best.settings, best.log_probs, best.lam),
        ]
    before = None
    if current is not None:
        kept = replace(current, k=min(current.k, scored.k))
        before = judge("current", lambda _: kept, evidence[at])
    return Comparison(len(lengths), len(scored), judged.base, tuple(candidates), before)


def check_enough(documents: int, tokens: int) -> None:
    """Refuse to fit on too little.

    Raises:
        InputError: there are fewer documents or tokens than needed.
    """
    if documents < MIN_DOCUMENTS or tokens < MIN_TOKENS:
        raise InputError(
            f"{documents:,} documents of {tokens:,} tokens are too little to fit on: at least "
            f"{MIN_DOCUMENTS} documents and {MIN_TOKENS:,} tokens are needed, and 50,000 tokens are better"
        )


class _Judged:
    """Perplexities with intervals, all over the same resamples of the documents."""

    def __init__(self, scored: ScoredText) -> None:
        _, self._documents = torch.unique(scored.documents, return_inverse=True)
        self._lengths = torch.bincount(self._documents).numpy()
        count = len(self._lengths)
        # How often each document is drawn, shape (resamples, documents).
        self._draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
        self._base = self._losses(scored.lm_log_probs)
        self.base = _interval(*self._base)

    def __call__(self, log_probs: Tensor) -> tuple[Interval, Interval]:
        """Return the perplexity, and its ratio to that of the model alone."""
        whole, resampled = self._losses(log_probs)
        return _interval(whole, resampled), _interval(whole - self._base[0], resampled - self._base[1])

    def _losses(self, log_probs: Tensor) -> tuple[float, NDArray[np.float64]]:
        losses = -torch.zeros(len(self._lengths), dtype=torch.float64).index_add_(
            0, self._documents, log_probs.double()
        ).numpy()  # fmt: skip
        return losses.sum() / self._lengths.sum(), self._draws @ losses / (self._draws @ self._lengths)


def _interval(loss: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(math.exp(loss), math.exp(low), math.exp(high))


def _halves(documents: Tensor) -> Tensor:
    """Which tokens are of the first half: whole documents, the longest dealt out first.

    Args:
        documents: of each token, int64, shape (n,).

    Returns:
        bool, shape (n,).
    """
    lengths = torch.bincount(documents)
    first = torch.zeros(len(lengths), dtype=torch.bool)
    taken = [0, 0]
    for document in lengths.argsort(descending=True, stable=True).tolist():
        lighter = int(taken[1] < taken[0])
        taken[lighter] += int(lengths[document])
        first[document] = lighter == 0
    return first[documents]


def _ks(largest: int) -> list[int]:
    """The largest k and what is left when it is divided again and again; ascending."""
    ks = [largest]
    while ks[0] // _K_STEP >= _K_STEP:
        ks.insert(0, ks[0] // _K_STEP)
    return ks
