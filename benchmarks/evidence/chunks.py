"""Chunks of documents, found with BM25, to put into a prompt."""

from collections.abc import Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader


class ChunkIndex:
    """A BM25 index of consecutive chunks of documents, with the defaults of `bm25s` (Lucene's formula).

    Args:
        reader: the object with the tokenizer.
        documents: the documents.
        size: number of tokens in a chunk; the last chunk of a document may be shorter.
        prompt_tokens: number of tokens of all chunks in a prompt: as many chunks as fit, at least one.
    """

    def __init__(
        self, reader: TextReader, documents: Sequence[TextDocument], size: int, prompt_tokens: int
    ) -> None:
        texts = reader.tokenize_documents(documents)
        self._chunks = [
            text[start : start + size].astype(np.int64)
            for text in texts
            for start in range(0, len(text), size)
        ]
        self._separator = reader.tokenize("\n\n").astype(np.int64)
        self._count = min(max(1, prompt_tokens // size), len(self._chunks))
        words = _split_words([reader.decode(chunk.tolist()) for chunk in self._chunks])
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)
        self.bytes = sum(array.nbytes for array in self._index.scores.values() if hasattr(array, "nbytes"))
        """Bytes of the index's arrays, without the chunks' tokens and the vocabulary."""

    def retrieve(self, query: str) -> list[NDArray[np.int64]]:
        """Return token ids of the best chunks, each with a blank line after it; the last one is the best."""
        found, scores = self._index.retrieve(_split_words([query]), k=self._count, show_progress=False)
        best = [int(number) for number, score in zip(found[0], scores[0], strict=True) if score > 0]
        return [np.concatenate([self._chunks[number], self._separator]) for number in reversed(best)]


def _split_words(texts: list[str]) -> list[list[str]]:
    """Split texts into lower-case words without English stop words."""
    words: list[list[str]] = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return words
