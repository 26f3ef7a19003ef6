"""A model that reads text: documents become tokens, windows, keys and log-probabilities."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from knnstore.documents import OnBad, Origin, TextDocument, documents_of
from knnstore.errors import InputError, UnusableDocumentError
from knnstore.lm.reading.encoder import Encoder
from knnstore.lm.reading.token_text import TokenTexts, decode_tokens, letters_of
from knnstore.lm.reading.windows import BATCH_TOKENS, WindowBatch, pack, prefix_of
from knnstore.store import Letters

_AHEAD = 64  # tokenized together: fast tokenizers work in parallel


@dataclass(frozen=True, slots=True)
class TextReader:
    """A language model with its tokenizer, and the windows in which it reads."""

    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Tokens in a window, the prefix counted."""
    stride: int
    """By how much a window's end moves on."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens in one forward pass, padding included."""

    @property
    def prefix(self) -> int | None:
        """The token that precedes every document, if any."""
        return prefix_of(self.tokenizer)

    @property
    def letters(self) -> Letters:
        """What each token is spelled with."""
        return letters_of(self.tokenizer)

    def tokens(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text, without special tokens, shape (length,).

        Raises:
            InputError: the tokenizer gives a token that the model does not have.
        """
        tokens = tokenized(self.tokenizer, [text])[0]
        check_tokens(tokens, self.encoder.vocabulary, self.tokenizer)
        return tokens

    def tokenized(self, documents: Sequence[TextDocument]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each document, without special tokens, shapes (length,).

        Raises:
            InputError: the tokenizer gives a token that the model does not have; names the document.
        """
        texts = tokenized(self.tokenizer, [document.text for document in documents])
        vocabulary = self.encoder.vocabulary
        for document, tokens in zip(documents, texts, strict=True):
            try:
                check_tokens(tokens, vocabulary, self.tokenizer)
            except InputError as error:
                raise InputError(f"{document.place}: {error}") from error
        return texts

    def text(self, tokens: Sequence[int]) -> str:
        """Decode a text, with its special tokens."""
        return decode_tokens(self.tokenizer, tokens)

    def pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return what each token adds to the text of those before it; see `TokenTexts.pieces`."""
        return TokenTexts(self.tokenizer).pieces(tokens, before)

    def batches(self, texts: Sequence[NDArray[np.integer[Any]]]) -> Iterator[WindowBatch]:
        """Cut texts, given by their tokens, into windows and pack these into batches; see `pack`."""
        return pack(
            texts,
            prefix=self.prefix,
            max_length=self.max_length,
            stride=self.stride,
            batch_tokens=self.batch_tokens,
        )

    def count_predicted(self, documents: Iterable[TextDocument]) -> int:
        """Count the tokens that are predicted: all, or without a prefix all but each document's first."""
        context = 0 if self.prefix is not None else 1
        return sum(
            max(0, len(ids) - context) for ahead in in_chunks(documents) for ids in self.tokenized(ahead)
        )


def usable_documents(
    reader: TextReader, documents: Iterable[object], on_bad: OnBad | None = None
) -> Iterator[TextDocument]:
    """Yield the documents that the model can read; an empty one is among them.

    Args:
        reader: of the model.
        documents: rows, texts or `TextDocument`s, see `documents_of`.
        on_bad: called for each row that is no document and for each document with a token that the model
            does not have, which is then left out. None raises at the first.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; names it.
    """
    for ahead in in_chunks(documents_of(documents, on_bad=on_bad)):
        texts = tokenized(reader.tokenizer, [document.text for document in ahead])
        for document, tokens in zip(ahead, texts, strict=True):
            try:
                check_tokens(tokens, reader.encoder.vocabulary, reader.tokenizer)
            except InputError as error:
                problem = unusable_document_error(document, error)
                if on_bad is None:
                    raise problem from error
                on_bad(problem)
            else:
                yield document


def unusable_document_error(document: TextDocument, reason: InputError) -> UnusableDocumentError:
    """Return the error of a document that cannot be used; it names the document and where it was read."""
    origin = document.origin or Origin("")
    return UnusableDocumentError(
        f"{document.place}: {reason}", in_folder=origin.in_folder, id=document.id, where=origin.where
    )


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[NDArray[np.uint32]]:
    """The token ids of each text, without special tokens, shapes (length,)."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return [np.array(tokens, np.uint32) for tokens in encoded]


def check_tokens(
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse tokens that a model cannot read.

    Args:
        tokens: token ids, shape (n,); may be empty.
        vocabulary: number of tokens that the model has.
        tokenizer: writes the token's text into the message.

    Raises:
        InputError: a token is negative or not below `vocabulary`; names the first one and its position,
            counted from 0.
    """
    ids = np.asarray(tokens)  # of Python integers of any size, too
    is_outside = (ids < 0) | (ids >= vocabulary)
    if not is_outside.any():
        return
    position = int(np.argmax(is_outside))
    token = int(ids[position])
    text, advice = "", ""
    if tokenizer is not None and 0 <= token < len(tokenizer):
        text = f" ({tokenizer.convert_ids_to_tokens(token)!r})"
        advice = f"; the tokenizer has {len(tokenizer):,}: use the tokenizer that the model was trained with"
    raise InputError(
        f"token {token}{text} at position {position} is not among the model's {vocabulary:,} tokens{advice}"
    )


def in_chunks(documents: Iterable[TextDocument], size: int = _AHEAD) -> Iterator[list[TextDocument]]:
    """Cut a stream of documents into lists of at most `size`."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, size)):
        yield chunk
