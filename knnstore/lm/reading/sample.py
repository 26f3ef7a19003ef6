"""A small random sample of many documents, for what is fitted before there is a store."""

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys
from knnstore.documents import OnBad, TextDocument
from knnstore.errors import InputError
from knnstore.lm.reading.reader import TextReader, in_chunks, usable_documents
from knnstore.progress import Progress

KEYS_FITTED_ON = 32_768
"""Keys that a projection is fitted on, if there is so much text."""

_CHARACTERS_PER_TOKEN = 8  # more than most texts have


def sample_documents(
    documents: Iterable[TextDocument], characters: int, *, longest: int | None = None
) -> list[TextDocument]:
    """Choose documents at random until their texts are about so long together; the same ones each time.

    Those with the lowest hashes are chosen: in whichever order they come, and each text once. Memory is
    that of the sample, however many documents there are. Of each at most `longest` characters are counted;
    the last one may exceed what is to be reached.
    """
    chosen: list[tuple[int, int, TextDocument]] = []  # a heap with the highest hash first
    hashes: set[int] = set()
    size = 0

    def counted(document: TextDocument) -> int:
        return len(document.text) if longest is None else min(len(document.text), longest)

    for at, document in enumerate(documents):
        hash = int(document.content_hash, 16)
        if hash in hashes:
            continue
        heapq.heappush(chosen, (-hash, at, document))
        hashes.add(hash)
        size += counted(document)
        while size - counted(chosen[0][2]) >= characters:
            negative, _, dropped = heapq.heappop(chosen)
            hashes.remove(-negative)
            size -= counted(dropped)
    return [document for *_, document in sorted(chosen, reverse=True)]


def sample_tokens(
    reader: TextReader,
    documents: Iterable[TextDocument],
    count: int,
    *,
    longest: int | None = None,
    on_bad: OnBad | None = None,
) -> list[NDArray[np.uint32]]:
    """Choose documents at random, see `sample_documents`, of so many tokens together.

    Args:
        reader: makes their tokens.
        documents: read once, to the end.
        count: tokens; the last document is cut there.
        longest: tokens where each document is cut; default nowhere.
        on_bad: called for each chosen document with a token that the model does not have, which is then
            left out. None raises at the first.

    Returns:
        The tokens of each document; fewer in all where there is less text.

    Raises:
        UnusableDocumentError: a chosen document has such a token and `on_bad` is None; names it.
    """
    texts: list[NDArray[np.uint32]] = []
    longest = longest or count
    chosen = sample_documents(
        documents, _CHARACTERS_PER_TOKEN * count, longest=_CHARACTERS_PER_TOKEN * longest
    )
    for ahead in in_chunks(usable_documents(reader, chosen, on_bad)):
        for tokens in reader.tokenized(ahead):
            texts.append(tokens[: min(count, longest)])
            count -= len(texts[-1])
            if count == 0:
                return texts
    return texts


def sample_keys(
    reader: TextReader,
    documents: Iterable[TextDocument],
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Keys:
    """Take the keys of documents chosen at random.

    Args:
        reader: the model.
        documents: read once, to the end.
        on_bad: as of `sample_tokens`.
        progress: is told of each batch.

    Returns:
        float32, shape (n, d).
    """
    shown = progress or Progress()
    texts = sample_tokens(reader, documents, KEYS_FITTED_ON, on_bad=on_bad)
    shown.start("sampling keys", total=sum(len(text) for text in texts))
    parts: list[Keys] = []
    for batch in reader.batches(texts):
        parts.append(reader.encoder.keys(batch.input_ids, batch.at).cpu().numpy())
        shown.advance(len(batch.at))
    shown.finish()
    if not parts:
        raise InputError("the sample holds no token to take a key of: give other documents")
    return np.concatenate(parts)
