"""Held-out text after one pass of model and search: all that settings are fitted and judged by."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knnstore.documents import TextDocument
from knnstore.lm.calibration.on_grid import CHUNK_VALUES, GoldOnGrid
from knnstore.lm.components import (
    DocumentKeys,
    Found,
    NGrams,
    OwnNGrams,
    RecentText,
    TargetContinuation,
    mixture_of,
)
from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import described
from knnstore.lm.mixing import (
    DISTINCT_AMONG,
    FixedLambda,
    NearnessLambda,
    Retrieved,
    distinct_tokens,
    mix_log_probs,
    powers_up_to,
)
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import score_held_out
from knnstore.lm.settings import KNNSettings, NGramSettings, Substitute, other_components
from knnstore.progress import Progress
from knnstore.store import Reader, Selection

_SEES_NEIGHBORS = NearnessLambda()
_NGRAMS = NGramSettings()
OWN_ORDER = 5
"""Tokens of the longest own n-grams of a text."""


class Mixed(NamedTuple):
    """The mixture at n tokens."""

    log_probs: Tensor
    """log p of each token, float32, shape (n,)."""
    lam: Tensor
    """λ in force, 0 where nothing was found: float32, shape (n,)."""


class ScoredSubstitute(NamedTuple):
    """A substitute, and what it predicts at n tokens."""

    substitute: Substitute
    log_probs: Tensor
    """log p_sub of each token, float32, shape (n,)."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """n tokens with k neighbors each; no model and no search is needed any more.

    5 bytes a neighbor and 4 a component of a key: 50,000 tokens with 1,024 neighbors take 256 MB, their
    keys of 288 components 58 MB.
    """

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the token that was likeliest there, float32, shape (n,)."""
    distances: Tensor
    """To the neighbors, float32, shape (n, k), ascending, +inf where one is missing."""
    hits: Tensor
    """Whether a neighbor carries the token, bool, shape (n, k)."""
    documents: Tensor
    """Index of each token's document, int64, shape (n,)."""
    log_weights: Tensor | None = None
    """Of the neighbors, float32, shape (n, k); None where each stands for itself."""
    reading: DocumentKeys | None = None
    """What a continuous cache needs, and the keys for a gate; None where it was not asked for."""
    lm_entropy: Tensor | None = None
    """Entropy of p_LM in nats, float32, shape (n,)."""
    distinct: Tensor | None = None
    """`distinct_tokens` among the neighbors, int16, shape (n, r)."""
    fitted_for: Mapping[str, Any] | None = None
    """What weights that are fitted on this text are for; see `described`."""
    substitute: ScoredSubstitute | None = None
    """What a substitute predicts; None where the text was not scored with one."""
    ngrams: TargetContinuation | None = None
    """What n-grams say; None where the text was scored without them."""
    own_ngrams: TargetContinuation | None = None
    """What the own n-grams of each document say."""
    others: Mapping[str, Found] = field(default_factory=dict)
    """Findings of components of other packages, by their names."""
    visited: Mapping[int, GoldOnGrid] = field(default_factory=dict)
    """p_kNN over the cells visited, by how many these were; then only the nearest are among the neighbors."""

    def __len__(self) -> int:
        return len(self.lm_log_probs)

    @property
    def k(self) -> int:
        """Neighbors of each token."""
        return self.distances.shape[1]

    def chunks(self, k: int, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Indices of tokens to weigh together with k neighbors each; of all, or of those given."""
        every = torch.arange(len(self)) if tokens is None else tokens
        return torch.split(every, max(1, CHUNK_VALUES // k))

    def chunks_for(self, settings: KNNSettings, tokens: Tensor | None = None) -> Iterable[Tensor]:
        """Indices of tokens to mix together as settings say."""
        k = self.k if settings.probes else settings.k
        return self.chunks(max(k, settings.cache.size if settings.cache else 1), tokens)

    @property
    def is_anything_found(self) -> bool:
        """Whether neighbors or n-grams say something of some token."""
        said = self.ngrams is not None and bool(self.ngrams.probs.isfinite().any())
        return said or bool(len(self.found))

    @property
    def found(self) -> Tensor:
        """Indices of the tokens for which a neighbor was found, int64."""
        return self.distances[:, 0].isfinite().nonzero()[:, 0]

    def retrieved(self, k: int, tokens: Tensor, probes: int | None = None) -> Retrieved:
        """What a mixer chooses from, with the k nearest neighbors of some tokens, or so many cells."""
        counted = {NGrams.name: self.ngrams, OwnNGrams.name: self.own_ngrams}
        known = {**counted, **self.others}
        found = {name: one.rows(tokens) for name, one in known.items() if one is not None}
        return Retrieved(
            self.distances[tokens, :k],
            self.lm_max[tokens],
            keys=None if self.reading is None else self.reading.keys[tokens],
            lm_entropy=None if self.lm_entropy is None else self.lm_entropy[tokens],
            distinct=None if self.distinct is None else self.distinct[tokens],
            log_weights=None if self.log_weights is None else self.log_weights[tokens, :k],
            found=found,
            hits=self.hits[tokens, :k],
            visited=None if probes is None else [self.visited[probes].rows(tokens)],
        )

    def retrieved_for(self, settings: KNNSettings, tokens: Tensor) -> tuple[Retrieved, Tensor]:
        """What settings mix at some tokens, and the tokens that came."""
        retrieved = self.retrieved(self.k if settings.probes else settings.k, tokens, settings.probes)
        if settings.cache is None or self.reading is None:
            return retrieved, tokens  # anything: looked at by the cache alone
        recent = self.reading.look_back(tokens, settings.cache.size)
        found = {**retrieved.found, RecentText.name: recent}
        return replace(retrieved, found=found), self.reading.gold[tokens]

    def log_probs(self, settings: KNNSettings, tokens: Tensor | None = None) -> Mixed:
        """Mix as `settings` say; its selection is not looked at, nor a substitute that was not scored.

        Args:
            settings: with a k of at most that of the pass or with probes that are known, and a mixer that
                searches once.
            tokens: indices, int64, shape (m,), each of which has an entry in what is returned; default all.
        """
        parts = []
        for chunk in self.chunks_for(settings, tokens):
            retrieved, gold = self.retrieved_for(settings, chunk)
            below = self.lm_log_probs[chunk]
            if settings.substitute is not None and self.substitute is not None:
                below = mix_log_probs(below, self.substitute.log_probs[chunk], settings.substitute.lam)
            mixture = mixture_of(settings, retrieved)
            parts.append((mixture.gold(below, gold), mixture.lam))
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

    With probes the k nearest are those in the cells visited, and there are `DISTINCT_AMONG`.
    """
    if probes is not None:
        k = DISTINCT_AMONG
    shown = progress or Progress()
    total = reader.count_predicted(documents)
    shown.start("scoring", total=total)
    scored = ScoredText(
        torch.empty(total), torch.empty(total), torch.full((total, k), torch.inf),
        torch.zeros((total, k), dtype=torch.bool), torch.empty(total, dtype=torch.int64),
    )  # fmt: skip
    keys, gold = torch.empty(total, store.identity.dim), torch.empty(total, dtype=torch.int64)
    lm_entropy = torch.empty(total)
    said, own = (TargetContinuation.empty(order, total) for order in ((ngrams or _NGRAMS).order, OWN_ORDER))
    own_ngrams, texts = OwnNGrams(), Contexts.of_documents(reader.tokenized(documents))
    distinct = torch.empty((total, len(powers_up_to(min(k, DISTINCT_AMONG)))), dtype=torch.int16)
    log_weights = None
    done = 0
    mixer = FixedLambda(0.0) if store.is_keyless else _SEES_NEIGHBORS
    others: dict[str, list[Found]] = {name: [] for name in other_components()}
    settings = KNNSettings(
        k=k, mixer=mixer, selection=selection, probes=probes, ngrams=ngrams,
        others={name: {} for name in others},
    )  # fmt: skip
    for part in score_held_out(
        store, reader, documents, settings, left_out=left_out, progress=shown,
    ):  # fmt: skip
        rows = slice(done, done + len(part.gold))
        scored.lm_log_probs[rows] = part.lm_log_probs
        scored.lm_max[rows] = part.lm_max
        columns = slice(part.distances.shape[1])  # fewer where the document left out has many of the records
        scored.distances[rows, columns] = part.distances
        scored.hits[rows, columns] = part.tokens == part.gold[:, None]
        scored.documents[rows] = torch.from_numpy(part.documents)
        keys[rows], gold[rows] = part.keys, part.gold
        lm_entropy[rows] = part.lm_entropy
        if ngrams is not None:
            _copy_rows(part.found[NGrams.name], said, rows)
        for name, parts in others.items():
            parts.append(part.found[name])
        at = texts.at_positions(part.documents, part.positions)
        _copy_rows(own_ngrams.target(at, OWN_ORDER), own, rows)
        distinct[rows] = distinct_tokens(part.tokens, part.distances)
        if part.log_weights is not None:
            log_weights = torch.zeros(total, k) if log_weights is None else log_weights
            log_weights[rows, columns] = part.log_weights
        done = rows.stop
    shown.finish()
    return replace(
        scored,
        log_weights=log_weights,
        reading=DocumentKeys(keys, gold, scored.documents, store.identity.metric),
        lm_entropy=lm_entropy,
        distinct=distinct,
        ngrams=None if ngrams is None else said,
        own_ngrams=own,
        others={name: parts[0].joined(parts) for name, parts in others.items() if parts},
        fitted_for=described(store.identity),
    )


def _copy_rows(found: Any, target: TargetContinuation, rows: slice) -> None:
    """Copy what n-grams give to some tokens into the rows of all tokens."""
    target.probs[rows], target.suffixes[rows] = found.probs, found.suffixes
