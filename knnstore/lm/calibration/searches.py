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
from knnstore.lm.calibration.evidence import (
    Evidence,
    between_points,
    evidence_of,
    gold_on_grid,
    temperatures_for,
)
from knnstore.lm.calibration.fit_domains import DomainEvidence
from knnstore.lm.calibration.scored_text import Mixed, ScoredText
from knnstore.lm.mixing import LEAST_PROBABILITY, Retrieved, mix_probs
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_NEIGHBORS = 1 << 22
"""Of all queries that are searched for at once."""


@dataclass(frozen=True, slots=True)
class FurtherSearches:
    """Searches for the tokens of a scored text, which is of these documents; nothing is encoded again.

    `left_out` has the content hashes of documents that are not among what they retrieve from.
    """

    store: Reader
    scored: ScoredText
    documents: Sequence[TextDocument]
    selection: Selection
    left_out: Collection[str] = ()
    progress: Progress | None = None

    def with_k(self, ks: Sequence[int]) -> list["WideEvidence"]:
        """Search once with the largest of some k, ascending: what the tokens say about each of them."""
        parts = self._search(ks[-1], f"searching k={ks[-1]:,}", self.selection)
        return [WideEvidence(of, self.scored.lm_log_probs) for of in evidence_of(self.scored, ks, parts)]

    def by_domain(self, domains: Sequence[str], k: int) -> DomainEvidence:
        """Search each domain, all of which are selected, on its own for k neighbors."""
        scored, temperatures = self.scored, temperatures_for(self.scored)
        lm = scored.lm_log_probs.exp().clamp_(min=LEAST_PROBABILITY)
        knn = lm[:, None].repeat(len(domains), 1, len(temperatures))
        everywhere = torch.zeros(len(domains), len(scored), dtype=torch.bool)
        for number, domain in enumerate(domains):
            selection = replace(self.selection, domains=(domain,))
            for tokens, found, hits in self._search(k, f"searching {domain}", selection):
                probs = gold_on_grid(found.distances, hits, [k], temperatures, found.log_weights)
                knn[number, tokens] = probs[0]
                everywhere[number, tokens] = True
        return DomainEvidence(k, tuple(domains), temperatures, knn, everywhere, lm)

    def _search(self, k: int, title: str, selection: Selection) -> Iterator[tuple[Tensor, Retrieved, Tensor]]:
        """Yield tokens for which something is found, their neighbors, and which of these have the token."""
        scored, shown = self.scored, self.progress or Progress()
        reading = scored.reading
        assert reading is not None
        hashes = [one.content_hash for one in self.documents]
        apart = [number for number, one in enumerate(hashes) if one in self.left_out]
        groups = [(~torch.isin(scored.documents, torch.tensor(apart, dtype=torch.int64)), selection)]
        groups += [(scored.documents == number, selection.without(hashes[number])) for number in apart]
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
        """Mix at some tokens, shape (m,), as settings with this k say; p_kNN is taken `between_points`."""
        evidence = self.evidence
        _, lam, temperature = settings.mixer.weigh(evidence.nearest, settings.temperature)
        knn = between_points(evidence.knn, evidence.temperatures, temperature)
        log_probs, lambdas = self.lm_log_probs.clone(), torch.zeros_like(self.lm_log_probs)
        log_probs[evidence.tokens] = mix_probs(evidence.lm[:, 0], (lam, knn)).log()
        lambdas[evidence.tokens] = lam
        return Mixed(log_probs[tokens], lambdas[tokens])
