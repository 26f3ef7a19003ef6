"""Held-out text after one pass of model and search: all that settings are fitted and judged by."""

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
    other_components,
)
from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import described
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
from knnstore.lm.mixture import mixture_of
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import ReadTokens, score_held_out
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_NGRAMS = NGramSettings()
OWN_ORDER = 5
"""Tokens of the longest own n-grams of a text."""


class _EveryMixer(FixedLambda):
    """Stands for all mixers that will be fitted: the search keeps everything that one may look at."""

    needs_nearest_only = False


class Mixed(NamedTuple):
    """The mixture at n tokens."""

    log_probs: Tensor
    """log p of each token, float32, shape (n,)."""
    lam: Tensor
    """λ in force, 0 where nothing was found: float32, shape (n,)."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """n tokens with k neighbors each; no model and no search is needed any more.

    5 bytes a neighbor and 4 a component of a key: 50,000 tokens with 1,024 neighbors take 256 MB, their
    keys of 288 components 58 MB.
    """

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    documents: Tensor
    """Index of each token's document, int64, shape (n,)."""
    evidence: Evidence
    """Findings of one search and of all other components, own n-grams among them, in target form."""
    targets: Tensor | None = None
    """The tokens themselves, int64, shape (n,); None if only neighbors are weighed."""
    metric: Metric | str = Metric.L2
    """Measure of distances between keys."""
    fitted_for: Mapping[str, Any] | None = None
    """Store and model for which weights are fitted on this text; see `described`."""
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings with which components of other packages were looked up, by name."""
    visited: Mapping[int, TargetSums] = field(default_factory=dict)
    """p_kNN over the probed cells, by their number; the evidence then has only the nearest records."""

    def __len__(self) -> int:
        return len(self.lm_log_probs)

    @property
    def reading(self) -> DocumentKeys | None:
        """The keys of whole documents, for a continuous cache; None if `targets` is None."""
        if self.targets is None:
            return None
        assert self.evidence.keys is not None
        return DocumentKeys(self.evidence.keys, self.targets, self.documents, self.metric)

    @property
    def sums(self) -> NeighborSums:
        """The neighbors of each token, with whether each has the token."""
        (sums,) = self.evidence.searches
        assert isinstance(sums, NeighborSums)
        return sums

    @property
    def distances(self) -> Tensor:
        """Distances to the neighbors, float32, shape (n, k), ascending, +inf where one is missing."""
        return self.sums.distances

    @property
    def ngrams(self) -> TargetContinuation | None:
        """Probability of each token by n-grams; None if the text was scored without them."""
        return self.evidence.found.get(NGrams.name)

    @property
    def k(self) -> int:
        """Neighbors of each token."""
        return self.distances.shape[1]

    def chunks(self, k: int, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Divide the indices of all tokens, or of those given, to weigh with k neighbors each."""
        every = torch.arange(len(self)) if tokens is None else tokens
        return torch.split(every, max(1, CHUNK_VALUES // k))

    def chunks_for(self, settings: KNNSettings, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Divide the indices of tokens to mix as settings say."""
        k = self.k if settings.probes else settings.k
        return self.chunks(max(k, settings.cache.size if settings.cache else 1), tokens)

    @property
    def is_anything_found(self) -> bool:
        """True if neighbors or n-grams were found for at least one token."""
        counted = self.ngrams is not None and bool(self.ngrams.probs.isfinite().any())
        return counted or bool(len(self.found))

    @property
    def found(self) -> Tensor:
        """Indices of the tokens for which a neighbor was found, int64."""
        return self.distances[:, 0].isfinite().nonzero()[:, 0]

    def evidence_for(self, settings: KNNSettings, tokens: Tensor) -> Evidence:
        """Return the evidence of some tokens, given by their indices, with k or probes of the settings."""
        search: TokenSums = self.sums.nearest(settings.k)
        if settings.probes is not None:
            search = replace(self.visited[settings.probes], nearest=self.sums)
        evidence = replace(self.evidence, searches=[search]).select_rows(tokens)
        if settings.cache is None or self.reading is None:
            return evidence
        recent = self.reading.look_back(tokens, settings.cache.size)
        return replace(evidence, found={**evidence.found, RecentText.name: recent})

    def targets_for(self, tokens: Tensor) -> Tensor:
        """Return some of the tokens; arbitrary numbers where `targets` are unknown: nothing reads them."""
        return tokens if self.targets is None else self.targets[tokens]

    def log_probs(self, settings: KNNSettings, tokens: Tensor | None = None) -> Mixed:
        """Mix as `settings` say; their selection does not count.

        Args:
            settings: with a k of at most that of the pass or with probes that are known, and a mixer that
                searches once.
            tokens: indices, int64, shape (m,), each of which has an entry in what is returned; default all.
        """
        parts = []
        for chunk in self.chunks_for(settings, tokens):
            evidence, targets = self.evidence_for(settings, chunk), self.targets_for(chunk)
            mixture = mixture_of(settings, evidence)
            parts.append((mixture.gold(self.lm_log_probs[chunk], targets), mixture.lam))
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
    """Run the model and one search over every token of held-out documents; see `score_held_out`.

    With probes the k nearest are those in the probed cells, and there are `DISTINCT_AMONG`.
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
        nearest = search.nearest_only() if isinstance(search, CellSums) else search
        reads.append(scores.read)
        parts.append(replace(scores.evidence, searches=[nearest]))
    shown.finish()
    # 2) Add the own n-grams of the documents, which need no model.
    read, evidence = ReadTokens.joined(reads), Evidence.joined(parts, k)
    texts = Contexts.of_documents(reader.tokenized(documents))
    own = OwnNGrams().look_up_targets(texts.at_positions(read.documents, read.positions), OWN_ORDER)
    numbers = torch.from_numpy(read.documents)
    return ScoredText(
        read.lm_log_probs,
        numbers,
        replace(evidence, found={**evidence.found, OwnNGrams.name: own}),
        targets=read.targets,
        metric=store.identity.metric,
        fitted_for=described(store.identity),
        others=settings.others,
    )


def _choose_other_components(
    store: Reader, selection: Selection, *, is_left_out: bool
) -> dict[str, Mapping[str, Any]]:
    """Return the settings with which components of other packages are scored, by name.

    If documents are left out of retrieval (`is_left_out`), components that were trained on stored documents
    are not scored, since they cannot leave out any.
    """
    chosen = {}
    for name, component in other_components().items():
        settings = component.settings_to_fit(store, selection)
        if settings is not None and not (is_left_out and settings.get("traces") is not None):
            chosen[name] = settings
    return chosen
