"""A model with its tokenizer and windows (`TextReader`), and checks that it can process documents.

`DocumentTokenizer` reads documents and tokenizes them; it needs no model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.documents import (
    FIELDS,
    PAIR_FIELDS,
    Fields,
    OnBad,
    Origin,
    TextDocument,
    convert_rows_to_documents,
)
from knnstore.errors import ConfigError, InputError, UnusableDocumentError
from knnstore.lm.reading.encoder import Encoder
from knnstore.lm.reading.token_text import (
    TokenTexts,
    convert_tokenizer_panics,
    decode_tokens,
    get_token_letters,
)
from knnstore.lm.reading.windows import (
    BATCH_TOKENS,
    WindowBatch,
    find_decoder_prefix,
    pack_windows,
    prefix_of,
)
from knnstore.store import Letters

_CHUNK_DOCUMENTS = 64  # documents that are tokenized together, because fast tokenizers work in parallel


@dataclass(frozen=True, slots=True)
class DocumentTokenizer:
    """Reads documents, and converts them to the tokens that a store keeps.

    A document of an encoder-decoder model is a pair of a source and a text. The tokens of such a text end
    with the EOS token, because the model must also predict where a translation ends.
    """

    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""
    vocabulary: int
    """Number of tokens that the model has."""
    max_source: int | None = None
    """Largest number of tokens in a source, special tokens included; None if documents have no sources."""

    @property
    def fields(self) -> Fields:
        """Names of the fields of a row; a pair also has a field for its source."""
        return FIELDS if self.max_source is None else PAIR_FIELDS

    @property
    def end(self) -> tuple[int, ...]:
        """The token that ends the tokens of every document; empty if documents are not pairs."""
        return () if self.max_source is None else (int(self.tokenizer.eos_token_id),)

    def read(self, rows: Iterable[object], on_bad: OnBad | None = None) -> Iterator[TextDocument]:
        """Convert rows to documents, with sources if documents are pairs; see `convert_rows_to_documents`."""
        return convert_rows_to_documents(rows, fields=self.fields, on_bad=on_bad)

    def tokenize(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids that are stored for each text, uint32, shapes (n_i,).

        Special tokens are left out, except the EOS token after the text of a pair. Does not check whether the
        model has the tokens.

        Raises:
            InputError: the tokenizer fails on one of the texts.
        """
        if self.max_source is None:
            return tokenize_texts(self.tokenizer, texts)
        found = _tokenize(self.tokenizer, text_target=texts, add_special_tokens=False) if texts else []
        return [np.append(tokens, np.array(self.end, np.uint32)) for tokens in found]

    def get_source(self, document: TextDocument) -> str:
        """Return the source of a document, which must be a pair.

        Raises:
            InputError: the document has no source.
        """
        return str(TextDocument.from_row(document, self.fields).source)

    def tokenize_sources(self, sources: list[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each source as the encoder reads it, with special tokens.

        Returns:
            uint32, shapes (m_i,).

        Raises:
            InputError: the tokenizer fails on a source; or a source has too many tokens, no token, or a token
                that the model does not have.
        """
        assert self.max_source is not None
        found = _tokenize(self.tokenizer, text=sources) if sources else []
        for tokens in found:
            if not 0 < len(tokens) <= self.max_source:
                raise InputError(
                    f"the source has {len(tokens):,} tokens, but must have 1 to {self.max_source:,}"
                )
            check_tokens(tokens, self.vocabulary, self.tokenizer)
        return found

    def find_problem(self, document: TextDocument, tokens: NDArray[np.uint32]) -> InputError | None:
        """Return the reason why the model cannot read a document; None if it can.

        Args:
            document: the document.
            tokens: token ids of the document.
        """
        try:
            check_tokens(tokens, self.vocabulary, self.tokenizer)
            if self.max_source is not None:
                self.tokenize_sources([self.get_source(document)])
            elif document.source is not None:
                raise InputError("the document is a pair, but the model reads no source")
        except InputError as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class TextReader:
    """A language model with its tokenizer, and the size of the windows into which texts are cut."""

    encoder: Encoder
    """Computes keys and log-probabilities."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""
    max_length: int
    """Number of tokens in a window, the prefix included; also the largest number of tokens in a source."""
    stride: int
    """Number of tokens between the ends of two windows."""
    batch_tokens: int = BATCH_TOKENS
    """Number of tokens in one forward pass, padding included."""

    @property
    def reads_pairs(self) -> bool:
        """True for an encoder-decoder model, whose documents are pairs of a source and a text."""
        return self.encoder.reads_source

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that precede every document; empty if documents have no prefix."""
        return find_decoder_prefix(self.encoder.model) if self.reads_pairs else prefix_of(self.tokenizer)

    @property
    def document_tokenizer(self) -> DocumentTokenizer:
        """The object that reads and tokenizes documents for the model."""
        limit = self.max_length if self.reads_pairs else None
        return DocumentTokenizer(self.tokenizer, self.encoder.vocabulary, limit)

    @property
    def letters(self) -> Letters:
        """The letters of each token in the vocabulary, without spaces, to compare texts by their letters."""
        return get_token_letters(self.tokenizer)

    def tokenize(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids that a store keeps for a text, uint32, shape (length,).

        Special tokens are left out, except the EOS token after the text of a pair.

        Raises:
            InputError: the text has a token that the model does not have.
        """
        tokens = self.document_tokenizer.tokenize([text])[0]
        check_tokens(tokens, self.encoder.vocabulary, self.tokenizer)
        return tokens

    def tokenize_documents(self, documents: Sequence[TextDocument]) -> list[NDArray[np.uint32]]:
        """Return the token ids that a store keeps for each document, uint32, shapes (length,).

        Special tokens are left out, except the EOS token after the text of a pair.

        Raises:
            InputError: a document has a token that the model does not have, or a source that it cannot read;
                the message names the document.
        """
        tokenizer = self.document_tokenizer
        texts = tokenizer.tokenize([document.text for document in documents])
        for document, tokens in zip(documents, texts, strict=True):
            problem = tokenizer.find_problem(document, tokens)
            if problem is not None:
                raise InputError(f"{document.place}: {problem}") from problem
        return texts

    def tokenize_sources(self, documents: Sequence[TextDocument]) -> list[NDArray[np.uint32]] | None:
        """Return the token ids of each document's source, uint32, shapes (m_i,).

        Returns None if the model reads no sources.

        Raises:
            InputError: a document has no source, or the model cannot read it.
        """
        if not self.reads_pairs:
            return None
        tokenizer = self.document_tokenizer
        return tokenizer.tokenize_sources([tokenizer.get_source(document) for document in documents])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return decode_tokens(self.tokenizer, tokens)

    def decode_pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return the text that each token adds after the previous tokens.

        Args:
            tokens: token ids.
            before: the tokens before `tokens`, whose text is not returned.
        """
        return TokenTexts(self.tokenizer).decode_pieces(tokens, before)

    def batch_windows(
        self,
        texts: Sequence[NDArray[np.integer[Any]]],
        sources: Sequence[NDArray[np.integer[Any]]] | None = None,
    ) -> Iterator[WindowBatch]:
        """Cut texts into windows of `max_length` tokens, and yield batches of windows.

        Args:
            texts: token ids of each text, shapes (n_i,).
            sources: token ids of the source of each text, as `tokenize_sources` returns them.

        Raises:
            ConfigError: the model reads sources, but `sources` is None.
        """
        if self.reads_pairs and sources is None:
            raise ConfigError(
                "an encoder-decoder model needs the source of each text, but only the text was given: "
                "`explain` takes the source as source=... (--source)"
            )
        return pack_windows(
            texts,
            prefix=self.prefix,
            max_length=self.max_length,
            stride=self.stride,
            batch_tokens=self.batch_tokens,
            sources=sources,
        )

    def count_predicted(self, documents: Iterable[TextDocument]) -> int:
        """Count the tokens of documents that are predicted when the documents are scored.

        These are all tokens; without a prefix, all except the first token of each document.

        Raises:
            InputError: a document has a token that the model does not have.
        """
        context = 0 if self.prefix else 1
        return sum(
            max(0, len(ids) - context)
            for chunk in chunk_documents(documents)
            for ids in self.tokenize_documents(chunk)
        )


def usable_documents(
    reader: TextReader, documents: Iterable[object], on_bad: OnBad | None = None
) -> Iterator[TextDocument]:
    """Yield the documents that the model can read. Documents without tokens are yielded as well.

    Args:
        reader: the object with the model and its tokenizer.
        documents: rows (dicts), texts or `TextDocument`s.
        on_bad: called with the error of each row that is not a document, and of each document with a token
            that the model does not have or a source that it cannot read; the row or document is skipped. None
            raises the first error.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; the message names the document.
    """
    tokenizer = reader.document_tokenizer
    for chunk in chunk_documents(tokenizer.read(documents, on_bad)):
        texts = tokenizer.tokenize([document.text for document in chunk])
        for document, tokens in zip(chunk, texts, strict=True):
            reason = tokenizer.find_problem(document, tokens)
            if reason is None:
                yield document
                continue
            problem = unusable_document_error(document, reason)
            if on_bad is None:
                raise problem from reason
            on_bad(problem)


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


def tokenize_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[NDArray[np.uint32]]:
    """Return the token ids of each text, without special tokens, as uint32 arrays of shapes (length,).

    Does not check whether the model has the tokens. No texts give an empty list.

    Raises:
        InputError: the tokenizer fails on one of the texts.
    """
    return _tokenize(tokenizer, text=texts, add_special_tokens=False) if texts else []


def _tokenize(tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> list[NDArray[np.uint32]]:
    """Call a tokenizer with at least one text, and return the token ids of each text, uint32, shapes (n_i,).

    Raises:
        InputError: the tokenizer fails on one of the texts.
    """
    with convert_tokenizer_panics():
        encoded = tokenizer(**arguments, verbose=False)["input_ids"]
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


def check_tensors(**values: Any) -> None:
    """Check that arguments of a model are tensors or None.

    Args:
        **values: the arguments, by name.

    Raises:
        InputError: an argument is something else, for example a list or an array of numpy.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise InputError(
                f"{name} is {type(value).__name__}, not a tensor of torch: convert it with torch.tensor, or "
                'tokenize with return_tensors="pt"'
            )


def chunk_documents(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    """Yield consecutive lists of at most `_CHUNK_DOCUMENTS` documents; no documents give no lists."""
    remaining = iter(documents)
    while chunk := list(islice(remaining, _CHUNK_DOCUMENTS)):
        yield chunk
