"""Running the model and one search over every token of held-out documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Ids
from knnstore.documents import TextDocument
from knnstore.lm.continuous_cache import ReadText, Recent
from knnstore.lm.encoder import Encoder
from knnstore.lm.mixing import Retrieved
from knnstore.lm.retrieval import columns_of
from knnstore.lm.settings import KNNSettings
from knnstore.lm.skipping import search_some
from knnstore.lm.text import in_chunks, tokenized
from knnstore.lm.windows import Batch, pack, prefix_of
from knnstore.progress import Progress
from knnstore.store import KNNStore, tokens_of

BATCH_TOKENS = 4_096
"""Tokens in one forward pass, padding included."""
_NEIGHBORS = BATCH_TOKENS << 10
"""Of all tokens of a batch: those of larger k have fewer tokens, so that memory does not grow."""


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


def score_batch(
    store: KNNStore,
    encoder: Encoder,
    batch: Batch,
    settings: KNNSettings,
    read: ReadText | None = None,
) -> TokenScores:
    """Score the tokens that one batch of windows predicts; see `score`."""
    skip = settings.skip
    encoded = encoder.encode(batch.input_ids, batch.at)
    keys = encoded.keys.cpu()
    log_probs = encoder.log_probs(encoded.states, batch.gold)
    lm_max, lm_entropy = log_probs.best.cpu(), log_probs.entropy.cpu()
    searched = np.ones(len(keys), bool) if skip is None else skip.searched(keys, lm_max, lm_entropy).numpy()
    found = search_some(store, keys.numpy(), searched, settings.k, settings.selection, settings.mixer)
    gold = torch.from_numpy(batch.gold)
    return TokenScores(
        lm_log_probs=log_probs.gold.cpu(),
        lm_max=lm_max,
        lm_entropy=lm_entropy,
        searched=searched,
        ids=found.ids,
        distances=torch.from_numpy(found.distances),
        tokens=torch.from_numpy(tokens_of(found.ids)),
        gold=gold,
        keys=keys,
        documents=batch.documents,
        positions=batch.positions,
        log_weights=None if found.log_weights is None else torch.from_numpy(found.log_weights),
        recent=None if read is None else read.follow(keys, gold, batch.documents, batch.positions),
    )


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
    for ahead in in_chunks(documents):
        cache = settings.cache
        read = None if cache is None else ReadText(cache.size, store.identity.metric)
        for batch in pack(
            tokenized(ahead, tokenizer),
            prefix=prefix_of(tokenizer),
            max_length=store.identity.max_length,
            stride=store.identity.stride,
            batch_tokens=min(batch_tokens, max(1, _NEIGHBORS // columns_of(settings.k, settings.mixer))),
        ):
            scores = score_batch(store, encoder, batch, settings, read)
            yield replace(scores, documents=scores.documents + before)
            shown.advance(len(batch.at))
        before += len(ahead)


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
