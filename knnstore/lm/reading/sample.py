"""Drawing a small random sample of documents, tokens or keys, to fit a projection before a store exists."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys
from knnstore.documents import OnBad, TextDocument
from knnstore.errors import InputError
from knnstore.lm.reading.reader import TextReader, chunk_documents, usable_documents
from knnstore.progress import Progress

KEYS_FITTED_ON = 32_768
"""Largest number of keys that a projection is fitted on."""

_CHARACTERS_PER_TOKEN = 8  # more than in most texts, so that the sample has enough tokens


def sample_documents(
    documents: Iterable[TextDocument], characters: int, *, longest: int | None = None
) -> list[TextDocument]:
    """Sample documents until their texts have at least `characters` characters together.

    The documents with the lowest content hashes are chosen, so the sample does not depend on the order of the
    documents, and each text is chosen once. Only the sample is kept in memory. If the documents have fewer
    characters, all of them are returned.

    Args:
        documents: the documents to choose from; read once, to the end.
        characters: number of characters to reach; the last chosen document may go beyond it.
        longest: largest number of characters that count for one document; default no limit.

    Returns:
        The documents in ascending order of their hashes.
    """
    chosen: list[tuple[int, int, TextDocument]] = []  # a heap with the highest hash first
    hashes: set[int] = set()
    size = 0

    def count_characters(document: TextDocument) -> int:
        return len(document.text) if longest is None else min(len(document.text), longest)

    for at, document in enumerate(documents):
        hash = int(document.content_hash, 16)
        if hash in hashes:
            continue
        heapq.heappush(chosen, (-hash, at, document))
        hashes.add(hash)
        size += count_characters(document)
        while size - count_characters(chosen[0][2]) >= characters:
            negative, _, dropped = heapq.heappop(chosen)
            hashes.remove(-negative)
            size -= count_characters(dropped)
    return [document for *_, document in sorted(chosen, reverse=True)]


class TokenSample(NamedTuple):
    """The tokens of a sample of documents."""

    texts: list[NDArray[np.uint32]]
    """Token ids of each document, shapes (n_i,)."""
    sources: list[NDArray[np.uint32]] | None
    """Token ids of the source of each document, shapes (m_i,); None for a model that reads no sources."""


def sample_tokens(
    reader: TextReader,
    documents: Iterable[TextDocument],
    count: int,
    *,
    longest: int | None = None,
    on_bad: OnBad | None = None,
) -> TokenSample:
    """Sample documents that have `count` tokens together, and return their token ids.

    The documents with the lowest content hashes are chosen, so the sample does not depend on their order.

    Args:
        reader: the object that tokenizes the documents.
        documents: the documents to choose from; read once, to the end.
        count: total number of tokens; the last document is cut to reach it exactly.
        longest: number of tokens to which each document is cut; default `count`.
        on_bad: called with the error of each chosen document that has a token that the model does not have;
            the document is skipped. None raises the first error.

    Returns:
        The token ids of each document; fewer than `count` in total if the documents have less text.

    Raises:
        UnusableDocumentError: a chosen document has a token that the model does not have, and `on_bad` is
            None; the message names the document.
    """
    texts, sources = list[NDArray[np.uint32]](), list[NDArray[np.uint32]]()
    longest = longest or count
    chosen = sample_documents(
        documents, _CHARACTERS_PER_TOKEN * count, longest=_CHARACTERS_PER_TOKEN * longest
    )
    for chunk in chunk_documents(usable_documents(reader, chosen, on_bad)):
        sources += reader.tokenize_sources(chunk) or ()
        for tokens in reader.tokenize_documents(chunk):
            texts.append(tokens[: min(count, longest)])
            count -= len(texts[-1])
            if count == 0:
                break
        if count == 0:
            break
    return TokenSample(texts, sources[: len(texts)] if reader.reads_pairs else None)


def sample_keys(
    reader: TextReader,
    documents: Iterable[TextDocument],
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Keys:
    """Compute the keys of a random sample of at most 32,768 tokens.

    Args:
        reader: the object that computes the keys.
        documents: the documents to choose from; read once, to the end.
        on_bad: called with the error of each chosen document that has a token that the model does not have;
            the document is skipped. None raises the first error.
        progress: progress display, which receives the number of keys of each batch; None for no display.

    Returns:
        The keys, float32, shape (n, d), n >= 1.

    Raises:
        InputError: the sample has no token with a key.
        UnusableDocumentError: a chosen document has a token that the model does not have, and `on_bad` is
            None.
    """
    shown = progress or Progress()
    sample = sample_tokens(reader, documents, KEYS_FITTED_ON, on_bad=on_bad)
    shown.start("sampling keys", total=sum(len(text) for text in sample.texts))
    parts: list[Keys] = []
    for batch in reader.batch_windows(*sample):
        parts.append(reader.encoder.compute_keys(batch.input_ids, batch.at, batch.source).cpu().numpy())
        shown.advance(len(batch.at))
    shown.finish()
    if not parts:
        raise InputError("the sample has no token for which a key can be computed: give other documents")
    return np.concatenate(parts)
