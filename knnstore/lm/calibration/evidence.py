"""What scored tokens say about settings: p_kNN of the token that came, at every temperature of a grid."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.calibration.on_grid import gold_on_grid, grid
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import LEAST_PROBABILITY, Mixer, Retrieved, relative_distance
from knnstore.lm.settings import KNNSettings

_SAMPLE = 2048  # tokens to choose the temperatures by


@dataclass(frozen=True, slots=True)
class Evidence:
    """What n tokens, for which something was found, say about settings with one k or number of probes."""

    k: int
    """Neighbors that mixers may look at."""
    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN of each token at each temperature, float32, shape (n, m)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n, 1)."""
    nearest: Retrieved
    """The nearest neighbor alone: distances of shape (n, 1)."""
    relative: Tensor
    """`relative_distance` of each token, shape (n,)."""
    tokens: Tensor
    """Indices of the n tokens in the text that was scored, int64, shape (n,)."""
    probes: int | None = None
    """Cells whose records p_kNN is over; None where it is over k neighbors."""

    def settings(self, temperature: float, mixer: Mixer) -> KNNSettings:
        """Settings that the evidence is about."""
        return KNNSettings(self.k, temperature, mixer, probes=self.probes)

    def only(self, wanted: Tensor) -> "Evidence":
        """The evidence of some tokens: bool for every token of the text that was scored."""
        rows = wanted[self.tokens]
        return replace(
            self,
            knn=self.knn[rows],
            lm=self.lm[rows],
            nearest=Retrieved(self.nearest.distances[rows], self.nearest.lm_max[rows]),
            relative=self.relative[rows],
            tokens=self.tokens[rows],
        )


def evidence_of_cells(scored: ScoredText) -> list[Evidence]:
    """What the tokens of a text say about each number of probes that is known, ascending."""
    tokens = scored.found
    nearest, lm = _nearest(scored)
    relative = relative_distance(scored.retrieved(scored.k, tokens))
    return [
        Evidence(scored.k, of.temperatures, of.knn[tokens], lm, nearest, relative, tokens, probes)
        for probes, of in sorted(scored.visited.items())
    ]


def evidence_without_keys(scored: ScoredText) -> Evidence:
    """What the tokens of a text say where no neighbor was found: of no temperature anything."""
    tokens = torch.arange(len(scored))
    lm, nothing = scored.lm_log_probs.exp().clamp(min=LEAST_PROBABILITY)[:, None], torch.zeros(len(scored), 0)
    return Evidence(1, nothing[0], nothing, lm, scored.retrieved(1, tokens), torch.zeros(len(scored)), tokens)


def gather_evidence(scored: ScoredText, ks: Sequence[int]) -> list[Evidence]:
    """What the tokens of a text say about each k, ascending and at most ``scored.k``, without a search."""
    k = ks[-1]
    chunks = scored.chunks(k, scored.found)
    parts = ((chunk, scored.retrieved(k, chunk), scored.hits[chunk, :k]) for chunk in chunks)
    return evidence_of(scored, ks, parts)


def evidence_of(
    scored: ScoredText, ks: Sequence[int], parts: Iterable[tuple[Tensor, Retrieved, Tensor]]
) -> list[Evidence]:
    """What the tokens of a text say about each k, at each temperature of a grid.

    Args:
        scored: the text.
        ks: ascending.
        parts: tokens for which something is found, their neighbors for the last k, and which of these have
            the token.
    """
    temperatures, tokens = temperatures_for(scored), scored.found
    knn = torch.empty(len(ks), len(scored), len(temperatures))
    relative = torch.empty(len(ks), len(scored))
    for rows, found, hits in parts:
        knn[:, rows] = gold_on_grid(found.distances, hits, ks, temperatures, found.log_weights)
        for at, k in enumerate(ks):
            relative[at, rows] = relative_distance(replace(found, distances=found.distances[:, :k]))
    nearest, lm = _nearest(scored)
    return [
        Evidence(k, temperatures, knn[at, tokens], lm, nearest, relative[at, tokens], tokens)
        for at, k in enumerate(ks)
    ]


def _nearest(scored: ScoredText) -> tuple[Retrieved, Tensor]:
    """The nearest neighbor of each token for which something was found, and p_LM of it, shape (n, 1)."""
    tokens = scored.found
    lm = scored.lm_log_probs[tokens].exp().clamp_(min=LEAST_PROBABILITY)[:, None]
    return scored.retrieved(1, tokens), lm


def temperatures_for(scored: ScoredText) -> Tensor:
    """The grid for a text in which something was found, float32, shape (m,), ascending."""
    found = scored.found
    return grid(scored.distances[found[:: max(1, len(found) // _SAMPLE)]])
