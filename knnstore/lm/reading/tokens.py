"""From documents to tokens."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from knnstore.documents import TextDocument
from knnstore.lm.reading.windows import prefix_of

_AHEAD = 64  # tokenised together: fast tokenizers work in parallel


def in_chunks(documents: Iterable[TextDocument], size: int = _AHEAD) -> Iterator[list[TextDocument]]:
    """Cut a stream of documents into lists of at most `size`."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, size)):
        yield chunk


def tokenized(
    documents: Sequence[TextDocument], tokenizer: PreTrainedTokenizerBase
) -> list[NDArray[np.uint32]]:
    """The token ids of each document, without special tokens, uint32 of shape (length,)."""
    if not documents:
        return []
    texts = [document.text for document in documents]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(tokens, np.uint32) for tokens in encoded]


def count_predicted(documents: Iterable[TextDocument], tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens that `score` predicts: all, or without a prefix all but each document's first."""
    context = 0 if prefix_of(tokenizer) is not None else 1
    return sum(
        max(0, len(ids) - context) for ahead in in_chunks(documents) for ids in tokenized(ahead, tokenizer)
    )
