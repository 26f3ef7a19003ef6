"""Fitting a candidate (settings of one kind) on each half of a text, and judging it on the other half."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits import (
    DomainEvidence,
    fit_all_components,
    fit_with_ngrams,
)
from knnstore.lm.calibration.judging import Judge, check_text_size, mask_first_half
from knnstore.lm.calibration.scored_text import Mixed, ScoredText
from knnstore.lm.components import (
    DistributionFitting,
    Fitting,
    NGramFitting,
    NGrams,
    OwnNGrams,
    RecentFitting,
    RecentText,
    load_plugin_components,
)
from knnstore.lm.scoring import Interval
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress

Fit = Callable[[GridEvidence], KNNSettings]
"""A function that fits settings to the probabilities of some tokens."""
Mix = Callable[[KNNSettings, Tensor], Mixed]
"""A function ``mix(settings, tokens)`` that computes log-probabilities of tokens in the mixture of the
settings. Its second argument has the indices of the tokens, int64, shape (m,)."""
E = TypeVar("E", GridEvidence, DomainEvidence)


@dataclass(frozen=True)
class Candidate:
    """Fitted settings of one kind, with their held-out perplexity.

    The text is divided into two halves. Held-out means that settings fitted on one half judge the other half.
    """

    name: str
    """Kind of the settings, for example ``fixed`` or ``bins 8 + n-grams``."""
    held_out: Interval
    """Perplexity of all tokens; each token is judged by settings that were fitted on the other half of the
    documents."""
    lam: float
    """Mean λ over the tokens."""
    change: Interval
    """`held_out` divided by the perplexity of the model alone."""
    log_probs: Tensor = field(repr=False, compare=False)
    """log p of every token by the settings that were fitted on the other half, float32, shape (n,)."""
    by_half: tuple[KNNSettings, KNNSettings]
    """The settings that were fitted on the first half, and on the second half."""
    fit_all: Callable[[], KNNSettings] = field(repr=False, compare=False)
    """Fits the settings on all documents."""

    @cached_property
    def settings(self) -> KNNSettings:
        """Settings that are fitted on all documents.

        They are fitted when they are first asked for, because most candidates are judged and not used.
        """
        return self.fit_all()

    @property
    def k(self) -> int:
        """Number of neighbors that the settings ask for."""
        return self.by_half[0].k

    @property
    def probes(self) -> int | None:
        """Number of cells that the settings search; None in a store without cells."""
        return self.by_half[0].probes


def find_best_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the lowest held-out perplexity; at least one candidate is needed."""
    return min(candidates, key=lambda candidate: candidate.held_out.ppl)


class Trial:
    """Fits candidates (settings of one kind) on each half of a text, and judges them on the other half.

    Args:
        scored: the text.
        ngrams: True to try n-grams of the store, if the text was scored with n-grams, and n-grams of the text
            itself together with a continuous cache.
        progress: progress display, which receives each candidate that was judged; None for no display.

    Raises:
        InputError: the text is too short to fit to.
    """

    def __init__(self, scored: ScoredText, *, ngrams: bool = True, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self.documents = len(np.unique(scored.documents.numpy()))
        check_text_size(scored.documents.numpy())
        self.judge = Judge(scored)
        self._scored, self.first_half = scored, mask_first_half(scored.documents)
        self._with_ngrams = ngrams
        self._ngrams = NGramFitting(scored.ngrams) if ngrams and scored.ngrams is not None else None

    def fit_candidate(
        self, name: str, fit: Callable[[E], KNNSettings], evidence: E, mix: Mix | None = None
    ) -> Candidate:
        """Fit settings on each half of the text, and judge each half with the settings of the other half.

        Args:
            name: name of the candidate.
            fit: function that fits the settings to given tokens.
            evidence: probabilities of the tokens of the whole text, to fit on.
            mix: function that computes the tokens' log-probabilities with fitted settings; default is
                `ScoredText.log_probs`.
        """
        log_probs, lam = torch.empty(len(self._scored)), torch.empty(len(self._scored))
        by_half = fit(evidence.select_tokens(self.first_half)), fit(evidence.select_tokens(~self.first_half))
        for settings, judged in zip(by_half, (~self.first_half, self.first_half), strict=True):
            tokens = judged.nonzero()[:, 0]
            log_probs[tokens], lam[tokens] = (mix or self._scored.log_probs)(settings, tokens)
        held_out, change = self.judge(log_probs)
        fit_all = partial(fit, evidence)
        self._progress.advance(1)
        return Candidate(name, held_out, float(lam.mean()), change, log_probs, by_half, fit_all)

    def count_further_candidates(self) -> int:
        """Return about how many candidates with n-grams, a cache and other components will be tried."""
        return 3 * (self._ngrams is not None) + 2 * len(self._others)

    def judge_with_all_components(self, fit: Fit, evidence: GridEvidence) -> Interval:
        """Fit keys, n-grams and a continuous cache, and return the held-out perplexity of their mixture.

        N-grams are left out if the trial does not try n-grams. The cache is left out if the text was scored
        without target tokens.

        Args:
            fit: function that fits the settings of the keys.
            evidence: probabilities of the tokens of the whole text, to fit on.
        """
        if self._ngrams is not None:
            fit = partial(fit_with_ngrams, scored=self._scored, ngrams=self._ngrams, fit=fit)
        below = self.fit_candidate("keys", fit, evidence).log_probs
        log_probs, recent = below.clone(), self._others.get(RecentText.name)
        if recent is not None:
            for half in (self.first_half, ~self.first_half):
                log_probs[~half] = recent.mix(below, recent.fit(below, half))[~half]
        return self.judge(log_probs)[0]

    @cached_property
    def _others(self) -> dict[str, Fitting]:
        """The objects that fit the components after keys and n-grams, by component name.

        The names are in the order of the mixture. Empty if the text was scored without target tokens.
        """
        scored = self._scored
        if scored.reading is None:
            return {}
        own = scored.evidence.found.get(OwnNGrams.name) if self._with_ngrams else None
        others: dict[str, Fitting] = {RecentText.name: RecentFitting.from_keys(scored.reading, own)}
        for name, settings in scored.others.items():
            component, found = load_plugin_components()[name], scored.evidence.found[name]
            others[name] = DistributionFitting(component, found, scored.reading.targets, settings)
        return others

    def compute_nested_log_probs(self, candidates: Sequence[Candidate]) -> Tensor:
        """Return log p of every token by the candidate that is best on the other half of the text.

        The lowest of many perplexities is too optimistic, because the best candidate is also the luckiest.
        So for each half of the text, the candidate is chosen by its perplexity on the other half.

        Args:
            candidates: at least one candidate.

        Returns:
            float32, shape (n,).
        """
        log_probs = torch.empty(len(self._scored))
        for half in (self.first_half, ~self.first_half):
            sums = [float(candidate.log_probs[~half].double().sum()) for candidate in candidates]
            log_probs[half] = candidates[sums.index(max(sums))].log_probs[half]
        return log_probs

    def try_ngrams(
        self, candidates: Sequence[Candidate], evidence: Sequence[GridEvidence], fits: Mapping[str, Fit]
    ) -> list[Candidate]:
        """Fit n-grams in up to three ways, and return the new candidates.

        1. The n-grams are mixed with the model alone.
        2. The n-grams are mixed with the best candidate so far, which is not fitted again.
        3. The best candidate in `fits` is fitted again, together with the n-grams. If it is the best of all
           candidates, the second way is left out.

        Args:
            candidates: the candidates so far. If there are none, only the first way is tried.
            evidence: probabilities of the tokens for each k or number of searched cells.
            fits: for each candidate's name, the function that fits the keys.

        Returns:
            The new candidates; empty if the trial does not try n-grams.
        """
        if self._ngrams is None:
            return []
        on_top = self._try_on_top(candidates, NGrams.name, self._ngrams)
        if not candidates:
            return on_top
        best, at_its_k = self._find_best_fit(fits, candidates, evidence)
        again = partial(fit_with_ngrams, scored=self._scored, ngrams=self._ngrams, fit=fits[best.name])
        if best is find_best_candidate(candidates):
            on_top.pop()
        return [*on_top, self.fit_candidate(f"{best.name} + n-grams", again, at_its_k)]

    def _find_best_fit(
        self, fits: Mapping[str, Fit], candidates: Sequence[Candidate], evidence: Sequence[GridEvidence]
    ) -> tuple[Candidate, GridEvidence]:
        """Find the best candidate that can be fitted again; return it and the probabilities to fit on.

        These are the candidates whose name is in `fits`, and whose k is not larger than the scored text's k.

        Args:
            fits: for each candidate's name, the function that fits the keys.
            candidates: the candidates so far.
            evidence: probabilities of the tokens for each k or number of searched cells.
        """
        best = find_best_candidate(
            [one for one in candidates if one.name in fits and one.k <= self._scored.k]
        )
        reach = best.k, best.probes
        return best, next(of for of in evidence if (of.k, of.probes) == reach)

    def try_other_components(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Try the continuous cache and the components of other packages.

        Each component is tried with the model alone, and with the best candidate so far.

        Args:
            candidates: the candidates so far. The new candidates of a component are added to them before the
                next component is tried.

        Returns:
            The new candidates, two for each component; one if there is no candidate so far.
        """
        found = list[Candidate]()
        for name, component in self._others.items():
            found += self._try_on_top([*candidates, *found], name, component)
        return found

    def try_gate(
        self, candidates: Sequence[Candidate], evidence: Sequence[GridEvidence], fit: Fit
    ) -> list[Candidate]:
        """Try one gate, a network that weighs all components.

        The gate uses the k, or the number of searched cells, with which a fixed λ is best.

        Args:
            candidates: the candidates so far.
            evidence: probabilities of the tokens for each k or number of searched cells.
            fit: function that fits a fixed λ of the keys, before the gate is fitted.

        Returns:
            A list with one candidate; empty if the text was scored without target tokens.
        """
        if self._scored.reading is None:
            return []
        at_its_k = evidence[0]
        if len(evidence) > 1:
            _, at_its_k = self._find_best_fit({"fixed": fit}, candidates, evidence)
        together = partial(
            fit_all_components, scored=self._scored, ngrams=self._ngrams, others=self._others, fit=fit
        )
        return [self.fit_candidate("gate over all", together, at_its_k)]

    def _try_on_top(
        self, candidates: Sequence[Candidate], part_name: str, component: Fitting
    ) -> list[Candidate]:
        """Try a component mixed with the model alone, and mixed over the best candidate so far.

        Args:
            candidates: the candidates so far; if empty, the component is tried with the model alone only.
            part_name: name of the component.
            component: the object that fits the component.

        Returns:
            One new candidate, or two if there are candidates so far.
        """

        def fit_over(name: str, below: Candidate | None) -> Candidate:
            """Fit the component over a candidate, or over the model alone if `below` is None."""
            nothing = KNNSettings(k=1, lam=0)
            by_half = (nothing, nothing) if below is None else below.by_half
            before = self._scored.lm_log_probs if below is None else below.log_probs
            log_probs = torch.empty(len(before))
            halves = self.first_half, ~self.first_half
            parts = [component.fit(before, half) for half in halves]
            for part, half in zip(parts, halves, strict=True):
                log_probs[~half] = component.mix(before, part)[~half]
            fitted = component.fit(before, torch.ones_like(self.first_half))
            held_out, change = self.judge(log_probs)
            lam = 1 - (1 - (0.0 if below is None else below.lam)) * (1 - component.lam(fitted))
            one, other = (of.with_part(part_name, part) for of, part in zip(by_half, parts, strict=True))
            self._progress.advance(1)

            def fit_all() -> KNNSettings:
                return (nothing if below is None else below.settings).with_part(part_name, fitted)

            return Candidate(name, held_out, lam, change, log_probs, (one, other), fit_all)

        alone = fit_over(part_name, None)
        if not candidates:
            return [alone]
        best = find_best_candidate(candidates)
        return [alone, fit_over(f"{best.name} + {part_name}", best)]
