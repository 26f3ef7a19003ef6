"""The recent text: keys of the same text, retrieved like records of a store (a continuous cache).

    p_cache(y) ∝ Σ_{i < t: x_i+1 = y} exp(-d(key_i, key_t) / T)        over the last M tokens before t

(Grave et al. 2017, https://arxiv.org/abs/1612.04426.) Keys and distances are as in the store. A key can be
retrieved once the token that it predicts is known, and only in its own text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.checks import check_numbers, convert_scalars
from knnstore.datastore import Metric, pairwise_distances
from knnstore.errors import ConfigError
from knnstore.lm.components.component import Citations, Form, Place, Question
from knnstore.lm.components.ngrams import NGramFitting, NGramSettings, TargetContinuation
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import (
    CHUNK_VALUES,
    LEAST_PROBABILITY,
    LEAST_TEMPERATURE,
    Contribution,
    compute_neighbor_weights,
    compute_target_probs_on_grid,
    fit_lambdas,
    group_into_halving_chains,
    mix_target_log_probs,
)
from knnstore.lm.transfers import upload

_BLOCK_ROWS = 256
"""Number of query vectors that are compared with earlier keys at once; larger blocks compute more unused
distances."""

Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size, temperature and weight of the continuous cache, which compares keys within the current text.

    Raises:
        ConfigError: a value is out of range.
    """

    size: int = 500
    """M >= 1: number of preceding tokens that are compared; published values are between 100 and 2,000."""

    temperature: float = 1.0
    """T > 0 of the softmax over distances, in the unit of the store's distances."""

    lam: float = 0.1
    """λ, between 0 and 1: the weight of the cache in the mixture with the model, the keys and the n-grams."""

    ngrams: NGramSettings | None = None
    """Order and weight of n-grams that are counted in the whole current text so far. They are the last
    built-in component of the mixture. None leaves these n-grams out."""

    def __post_init__(self) -> None:
        if isinstance(self.ngrams, dict):  # as it is saved
            object.__setattr__(self, "ngrams", NGramSettings(**self.ngrams))
        convert_scalars(self, "size", "temperature", "lam")
        check_numbers(self, "temperature", "lam")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"the cache's size must be an integer of at least 1, got {self.size!r}")
        if not (self.temperature >= LEAST_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"the cache's temperature must be above 0 (at least {LEAST_TEMPERATURE}) and finite, "
                f"got {self.temperature}"
            )
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"the cache's lambda must be between 0 and 1, got {self.lam}")


class Recent(NamedTuple):
    """The last m tokens before each of n positions, with the distances of their keys.

    A column is one preceding token; the token just before the position is in the last column.
    """

    distances: Tensor
    """Distance from the key of each preceding token to the position's own key, float32, shape (n, m); +inf in
    columns before the beginning of the text."""
    tokens: Tensor
    """The token that followed each preceding token, int64, shape (n, m); arbitrary before the beginning."""

    @property
    def width(self) -> int:
        """Number of preceding tokens of each position, m."""
        return self.distances.shape[1]

    @property
    def nearest(self) -> Tensor:
        """Distance of the nearest key, float32, shape (n,); +inf for a position without preceding keys."""
        return self.distances.amin(1)

    @property
    def counts(self) -> Tensor:
        """Number of keys that precede each position, int64, shape (n,)."""
        return self.distances.isfinite().sum(1)

    def select_rows(self, rows: Rows) -> "Recent":
        """Return the preceding tokens of some of the positions; `rows` is a slice, indices or a mask."""
        return Recent(self.distances[rows], self.tokens[rows])

    def to(self, device: torch.device) -> "Recent":
        """Return the preceding tokens with both tensors on a device."""
        return Recent(self.distances.to(device), self.tokens.to(device))

    @classmethod
    def concatenate(cls, parts: Sequence["Recent"]) -> "Recent":
        """Concatenate several groups of positions; groups with fewer columns are padded at the front."""
        width = max(part.width for part in parts)
        short = [(part, (width - part.width, 0)) for part in parts]
        return cls(
            torch.cat([pad(part.distances, before, value=torch.inf) for part, before in short]),
            torch.cat([pad(part.tokens, before) for part, before in short]),
        )


class TargetRecent(NamedTuple):
    """The continuous cache's probability of the target token at n positions.

    Needs less memory than `Recent`.
    """

    nearest: Tensor
    """Distance of the nearest preceding key, float32, shape (n,); +inf for a position without preceding
    keys."""
    counts: Tensor
    """Number of preceding keys, int64, shape (n,)."""
    probs: Tensor
    """Probability of the target token at each temperature, float32, shape (n, t)."""
    temperatures: tuple[float, ...]
    """The t temperatures, ascending."""

    @property
    def width(self) -> int:
        """Number of values that are kept for each position, to estimate memory: always 1."""
        return 1

    def select_rows(self, rows: Rows) -> "TargetRecent":
        """Return the probabilities at some of the positions; `rows` is a slice, indices or a mask."""
        return self._replace(nearest=self.nearest[rows], counts=self.counts[rows], probs=self.probs[rows])

    def to(self, device: torch.device) -> "TargetRecent":
        """Return the probabilities with all tensors on a device."""
        nearest, counts, probs = (column.to(device) for column in (self.nearest, self.counts, self.probs))
        return TargetRecent(nearest, counts, probs, self.temperatures)

    @classmethod
    def concatenate(cls, parts: Sequence["TargetRecent"]) -> "TargetRecent":
        """Concatenate several groups of positions, which all have the same temperatures."""
        nearest, counts, probs, (temperatures, *_) = zip(*parts, strict=True)
        return cls(torch.cat(nearest), torch.cat(counts), torch.cat(probs), temperatures)

    def interpolate_weights(self, temperature: float) -> Tensor:
        """Return the probabilities of the target token and of all other tokens together, shape (n, 2).

        A row sums to 1, or is 0 for a position without preceding keys.

        Raises:
            ValueError: `temperature` is not one of `temperatures`.
        """
        probs = self.probs[:, self.temperatures.index(temperature)]
        return torch.stack([probs, (self.counts > 0).float() - probs], 1)


class RecentText:
    """The continuous cache: earlier tokens of the same text, weighted by the distances of their keys."""

    name = "cache"
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2

    def look_up(self, question: Question[CacheSettings], form: Form) -> Recent | TargetRecent:
        """Compare the key of each position with the keys of preceding tokens of the same text.

        Args:
            question: the positions with their texts, and the settings of the cache.
            form: the part of the result that is kept.

        Returns:
            A `TargetRecent` (probabilities of the target tokens only) if `form` is `Form.TARGET` and at least
            one position is not padding. Else a `Recent` (tokens and distances).
        """
        contexts, size = question.contexts, question.settings.size
        metric = question.reader.identity.metric
        if not (contexts.owners >= 0).any():  # nothing but padding
            return Recent(torch.full((len(contexts), 1), torch.inf), torch.zeros((len(contexts), 1)).long())
        laid = _KeysInReach.from_contexts(contexts, size)
        columns = laid.keys, laid.tokens, laid.at, laid.starts
        if form is Form.TARGET:
            targets = torch.from_numpy(contexts.target_tokens(laid.firsts)).to(laid.keys.device)
            temperatures = {question.settings.temperature * factor for factor in question.factors}
            found = look_back_for_targets(*columns, targets, size, metric, sorted(temperatures))
            return found.select_rows(laid.order)
        recent = compare_preceding_keys(*columns, size, metric)
        # Padding has the last row, which has no preceding keys.
        nothing = Recent(torch.full_like(recent.distances[:1], torch.inf), recent.tokens[:1])
        return Recent.concatenate([recent, nothing]).select_rows(laid.order)

    def contribute(
        self, settings: CacheSettings, found: Recent | TargetRecent, factor: float = 1.0
    ) -> Contribution:
        """Return a distribution over preceding tokens and the weight λ of the settings for each position.

        The probability of a preceding token is a softmax over the distances of the preceding keys.

        Args:
            settings: temperature and weight λ of the cache.
            found: the result of the look-up at n positions. A `TargetRecent` gives two probabilities at each
                position: of the target token, and of all other tokens together.
            factor: factor by which the temperature of the settings is multiplied.
        """
        temperature = settings.temperature * factor
        tokens, hits = None, None
        if isinstance(found, TargetRecent):
            weights = found.interpolate_weights(temperature)
            hits = torch.tensor([[True, False]]).expand(len(weights), -1)
        else:
            weights, tokens = compute_neighbor_weights(found.distances, temperature), found.tokens
        lam = torch.full((len(weights),), settings.lam, device=weights.device)
        return Contribution(weights, lam, tokens, hits, name=self.name, temperature=temperature)

    def cite(self, question: Question[CacheSettings], found: Recent, weights: Tensor, most: int) -> Citations:
        """List the preceding tokens with the largest weights, of any token and of the target token.

        Args:
            question: the n positions; their texts contain the target tokens.
            found: the result of the look-up with `Form.SOURCES`.
            weights: share of each preceding token in the prediction, shape (n, columns).
            most: largest number of places in each of the two lists.
        """
        contexts = question.contexts
        targets = torch.from_numpy(contexts.target_tokens(np.arange(len(contexts))))
        hits = weights * (found.tokens == targets[:, None])
        starts = (contexts.lengths - found.width).tolist()
        return Citations(
            *(
                [
                    _list_earlier_places(*row, most)
                    for row in zip(starts, found.tokens, found.distances, column_weights, strict=True)
                ]
                for column_weights in (weights, hits)
            )
        )

    def features(self, found: Recent | TargetRecent, unit: float) -> Tensor:
        """Compute inputs for the gate network from the preceding keys, shape (n, 2).

        The columns are asinh(nearest distance / `unit`) and log(1 + number of keys).
        """
        return torch.stack([(found.nearest / unit).asinh(), found.counts.float().log1p()], 1)


def _list_earlier_places(
    start: int, tokens: Tensor, distances: Tensor, weights: Tensor, most: int
) -> list[Place]:
    """Return the preceding tokens with the largest weights as places, the largest first.

    Args:
        start: position in the text of the first column.
        tokens: token of each column, shape (m,).
        distances: distance of each column, shape (m,); +inf for a missing token, which is left out.
        weights: weight of each column, shape (m,).
        most: largest number of places.
    """
    return [
        Place(
            int(tokens[column]),
            float(weights[column]),
            RecentText.name,
            float(distances[column]),
            position=start + column,
        )
        for column in weights.sort(descending=True, stable=True).indices[:most].tolist()
        if distances[column].isfinite()
    ]


def compare_preceding_keys(
    keys: Tensor, tokens: Tensor, at: Tensor, starts: Tensor, size: int, metric: Metric | str
) -> Recent:
    """Compute the distances from n keys to the preceding keys of the same text.

    Args:
        keys: keys of several texts, concatenated, float32, shape (m, d).
        tokens: the token that each key predicts, int64, shape (m,); not used for the last key of a text.
        at: the n keys to compare, as row numbers in `keys`, int64, shape (n,), ascending, in main memory.
        starts: row number in `keys` where the text of each of the n keys begins, int64, shape (n,), in main
            memory.
        size: largest number of preceding keys that are compared.
        metric: ``l2`` or ``ip``.

    Returns:
        The distances to the preceding keys, and the tokens that these keys predict, each with one row for
        each of the n keys. The number of columns is the largest number of keys that precede one of the n keys
        in its text, at least one and at most `size`. Missing keys have the distance +inf.
    """
    reach = int((at - starts).max()) if len(at) else 0
    width = min(size, max(reach, 1))
    at_device, starts_device = upload(at, keys.device), upload(starts, keys.device)
    before = at_device[:, None] + torch.arange(-width, 0, device=keys.device)
    distances = torch.full(before.shape, torch.inf, device=keys.device)
    done = 0
    for count in torch.unique_consecutive(at // _BLOCK_ROWS, return_counts=True)[1].tolist():
        rows = slice(done, done + count)
        first = max(0, int(at[done]) - width)
        reached = keys[first : int(at[done + count - 1]) + 1]
        compared = pairwise_distances(keys[at_device[rows]], reached, metric)
        distances[rows] = compared.gather(1, (before[rows] - first).clamp(min=0))
        done += count
    distances.masked_fill_(before < starts_device[:, None], torch.inf)
    return Recent(distances, tokens[before.clamp(min=0)])


def look_back_for_targets(
    keys: Tensor,
    tokens: Tensor,
    at: Tensor,
    starts: Tensor,
    targets: Tensor,
    size: int,
    metric: Metric | str,
    temperatures: Sequence[float],
) -> TargetRecent:
    """Compute the continuous cache's probability of each target token, in blocks that bound memory.

    Args:
        keys: keys of several texts, concatenated, float32, shape (m, d).
        tokens: the token that each key predicts, int64, shape (m,); not used for the last key of a text.
        at: row number in `keys` of each of n queries, int64, shape (n,), ascending, in main memory.
        starts: row number in `keys` where the text of each query begins, int64, shape (n,), in main memory.
        targets: target token of each query, int64, shape (n,).
        size: largest number of preceding keys that are compared.
        metric: ``l2`` or ``ip``.
        temperatures: the temperatures at which probabilities are computed, at least one.

    Returns:
        The probabilities of the n target tokens at each temperature; for each query also the number of
        preceding keys, and the distance of the nearest of these keys.
    """
    parts, ascending = list[TargetRecent](), tuple(sorted(temperatures))
    for rows in torch.split(torch.arange(len(at)), _BLOCK_ROWS):
        recent = compare_preceding_keys(keys, tokens, at[rows], starts[rows], size, metric)
        own_targets = targets[upload(rows, keys.device)]
        row, column = (recent.tokens == own_targets[:, None]).nonzero(as_tuple=True)
        nearest, probs = recent.nearest, torch.empty(len(rows), len(ascending), device=keys.device)
        gaps = nearest.where(nearest.isfinite(), 0)[:, None] - recent.distances
        for chain in group_into_halving_chains(ascending):
            powers = (gaps / chain[0]).exp_()
            for temperature in chain:
                if temperature != chain[0]:
                    powers.square_()  # e^(-2d/T) is the square of e^(-d/T)
                gold = torch.zeros_like(nearest).index_add_(0, row, powers[row, column])
                shares = gold / powers.sum(1).clamp_(min=LEAST_PROBABILITY)
                probs[:, ascending.index(temperature)] = shares.clamp_(max=1.0)
        parts.append(TargetRecent(nearest, recent.counts, probs, ascending))
    return TargetRecent.concatenate(parts)


class _KeysInReach(NamedTuple):
    """The keys of n contexts and of the tokens before them, from several texts, in one array.

    Contexts at the same position of the same text are one query, so there are q <= n queries.
    """

    keys: Tensor
    """Keys, float32, shape (m, d)."""
    tokens: Tensor
    """The token that each key predicts, int64, shape (m,); arbitrary at the end of a text."""
    at: Tensor
    """Row in `keys` of each query, int64, shape (q,), ascending, in main memory."""
    starts: Tensor
    """Row in `keys` where the text of each query begins, int64, shape (q,), in main memory."""
    order: Tensor
    """Index of the query of each context, int64, shape (n,); q for padding."""
    firsts: NDArray[np.int64]
    """Index of the first context of each query, shape (q,)."""

    @classmethod
    def from_contexts(cls, contexts: Contexts, size: int) -> "_KeysInReach":
        """Concatenate the keys that are needed to compare each context's key with the keys before it.

        From each text it takes the keys from `size` tokens before its first context to its last context.

        Args:
            contexts: n positions, at least one of which is not padding.
            size: largest number of preceding keys that are compared.
        """
        rows = np.flatnonzero(contexts.owners >= 0)
        used, owners = np.unique(contexts.owners[rows], return_inverse=True)
        ends = contexts.ends[rows]
        firsts, stops = np.full(len(used), np.iinfo(np.int64).max), np.zeros(len(used), np.int64)
        np.minimum.at(firsts, owners, ends)
        firsts = np.maximum(firsts - 1 - size, np.array(contexts.heads, np.int64)[used])
        np.maximum.at(stops, owners, ends)
        keys, tokens = list[Tensor](), [np.empty(0, np.int64)]
        for text, first, stop in zip(used.tolist(), firsts.tolist(), stops.tolist(), strict=True):
            keys.append(contexts.states[text].keys(first, stop))
            tokens += [contexts.states[text].tokens(first + 1, stop), np.zeros(1, np.int64)]
        laid = torch.cat(keys) if len(keys) != 1 else keys[0]
        begins = np.cumsum(stops - firsts) - (stops - firsts)
        places = begins[owners] + ends - 1 - firsts[owners]
        at, first_rows, back = np.unique(places, return_index=True, return_inverse=True)
        order = np.full(len(contexts), len(at))
        order[rows] = back
        return cls(
            laid,
            upload(torch.from_numpy(np.concatenate(tokens)), laid.device),
            torch.from_numpy(at),
            torch.from_numpy(begins[owners[first_rows]]),
            upload(torch.from_numpy(order), laid.device),
            rows[first_rows],
        )


@dataclass(frozen=True, slots=True)
class DocumentKeys:
    """The keys from which the n tokens of whole documents are predicted, in one array."""

    keys: Tensor
    """The key from which each token is predicted, float32, shape (n, d)."""
    targets: Tensor
    """The predicted tokens, int64, shape (n,)."""
    documents: Tensor
    """The document of each token, int64, shape (n,); tokens of a document are adjacent and in order."""
    metric: Metric | str
    """``l2`` or ``ip``."""

    def compare_preceding_keys(self, tokens: Tensor, size: int) -> Recent:
        """Compute the distances from selected tokens' keys to the preceding keys of the same document.

        Args:
            tokens: indices of the selected tokens, int64, shape (m,), ascending.
            size: largest number of preceding keys that are compared.

        Returns:
            The distances to the preceding keys, and the tokens that these keys predict; one row for each
            selected token.
        """
        rows = torch.arange(len(self.documents))
        begins = torch.cat([torch.tensor([True]), self.documents.diff() != 0])
        starts = rows.where(begins, 0).cummax(0).values
        return compare_preceding_keys(self.keys, self.targets, tokens, starts[tokens], size, self.metric)


RECENT_SIZES = (100, 400, 1600, 6400)
"""Sizes of the continuous cache that a fit tries, in tokens. Of the sizes that cover the longest document,
only the smallest is tried."""

_OCTAVES = torch.arange(-6.0, 3.0, 0.5)
_SAMPLE_TOKENS = 1024  # tokens to choose the temperatures by


@dataclass(frozen=True, slots=True)
class RecentFitting:
    """Fits the continuous cache (size, T, λ) and the λ of the documents' own n-grams to scored tokens."""

    sizes: tuple[int, ...]
    """The sizes to try, ascending."""
    temperatures: Tensor
    """The temperatures to try, each √2 times the temperature before, float32, shape (m,)."""
    probs: Tensor
    """The continuous cache's probability of each of n tokens at each size and temperature, float32, shape (n,
    len(sizes), m)."""
    found: Tensor
    """True for tokens that have preceding keys in their document, bool, shape (n,)."""
    own: NGramFitting | None = None
    """Fits the documents' own n-grams, which are mixed after the cache; None leaves them out."""

    @classmethod
    def from_keys(cls, keys: "DocumentKeys", own: TargetContinuation | None = None) -> Self:
        """Create the fitting: compute the cache's probability of every token at each size and temperature.

        Args:
            keys: keys of whole documents, at least one token.
            own: predictions of the tokens by the documents' own n-grams; None leaves n-grams out.
        """
        longest = int(torch.unique_consecutive(keys.documents, return_counts=True)[1].max())
        sizes = tuple(
            size
            for index, size in enumerate(RECENT_SIZES)
            if index == 0 or RECENT_SIZES[index - 1] < longest - 1
        )
        every = torch.arange(len(keys.documents))
        sample = keys.compare_preceding_keys(
            every[:: max(1, len(every) // _SAMPLE_TOKENS)], sizes[-1]
        ).distances
        temperatures = _compute_typical_gap(sample) * 2**_OCTAVES
        probs = torch.empty(len(sizes), len(every), len(temperatures))
        found = torch.empty(len(every), dtype=torch.bool)
        for chunk in torch.split(every, max(1, CHUNK_VALUES // min(sizes[-1], longest))):
            recent = keys.compare_preceding_keys(chunk, sizes[-1])
            distances = recent.distances.flip(1)  # the latest first
            hits = recent.tokens.flip(1) == keys.targets[chunk, None]
            found[chunk] = distances.isfinite().any(1)
            probs[:, chunk] = compute_target_probs_on_grid(distances, hits, sizes, temperatures)
        return cls(
            sizes, temperatures, probs.transpose(0, 1), found, None if own is None else NGramFitting(own)
        )

    def fit(self, log_probs: Tensor, wanted: Tensor) -> CacheSettings:
        """Fit the cache's size, temperature and weight λ to the largest likelihood; return the settings.

        If the object has predictions of the documents' own n-grams, their weights λ are fitted next. If no
        token in `wanted` has preceding keys, λ of the cache is 0, and n-grams are left out.

        Args:
            log_probs: log p of each token in the mixture without the cache, float32, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).
        """
        rows = wanted & self.found
        if not rows.any():
            return CacheSettings(self.sizes[0], self.temperatures[0].item(), 0.0)
        probs = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        bins = torch.zeros(len(probs), dtype=torch.long)
        lam, loss = fit_lambdas(probs, self.probs[rows].flatten(1), bins, 1)
        best = int(loss.argmin())
        size, column = divmod(best, len(self.temperatures))
        cache = CacheSettings(self.sizes[size], self.temperatures[column].item(), lam[0, best].item())
        if self.own is None:
            return cache
        return replace(cache, ngrams=self.own.fit(self.mix(log_probs, cache), wanted))

    def mix(self, log_probs: Tensor, fitted: CacheSettings) -> Tensor:
        """Return log p of each token in the mixture with the cache and its n-grams, float32, shape (n,).

        Args:
            log_probs: log p of each token in the mixture without the cache, float32, shape (n,).
            fitted: the cache's settings. The size must be one of `sizes`; the nearest temperature of
                `temperatures` is used.
        """
        column = int((self.temperatures - fitted.temperature).abs().argmin())
        probs = self.probs[:, self.sizes.index(fitted.size), column]
        log_probs = mix_target_log_probs(log_probs, probs, fitted.lam * self.found)
        if self.own is None or fitted.ngrams is None:
            return log_probs
        return self.own.mix(log_probs, fitted.ngrams)

    def lam(self, fitted: CacheSettings) -> float:
        """Return the weight λ of the cache in settings that `fit` returned."""
        return fitted.lam


def _compute_typical_gap(distances: Tensor) -> float:
    """Return the mean difference between a distance and the smallest distance of its row; 1.0 if it is 0.

    Args:
        distances: shape (n, k); a missing distance is +inf and is left out.
    """
    is_found = distances.isfinite()
    nearest = torch.where(is_found.any(1), distances.amin(1), 0.0)
    gaps = torch.where(is_found, distances - nearest[:, None], 0.0)
    return float(gaps.sum() / is_found.sum().clamp(min=1)) or 1.0
