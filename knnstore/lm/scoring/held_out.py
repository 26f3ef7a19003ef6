"""Running the model and one search over every token of held-out documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Neighbors
from knnstore.documents import TextDocument
from knnstore.lm.reading import BATCH_TOKENS, Batch, Encoder, in_chunks, pack, prefix_of, tokenized
from knnstore.lm.retrieval import ReadText, columns_of, reachable, retrieve_in_step, search_some
from knnstore.lm.scoring.scores import TokenScores, together
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import KNNStore

_NEIGHBORS = BATCH_TOKENS << 10
"""Of all tokens that are searched for at once: fewer with a larger k, so that memory does not grow."""


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


_TOKENS = 1 << 15
"""Of documents that advance together: what is known of each is in memory at once."""


def few_tokens(texts: Sequence[NDArray[np.integer[Any]]], most: int) -> list[range]:
    """Divide texts into runs that advance together, of at most so many texts."""
    runs, tokens = [range(0)], 0
    for at, text in enumerate(texts):
        if tokens + len(text) > _TOKENS or len(runs[-1]) == most:
            runs, tokens = [*runs, range(at, at)], 0
        runs[-1] = range(runs[-1].start, at + 1)
        tokens += len(text)
    return [run for run in runs if len(run)]


def score_in_step(
    store: KNNStore, parts: Sequence["TokenScores"], settings: KNNSettings
) -> Iterator["TokenScores"]:
    """Retrieve for every token of some texts.

    Args:
        store: where to search and to follow pointers.
        parts: from `read_batch`, together the whole texts, in any order.
        settings: with pointers.

    Yields:
        The tokens at one position of all texts.
    """
    if not parts:
        return
    whole = together(parts)
    keys = whole.keys.numpy()

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return search_some(
            store, keys[rows], whole.searched[rows], settings.k, settings.selection, settings.mixer
        )

    steps = retrieve_in_step(
        store, keys, whole.gold.numpy(), whole.documents, whole.positions, settings, search
    )
    for rows, (found, searched) in steps:
        yield whole.rows(rows).with_neighbors(found, searched & whole.searched[rows])
