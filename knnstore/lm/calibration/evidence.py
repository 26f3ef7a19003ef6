"""The evidence of scored tokens for fitting: p_kNN of each target token at every temperature of a grid."""

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
    """p_LM and p_kNN of the n target tokens with a neighbor, for one k or one number of probes."""

    k: int
    """Number of neighbors that mixers may use."""
    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN of each token at each temperature, float32, shape (n, m)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n, 1)."""
    nearest: Evidence
    """The nearest neighbor alone: distances of shape (n, 1)."""
    tokens: Tensor
    """Indices of the n tokens in the scored text, int64, shape (n,)."""
    probes: int | None = None
    """Number of probed cells over whose records p_kNN sums; None if p_kNN sums over k neighbors."""

    def settings(self, temperature: float, mixer: Mixer) -> KNNSettings:
        """Return settings with this T and mixer, and with k and probes of the evidence."""
        return KNNSettings(self.k, temperature, mixer, probes=self.probes)

    def only(self, wanted: Tensor) -> "GridEvidence":
        """Return the evidence of a subset of the tokens.

        Args:
            wanted: mask over all tokens of the scored text, bool.
        """
        rows = wanted[self.tokens]
        return replace(
            self,
            knn=self.knn[rows],
            lm=self.lm[rows],
            nearest=self.nearest.select_rows(rows),
            tokens=self.tokens[rows],
        )


def evidence_of_cells(scored: ScoredText) -> list[GridEvidence]:
    """Return the evidence of a text for each number of probes in `ScoredText.visited`, ascending."""
    tokens = scored.found
    nearest, lm = _select_nearest(scored, tokens)
    return [
        GridEvidence(scored.k, of.temperatures, of.knn[tokens], lm, nearest, tokens, probes)
        for probes, of in sorted(scored.visited.items())
    ]


def evidence_without_keys(scored: ScoredText) -> GridEvidence:
    """Return the evidence of a text without any neighbor: all tokens, k = 1 and an empty temperature grid."""
    tokens = torch.arange(len(scored))
    nothing = torch.zeros(len(scored), 0)
    nearest, lm = _select_nearest(scored, tokens)
    return GridEvidence(1, nothing[0], nothing, lm, nearest, tokens)


def gather_evidence(scored: ScoredText, ks: Sequence[int]) -> list[GridEvidence]:
    """Compute the evidence of a text for each k from its neighbors, without a search.

    Args:
        scored: the text.
        ks: numbers of neighbors, ascending, at most ``scored.k``.
    """
    sums = scored.sums.nearest(ks[-1])
    chunks = scored.chunks(ks[-1], scored.found)
    return compute_grid_evidence(scored, ks, ((chunk, sums.select_rows(chunk)) for chunk in chunks))


def compute_grid_evidence(
    scored: ScoredText, ks: Sequence[int], parts: Iterable[tuple[Tensor, NeighborSums]]
) -> list[GridEvidence]:
    """Compute the evidence of a text for each k, at each temperature of a grid.

    Args:
        scored: the text.
        ks: numbers of neighbors, ascending.
        parts: groups of tokens: their indices, and the nearest ``ks[-1]`` neighbors of each token, with hits.
            The groups together have all tokens with a neighbor.
    """
    temperatures, tokens = choose_temperatures(scored), scored.found
    knn = torch.empty(len(ks), len(scored), len(temperatures))
    for rows, found in parts:
        assert found.hits is not None
        knn[:, rows] = compute_target_probs_on_grid(found.distances, found.hits, ks, temperatures)
    nearest, lm = _select_nearest(scored, tokens)
    return [GridEvidence(k, temperatures, knn[at, tokens], lm, nearest, tokens) for at, k in enumerate(ks)]


def _select_nearest(scored: ScoredText, tokens: Tensor) -> tuple[Evidence, Tensor]:
    """Return the evidence of the nearest neighbor alone, and p_LM, float32, shape (n, 1), of n tokens."""
    lm = scored.lm_log_probs[tokens].exp().clamp_(min=LEAST_PROBABILITY)[:, None]
    nearest = scored.sums.nearest(1)
    alone = replace(scored.evidence, searches=[nearest], keys=None, lm_entropy=None, found={})
    return alone.select_rows(tokens), lm


def choose_temperatures(scored: ScoredText) -> Tensor:
    """Choose the temperature grid for a text with at least one neighbor, float32, shape (m,), ascending."""
    found = scored.found
    return make_temperature_grid(scored.distances[found[:: max(1, len(found) // _SAMPLE_TOKENS)]])
