"""Held-out text after one pass of model and search (`ScoredText`); settings are fitted and judged on it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knnstore.datastore import Metric
from knnstore.documents import TextDocument
from knnstore.lm.components import (
    DocumentKeys,
    NGrams,
    NGramSettings,
    OwnNGrams,
    RecentText,
    TargetContinuation,
    load_plugin_components,
)
from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import describe_keys
from knnstore.lm.mixing import (
    CHUNK_VALUES,
    DISTINCT_AMONG,
    CellSums,
    Evidence,
    FixedLambda,
    NeighborSums,
    TargetSums,
    TokenSums,
)
from knnstore.lm.mixture import build_mixture
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import ReadTokens, score_held_out
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_NGRAMS = NGramSettings()
OWN_ORDER = 5
"""Number of tokens of the longest n-grams that are counted in the text itself."""


class _EveryMixer(FixedLambda):
    """A placeholder mixer for scoring: the search keeps the features that any mixer may need in the fit."""

    needs_nearest_only = False


class Mixed(NamedTuple):
    """Log-probabilities of n target tokens in a mixture of model and store, and the weight λ of the store."""

    log_probs: Tensor
    """log p of each token, float32, shape (n,)."""
    lam: Tensor
    """λ of each token, float32, shape (n,); 0 for a token for which nothing was found."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """n tokens of held-out text with the model's probability and k neighbors each.

    Settings are fitted and judged on this object; neither the model nor the store is needed any more. A
    neighbor takes 5 bytes, and a component of a key 4 bytes: 50,000 tokens with 1,024 neighbors take 256 MB,
    and their keys of 288 components 58 MB.
    """

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    documents: Tensor
    """Index of each token's document, int64, shape (n,)."""
    evidence: Evidence
    """Look-up results with `Form.TARGET` (target token only): of one search for keys, and of all other
    components, including n-grams of the text itself."""
    targets: Tensor | None = None
    """The target tokens, int64, shape (n,); None if no component besides the keys is used."""
    metric: Metric | str = Metric.L2
    """``l2`` or ``ip``."""
    fitted_for: Mapping[str, Any] | None = None
    """Metadata for networks that are fitted on this text: the store's model and keys. None for no
    metadata."""
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each component of another package that was looked up, by name: the settings of the look-up."""
    visited: Mapping[int, TargetSums] = field(default_factory=dict)
    """For each number of searched cells (groups of records with near keys): p_kNN (the probability by the
    retrieved records) of every token over all records of the cells. The evidence then has only the nearest
    records. Empty in a store without cells."""

    def __len__(self) -> int:
        return len(self.lm_log_probs)

    @property
    def reading(self) -> DocumentKeys | None:
        """The keys and target tokens of whole documents, for a continuous cache.

        None if `targets` is None.
        """
        if self.targets is None:
            return None
        assert self.evidence.keys is not None
        return DocumentKeys(self.evidence.keys, self.targets, self.documents, self.metric)

    @property
    def sums(self) -> NeighborSums:
        """The neighbors of each token: distances, and hits (whether a neighbor has the target token)."""
        (sums,) = self.evidence.searches
        assert isinstance(sums, NeighborSums)
        return sums

    @property
    def distances(self) -> Tensor:
        """Distances to each token's neighbors, float32, shape (n, k), ascending.

        The distance of a missing neighbor is +inf.
        """
        return self.sums.distances

    @property
    def ngrams(self) -> TargetContinuation | None:
        """Probability of each token by n-grams of stored text; None if n-grams were not used in scoring."""
        return self.evidence.found.get(NGrams.name)

    @property
    def k(self) -> int:
        """Number of neighbors of each token; missing neighbors count too."""
        return self.distances.shape[1]

    def split_into_chunks(self, k: int, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Split token indices into chunks whose neighbors, k for each token, fit in bounded memory.

        Args:
            k: number of neighbors, >= 1.
            tokens: indices, int64, shape (m,); default all tokens.
        """
        every = torch.arange(len(self)) if tokens is None else tokens
        return torch.split(every, max(1, CHUNK_VALUES // k))

    def split_for_settings(self, settings: KNNSettings, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Split token indices into chunks to which the settings can be applied in bounded memory.

        Args:
            settings: the settings; k and the size of their cache determine the size of a chunk.
            tokens: indices, int64, shape (m,); default all tokens.
        """
        k = self.k if settings.probes else settings.k
        return self.split_into_chunks(max(k, settings.cache.size if settings.cache else 1), tokens)

    @property
    def is_anything_found(self) -> bool:
        """True if neighbors or n-grams were found for at least one token."""
        counted = self.ngrams is not None and bool(self.ngrams.probs.isfinite().any())
        return counted or bool(len(self.found))

    @property
    def found(self) -> Tensor:
        """Indices of the tokens for which a neighbor was found, int64."""
        return self.distances[:, 0].isfinite().nonzero()[:, 0]

    def select_tokens(self, rows: Tensor) -> "ScoredText":
        """Return the text with only some tokens. Documents keep their indices.

        Args:
            rows: indices of the tokens, ascending, int64, shape (m,). With a token, all earlier tokens of its
                document must be selected, because a continuous cache looks back at them.
        """
        return replace(
            self,
            lm_log_probs=self.lm_log_probs[rows],
            documents=self.documents[rows],
            evidence=self.evidence.select_rows(rows),
            targets=None if self.targets is None else self.targets[rows],
            visited={probes: sums.select_rows(rows) for probes, sums in self.visited.items()},
        )

    def select_evidence(self, settings: KNNSettings, tokens: Tensor) -> Evidence:
        """Return the look-up results of some tokens, without values that the settings do not use.

        The results have only the neighbors (or the sums over cells, i.e. groups of records) that the settings
        ask for. If the settings have a continuous cache, its preceding tokens are added.

        Args:
            settings: the settings; their `k` is at most the text's k, or their `probes` is a key of
                `visited`.
            tokens: indices of the tokens, int64, shape (m,).
        """
        search: TokenSums = self.sums.keep_nearest(settings.k)
        if settings.probes is not None:
            search = replace(self.visited[settings.probes], nearest=self.sums)
        evidence = replace(self.evidence, searches=[search]).select_rows(tokens)
        if settings.cache is None or self.reading is None:
            return evidence
        recent = self.reading.compare_preceding_keys(tokens, settings.cache.size)
        return replace(evidence, found={**evidence.found, RecentText.name: recent})

    def target_tokens(self, tokens: Tensor) -> Tensor:
        """Return the target tokens at some indices, int64, shape (m,).

        If `targets` is None, no component needs target tokens, and `tokens` itself is returned.

        Args:
            tokens: indices of tokens of the text, int64, shape (m,).
        """
        return tokens if self.targets is None else self.targets[tokens]

    def log_probs(self, settings: KNNSettings, tokens: Tensor | None = None) -> Mixed:
        """Compute the log-probability of target tokens in the mixture that settings describe.

        Args:
            settings: the settings. Their `k` is at most the text's k, or their `probes` is a key of
                `visited`. Their mixer (the rule that chooses λ) asks for one search. Their selection is
                ignored.
            tokens: indices of the tokens, int64, shape (m,); default all tokens.
        """
        parts = []
        for chunk in self.split_for_settings(settings, tokens):
            evidence, targets = self.select_evidence(settings, chunk), self.target_tokens(chunk)
            mixture = build_mixture(settings, evidence)
            parts.append((mixture.target_log_probs(self.lm_log_probs[chunk], targets), mixture.lam))
        return Mixed(*(torch.cat(part) for part in zip(*parts, strict=True)))


def score_once(
    store: Reader,
    reader: TextReader,
    documents: Sequence[TextDocument],
    *,
    k: int,
    selection: Selection,
    probes: int | None = None,
    ngrams: NGramSettings | None = _NGRAMS,
    left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> ScoredText:
    """Run the model and one search for every token of held-out documents, and return all results.

    Args:
        store: the store.
        reader: the object that tokenizes the documents and runs the model.
        documents: the documents.
        k: number of neighbors to keep for each token. If `probes` is not None, `DISTINCT_AMONG` neighbors are
            kept instead.
        selection: the documents to search.
        probes: number of cells (groups of records with near keys) that are searched for each query; None
            searches for the k nearest records.
        ngrams: settings of n-grams; only their order is used. None scores without n-grams.
        left_out: stored documents that the search for a document leaves out. It maps the content hash of the
            document to the content hashes of the stored documents.
        progress: progress display, which receives the number of scored tokens; None for no display.
    """
    if probes is not None:
        k = DISTINCT_AMONG
    # 1) Score with everything that does not depend on what is fitted.
    mixer = FixedLambda(0.0) if store.is_keyless else _EveryMixer(1.0)
    others = _choose_other_components(store, selection, is_left_out=bool(left_out))
    settings = KNNSettings(k=k, mixer=mixer, selection=selection, probes=probes, ngrams=ngrams, others=others)
    shown = progress or Progress()
    shown.start("scoring", total=reader.count_predicted(documents))
    reads, parts = list[ReadTokens](), list[Evidence]()
    for scores in score_held_out(store, reader, documents, settings, left_out=left_out, progress=shown):
        (search,) = scores.evidence.searches
        nearest = search.to_neighbor_sums() if isinstance(search, CellSums) else search
        reads.append(scores.read)
        parts.append(replace(scores.evidence, searches=[nearest]))
    shown.finish()
    # 2) Add the own n-grams of the documents, which need no model.
    read, evidence = ReadTokens.concatenate(reads), Evidence.concatenate(parts, k)
    texts = Contexts.from_documents(reader.tokenize_documents(documents))
    own = OwnNGrams().look_up_targets(texts.with_positions(read.documents, read.positions), OWN_ORDER)
    numbers = torch.from_numpy(read.documents)
    return ScoredText(
        read.lm_log_probs,
        numbers,
        replace(evidence, found={**evidence.found, OwnNGrams.name: own}),
        targets=read.targets,
        metric=store.identity.metric,
        fitted_for=describe_keys(store.identity),
        others=settings.others,
    )


def _choose_other_components(
    store: Reader, selection: Selection, *, is_left_out: bool
) -> dict[str, Mapping[str, Any]]:
    """Choose the components of other packages to score with, and return their settings by name.

    Args:
        store: the store.
        selection: the documents to search.
        is_left_out: True if stored documents are left out of searches. Then components that were trained on
            stored documents are not chosen, because they cannot leave out a document.
    """
    chosen = {}
    for name, component in load_plugin_components().items():
        settings = component.settings_to_fit(store, selection)
        if settings is not None and not (is_left_out and settings.get("traces") is not None):
            chosen[name] = settings
    return chosen
