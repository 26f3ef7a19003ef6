"""Comparing every k, T, λ and mixer on held-out text, each judged by what it was not fitted on.

Documents are divided in two halves. Every candidate is fitted on each half and judged on the other, so
that each token is judged by settings that never saw its document; the one with the lowest perplexity is then
fitted on all of them. Intervals are of the bootstrap over documents, since tokens of one document
are not independent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.bins import BinnedLambda
from knnstore.lm.cache_fitting import fit_cache, gather_cache_evidence
from knnstore.lm.domain_fitting import DomainEvidence, fit_domains
from knnstore.lm.domain_weights import DomainWeights
from knnstore.lm.fitting import Evidence, fit_bins, fit_fixed, fit_nearness, fit_relative, gather_evidence
from knnstore.lm.further_searches import WideEvidence
from knnstore.lm.gate_fit import fit_gate
from knnstore.lm.mixing import FixedLambda
from knnstore.lm.scored_text import Mixed, ScoredText
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute_fitting import fit_alone, fit_beside

MIN_DOCUMENTS = 8
MIN_TOKENS = 1_000
RESAMPLES = 1_000
"""Of the documents, for an interval of 95 %."""

_K_STEP = 4

Fit = Callable[[Evidence], KNNSettings]
Mix = Callable[[KNNSettings, Tensor], Mixed]
"""Judges settings by some tokens, given by their indices."""
E = TypeVar("E", Evidence, DomainEvidence)

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
    """The settings in force until now, with at most the k of the pass if theirs was not searched; nothing
    was fitted here. None where there are none, or none that can be judged."""

    @property
    def best(self) -> Candidate:
        """The one with the lowest held-out perplexity."""
        return min(self.candidates, key=lambda candidate: candidate.held_out.ppl)

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
        InputError: there is too little text.
    """
    lengths = torch.bincount(scored.documents).numpy()
    lengths = lengths[lengths > 0]
    check_enough(len(lengths), len(scored))
    halves = in_halves(scored.documents)
    judged = Judge(scored)
    evidence = gather_evidence(scored, ks_up_to(scored.k))
    if not len(evidence[0].tokens):
        raise InputError("nothing can be fitted: the search found no neighbour of any token")

    def judge(name: str, fit: Callable[[E], KNNSettings], of: E, mix: Mix = scored.log_probs) -> Candidate:
        log_probs, lam = torch.empty(len(scored)), torch.empty(len(scored))
        for half in (halves, ~halves):
            tokens = (~half).nonzero()[:, 0]
            log_probs[tokens], lam[tokens] = mix(fit(of.only(half)), tokens)
        held_out, change = judged(log_probs)
        return Candidate(name, fit(of), held_out, float(lam.mean()), change, log_probs)

    fixed = [judge("fixed", fit_fixed, of) for of in evidence]
    at = min(range(len(fixed)), key=lambda index: fixed[index].held_out.ppl)
    others = [judge(name, fit, evidence[at]) for name, fit in fits.items()]
    if networks:
        others.append(judge("gate", partial(fit_gate, scored=scored), evidence[at]))
    if wide:
        with_k = [judge("fixed", fit_fixed, of.evidence, of.log_probs) for of in wide]
        best, of = min(zip(with_k, wide, strict=True), key=lambda pair: pair[0].held_out.ppl)
        if best.held_out.ppl < fixed[at].held_out.ppl:
            others += [judge(name, fit, of.evidence, of.log_probs) for name, fit in BIN_FITS.items()]
        fixed += with_k
    if domains is not None:
        others.append(judge("domains", fit_domains, domains, domains.log_probs))
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
        kept, mix = _as_judged(current, scored, wide, domains)
        before = judge("current", lambda _: kept, evidence[at], mix) if kept else None
    return Comparison(len(lengths), len(scored), judged.base, tuple(candidates), before)


def _as_judged(
    current: KNNSettings,
    scored: ScoredText,
    wide: Sequence[WideEvidence],
    domains: DomainEvidence | None,
) -> tuple[KNNSettings | None, Mix]:
    """Settings as they can be judged without a search, and by what; None where they cannot."""
    if isinstance(current.mixer, DomainWeights):
        names = {current.mixer.domains[number] for number in current.mixer.searched}
        if domains is None or current.cache is not None or not names <= set(domains.domains):
            return None, scored.log_probs
        return current, domains.log_probs
    if isinstance(current.mixer, FixedLambda | BinnedLambda) and current.cache is None:
        for of in wide:
            if of.evidence.k == current.k:
                return current, of.log_probs
    return replace(current, k=min(current.k, scored.k)), scored.log_probs


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


class Judge:
    """Gives perplexities with intervals, all over the same resamples of the documents.

    Args:
        scored: the text, and what the model alone thinks of it.
    """

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


def in_halves(documents: Tensor) -> Tensor:
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


def ks_up_to(largest: int) -> list[int]:
    """The largest k and what is left when it is divided again and again; ascending."""
    ks = [largest]
    while ks[0] // _K_STEP >= _K_STEP:
        ks.insert(0, ks[0] // _K_STEP)
    return ks
