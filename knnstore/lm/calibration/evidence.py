"""Probabilities of scored tokens for fitting: p_kNN of each target token at every temperature of a grid.

p_kNN is the next-token distribution of the retrieved records, p_LM is the distribution of the model alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    Evidence,
    Mixer,
    NeighborSums,
    compute_target_probs_on_grid,
    make_temperature_grid,
)
from knnstore.lm.settings import KNNSettings

_SAMPLE_TOKENS = 2048  # tokens to choose the temperatures by


@dataclass(frozen=True, slots=True)
class GridEvidence:
    """Probabilities of n target tokens for fitting, for one k or one number of searched cells.

    p_LM is the probability by the model alone, p_kNN by the retrieved records. Only tokens with a neighbor
    are included; `build_evidence_without_keys` includes all tokens.
    """

    k: int
    """Number of neighbors that mixers may use."""
    temperatures: Tensor
    """The temperatures at which p_kNN is computed, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN of each token at each temperature, float32, shape (n, m)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n, 1)."""
    nearest: Evidence
    """Search result with the nearest neighbor only: distances of shape (n, 1)."""
    tokens: Tensor
    """Indices of the n tokens in the scored text, int64, shape (n,)."""
    probes: int | None = None
    """Number of cells (groups of records with near keys) that are searched for each query. p_kNN then sums
    over all their records. None if p_kNN sums over k neighbors."""

    def build_settings(self, temperature: float, mixer: Mixer) -> KNNSettings:
        """Return settings with the given temperature and mixer, and with `k` and `probes` of this object.

        Args:
            temperature: T > 0 of the softmax over distances.
            mixer: the rule that chooses the weight λ.
        """
        return KNNSettings(self.k, temperature, mixer, probes=self.probes)

    def select_tokens(self, wanted: Tensor) -> "GridEvidence":
        """Return the probabilities of the tokens that a mask selects.

        Args:
            wanted: True for the tokens to keep, bool, with one value for each token of the scored text. (This
                object may have only some of these tokens.)
        """
        rows = wanted[self.tokens]
        return replace(
            self,
            knn=self.knn[rows],
            lm=self.lm[rows],
            nearest=self.nearest.select_rows(rows),
            tokens=self.tokens[rows],
        )


def list_evidence_by_probes(scored: ScoredText) -> list[GridEvidence]:
    """Return the probabilities of a text's tokens for each number of cells that was tried, ascending.

    A cell is a group of stored records with near keys; a query searches the nearest cells.

    Args:
        scored: the text, with p_kNN for each number of searched cells in `visited`.
    """
    tokens = scored.found
    nearest, lm = _select_nearest(scored, tokens)
    return [
        GridEvidence(scored.k, of.temperatures, of.knn[tokens], lm, nearest, tokens, probes)
        for probes, of in sorted(scored.visited.items())
    ]


def build_evidence_without_keys(scored: ScoredText) -> GridEvidence:
    """Return the model's probabilities of all tokens of a text for which no neighbor was found.

    The result has k = 1 and an empty temperature grid, so it has no probabilities by neighbors.

    Args:
        scored: the text.
    """
    tokens = torch.arange(len(scored))
    nothing = torch.zeros(len(scored), 0)
    nearest, lm = _select_nearest(scored, tokens)
    return GridEvidence(1, nothing[0], nothing, lm, nearest, tokens)


def gather_evidence(scored: ScoredText, ks: Sequence[int]) -> list[GridEvidence]:
    """Compute the probabilities of a text's tokens by their k nearest neighbors, for several k.

    The neighbors are those in `scored`; the store is not searched.

    Args:
        scored: the text.
        ks: numbers of neighbors, ascending, at most ``scored.k``.

    Returns:
        The probabilities for each k, in the order of `ks`.
    """
    sums = scored.sums.keep_nearest(ks[-1])
    chunks = scored.split_into_chunks(ks[-1], scored.found)
    return compute_grid_evidence(scored, ks, ((chunk, sums.select_rows(chunk)) for chunk in chunks))


def compute_grid_evidence(
    scored: ScoredText, ks: Sequence[int], parts: Iterable[tuple[Tensor, NeighborSums]]
) -> list[GridEvidence]:
    """Compute the probabilities of a text's tokens by their k nearest neighbors, for several k.

    The probabilities (p_kNN) are computed at each temperature of a grid.

    Args:
        scored: the text.
        ks: numbers of neighbors, ascending.
        parts: groups of tokens. A group has the indices of its tokens, and the nearest ``ks[-1]`` neighbors
            of each token, with hits (True for a neighbor with the target token). The groups together have all
            tokens with a neighbor.

    Returns:
        The probabilities for each k, in the order of `ks`.
    """
    temperatures, tokens = choose_temperatures(scored), scored.found
    knn = torch.empty(len(ks), len(scored), len(temperatures))
    for rows, found in parts:
        assert found.hits is not None
        knn[:, rows] = compute_target_probs_on_grid(found.distances, found.hits, ks, temperatures)
    nearest, lm = _select_nearest(scored, tokens)
    return [GridEvidence(k, temperatures, knn[at, tokens], lm, nearest, tokens) for at, k in enumerate(ks)]


def _select_nearest(scored: ScoredText, tokens: Tensor) -> tuple[Evidence, Tensor]:
    """Return the search result with only the nearest neighbor, and p_LM, of n tokens.

    Args:
        scored: the text.
        tokens: indices of the tokens, int64, shape (n,).

    Returns:
        The search result; and p_LM of each token, float32, shape (n, 1).
    """
    lm = scored.lm_log_probs[tokens].exp().clamp_(min=LEAST_PROBABILITY)[:, None]
    nearest = scored.sums.keep_nearest(1)
    alone = replace(scored.evidence, searches=[nearest], keys=None, lm_entropy=None, found={})
    return alone.select_rows(tokens), lm


def choose_temperatures(scored: ScoredText) -> Tensor:
    """Choose the temperatures at which p_kNN is computed, from distances of a sample of the text's tokens.

    Args:
        scored: the text; at least one token has a neighbor.

    Returns:
        float32, shape (m,), ascending.
    """
    found = scored.found
    return make_temperature_grid(scored.distances[found[:: max(1, len(found) // _SAMPLE_TOKENS)]])
