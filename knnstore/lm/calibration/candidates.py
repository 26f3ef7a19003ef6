"""Comparing candidates (`compare_candidates`): every k, T, λ and mixer is fitted and judged on held-out text.

The method is two-fold cross-fitting. Every candidate is fitted on each half of the documents and judged on
the other half, so the settings that judge a token were not fitted on its document. The candidate with the
lowest perplexity is then fitted on all documents. The lowest of many perplexities is too optimistic. For the
expected perplexity, each half is therefore judged by the candidate that is best on the other half. Intervals
are over documents, because tokens of one document are not independent.

In a store with cells, the number of probes is chosen first, on a sample of the documents. For each number a
fixed λ, n-grams and a continuous cache are fitted. The smallest number is chosen whose perplexity is at most
`WORTH_PROBES` times the lowest perplexity. All candidates use this number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.calibration.evidence import (
    GridEvidence,
    build_evidence_without_keys,
    gather_evidence,
    list_evidence_by_probes,
)
from knnstore.lm.calibration.fits import (
    DomainEvidence,
    fit_bins,
    fit_domains,
    fit_fixed,
    fit_gate,
)
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.calibration.searches import FurtherSearches, WideEvidence
from knnstore.lm.calibration.trying import Candidate, Fit, Mix, Trial, find_best_candidate
from knnstore.lm.mixing import load_plugin_mixers
from knnstore.lm.scoring import Interval
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress

_K_STEP = 4
_SAMPLE_TOKENS, _SAMPLE_DOCUMENTS = 4_000, 64
"""Least number of tokens, and largest number of documents, of the sample on which the number of searched
cells is chosen."""
WORTH_PROBES = 1.005
"""Largest accepted perplexity, as a multiple of the lowest one. Each searched cell costs time, so the
smallest number of cells is chosen whose perplexity is accepted."""

BIN_FITS: dict[str, Fit] = {
    "bins 8": partial(fit_bins, distance_bins=8),
    "bins 32": partial(fit_bins, distance_bins=32),
    "bins 8 + T": partial(fit_bins, distance_bins=8, temperatures=True),
    "bins 32 + T": partial(fit_bins, distance_bins=32, temperatures=True),
    "bins 8x8": partial(fit_bins, distance_bins=8, confidence_bins=8),
    "bins 8x8 + T": partial(fit_bins, distance_bins=8, confidence_bins=8, temperatures=True),
    "bins 16x16 + T": partial(fit_bins, distance_bins=16, confidence_bins=16, temperatures=True),
}
"""Functions that fit bins, by the candidate's name.

The name has the number of bins of the nearest distance: ``bins 8``; with bins of the model's confidence:
``bins 8x8``. ``+ T`` means that T is fitted in each bin too, not only λ.
"""


class FittableMixer(Protocol):
    """A mixer class of another package that `calibrate` can fit and try.

    A mixer is a rule that chooses λ and the temperature of each token. `register_mixer` registers the class.
    """

    @classmethod
    def fit(cls, evidence: GridEvidence, scored: ScoredText) -> KNNSettings | None:
        """Fit the mixer (a rule that chooses the weight λ) to some tokens; return settings with it.

        Args:
            evidence: probabilities of the tokens to fit on: by the model (p_LM) and by the retrieved records
                (p_kNN). If n-grams are used, both probabilities are already mixed with n-grams.
            scored: the text, from which further features can be computed; ``evidence.tokens`` has the indices
                of the tokens in the text.

        Returns:
            The settings, ``evidence.build_settings(temperature, mixer)``. None if the mixer cannot be used
            with this text, for example because it needs single neighbors or squared distances.
        """


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare_candidates`: the perplexity of every candidate (settings of one kind)."""

    documents: int
    """Number of documents of the text."""
    tokens: int
    """Number of tokens of the text."""
    base: Interval
    """Perplexity of the model alone."""
    candidates: tuple[Candidate, ...]
    """All candidates, in this order:

    1. the keys alone, with a fixed λ for each k and with the other mixers;
    2. n-grams alone, and mixed over the best candidate so far;
    3. the continuous cache alone, and mixed over the best candidate so far;
    4. each component of another package in the same two ways;
    5. one gate over all components.
    """
    current: Candidate | None
    """The settings that were in force before, which are judged without a new fit. If their k was not
    searched, they are judged with the k of the first search. None if no settings were given, or if they
    cannot be judged."""
    expected: Interval
    """Expected perplexity of the best candidate: each half of the text is judged by the candidate that is
    best on the other half."""
    change: Interval
    """Expected perplexity divided by the perplexity of the model alone."""
    gain: Interval | None
    """Expected perplexity divided by the perplexity of the settings in force; None if no settings in force
    were judged."""
    probes: Mapping[int, float] = field(default_factory=dict)
    """Perplexity on a sample of the text for each number of searched cells (groups of records with near keys)
    that was tried. The number of cells was chosen by it. Empty in a store without cells."""

    @property
    def best(self) -> Candidate:
        """The candidate with the lowest held-out perplexity.

        This perplexity is too optimistic, because it is the lowest of many; `expected` is not.
        """
        return find_best_candidate(self.candidates)

    @property
    def chosen_probes(self) -> int | None:
        """Number of cells (groups of records with near keys) that all candidates search for each query.

        None in a store without cells.
        """
        return choose_probes(self.probes) if self.probes else None

    @property
    def beats_base(self) -> bool:
        """True if the gain over the model alone is not chance: the 95 % interval of `change` is below 1."""
        return self.change.high < 1

    @property
    def beats_current(self) -> bool:
        """True if the gain over the settings in force is not chance: the 95 % interval of `gain` is below 1.

        Also True if no settings in force were judged.
        """
        return self.gain is None or self.gain.high < 1


def compare_candidates(
    scored: ScoredText,
    current: KNNSettings | None = None,
    *,
    fits: Mapping[str, Fit] | None = None,
    wide: Sequence[WideEvidence] = (),
    domains: DomainEvidence | None = None,
    by_probes: Mapping[int, float] = MappingProxyType({}),
    networks: bool = False,
    ngrams: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Fit every candidate, and judge it on documents that it was not fitted on.

    A candidate is settings of one kind, for example with a fixed weight λ and a certain k.

    Args:
        scored: held-out text that was scored once.
        current: settings to compare the candidates with; None for no comparison.
        fits: functions that fit settings of the keys, by name, tried with the k that is best for a fixed λ.
            None tries bins, and the mixers of other packages (classes with a method ``fit``, see
            `FittableMixer`).
        wide: search results for larger k. A fixed λ is fitted for each larger k; bins are fitted too if the
            best larger k is better than every k of the first search.
        domains: search results for each domain alone, to fit one weight for each domain; None tries no such
            weights.
        by_probes: the result of `measure_probes`, by which the number of searched cells is chosen. If empty,
            it is computed from the whole text, which then needs every number in `ScoredText.visited`.
        networks: True to fit gates (networks that choose weights for each token), which takes most of the
            time.
        ngrams: True to try n-grams of the stored text (if the text was scored with n-grams), and n-grams of
            the text itself together with a continuous cache.
        progress: progress display, which receives each candidate that was judged; None for no display.

    Raises:
        InputError: the text is too short, or neither a neighbor nor an n-gram was found for any token.
    """
    shown = progress or Progress()
    # 1) Divide the text into two halves.
    trial = Trial(scored, ngrams=ngrams, progress=shown)
    if not scored.is_anything_found:
        raise InputError("nothing can be fitted: the search found no neighbor of any token")
    if scored.visited and len(scored.found) and not by_probes:
        by_probes = _judge_probes(trial, scored)
    # 2) Count the candidates for the progress display, without the mixers of other packages.
    total = trial.count_further_candidates() + (domains is not None) + (current is not None) + networks
    if len(scored.found):
        total += (1 if by_probes else len(list_ks(scored.k))) + len(wide) + len(BIN_FITS) + networks
    shown.start("fitting", total=total, unit=" candidates")
    # 3) Fit and judge the candidates: keys alone, domains, n-grams, other components, and a gate over all.
    if len(scored.found):
        of_keys = _fit_key_candidates(trial, scored, fits, wide, by_probes, networks=networks)
    else:
        of_keys = _KeyCandidates(
            [], [build_evidence_without_keys(scored)], build_evidence_without_keys(scored), {}
        )
    candidates, evidence, at_best_k, again = of_keys
    if domains is not None:
        candidates.append(trial.fit_candidate("domains", fit_domains, domains, domains.log_probs))
    candidates += trial.try_ngrams(candidates, evidence, again)
    candidates += trial.try_other_components(candidates)
    if networks:
        candidates += trial.try_gate(candidates, evidence, fit_fixed)
    # 4) Judge the settings in force, without a new fit.
    before = None
    if current is not None:
        current = current.without_components(*_find_unscored_components(current, scored))
        kept, mix = _make_judgeable(current, scored, wide, domains)
        before = trial.fit_candidate("current", lambda _: kept, at_best_k, mix) if kept else None
    shown.finish()
    # 5) Compute the expected perplexity of the best candidate.
    nested = trial.compute_nested_log_probs(candidates)
    expected, change = trial.judge(nested)
    gain = None if before is None else trial.judge.perplexity_ratio(nested, before.log_probs)
    return Comparison(
        trial.documents,
        len(scored),
        trial.judge.base,
        tuple(candidates),
        before,
        expected,
        change,
        gain,
        dict(by_probes),
    )


def measure_probes(
    further: FurtherSearches, probes: Sequence[int], *, ngrams: bool = True
) -> tuple[ScoredText, Mapping[int, float]]:
    """Search several numbers of cells for a sample of the documents, and judge each number.

    A cell is a group of records with near keys. The whole text is used if it has at most twice
    `_SAMPLE_TOKENS` tokens, or if its documents are so uneven that the sample would be too short.

    Args:
        further: the searches of the text.
        probes: the numbers of searched cells, ascending.
        ngrams: True to fit n-grams too.

    Returns:
        The sample, with the results of the searches in `ScoredText.visited`. And for each number of cells the
        perplexity of keys, n-grams and a continuous cache together, to choose a number by.
    """
    scored = further.scored
    sample = scored
    if len(scored) > 2 * _SAMPLE_TOKENS:
        sample = scored.select_tokens(_sample_beginnings(scored.documents))
    if len(sample) < _SAMPLE_TOKENS or not len(sample.found):
        sample = scored
    sample = replace(sample, visited=replace(further, scored=sample).search_with_probes(probes))
    return sample, _judge_probes(Trial(sample, ngrams=ngrams), sample)


def _sample_beginnings(documents: Tensor) -> Tensor:
    """Choose the beginnings of up to `_SAMPLE_DOCUMENTS` documents, together about `_SAMPLE_TOKENS` tokens.

    All tokens of these documents are chosen if they have fewer.

    Args:
        documents: index of each token's document, int64, shape (n,).

    Returns:
        Indices of the chosen tokens, ascending, int64.
    """
    numbers, counts = torch.unique(documents, return_counts=True)
    chosen = numbers[:: math.ceil(len(numbers) / _SAMPLE_DOCUMENTS)]
    rows = [(documents == number).nonzero()[:, 0] for number in chosen]
    length, longest = math.ceil(_SAMPLE_TOKENS / len(chosen)), int(counts.max())
    while length < longest and sum(min(len(of), length) for of in rows) < _SAMPLE_TOKENS:
        length += math.ceil(length / 8)
    return torch.cat([of[:length] for of in rows]).sort().values


def _judge_probes(trial: Trial, scored: ScoredText) -> dict[int, float]:
    """Return for each number of searched cells the held-out perplexity of keys, n-grams and cache together.

    Args:
        trial: the object that fits and judges on the text.
        scored: the text, with the results for each number of cells in `ScoredText.visited`.
    """
    evidence = {of.probes: of for of in list_evidence_by_probes(scored) if of.probes is not None}
    return {probes: trial.judge_with_all_components(fit_fixed, of).ppl for probes, of in evidence.items()}


class _KeyCandidates(NamedTuple):
    """The candidates that use only the keys."""

    candidates: list[Candidate]
    evidence: list[GridEvidence]
    """Search results for each k, or for the chosen number of searched cells (groups of records with near
    keys)."""
    at_best_k: GridEvidence
    """The item of `evidence` for which a fixed λ is best."""
    fits: Mapping[str, Fit]
    """The fits that were tried, by the name of the candidate."""


def _fit_key_candidates(
    trial: Trial,
    scored: ScoredText,
    fits: Mapping[str, Fit] | None,
    wide: Sequence[WideEvidence],
    by_probes: Mapping[int, float],
    *,
    networks: bool,
) -> _KeyCandidates:
    """Fit and judge every candidate that uses only the keys.

    In a store with cells (groups of records with near keys), the number of cells to search is chosen by
    `by_probes`. Otherwise a fixed weight λ is fitted for each number of neighbors k. The other mixers (rules
    that choose λ) are then fitted with the best k or the chosen number of cells.

    Args:
        trial: the object that fits and judges candidates.
        scored: the text.
        fits: functions that fit settings of the keys, by name; None tries bins and the mixers of other
            packages.
        wide: search results for larger k.
        by_probes: for each number of searched cells the perplexity by which the number is chosen; the chosen
            number is in `ScoredText.visited`. Empty in a store without cells.
        networks: True to fit a gate too.
    """
    if by_probes:
        chosen = choose_probes(by_probes)
        evidence = [of for of in list_evidence_by_probes(scored) if of.probes == chosen]
    else:
        evidence = gather_evidence(scored, list_ks(scored.k))
    fixed = [trial.fit_candidate("fixed", fit_fixed, of) for of in evidence]
    at_best_k = evidence[fixed.index(find_best_candidate(fixed))]
    if fits is None:
        fits = {**_list_fits_of_other_packages(scored, at_best_k), **BIN_FITS}
    others = [trial.fit_candidate(name, fit, at_best_k) for name, fit in fits.items()]
    if networks:
        others.append(trial.fit_candidate("gate", partial(fit_gate, scored=scored), at_best_k))
    if wide:
        with_k = [trial.fit_candidate("fixed", fit_fixed, of.evidence, of.log_probs) for of in wide]
        best, widest = min(zip(with_k, wide, strict=True), key=lambda pair: pair[0].held_out.ppl)
        if best.held_out.ppl < find_best_candidate(fixed).held_out.ppl:
            others += [
                trial.fit_candidate(name, fit, widest.evidence, widest.log_probs)
                for name, fit in BIN_FITS.items()
            ]
        fixed += with_k
    return _KeyCandidates([*fixed, *others], evidence, at_best_k, {"fixed": fit_fixed, **fits})


def _list_fits_of_other_packages(scored: ScoredText, evidence: GridEvidence) -> dict[str, Fit]:
    """Return the functions that fit the mixers of other packages, by name.

    A mixer is a rule that chooses the weight λ. Each function is run once; a function that returns None is
    left out, because its mixer cannot be used with the text.

    Args:
        scored: the text.
        evidence: search results for the text's tokens.
    """
    fits: dict[str, Any] = {
        name: partial(mixer.fit, scored=scored)
        for name, mixer in load_plugin_mixers().items()
        if hasattr(mixer, "fit")
    }
    return {name: fit for name, fit in fits.items() if fit(evidence) is not None}


def _find_unscored_components(settings: KNNSettings, scored: ScoredText) -> list[str]:
    """Return the names of components in `settings.others` for which the scored text has no valid results.

    A component has no valid results if the text was scored without the component, or with other trained
    weights.

    Args:
        settings: the settings whose components are checked.
        scored: the text.
    """
    return [
        name
        for name, values in settings.others.items()
        if name not in scored.others or values.get("weights") != scored.others[name].get("weights")
    ]


def choose_probes(perplexities: Mapping[int, float]) -> int:
    """Return the smallest number of searched cells whose perplexity is nearly the lowest.

    A cell is a group of records with near keys. Nearly means at most `WORTH_PROBES` times the lowest
    perplexity.

    Args:
        perplexities: the perplexity for each number of cells that was tried; at least one number.
    """
    enough = min(perplexities.values()) * WORTH_PROBES
    return min(probes for probes, ppl in perplexities.items() if ppl <= enough)


def _make_judgeable(
    current: KNNSettings,
    scored: ScoredText,
    wide: Sequence[WideEvidence],
    domains: DomainEvidence | None,
) -> tuple[KNNSettings | None, Mix]:
    """Convert settings in force to settings that can be judged without another search.

    Args:
        current: the settings in force.
        scored: the text.
        wide: search results for larger k.
        domains: search results for each domain alone; None if domains were not searched alone.

    Returns:
        Two values. First the settings, with k lowered to a k that was searched if necessary; None if the
        settings cannot be judged. Then the function that computes the tokens' log-probabilities with them.
    """
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
    if current.needs_nearest_only and not current.needs_text:
        for of in wide:
            if of.evidence.k == current.k:
                return current, of.log_probs
    return replace(current, k=min(current.k, scored.k)), scored.log_probs


def list_ks(largest: int) -> list[int]:
    """Return `largest`, `largest` / 4, / 16, …, rounded down, without numbers below 4, ascending.

    Example: ``list_ks(1024)`` is ``[4, 16, 64, 256, 1024]``. `largest` itself may be below 4.
    """
    ks = [largest]
    while ks[0] // _K_STEP >= _K_STEP:
        ks.insert(0, ks[0] // _K_STEP)
    return ks
