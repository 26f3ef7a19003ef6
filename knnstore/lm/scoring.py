"""Running the model and one search over every token of held-out documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Ids, Neighbors
from knnstore.documents import TextDocument
from knnstore.lm.continuous_cache import ReadText, Recent
from knnstore.lm.encoder import Encoder
from knnstore.lm.in_step import few_tokens, score_in_step
from knnstore.lm.mixing import Retrieved
from knnstore.lm.retrieval import columns_of, reachable
from knnstore.lm.settings import KNNSettings
from knnstore.lm.skipping import search_some
from knnstore.lm.text import in_chunks, tokenized
from knnstore.lm.windows import Batch, pack, prefix_of
from knnstore.progress import Progress
from knnstore.store import KNNStore, tokens_of

BATCH_TOKENS = 4_096
"""Tokens in one forward pass, padding included."""
_NEIGHBORS = BATCH_TOKENS << 10
"""Of all tokens that are searched for at once: fewer with a larger k, so that memory does not grow."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What is known of n tokens before temperature and λ are chosen."""

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the token that was likeliest there, float32, shape (n,)."""
    lm_entropy: Tensor
    """Entropy of p_LM in nats, float32, shape (n,)."""
    searched: NDArray[np.bool_]
    """For which of them a search was made, shape (n,)."""
    ids: Ids
    """The neighbours' records, shape (n, k), -1 where one is missing."""
    distances: Tensor
    """To the neighbours, float32, shape (n, k), +inf where one is missing."""
    tokens: Tensor
    """Of the neighbours, int64, shape (n, k)."""
    gold: Tensor
    """The tokens themselves, int64, shape (n,)."""
    keys: Tensor
    """What was searched for, float32, shape (n, d)."""
    documents: NDArray[np.int64]
    """Index of each token's document, in the order given; shape (n,)."""
    positions: NDArray[np.int64]
    """Of each token in its document, shape (n,)."""
    log_weights: Tensor | None = None
    """Of the neighbours, float32, shape (n, k); see `Retrieved`."""
    recent: Recent | None = None
    """What stands before each token in its document; None without a cache."""

    def retrieved(self) -> Retrieved:
        """What a mixer chooses from."""
        return Retrieved(
            self.distances,
            self.lm_max,
            tokens=self.tokens,
            keys=self.keys,
            lm_entropy=self.lm_entropy,
            log_weights=self.log_weights,
            recent=self.recent,
        )

    def rows(self, rows: NDArray[np.int64]) -> "TokenScores":
        """Some of the tokens, shape (m,)."""
        at = torch.from_numpy(rows)
        return TokenScores(
            lm_log_probs=self.lm_log_probs[at],
            lm_max=self.lm_max[at],
            lm_entropy=self.lm_entropy[at],
            searched=self.searched[rows],
            ids=self.ids[rows],
            distances=self.distances[at],
            tokens=self.tokens[at],
            gold=self.gold[at],
            keys=self.keys[at],
            documents=self.documents[rows],
            positions=self.positions[rows],
            log_weights=None if self.log_weights is None else self.log_weights[at],
            recent=None if self.recent is None else self.recent.rows(at),
        )

    def with_neighbors(self, found: Neighbors, searched: NDArray[np.bool_]) -> "TokenScores":
        """The same tokens with other neighbours."""
        return replace(
            self,
            searched=searched,
            ids=found.ids,
            distances=torch.from_numpy(found.distances),
            tokens=torch.from_numpy(tokens_of(found.ids)),
            log_weights=None if found.log_weights is None else torch.from_numpy(found.log_weights),
        )


def read_batch(
    encoder: Encoder, batch: Batch, settings: KNNSettings, read: ReadText | None = None
) -> TokenScores:
    """Run the model over one batch of windows; what is to be searched is marked, no neighbour is there."""
    skip = settings.skip
    encoded = encoder.encode(batch.input_ids, batch.at)
    keys = encoded.keys.cpu()
    log_probs = encoder.log_probs(encoded.states, batch.gold)
    lm_max, lm_entropy = log_probs.best.cpu(), log_probs.entropy.cpu()
    gold, nothing = torch.from_numpy(batch.gold), np.empty((len(keys), 0), np.int64)
    return TokenScores(
        lm_log_probs=log_probs.gold.cpu(),
        lm_max=lm_max,
        lm_entropy=lm_entropy,
        searched=np.ones(len(keys), bool)
        if skip is None
        else skip.searched(keys, lm_max, lm_entropy).numpy(),
        ids=nothing,
        distances=torch.empty(nothing.shape),
        tokens=torch.from_numpy(nothing),
        gold=gold,
        keys=keys,
        documents=batch.documents,
        positions=batch.positions,
        recent=None if read is None else read.follow(keys, gold, batch.documents, batch.positions),
    )


def score_batch(
    store: KNNStore,
    encoder: Encoder,
    batch: Batch,
    settings: KNNSettings,
    read: ReadText | None = None,
) -> TokenScores:
    """Score the tokens that one batch of windows predicts; see `score`."""
    return _with_search(store, read_batch(encoder, batch, settings, read), settings)


def score(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[TextDocument],
    settings: KNNSettings,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Run the model and one search over every token of some documents.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        documents: read once, a few at a time.
        settings: what to search for and where, how far to look back, and for which tokens not to search.
        batch_tokens: tokens in one forward pass, padding included.
        progress: hears of each batch.

    Yields:
        The scores of a batch of windows; together every token once.
    """
    shown = progress or Progress()
    before = 0
    prefix = prefix_of(tokenizer)
    for ahead in in_chunks(documents):
        for scores in score_texts(
            store, encoder, tokenized(ahead, tokenizer), prefix, settings, batch_tokens
        ):
            yield replace(scores, documents=scores.documents + before)
            shown.advance(len(scores.gold))
        before += len(ahead)


def score_texts(
    store: KNNStore,
    encoder: Encoder,
    texts: Sequence[NDArray[np.integer[Any]]],
    prefix: int | None,
    settings: KNNSettings,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[TokenScores]:
    """Score texts given by their tokens, see `score`; `TokenScores.documents` counts the texts."""
    settings = replace(settings, k=reachable(store, settings.k, settings.selection, settings.mixer))
    most = max(1, _NEIGHBORS // columns_of(settings.k, settings.mixer))
    for members in [range(len(texts))] if settings.pointers is None else few_tokens(texts, most):
        read = None if settings.cache is None else ReadText(settings.cache.size, store.identity.metric)
        batches = pack(
            [texts[at] for at in members],
            prefix=prefix,
            max_length=store.identity.max_length,
            stride=store.identity.stride,
            batch_tokens=batch_tokens,
        )
        parts: Iterator[TokenScores]
        if settings.pointers is None:
            parts = (
                _with_search(store, part, settings)
                for batch in batches
                for part in _divided(read_batch(encoder, batch, settings, read), most)
            )
        else:
            read_all = [read_batch(encoder, batch, settings, read) for batch in batches]
            parts = score_in_step(store, read_all, settings)
        for scores in parts:
            yield replace(scores, documents=scores.documents + members.start)


def _divided(scores: TokenScores, most: int) -> Iterator[TokenScores]:
    """Yield so many tokens at a time."""
    count = len(scores.gold)
    for start in range(0, count, most):
        yield scores if count <= most else scores.rows(np.arange(start, min(start + most, count)))


def _with_search(store: KNNStore, scores: TokenScores, settings: KNNSettings) -> TokenScores:
    found = search_some(
        store, scores.keys.numpy(), scores.searched, settings.k, settings.selection, settings.mixer
    )
    return scores.with_neighbors(found, scores.searched)


def score_held_out(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[TextDocument],
    settings: KNNSettings,
    *,
    left_out: Collection[str] = (),
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Score held-out documents, of which some are in the store and do not retrieve from themselves.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        documents: all of them.
        settings: what to search for and where, how far to look back, and for which tokens not to search.
        left_out: content hashes of documents that are not among what they retrieve from.
        batch_tokens: tokens in one forward pass, padding included.
        progress: hears of each batch.

    Yields:
        As `score`.
    """
    others = [at for at, document in enumerate(documents) if document.content_hash not in left_out]
    groups = [(others, settings)] + [
        ([at], replace(settings, selection=settings.selection.without(document.content_hash)))
        for at, document in enumerate(documents)
        if document.content_hash in left_out
    ]
    for members, reached in groups:
        for scores in score(
            store, encoder, tokenizer, [documents[at] for at in members], reached,
            batch_tokens=batch_tokens, progress=progress,
        ):  # fmt: skip
            yield replace(scores, documents=np.array(members, np.int64)[scores.documents])


def count_predicted(documents: Iterable[TextDocument], tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens that `score` predicts: all, or without a prefix all but each document's first."""
    context = 0 if prefix_of(tokenizer) is not None else 1
    return sum(
        max(0, len(ids) - context) for ahead in in_chunks(documents) for ids in tokenized(ahead, tokenizer)
    )
