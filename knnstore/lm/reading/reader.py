"""A model with its tokenizer and windows (`TextReader`), and checks that it can process documents."""

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
from knnstore.lm.reading.token_text import TokenTexts, decode_tokens, get_token_letters, named_panics
from knnstore.lm.reading.windows import BATCH_TOKENS, WindowBatch, pack, prefix_of
from knnstore.store import Letters

_CHUNK_DOCUMENTS = 64  # documents that are tokenized together, because fast tokenizers work in parallel


@dataclass(frozen=True, slots=True)
class TextReader:
    """A language model with its tokenizer, and the size of the windows into which texts are cut."""

    encoder: Encoder
    """Computes keys and log-probabilities."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""
    max_length: int
    """Number of tokens in a window, the prefix included."""
    stride: int
    """Number of tokens between the ends of two windows."""
    batch_tokens: int = BATCH_TOKENS
    """Number of tokens in one forward pass, padding included."""

    @property
    def prefix(self) -> int | None:
        """The token that precedes every document; None if documents have no prefix."""
        return prefix_of(self.tokenizer)

    @property
    def letters(self) -> Letters:
        """The letters of each token in the vocabulary, without spaces, to compare texts by their letters."""
        return get_token_letters(self.tokenizer)

    def tokens(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids of a text, without special tokens, uint32, shape (length,).

        Raises:
            InputError: the text has a token that the model does not have.
        """
        tokens = tokenized(self.tokenizer, [text])[0]
        check_tokens(tokens, self.encoder.vocabulary, self.tokenizer)
        return tokens

    def tokenized(self, documents: Sequence[TextDocument]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each document, without special tokens, uint32, shapes (length,).

        Raises:
            InputError: a document has a token that the model does not have; the message names the document.
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
        """Return the text of tokens, special tokens included."""
        return decode_tokens(self.tokenizer, tokens)

    def pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return the text that each token adds after the previous tokens.

        Args:
            tokens: token ids.
            before: the tokens before `tokens`, whose text is not returned.
        """
        return TokenTexts(self.tokenizer).pieces(tokens, before)

    def batches(self, texts: Sequence[NDArray[np.integer[Any]]]) -> Iterator[WindowBatch]:
        """Cut texts into windows of `max_length` tokens, and yield batches of windows.

        Args:
            texts: token ids of each text, shapes (n_i,).
        """
        return pack(
            texts,
            prefix=self.prefix,
            max_length=self.max_length,
            stride=self.stride,
            batch_tokens=self.batch_tokens,
        )

    def count_predicted(self, documents: Iterable[TextDocument]) -> int:
        """Count the target tokens of documents.

        All tokens count; without a prefix the first token of each document is not predicted, so it does not
        count.

        Raises:
            InputError: a document has a token that the model does not have.
        """
        context = 0 if self.prefix is not None else 1
        return sum(
            max(0, len(ids) - context) for chunk in in_chunks(documents) for ids in self.tokenized(chunk)
        )


def usable_documents(
    reader: TextReader, documents: Iterable[object], on_bad: OnBad | None = None
) -> Iterator[TextDocument]:
    """Yield the documents whose tokens the model has. Documents without tokens are yielded as well.

    Args:
        reader: the object with the model and its tokenizer.
        documents: rows (dicts), texts or `TextDocument`s.
        on_bad: called with the error of each row that is not a document, and of each document with a token
            that the model does not have; the row or document is skipped. None raises the first error.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; the message names the document.
    """
    for chunk in in_chunks(documents_of(documents, on_bad=on_bad)):
        texts = tokenized(reader.tokenizer, [document.text for document in chunk])
        for document, tokens in zip(chunk, texts, strict=True):
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
    """Create the error for a document that cannot be used; the error has the document's id and origin.

    Args:
        document: the document.
        reason: the error that says what is wrong with the document.
    """
    origin = document.origin or Origin("")
    return UnusableDocumentError(
        f"{document.place}: {reason}", in_folder=origin.in_folder, id=document.id, where=origin.where
    )


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[NDArray[np.uint32]]:
    """Return the token ids of each text, without special tokens, as uint32 arrays of shapes (length,).

    Whether the model has the tokens is not checked. No texts give an empty list.

    Raises:
        InputError: the tokenizer fails on one of the texts.
    """
    with named_panics():
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return [np.array(tokens, np.uint32) for tokens in encoded]


def check_tokens(
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Check that a model has all of the tokens.

    Args:
        tokens: token ids, shape (n,); may be empty.
        vocabulary: number of tokens that the model has.
        tokenizer: if given, the error message contains the text of the token.

    Raises:
        InputError: a token is negative or not below `vocabulary`. The message names the first wrong token and
            its position, counted from 0.
    """
    ids = np.asarray(tokens)  # Python integers may be larger than int64
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


def in_chunks(
    documents: Iterable[TextDocument], size: int = _CHUNK_DOCUMENTS
) -> Iterator[list[TextDocument]]:
    """Yield consecutive lists of at most `size` documents; no documents give no lists."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, size)):
        yield chunk
