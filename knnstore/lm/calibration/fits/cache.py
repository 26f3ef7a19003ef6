"""Fitting the continuous cache on top of what predicts already, on text that was scored once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.calibration.fits.ngrams import fit_ngrams, mix_ngrams
from knnstore.lm.calibration.on_grid import CHUNK_VALUES, targets_on_grid
from knnstore.lm.components import DocumentKeys, TargetContinuation
from knnstore.lm.mixing import LEAST_PROBABILITY, fit_lambdas, mix_gold
from knnstore.lm.settings import CacheSettings

SIZES = (100, 400, 1600, 6400)
"""How far back the cache may reach; no more are tried than the longest document has use for."""

_OCTAVES = torch.arange(-6.0, 3.0, 0.5)
_SAMPLE = 1024  # tokens to choose the temperatures by


@dataclass(frozen=True, slots=True)
class CacheEvidence:
    """What n tokens say about every size and temperature of the cache."""

    sizes: tuple[int, ...]
    """Ascending."""
    temperatures: Tensor
    """A grid of half octaves, float32, shape (m,)."""
    probs: Tensor
    """p_cache of each token at each size and temperature, float32, shape (n, len(sizes), m)."""
    found: Tensor
    """Which tokens have any before them, bool, shape (n,)."""

    own: TargetContinuation | None = None
    """What the own n-grams of each document say, which are fitted on top; None is nothing."""

    def mix(self, log_probs: Tensor, cache: CacheSettings) -> Tensor:
        """Mix a cache with a size and T from these grids into log p of each token, shape (n,)."""
        log_probs = self._mixed(log_probs, cache)
        if self.own is None or cache.ngrams is None:
            return log_probs
        return mix_ngrams(self.own, log_probs, cache.ngrams)

    def _mixed(self, log_probs: Tensor, cache: CacheSettings) -> Tensor:
        column = int((self.temperatures - cache.temperature).abs().argmin())
        probs = self.probs[:, self.sizes.index(cache.size), column]
        return mix_gold(log_probs, probs, cache.lam * self.found)


def gather_cache_evidence(reading: DocumentKeys, own: TargetContinuation | None = None) -> CacheEvidence:
    """Compute p_cache of every token at each size and each temperature of a grid.

    Args:
        reading: whole documents.
        own: what their own n-grams say, if these go with a cache.
    """
    longest = int(torch.unique_consecutive(reading.documents, return_counts=True)[1].max())
    sizes = tuple(size for at, size in enumerate(SIZES) if at == 0 or SIZES[at - 1] < longest - 1)
    every = torch.arange(len(reading.documents))
    sample = reading.look_back(every[:: max(1, len(every) // _SAMPLE)], sizes[-1]).distances
    temperatures = _spread(sample) * 2**_OCTAVES
    probs = torch.empty(len(sizes), len(every), len(temperatures))
    found = torch.empty(len(every), dtype=torch.bool)
    for chunk in torch.split(every, max(1, CHUNK_VALUES // min(sizes[-1], longest))):
        recent = reading.look_back(chunk, sizes[-1])
        distances = recent.distances.flip(1)  # the latest first
        hits = recent.tokens.flip(1) == reading.gold[chunk, None]
        found[chunk] = distances.isfinite().any(1)
        probs[:, chunk] = targets_on_grid(distances, hits, sizes, temperatures)
    return CacheEvidence(sizes, temperatures, probs.transpose(0, 1), found, own)


def fit_cache(evidence: CacheEvidence, log_probs: Tensor, wanted: Tensor) -> CacheSettings:
    """Find the likeliest size, T and λ of a cache over what predicts already, then λ of own n-grams over it.

    `log_probs` is log p of each token without a cache, float32, shape (n,); `wanted` says which to fit on.
    """
    rows = wanted & evidence.found
    if not rows.any():
        return CacheSettings(evidence.sizes[0], evidence.temperatures[0].item(), 0.0)
    probs = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
    bins = torch.zeros(len(probs), dtype=torch.long)
    lam, loss = fit_lambdas(probs, evidence.probs[rows].flatten(1), bins, 1)
    best = int(loss.argmin())
    size, column = divmod(best, len(evidence.temperatures))
    cache = CacheSettings(evidence.sizes[size], evidence.temperatures[column].item(), lam[0, best].item())
    if evidence.own is None:
        return cache
    return replace(cache, ngrams=fit_ngrams(evidence.own, evidence.mix(log_probs, cache), wanted))


def _spread(distances: Tensor) -> float:
    """The typical distance from what is nearest, of tokens that have anything before them."""
    known = distances.isfinite()
    nearest = torch.where(known.any(1), distances.amin(1), 0.0)
    gaps = torch.where(known, distances - nearest[:, None], 0.0)
    return float(gaps.sum() / known.sum().clamp(min=1)) or 1.0
