"""Searching once more for text that was scored: with larger k, and in each domain on its own.

Of thousands of neighbors of each token only p_kNN of the gold token is kept, at the temperatures of a
grid: memory does not grow with k.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.datastore import tokens_of
from knnstore.documents import TextDocument
from knnstore.lm.calibration.evidence import Evidence, between_points, gold_on_grid, temperatures_for
from knnstore.lm.calibration.fit_domains import DomainEvidence
from knnstore.lm.calibration.scored_text import Mixed, ScoredText
from knnstore.lm.mixing import LEAST_PROBABILITY, Retrieved, mix_probs, relative_distance
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_NEIGHBORS = 1 << 22
"""Of all queries that are searched for at once."""


@dataclass(frozen=True, slots=True)
class FurtherSearches:
    """Searches for the tokens of a scored text again; nothing is encoded again.

    Args:
        store: where to search.
        scored: the text.
        documents: those that it is of.
        selection: among which documents.
        left_out: content hashes of documents that are not among what they retrieve from.
        progress: is told of each batch.
    """

    store: Reader
    scored: ScoredText
    documents: Sequence[TextDocument]
    selection: Selection
    left_out: Collection[str] = ()
    progress: Progress | None = None

    def with_k(self, ks: Sequence[int]) -> list["WideEvidence"]:
        """Search once with the largest k.

        Args:
            ks: ascending.

        Returns:
            What the tokens say about settings with each of them.
        """
        scored, temperatures = self.scored, temperatures_for(self.scored)
        knn = torch.empty(len(ks), len(scored), len(temperatures))
        relative = torch.empty(len(ks), len(scored))
        for tokens, found, hits in self._search(ks[-1], f"searching k={ks[-1]:,}", self.selection):
            knn[:, tokens] = gold_on_grid(found.distances, hits, ks, temperatures, found.log_weights)
            for at, k in enumerate(ks):
                relative[at, tokens] = relative_distance(replace(found, distances=found.distances[:, :k]))
        every = scored.distances[:, 0].isfinite().nonzero()[:, 0]
        nearest = scored.retrieved(1, every)
        lm = scored.lm_log_probs[every].exp().clamp_(min=LEAST_PROBABILITY)[:, None]
        return [
            WideEvidence(
                Evidence(k, temperatures, knn[at, every], lm, nearest, relative[at, every], every),
                scored.lm_log_probs,
            )
            for at, k in enumerate(ks)
        ]

    def by_domain(self, domains: Sequence[str], k: int) -> DomainEvidence:
        """Search each domain on its own.

        Args:
            domains: their names; all are selected.
            k: neighbors in each.
        """
        scored, temperatures = self.scored, temperatures_for(self.scored)
        lm = scored.lm_log_probs.exp().clamp_(min=LEAST_PROBABILITY)
        knn = lm[:, None].repeat(len(domains), 1, len(temperatures))
        everywhere = torch.zeros(len(domains), len(scored), dtype=torch.bool)
        for number, domain in enumerate(domains):
            selection = replace(self.selection, domains=(domain,))
            for tokens, found, hits in self._search(k, f"searching {domain}", selection):
                knn[number, tokens] = gold_on_grid(
                    found.distances, hits, [k], temperatures, found.log_weights
                )[0]
                everywhere[number, tokens] = True
        return DomainEvidence(k, tuple(domains), temperatures, knn, everywhere, lm)

    def _search(self, k: int, title: str, selection: Selection) -> Iterator[tuple[Tensor, Retrieved, Tensor]]:
        """Yield tokens for which something is found, their neighbors, and which of these have the token."""
        scored, shown = self.scored, self.progress or Progress()
        reading = scored.reading
        assert reading is not None
        apart = [number for number, one in enumerate(self.documents) if one.content_hash in self.left_out]
        groups = [(~torch.isin(scored.documents, torch.tensor(apart, dtype=torch.int64)), selection)] + [
            (scored.documents == number, selection.without(self.documents[number].content_hash))
            for number in apart
        ]
        shown.start(title, total=len(scored))
        for members, reached in groups:
            for tokens in torch.split(members.nonzero()[:, 0], max(1, _NEIGHBORS // k)):
                if not len(tokens):
                    continue
                neighbors = self.store.search(reading.keys[tokens].numpy(), k, reached)
                distances = torch.from_numpy(neighbors.distances)
                found = distances[:, 0].isfinite()
                log_weights = neighbors.log_weights
                hits = torch.from_numpy(tokens_of(neighbors.ids)) == reading.gold[tokens, None]
                yield (
                    tokens[found],
                    Retrieved(
                        distances[found], scored.lm_max[tokens[found]],
                        log_weights=None if log_weights is None else torch.from_numpy(log_weights)[found],
                    ),
                    hits[found],
                )  # fmt: skip
                shown.advance(len(tokens))
        shown.finish()


@dataclass(frozen=True, slots=True)
class WideEvidence:
    """What tokens say about settings with a k larger than that of the pass."""

    evidence: Evidence
    """Only for mixers that look at no more than the nearest distance and the model's confidence."""
    lm_log_probs: Tensor
    """log p_LM of every token of the text, float32, shape (n,)."""

    def log_probs(self, settings: KNNSettings, tokens: Tensor) -> Mixed:
        """Mix as settings say; where T is between two of the grid, so is p_kNN.

        Args:
            settings: with this k.
            tokens: indices, int64, shape (m,).

        Returns:
            One entry for each of the m tokens.
        """
        evidence = self.evidence
        _, lam, temperature = settings.mixer.weigh(evidence.nearest, settings.temperature)
        knn = between_points(evidence.knn, evidence.temperatures, temperature)
        log_probs, lambdas = self.lm_log_probs.clone(), torch.zeros_like(self.lm_log_probs)
        log_probs[evidence.tokens] = mix_probs(evidence.lm[:, 0], (lam, knn)).log()
        lambdas[evidence.tokens] = lam
        return Mixed(log_probs[tokens], lambdas[tokens])
