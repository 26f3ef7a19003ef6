"""The component `NGrams`: it finds the last tokens of a text in the stored text, and predicts what follows.

`CountedNGrams` is the base class of this component and of n-grams of the text itself (`own_ngrams`). A suffix
is the end of a context: its last 1 to 7 tokens. The prediction depends on the longest suffix that occurs in
the counted text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.checks import check_numbers, convert_floats, convert_scalars
from knnstore.datastore import record_ids
from knnstore.errors import ConfigError
from knnstore.lm.components.component import Citations, Form, Place, Question
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    PRIOR_TOKENS,
    Contribution,
    fit_lambdas,
    mix_target_log_probs,
)
from knnstore.lm.transfers import upload, upload_floats
from knnstore.store import LONGEST_NGRAM, KeptStep, Matches, NGramCounts, NGramDistribution, Occurrence

Rows = slice | Tensor
_MAX_ENDS = 64
"""Largest number of contexts, e.g. of a decoding step, whose ends are matched one by one."""
_MIN_CITED_PLACES = 32
"""Least number of places that are cited for each length of n-grams, if the text has as many."""
_WINDOWS = (8, 64)
"""Numbers of last tokens over which the history is averaged: how well n-grams predicted the text so far."""
_HISTORY_FLOOR = 0.01
"""Added to each probability of the history, so that a token that n-grams do not expect at all counts little
more than one that they hardly expect."""
_HISTORY_PRIOR = 4
"""Number of tokens by which a window of the history is longer than its text, with a log-probability of 0, so
that the first tokens of a text count less."""
_TAIL = max(_WINDOWS) + LONGEST_NGRAM
"""Number of last tokens of a text that decide its history, and what n-grams predict after it."""
_KEPT_STEPS = 256
"""Largest number of steps of generation that are kept, of all texts together."""
_TOP_FLOOR = 0.01
"""Added to the probability of the most frequent next token before its logarithm is taken."""


@dataclass(frozen=True, slots=True)
class NGramSettings:
    """Length and weight of n-grams, which are counted sequences of tokens.

    Raises:
        ConfigError: a value is out of range.
    """

    order: int = 7
    """Number of tokens of the longest n-grams, between 2 and 8. At most order - 1 tokens of a context are
    matched."""

    lam: float = 0.25
    """λ, between 0 and 1: the weight of the n-grams in the mixture with the model and all earlier
    components."""

    by_length: tuple[float, ...] | None = None
    """λ for each length in tokens (0, 1, …) of the longest suffix (end of the context) that was found. The
    last value is used for all longer suffixes. `lam` is then the mean λ, for reports only. None uses `lam`
    for all lengths."""

    def __post_init__(self) -> None:
        if self.by_length is not None:
            convert_floats(self, "by_length")
        convert_scalars(self, "order", "lam")
        check_numbers(self, "lam")
        if type(self.order) is not int or not 2 <= self.order <= LONGEST_NGRAM:
            raise ConfigError(
                f"n-grams of 2 to {LONGEST_NGRAM} tokens are counted, their order cannot be {self.order!r}"
            )
        for lam in (self.lam, *(self.by_length or ())):
            if not 0 <= lam <= 1:
                raise ConfigError(f"lambda of n-grams must be between 0 and 1, got {lam}")


class Continuation(NamedTuple):
    """Next-token distributions of n-grams in n contexts.

    A distribution lists a few tokens, and spreads the rest of the probability over all tokens. A suffix is
    the end of a context.
    """

    weights: Tensor
    """Probabilities of k tokens, float32, shape (n, k); padded with 0."""
    tokens: Tensor
    """The tokens of these probabilities, int64, shape (n, k); arbitrary where the probability is 0."""
    suffixes: Tensor
    """The longest suffix of each context that occurs in the counted text: its length in tokens, its count,
    and the number of different next tokens; zeros if no suffix occurs. int64, shape (n, 3)."""
    rest: Tensor | None = None
    """For each context, the remaining probability, which is divided among all tokens in proportion to
    `unigrams`, float32, shape (n,); None means 0."""
    unigrams: Tensor | None = None
    """Distribution of the rest over the vocabulary, float32, shape (v,); None if there is no rest."""
    history: Tensor | None = None
    """Smoothed mean log-probability that n-grams gave to the last 8 and the last 64 tokens of each context,
    float32, shape (n, 2); see `compute_history`. None if no gate needs it."""
    top: Tensor | None = None
    """Probability of the token that most often follows the longest found suffix, float32, shape (n,); 0 if no
    suffix occurs. None if no gate needs it."""

    @classmethod
    def empty(cls, count: int) -> "Continuation":
        """Return empty distributions for `count` contexts, as in a store without text: all zeros."""
        tokens = torch.zeros((count, 1), dtype=torch.int64)
        return cls(tokens.float(), tokens, torch.zeros((count, 3), dtype=torch.int64))

    @property
    def width(self) -> int:
        """Number k of columns of `weights` and `tokens`, with the padded columns."""
        return self.weights.shape[1]

    def select_rows(self, rows: Rows) -> "Continuation":
        """Return the distributions of some of the contexts; `rows` is a slice, indices or a mask."""
        return Continuation(
            self.weights[rows],
            self.tokens[rows],
            self.suffixes[rows],
            _select_known(self.rest, rows),
            self.unigrams,
            _select_known(self.history, rows),
            _select_known(self.top, rows),
        )

    def to(self, device: torch.device) -> "Continuation":
        """Return the distributions with all tensors on a device."""
        moved = (None if column is None else upload(column, device) for column in self)
        return Continuation(*moved)  # type: ignore[arg-type]

    @classmethod
    def concatenate(cls, parts: Sequence["Continuation"]) -> "Continuation":
        """Concatenate the distributions of several groups of contexts, all from the same counts.

        Distributions that list fewer tokens are padded with zeros.
        """
        width = max(part.width for part in parts)
        weights, tokens = (
            torch.cat([pad(getattr(part, name), (0, width - part.width)) for part in parts])
            for name in ("weights", "tokens")
        )
        rest, history, top = (
            _join_known([getattr(part, name) for part in parts]) for name in ("rest", "history", "top")
        )
        suffixes = torch.cat([part.suffixes for part in parts])
        return cls(weights, tokens, suffixes, rest, parts[0].unigrams, history, top)

    def to_contribution(self, settings: NGramSettings, name: str) -> Contribution:
        """Return the distributions as a contribution to the mixture.

        Args:
            settings: the n-grams' settings, with the weight λ for each length of the longest found suffix.
            name: name of the component.
        """
        lam = select_ngram_lambdas(settings, self.suffixes[:, 0])
        return Contribution(self.weights, lam, self.tokens, rest=self.rest, base=self.unigrams, name=name)


class TargetContinuation(NamedTuple):
    """The probability that n-grams give to the target token of each of n contexts."""

    order: int
    """Number of tokens of the longest n-grams."""
    probs: Tensor
    """Probability of each target token, float32, shape (n,); NaN for a context without a prediction."""
    suffixes: Tensor
    """The longest suffix (end) of each context that occurs in the counted text: its length in tokens, its
    count, and the number of different next tokens; zeros if no suffix occurs. int64, shape (n, 3)."""
    history: Tensor | None = None
    """Smoothed mean log-probability that n-grams gave to the last 8 and the last 64 tokens of each context,
    float32, shape (n, 2); see `compute_history`. None for n-grams of the text itself."""
    top: Tensor | None = None
    """Probability of the token that most often follows the longest found suffix, float32, shape (n,); 0 if no
    suffix occurs. None for n-grams of the text itself."""

    @classmethod
    def empty(cls, order: int, count: int) -> "TargetContinuation":
        """Return an object for `count` contexts (texts before a token) that have no prediction.

        A store without text gives such an object. `probs` is NaN for each context. `suffixes` has three zeros
        for each context, which means that no end of the context was found in the counted text.

        Args:
            order: number of tokens of the longest n-grams; only kept in the field `order`.
            count: number of contexts.
        """
        suffixes = torch.zeros((count, 3), dtype=torch.int64)
        return cls(order, torch.full((count,), torch.nan), suffixes)

    @property
    def width(self) -> int:
        """Number of values that are kept for each context: always 1."""
        return 1

    @property
    def lengths(self) -> Tensor:
        """Length in tokens of the longest found suffix of each context, int64, shape (n,); 0 if none."""
        return self.suffixes[:, 0]

    def select_rows(self, rows: Rows) -> "TargetContinuation":
        """Return the probabilities of some of the contexts; `rows` is a slice, indices or a mask."""
        history, top = _select_known(self.history, rows), _select_known(self.top, rows)
        return self._replace(probs=self.probs[rows], suffixes=self.suffixes[rows], history=history, top=top)

    def to(self, device: torch.device) -> "TargetContinuation":
        """Return the probabilities with all tensors on a device."""
        moved = (None if column is None else column.to(device) for column in self[1:])
        return TargetContinuation(self.order, *moved)  # type: ignore[arg-type]

    @classmethod
    def concatenate(cls, parts: Sequence["TargetContinuation"]) -> "TargetContinuation":
        """Concatenate the probabilities of several groups of contexts, which all have the same `order`."""
        probs, suffixes = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("probs", "suffixes")
        )
        history, top = (_join_known([getattr(part, name) for part in parts]) for name in ("history", "top"))
        return cls(parts[0].order, probs, suffixes, history, top)

    def to_contribution(self, settings: NGramSettings, name: str) -> Contribution:
        """Return a contribution with two columns: the target token, and all other tokens together.

        Both columns are 0 for a context without a prediction.

        Args:
            settings: the n-grams' settings, with the weight λ for each length of the longest found suffix.
            name: name of the component.
        """
        known = self.probs.isfinite()
        weights = torch.stack([self.probs, 1 - self.probs], 1).where(known[:, None], 0.0)
        hits = torch.tensor([[True, False]]).expand(len(weights), -1)
        return Contribution(weights, select_ngram_lambdas(settings, self.lengths), hits=hits, name=name)


def _select_known(column: Tensor | None, rows: Rows) -> Tensor | None:
    """Return some rows of a column, or None if there is no column."""
    return None if column is None else column[rows]


def _join_known(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the parts that are not None; return None if there is no such part."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


class NGramFitting(NamedTuple):
    """Fits the weight λ of n-grams to scored tokens, one λ for each length of the longest found suffix."""

    found: TargetContinuation
    """The n-grams' predictions of the n target tokens."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> NGramSettings:
        """Fit the weight λ for each suffix length to the largest likelihood, and return it as settings.

        A suffix is the end of a context that occurs in the counted text. A prior of `PRIOR_TOKENS` tokens
        draws each λ towards the best λ for all lengths together. λ is 0 if n-grams predict none of the wanted
        tokens.

        Args:
            log_probs: log p of each token in the mixture without the n-grams, float32, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).
        """
        rows = wanted & self.found.probs.isfinite()
        if not rows.any():
            return NGramSettings(self.found.order, 0.0)
        below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        probs, lengths = self.found.probs[rows][:, None], self.found.lengths[rows]
        overall, _ = fit_lambdas(below, probs, torch.zeros_like(lengths), 1)
        lam, _ = fit_lambdas(below, probs, lengths, self.found.order, overall[0], PRIOR_TOKENS)
        return NGramSettings(self.found.order, float(lam[lengths].mean()), tuple(lam[:, 0].tolist()))

    def mix(self, log_probs: Tensor, fitted: NGramSettings) -> Tensor:
        """Return log p of each token in the mixture with the n-grams, float32, shape (n,).

        Args:
            log_probs: log p of each token in the mixture without the n-grams, float32, shape (n,).
            fitted: the settings from `fit`.
        """
        return mix_target_log_probs(log_probs, self.found.probs.nan_to_num(), self.lambdas(fitted))

    def lambdas(self, fitted: NGramSettings) -> Tensor:
        """Return the weight λ of each token under fitted settings, float32, shape (n,).

        0 for a token without a prediction.
        """
        return select_ngram_lambdas(fitted, self.found.lengths) * self.found.probs.isfinite()

    def lam(self, fitted: NGramSettings) -> float:
        """Return the mean weight λ of fitted settings, for reports."""
        return fitted.lam


class CountedNGrams:
    """Base of the two components of n-grams: n-grams of stored text, and of the current text.

    It chooses λ by the length of the longest found suffix (end of a context), and computes features for a
    gate.
    """

    name: str
    factors = (1.0,)
    width = 3

    def contribute(
        self, settings: NGramSettings, found: Continuation | TargetContinuation, factor: float = 1.0
    ) -> Contribution:
        """Convert the result of a look-up to distributions over tokens, each with a weight λ.

        Args:
            settings: the n-grams' settings, with λ for each length of the longest found suffix.
            found: the result of the look-up at n positions.
            factor: ignored, because n-grams have no temperature.
        """
        return found.to_contribution(settings, self.name)

    def features(self, found: Continuation | TargetContinuation, unit: float) -> Tensor:
        """Compute inputs for the gate network from the longest found suffix of each context.

        Args:
            found: the result of the look-up at n positions.
            unit: ignored, because n-grams have no distances.

        Returns:
            Float32, shape (n, 3). The columns are the suffix's length, log(1 + its count) and log(1 + number
            of different next tokens).
        """
        length, *counts = found.suffixes.to(torch.float32).unbind(1)
        return torch.stack([length, *(count.log1p() for count in counts)], 1)


class NGrams(CountedNGrams):
    """The component that predicts the next token by n-grams of the selected documents.

    The probabilities use interpolated Kneser-Ney smoothing. `NGramCounts` has the counts. A gate also learns
    how well n-grams have predicted the text so far (`compute_history`), and how probable the most frequent
    next token is.
    """

    name = "n-grams"
    _width_with_history = CountedNGrams.width + len(_WINDOWS)
    width = _width_with_history + 1

    def look_up(self, question: Question[NGramSettings], form: Form) -> Continuation | TargetContinuation:
        """Predict the next token: find the last tokens in stored text, and count the tokens that follow.

        Args:
            question: the positions, the store, the selection and the order of the n-grams.
            form: the part of the result that is kept.

        Returns:
            A `Continuation` (several tokens for each position) if `form` is `Form.DISTRIBUTION`, else a
            `TargetContinuation` (the target token's probability only). A selection without text predicts
            nothing.
        """
        contexts, order = question.contexts, question.settings.order
        counts = question.reader.ngrams(question.selection)
        # A gate may be fitted on target tokens, so they have all its inputs even if there is no gate yet.
        features = question.features
        if features is None:
            features = self.width if form is Form.TARGET else 0
        needs_history, needs_top = features >= self._width_with_history, features >= self.width
        top = torch.zeros(len(contexts)) if needs_top else None
        is_step = form is Form.DISTRIBUTION and len(contexts) <= _MAX_ENDS and not counts.is_empty
        history = compute_history(counts, contexts, order) if needs_history and not is_step else None
        if form is not Form.DISTRIBUTION:
            found = TargetContinuation.empty(order, len(contexts))._replace(history=history, top=top)
            if not counts.is_empty:
                matches, rows, at = _match_contexts(counts, contexts, order)
                of_rows = matches.find_longest_suffixes(at, order)
                found.probs[rows] = torch.from_numpy(matches.target_probs(at, order))
                found.suffixes[rows] = torch.from_numpy(np.stack(of_rows, 1))
                if top is not None:
                    tops = matches.find_top_tokens(at, of_rows)
                    top[rows] = torch.from_numpy(matches.token_probs(at, tops, order))
            return found
        if counts.is_empty:
            return Continuation.empty(len(contexts))._replace(history=history, top=top)
        matches, rows, at = (_match_ends if is_step else _match_contexts)(counts, contexts, order)
        seen = matches.next_token_distribution(at, order)
        probs = seen.probs.astype(np.float32)
        weights, tokens = arrange_by_row(rows[seen.rows], probs, seen.tokens, len(contexts))
        rest, suffixes = np.zeros(len(contexts), np.float32), np.zeros((len(contexts), 3), np.int64)
        rest[rows] = seen.rest
        suffixes[rows] = np.stack(seen.suffixes, 1)
        if needs_history and is_step:
            history = _extend_histories(counts, contexts, rows, order, seen)
        if top is not None:
            top[rows] = torch.from_numpy(seen.token_probs(seen.find_top_tokens(), counts.unigrams))
        device = torch.device("cpu") if question.keys is None else question.keys.device
        unigrams = _get_unigrams(counts, question.vocabulary, device)
        return Continuation(
            weights, tokens, torch.from_numpy(suffixes), torch.from_numpy(rest), unigrams, history, top
        )

    def features(self, found: Continuation | TargetContinuation, unit: float) -> Tensor:
        """Compute inputs for the gate network: the longest found suffix, the history, and the top token.

        Args:
            found: the result of the look-up at n positions.
            unit: ignored, because n-grams have no distances.

        Returns:
            Float32, shape (n, 6): the columns of `CountedNGrams.features`, then of `compute_history`, then
            the logarithm of the most frequent next token's probability. Columns that were not computed are
            NaN.
        """
        of_suffixes = super().features(found, unit)
        history = of_suffixes.new_full((len(of_suffixes), len(_WINDOWS)), torch.nan)
        top = history[:, 0]
        if found.history is not None:
            history = found.history
        if found.top is not None:
            top = (found.top + _TOP_FLOOR).log()
        return torch.cat([of_suffixes, history, top[:, None]], 1)

    def cite(
        self, question: Question[NGramSettings], found: TargetContinuation, weights: Tensor, most: int
    ) -> Citations:
        """List the places in stored text where the target token follows the end of its context.

        Places with a longer match before the token come first. Up to `_MIN_CITED_PLACES` places are listed
        for each length of n-grams, or up to `most` places if `most` is larger. So the result may have more
        than `most` places in total; callers compute the effects of documents from all of them.

        Args:
            question: the n positions, the store and the settings; the texts contain the target tokens.
            found: ignored.
            weights: weight of each column of the component's contribution, shape (n, columns).
            most: number of places to list for each length of n-grams, if it is above the minimum.
        """
        contexts, order = question.contexts, question.settings.order
        matches, _, at = _match_contexts(question.reader.ngrams(question.selection), contexts, order)
        occurrences = matches.find_occurrences(at, order, max(most, _MIN_CITED_PLACES))
        return cite_occurrences(self.name, contexts, weights, occurrences)


def cite_occurrences(
    name: str,
    contexts: Contexts,
    weights: Tensor,
    occurrences: Sequence[Sequence[Occurrence]],
    *,
    is_same_text: bool = False,
) -> Citations:
    """Convert the occurrences of n target tokens to `Citations`, which name the places of predictions.

    An occurrence is a place where n-grams found the target token. Both lists of the result (`nearest` and
    `causes`) are the same.

    Args:
        name: name of the component.
        contexts: n positions, whose texts contain the target tokens.
        weights: weight of each column of the component's contribution, shape (n, columns). The sum of a row
            is divided among the occurrences by their own shares.
        occurrences: the occurrences of each position's target token.
        is_same_text: True if the occurrences are positions in the same text, False if they are in the store.
    """
    targets = contexts.target_tokens(np.arange(len(contexts)))
    every = list[list[Place]]()
    for token, share, found in zip(targets.tolist(), weights.sum(1).tolist(), occurrences, strict=True):
        positions = np.array([occurrence.position for occurrence in found], np.int64)
        ids = record_ids(positions, np.full(len(found), token)).tolist()
        places = list[Place]()
        for id, occurrence in zip(ids, found, strict=True):
            place = Place(token, share * occurrence.share, name, matched=occurrence.matched)
            places.append(
                place._replace(position=occurrence.position) if is_same_text else place._replace(id=id)
            )
        every.append(places)
    return Citations(every, every)


_unigrams: WeakKeyDictionary[NGramCounts, dict[tuple[int, torch.device], Tensor]] = WeakKeyDictionary()


def _get_unigrams(counts: NGramCounts, vocabulary: int, device: torch.device) -> Tensor:
    """Return the distribution of single tokens on a device. The copy on the device is cached.

    Args:
        counts: the counts of the selected documents.
        vocabulary: number of tokens that the model predicts.
        device: the device.

    Returns:
        Float32, shape (v,), padded with 0 to the vocabulary.
    """
    of_counts = _unigrams.setdefault(counts, {})
    if (vocabulary, device) not in of_counts:
        with torch.inference_mode(False):  # the tensor may be used again to train
            values = torch.from_numpy(counts.unigrams)
            padded = pad(values, (0, max(0, vocabulary - len(values))))
            of_counts[vocabulary, device] = padded.to(device)
    return of_counts[vocabulary, device]


def compute_history(counts: NGramCounts, contexts: Contexts, order: int) -> Tensor:
    """Compute how well n-grams of stored text have predicted the last tokens before each position.

    All tokens of the texts are looked up at once.

    Of the last w tokens of a text, c are counted: all that have a token or the start of a document before
    them. With p_i, the probability that n-grams gave to token i,

        h_w = Σ log(p_i + 0.01) / (c + 4)        over the counted tokens, for w = 8 and w = 64

    Args:
        counts: the counts of the selected documents.
        contexts: n positions in texts.
        order: number of tokens of the longest n-grams.

    Returns:
        Float32, shape (n, 2). 0 for an empty text, at padding, and without counted text.
    """
    history = np.zeros((len(contexts), len(_WINDOWS)), np.float32)
    if counts.is_empty:
        return torch.from_numpy(history)
    cut = contexts.cut_to_positions(max(_WINDOWS) + order - 1)
    matches = Matches.look_up_texts(counts, cut.texts, cut.is_whole)
    # 1) The sum of log-probabilities before each symbol. A symbol without one before it is not counted.
    starts = matches.firsts + ~np.array(cut.is_whole, np.bool_)
    stops = matches.firsts + np.array([len(text) for text in cut.texts], np.int64)
    counted = np.concatenate([np.zeros(0, np.int64), *map(np.arange, starts, np.maximum(starts, stops))])
    sums = np.zeros(int(stops.max(initial=0)) + 1)
    sums[counted + 1] = np.log(matches.target_probs(counted - 1, order).astype(np.float64) + _HISTORY_FLOOR)
    sums = sums.cumsum()
    # 2) The mean over each window.
    ends, begins = matches.firsts[cut.owners] + cut.lengths, starts[cut.owners]
    for column, window in enumerate(_WINDOWS):
        firsts = np.minimum(np.maximum(ends - window, begins), ends)
        history[cut.rows, column] = (sums[ends] - sums[firsts]) / (ends - firsts + _HISTORY_PRIOR)
    return torch.from_numpy(history)


def _extend_histories(
    counts: NGramCounts,
    contexts: Contexts,
    rows: NDArray[np.int64],
    order: int,
    seen: NGramDistribution,
) -> Tensor:
    """Compute what `compute_history` does for a step of generation, from the step before.

    The distribution of the step before has the probability of the token that was generated since, the same as
    `Matches.target_probs` computes, so the result does not depend on what is kept. What this step found is
    kept in `NGramCounts.kept_steps` for the next step.

    Args:
        counts: the counts of the selected documents.
        contexts: n positions in texts.
        rows: indices of the positions that are not padding, shape (m,).
        order: number of tokens of the longest n-grams.
        seen: the distributions of the next token at these m positions.
    """
    history = np.zeros((len(contexts), len(_WINDOWS)), np.float32)
    kept, bounds = counts.kept_steps, seen.find_bounds()
    places = zip(rows.tolist(), contexts.owners[rows].tolist(), contexts.lengths[rows].tolist(), strict=True)
    for number, (row, owner, length) in enumerate(places):
        # 1) Append the last token's log-probability. The first tokens of a text have no step before.
        step = kept.get(_make_step_key(contexts, owner, length - 1, order)) if length > 1 else None
        if step is None:
            log_probs = _compute_last_log_probs(counts, contexts, owner, length, order)
        else:
            last = int(contexts.texts[owner][length - 1])
            unigram = float(counts.unigrams[last]) if last < len(counts.unigrams) else 0.0
            prob = np.float32(step.probs[step.tokens == last].sum() + step.rest * unigram)  # as in `Matches`
            log_probs = (*step.log_probs, math.log(float(prob) + _HISTORY_FLOOR))[-max(_WINDOWS) :]
        for column, window in enumerate(_WINDOWS):
            in_window = log_probs[-window:]
            history[row, column] = sum(in_window) / (len(in_window) + _HISTORY_PRIOR)
        # 2) Keep this step for the next.
        if len(kept) >= _KEPT_STEPS:
            kept.clear()
        entries = slice(bounds[number], bounds[number + 1])
        kept[_make_step_key(contexts, owner, length, order)] = KeptStep(
            log_probs, seen.tokens[entries], seen.probs[entries], float(seen.rest[number])
        )
    return torch.from_numpy(history)


def _make_step_key(contexts: Contexts, owner: int, length: int, order: int) -> tuple[int, bool, bytes]:
    """Return the key in `NGramCounts.kept_steps` of the first `length` tokens of a text.

    It has the last `_TAIL` tokens, on which alone the step depends, and whether they begin a document.
    """
    first = max(0, length - _TAIL)
    tail = contexts.texts[owner][first:length].astype(np.int64)
    return order, contexts.is_whole[owner] and not first, tail.tobytes()


def _compute_last_log_probs(
    counts: NGramCounts, contexts: Contexts, owner: int, length: int, order: int
) -> tuple[float, ...]:
    """Compute smoothed log-probabilities of the last counted tokens of a text, as `compute_history` does.

    Args:
        counts: the counts of the selected documents.
        contexts: positions in texts.
        owner: index of the text.
        length: number of tokens of the text to use.
        order: number of tokens of the longest n-grams.
    """
    first = max(0, length - _TAIL)
    is_start = contexts.is_whole[owner] and not first
    matches = Matches.look_up_texts(counts, [contexts.texts[owner][first:length]], [is_start])
    stop = int(matches.firsts[0]) + length - first
    counted = np.arange(max(1, stop - max(_WINDOWS)), stop)
    probs: list[float] = matches.target_probs(counted - 1, order).tolist()
    return tuple(math.log(prob + _HISTORY_FLOOR) for prob in probs)


def _match_contexts(
    counts: NGramCounts, contexts: Contexts, order: int
) -> tuple[Matches, NDArray[np.int64], NDArray[np.int64]]:
    """Find the end of each context in the counted text.

    The texts are first cut to the tokens that n-grams can use.

    Args:
        counts: the counts of the selected documents.
        contexts: n positions in texts.
        order: number of tokens of the longest n-grams.

    Returns:
        Three values. First the matches at every position of the cut texts. Then the indices of the m contexts
        that are not padding, int64, shape (m,). Last, for each of these contexts, the index of its last token
        in the matches, int64, shape (m,).
    """
    cut = contexts.cut_to_positions(order)
    matches = Matches.look_up_texts(counts, cut.texts, cut.is_whole)
    return matches, cut.rows, matches.firsts[cut.owners] + cut.lengths - 1


def _match_ends(
    counts: NGramCounts, contexts: Contexts, order: int
) -> tuple[Matches, NDArray[np.int64], NDArray[np.int64]]:
    """Find the end of each context in the counted text, as `_match_contexts` does; faster for few contexts.

    Args:
        counts: the counts of the selected documents.
        contexts: n positions in texts.
        order: number of tokens of the longest n-grams.
    """
    rows = np.flatnonzero(contexts.owners >= 0)
    ends, begins = list[list[int]](), list[bool]()
    for owner, length in zip(contexts.owners[rows].tolist(), contexts.lengths[rows].tolist(), strict=True):
        ends.append(contexts.texts[owner][max(0, length - order + 1) : length].tolist())
        begins.append(contexts.is_whole[owner] and length < order - 1)
    matches = Matches.look_up_ends(counts, ends, begins)
    return matches, rows, matches.firsts


def select_ngram_lambdas(ngrams: NGramSettings, lengths: Tensor) -> Tensor:
    """Return the weight λ of n-grams for each context, float32, in the shape of `lengths`.

    Args:
        ngrams: the settings.
        lengths: length in tokens of the longest found suffix of each context, int64.
    """
    table = upload_floats(ngrams.by_length or (ngrams.lam,), lengths.device)
    return table[lengths.clamp(max=len(table) - 1)]


def arrange_by_row(
    rows: NDArray[np.int64], probs: NDArray[np.float32], tokens: NDArray[np.int64], count: int
) -> tuple[Tensor, Tensor]:
    """Arrange entries (row, probability, token) as a matrix of probabilities and a matrix of tokens.

    The entries of a row stay in their order.

    Args:
        rows: row number of each of the e entries, ascending, shape (e,).
        probs: probability of each entry, shape (e,).
        tokens: token of each entry, shape (e,).
        count: number of rows, n.

    Returns:
        Probabilities, float32, shape (n, k), and tokens, int64, shape (n, k), both padded with 0; k is the
        largest number of entries of a row, at least 1.
    """
    if count == 1 and len(rows):
        return torch.from_numpy(probs)[None], torch.from_numpy(tokens)[None]
    per_row = np.bincount(rows, minlength=count)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    shape = count, max(1, int(per_row.max(initial=0)))
    prob_matrix, token_matrix = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    prob_matrix[rows, column], token_matrix[rows, column] = probs, tokens
    return torch.from_numpy(prob_matrix), torch.from_numpy(token_matrix)
