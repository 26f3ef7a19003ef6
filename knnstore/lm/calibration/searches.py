"""Further searches for a scored text (`FurtherSearches`): with larger k, in cells, and in each domain alone.

Each search keeps only p_kNN (the probability by the retrieved records) of the target token, at each
temperature of a grid, so memory does not grow with the number of records.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from knnstore.datastore import tokens_from_ids
from knnstore.documents import TextDocument
from knnstore.lm.calibration.evidence import GridEvidence, choose_temperatures, compute_grid_evidence
from knnstore.lm.calibration.fits import DomainEvidence
from knnstore.lm.calibration.scored_text import Mixed, ScoredText
from knnstore.lm.components import DocumentKeys, sum_cells
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    CellSums,
    NeighborSums,
    TargetSums,
    compute_target_probs_on_grid,
    interpolate_on_grid,
    mix_probs,
)
from knnstore.lm.scoring import group_by_left_out
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_MAX_NEIGHBORS = 1 << 22
"""Largest number of neighbors of all queries together in one search."""
_MAX_DISTANCES = 1 << 25
"""Largest number of distances to records of cells that are weighted at once."""
_FIRST_QUERIES = 64
"""Number of queries of the first look-up in cells, before the sizes of the cells are known."""


@dataclass(frozen=True, slots=True)
class FurtherSearches:
    """Searches the store for the tokens of a scored text, without running the model again.

    Args:
        store: the store.
        scored: the text, with target tokens and keys.
        documents: the documents of the scored text.
        selection: the documents to search.
        left_out: stored documents that the search for a document leaves out. It maps the content hash of the
            document to the content hashes of the stored documents.
        progress: progress display, which receives the number of searched tokens; None for no display.
    """

    store: Reader
    scored: ScoredText
    documents: Sequence[TextDocument]
    selection: Selection
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    progress: Progress | None = None

    def search_with_k(self, ks: Sequence[int]) -> list["WideEvidence"]:
        """Search once for the largest k, and return the probabilities of the text's tokens for each k.

        Args:
            ks: numbers of neighbors, ascending.

        Returns:
            For each k the probabilities by the nearest k records, in the order of `ks`.
        """
        parts = self._search(ks[-1], f"searching k={ks[-1]:,}", self.selection)
        return [
            WideEvidence(of, self.scored.lm_log_probs) for of in compute_grid_evidence(self.scored, ks, parts)
        ]

    def search_with_probes(self, probes: Sequence[int]) -> dict[int, TargetSums]:
        """Compute the probability of every token by all records of the searched cells.

        A cell is a group of stored records with near keys; a query searches the nearest cells.

        Args:
            probes: numbers of searched cells for each query, ascending.

        Returns:
            For each number of searched cells the probabilities at each temperature of a grid.
        """
        title = f"searching {probes[-1]:,} cells"
        found = self._compute_sums_by_probes(probes, title, self.selection, choose_temperatures(self.scored))
        return dict(zip(probes, found, strict=True))

    def search_each_domain(self, domains: Sequence[str], k: int, probes: int | None = None) -> DomainEvidence:
        """Search each domain alone, and return the probability of every token by each domain's records.

        Args:
            domains: names of the domains, all in the selection.
            k: number of neighbors.
            probes: number of cells (groups of records with near keys) that are searched in place of k
                neighbors; None searches for k neighbors.
        """
        scored, temperatures = self.scored, choose_temperatures(self.scored)
        lm = scored.lm_log_probs.exp().clamp_(min=LEAST_PROBABILITY)
        apart = []
        for domain in domains:
            selection, title = replace(self.selection, domains=(domain,)), f"searching {domain}"
            if probes is not None:
                apart += self._compute_sums_by_probes([probes], title, selection, temperatures)
                continue
            found = TargetSums.all_zero(len(scored), temperatures)
            for tokens, near in self._search(k, title, selection):
                assert near.hits is not None
                found.knn[tokens] = compute_target_probs_on_grid(
                    near.distances, near.hits, [k], temperatures
                )[0]
                found.found[tokens] = True
            apart.append(found)
        knn = torch.stack([sums.knn.where(sums.found[:, None], lm[:, None]) for sums in apart])
        is_found = torch.stack([sums.found for sums in apart])
        return DomainEvidence(k, tuple(domains), temperatures, knn, is_found, lm, probes)

    def _compute_sums_by_probes(
        self, probes: Sequence[int], title: str, selection: Selection, temperatures: Tensor
    ) -> list[TargetSums]:
        """Compute p_kNN of each scored token from all records in the cells nearest to the token's key.

        A cell is a group of stored records with near keys. This is done for several numbers of cells.

        Args:
            probes: each number of cells to search for a token, ascending.
            title: title of the progress display.
            selection: the documents to search.
            temperatures: the temperature grid, shape (m,).

        Returns:
            For each number of searched cells, p_kNN of each scored token at each temperature.
        """
        found, at_once = [TargetSums.all_zero(len(self.scored), temperatures) for _ in probes], _FIRST_QUERIES
        for members, reached in self._group_tokens(title, selection):
            left = members
            while len(left):
                tokens, left = left[:at_once], left[at_once:]
                visited = self._sum_cells(tokens, probes[-1], reached)
                if len(probes) > 1 and visited.is_ranked:
                    of_each = visited.target_weights_within(probes, temperatures)
                else:
                    fewer = [self._sum_cells(tokens, some, reached) for some in probes[:-1]]
                    of_each = torch.stack([of.target_weights(temperatures) for of in [*fewer, visited]])
                for of, knn in zip(found, of_each, strict=True):
                    of.knn[tokens], of.found[tokens] = knn, visited.nearest.isfinite()
                at_once = max(1, _MAX_DISTANCES * len(tokens) // max(1, visited.size))
                self._progress_bar.advance(len(tokens))
        self._progress_bar.finish()
        return found

    def _sum_cells(self, tokens: Tensor, probes: int, selection: Selection) -> CellSums:
        """Sum the weights of all records in the cells nearest to each query.

        A cell is a group of records with near keys. The records of the query's target token also have a sum
        of their own.

        Args:
            tokens: indices of q tokens of the text; their keys are the queries. int64, shape (q,).
            probes: number of cells that are searched for each query.
            selection: the documents to search.
        """
        keys, targets = self._document_keys.keys[tokens].numpy(), self._document_keys.targets[tokens]
        settings = KNNSettings(selection=selection, probes=probes)
        return sum_cells(self.store, keys, targets, settings)

    def _search(self, k: int, title: str, selection: Selection) -> Iterator[tuple[Tensor, NeighborSums]]:
        """Search the store for the k records nearest to each token's key, chunk by chunk.

        Args:
            k: number of neighbors.
            title: title of the progress display.
            selection: the documents to search.

        Yields:
            For each chunk the indices of the tokens with a neighbor, int64, shape (q,); and the neighbors of
            these tokens, with hits (True for a neighbor with the target token).
        """
        reading = self._document_keys
        for members, reached in self._group_tokens(title, selection):
            for tokens in torch.split(members, max(1, _MAX_NEIGHBORS // k)):
                if not len(tokens):
                    continue
                neighbors = self.store.search(reading.keys[tokens].numpy(), k, reached)
                distances = torch.from_numpy(neighbors.distances)
                found = distances[:, 0].isfinite()
                hits = torch.from_numpy(tokens_from_ids(neighbors.ids)) == reading.targets[tokens, None]
                yield tokens[found], NeighborSums(distances[found], hits=hits[found])
                self._progress_bar.advance(len(tokens))
        self._progress_bar.finish()

    @property
    def _document_keys(self) -> DocumentKeys:
        """The keys and target tokens of the scored text."""
        assert self.scored.reading is not None
        return self.scored.reading

    @property
    def _progress_bar(self) -> Progress:
        """The progress display; a silent display if `progress` is None."""
        return self.progress or Progress()

    def _group_tokens(self, title: str, selection: Selection) -> list[tuple[Tensor, Selection]]:
        """Start the progress display, and group the tokens by the documents that their searches leave out.

        Args:
            title: title of the progress display.
            selection: the documents to search.

        Returns:
            For each group the indices of its tokens, int64, and `selection` without the documents to leave
            out.
        """
        documents = self.scored.documents
        self._progress_bar.start(title, total=len(documents))
        return [
            (
                torch.isin(documents, torch.tensor(members)).nonzero()[:, 0],
                selection.without_content(*excluded),
            )
            for members, excluded in group_by_left_out(self.documents, self.left_out)
        ]


@dataclass(frozen=True, slots=True)
class WideEvidence:
    """Probabilities of a text's tokens for settings with a larger k than the first search."""

    evidence: GridEvidence
    """Probabilities for this k, for mixers that use only the nearest distance and the model's confidence."""
    lm_log_probs: Tensor
    """log p_LM of every token of the text, float32, shape (n,)."""

    def log_probs(self, settings: KNNSettings, tokens: Tensor) -> Mixed:
        """Compute log-probabilities of tokens with settings whose k is the k of this evidence.

        The neighbors' probabilities were computed for a grid of temperatures; this method interpolates
        between them. A token without a neighbor gets the model's probability, and the weight λ = 0.

        Args:
            settings: settings with the k of the evidence.
            tokens: indices of tokens of the text, int64, shape (m,).
        """
        evidence = self.evidence
        _, lam, temperature = settings.mixer.weigh(evidence.nearest, settings.temperature)
        knn = interpolate_on_grid(evidence.knn, evidence.temperatures, temperature)
        log_probs, lambdas = self.lm_log_probs.clone(), torch.zeros_like(self.lm_log_probs)
        log_probs[evidence.tokens] = mix_probs(evidence.lm[:, 0], (lam, knn)).log()
        lambdas[evidence.tokens] = lam
        return Mixed(log_probs[tokens], lambdas[tokens])
