"""Scoring text: the model's prediction of every token, and the evidence for the token.

`score_held_out` scores held-out documents, `score_texts` scores texts given by their tokens, and
`score_text_in_turns` does so in short turns, for a server. All yield `TokenScores`, from which the caller
computes mixtures. `HeldOut` finds the held-out documents that the store contains too.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import TextDocument
from knnstore.errors import InputError
from knnstore.lm.batch import Batch
from knnstore.lm.components import Form, bound_record_count, limit_k_to_store, probes_cells
from knnstore.lm.contexts import Contexts, DocumentTexts
from knnstore.lm.mixing import CellSums, Evidence, NeighborSums
from knnstore.lm.mixture import look_up
from knnstore.lm.reading import BATCH_TOKENS, Encoded, LogProbs, TextReader, WindowBatch, chunk_documents
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import KNOWN, Reader, Selection

_MAX_NEIGHBORS = BATCH_TOKENS << 10
"""Largest number of neighbors of all tokens together in one look-up; it bounds memory."""
_MAX_CELL_DISTANCES = 1 << 26
"""Largest number of distances to records of cells in memory: 256 MiB. With a larger number, each cell would
be read less often, but more memory would be needed."""
_MAX_CACHED_TOKENS = 1 << 23
"""Largest number of preceding tokens that one look-up in the continuous cache weights: 32 MiB for each
temperature."""
_QUERIES = 2 * BATCH_TOKENS
"""Number of queries that probe cells together: the more queries share a cell, the less a query costs."""
_TURN_TOKENS = 128
"""Largest number of tokens of a forward pass while other requests of a server wait."""
_MAX_TURN_NEIGHBORS = 1 << 16
"""Largest number of neighbors of all tokens together in the look-up of one turn."""


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """The base model's predictions of n tokens, before anything is retrieved from a store."""

    lm_log_probs: Tensor
    """Log-probability of each target token by the model alone, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the most probable token at each position, float32, shape (n,)."""
    lm_entropy: Tensor
    """Entropy of p_LM in nats, float32, shape (n,)."""
    targets: Tensor
    """The target tokens, int64, shape (n,)."""
    keys: Tensor
    """Query vector of each position, float32, shape (n, d)."""
    documents: NDArray[np.int64]
    """Index of each token's document among the scored documents, shape (n,)."""
    positions: NDArray[np.int64]
    """Index of each token in its document, shape (n,)."""

    def __len__(self) -> int:
        return len(self.targets)

    def select_rows(self, rows: slice | Tensor) -> "ReadTokens":
        """Return the predictions of some of the tokens.

        Args:
            rows: a slice; or indices, int64, shape (m,); or a mask, bool, shape (n,).
        """
        # numpy would take a tensor with one index for a number.
        array_rows = rows.numpy() if isinstance(rows, Tensor) else rows
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return ReadTokens(
            **{
                name: column[rows if isinstance(column, Tensor) else array_rows]
                for name, column in columns.items()
            }
        )

    @classmethod
    def concatenate(cls, parts: Sequence["ReadTokens"]) -> "ReadTokens":
        """Concatenate the predictions of several groups of tokens.

        Args:
            parts: at least one group; a single group is returned unchanged.
        """
        if len(parts) == 1:
            return parts[0]
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        joined: dict[str, Any] = {
            name: torch.cat(column) if isinstance(column[0], Tensor) else np.concatenate(column)
            for name, column in columns.items()
        }
        return cls(**joined)

    def to_batch(self, vocabulary: int, contexts: Contexts | None) -> Batch:
        """Return the positions of the tokens as a batch for `look_up`.

        Args:
            vocabulary: number of tokens of the vocabulary.
            contexts: the preceding text of each position; None if no component needs text.
        """
        return Batch(
            self.keys, self.lm_max, self.lm_entropy, vocabulary, contexts=contexts, targets=self.targets
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The model's predictions of n tokens with the evidence for each token, before λ and T are chosen.

    The evidence is what the components (keys, n-grams, cache) found.
    """

    read: ReadTokens
    """The model's predictions."""
    evidence: Evidence
    """The look-up results of all components."""

    def __len__(self) -> int:
        return len(self.read)

    @property
    def lm_log_probs(self) -> Tensor:
        """Log-probability of each target token by the model alone, float32, shape (n,)."""
        return self.read.lm_log_probs

    @property
    def targets(self) -> Tensor:
        """The target tokens, int64, shape (n,)."""
        return self.read.targets

    @property
    def documents(self) -> NDArray[np.int64]:
        """Index of each token's document, shape (n,)."""
        return self.read.documents

    @property
    def positions(self) -> NDArray[np.int64]:
        """Index of each token in its document, shape (n,)."""
        return self.read.positions

    def with_documents(self, documents: NDArray[np.int64]) -> Self:
        """Return the same scores with other document indices, int64, shape (n,)."""
        return replace(self, read=replace(self.read, documents=documents))


class HeldOut(NamedTuple):
    """Held-out documents, and the stored documents that share much text with them.

    `compare_with_store` creates it.
    """

    documents: list[TextDocument]
    """All held-out documents, in their order."""
    stored: Mapping[str, frozenset[str]]
    """The held-out documents that are in the store. The mapping has the content hash of each, and the content
    hashes of the stored documents that count as the same text. Two documents count as the same text if at
    least half (`KNOWN`) of the shorter one is in the other."""

    @classmethod
    def compare_with_store(
        cls, store: Reader, reader: TextReader, documents: Iterable[object], selection: Selection
    ) -> "HeldOut":
        """Find, for each held-out document, the stored documents with the same text or half of the text.

        Held-out documents that are in the store stay in the list `documents`. To raise an error for them,
        call `refuse_stored`.

        Args:
            store: the store.
            reader: the object that tokenizes the documents.
            documents: the held-out documents, in any form that `add` takes.
            selection: the stored documents to compare with.

        Raises:
            InputError: a document cannot be used.
        """
        listed = list(reader.document_tokenizer.read(documents))
        exact = store.find_stored_hashes((document.content_hash for document in listed), selection)
        overlaps = store.measure_overlaps(reader.tokenize_documents(listed), selection, reader.letters)
        stored = {
            document.content_hash: overlap.documents | ({document.content_hash} & exact)
            for document, overlap in zip(listed, overlaps, strict=True)
            if overlap.share >= KNOWN or document.content_hash in exact
        }
        return cls(listed, stored)

    def refuse_stored(self) -> None:
        """Raise an error if a held-out document is in the store, because it would retrieve from itself.

        Raises:
            InputError: `stored` is not empty.
        """
        if self.stored:
            first = next(document for document in self.documents if document.content_hash in self.stored)
            raise InputError(
                f"{len(self.stored):,} of the held-out documents (for example {first.id!r}) are in the "
                "store, whole or with at least half of their text, so a document would retrieve from itself. "
                "Give other documents, or leave each document out of its search (leave_out, --leave-out)"
            )


def score_held_out(
    store: Reader,
    reader: TextReader,
    documents: Sequence[TextDocument],
    settings: KNNSettings,
    *,
    left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Run the model on held-out documents, and look up what the store predicts for every token.

    Args:
        store: the store that is searched.
        reader: the object that tokenizes the documents and runs the model.
        documents: the held-out documents.
        settings: the settings in force.
        left_out: stored documents that the search for a held-out document leaves out. It maps the content
            hash of the held-out document to the content hashes of the stored documents.
        progress: progress display, which receives the number of scored tokens; None for no display.

    Yields:
        The scores of a few tokens at a time; `TokenScores.documents` has indices into `documents`.
    """
    for members, excluded in group_by_left_out(documents, left_out):
        narrowed = replace(settings, selection=settings.selection.without_content(*excluded))
        for scores in score_documents(store, reader, [documents[at] for at in members], narrowed, progress):
            yield scores.with_documents(np.array(members, np.int64)[scores.documents])


def group_by_left_out(
    documents: Sequence[TextDocument], left_out: Mapping[str, Collection[str]]
) -> list[tuple[list[int], list[str]]]:
    """Group documents whose searches leave out the same stored documents.

    All documents of a group can be scored with the same selection.

    Args:
        documents: the documents.
        left_out: stored documents that the search for a document leaves out. It maps the content hash of the
            document to the content hashes of the stored documents. Without an entry, nothing is left out.

    Returns:
        For each group the indices of its documents, ascending, and the content hashes of the stored documents
        to leave out, sorted. No documents give no groups.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(tuple(sorted(left_out.get(document.content_hash, ()))), []).append(index)
    return [(members, list(excluded)) for excluded, members in groups.items()]


def score_documents(
    store: Reader,
    reader: TextReader,
    documents: Iterable[TextDocument],
    settings: KNNSettings,
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Run the model on documents, and look up what the store predicts for every target token.

    The documents are iterated once, and a few are in memory at a time.

    Args:
        store: the store that is searched.
        reader: the object that tokenizes the documents and runs the model.
        documents: the documents.
        settings: the settings in force.
        progress: progress display, which receives the number of scored tokens; None for no display.

    Yields:
        The scores of a few tokens at a time, in the order in which windows are packed into batches. Every
        predicted token is in exactly one item. `TokenScores.documents` has the index of a token's document.
    """
    bar, preceding = progress or Progress(), 0
    for chunk in chunk_documents(documents):
        texts, sources = reader.tokenize_documents(chunk), reader.tokenize_sources(chunk)
        for scores in score_texts(store, reader, texts, settings, sources=sources):
            yield scores.with_documents(scores.documents + preceding)
            bar.advance(len(scores))
        preceding += len(chunk)


def score_texts(
    store: Reader,
    reader: TextReader,
    texts: Sequence[NDArray[np.integer[Any]]],
    settings: KNNSettings,
    *,
    sources: Sequence[NDArray[np.integer[Any]]] | None = None,
    with_record_ids: bool = False,
) -> Iterator[TokenScores]:
    """Run the model on texts given by their tokens, and look up what the store predicts for each token.

    Args:
        store: the store that is searched.
        reader: the object that runs the model.
        texts: token ids of each text, shapes (n_i,).
        settings: the settings in force.
        sources: token ids of the source of each text for an encoder-decoder model, else None.
        with_record_ids: True to keep each retrieved record with its id in the evidence, which needs more
            memory.

    Yields:
        The scores of a few tokens at a time; `TokenScores.documents` has indices into `texts`.
    """
    settings = replace(settings, k=limit_k_to_store(store, settings))
    lookup = EvidenceLookup(store, settings, Form.SOURCES if with_record_ids else Form.TARGET)
    document_texts = _follow_texts(reader, texts, settings)
    predictions = (predict_windows(reader, batch) for batch in reader.batch_windows(texts, sources))
    min_tokens = _QUERIES if probes_cells(store, settings) and not with_record_ids else 1
    for read in _join_batches(predictions, min_tokens):
        yield from lookup(read, _extend_texts(document_texts, read, settings))


def score_text_in_turns(
    store: Reader,
    reader: TextReader,
    text: NDArray[np.integer[Any]],
    settings: KNNSettings,
    most: int = _TURN_TOKENS,
    source: NDArray[np.integer[Any]] | None = None,
) -> Iterator[TokenScores | None]:
    """Score one text in turns. A turn is a short piece of work; between two turns a server can do other work.

    The scores are those of `score_texts` with ``with_record_ids=True``, which keeps the ids of retrieved
    records. They may differ by rounding, because the model runs over one window at a time, in parts of 128
    tokens (an encoder-decoder model: in one part). After each window, a turn searches the store for a few of
    the window's tokens.

    Args:
        store: the store that is searched.
        reader: the object that runs the model.
        text: token ids, shape (n,).
        settings: the settings in force.
        most: largest number of tokens of one look-up.
        source: token ids of the source for an encoder-decoder model, else None.

    Yields:
        At the end of each turn the scores of a few tokens, or None if the turn scored no token.
    """
    settings = replace(settings, k=limit_k_to_store(store, settings))
    lookup = EvidenceLookup(store, settings, Form.SOURCES, most)
    document_texts = _follow_texts(reader, [text], settings)
    sources = None if source is None else [source]
    for batch in replace(reader, batch_tokens=1).batch_windows([text], sources):
        yield None
        read = yield from _predict_window_in_turns(reader, batch)
        yield from lookup(read, _extend_texts(document_texts, read, settings))


def _follow_texts(
    reader: TextReader, texts: Sequence[NDArray[np.integer[Any]]], settings: KNNSettings
) -> DocumentTexts:
    """Create the object that keeps texts and their keys while they are scored, for components that need them.

    It keeps as many keys of each text as the continuous cache compares.

    Args:
        reader: the object with the token that precedes every document.
        texts: token ids of each text.
        settings: the settings in force; without a continuous cache no keys are kept.
    """
    return DocumentTexts(texts, reader.prefix, 0 if settings.cache is None else settings.cache.size)


def _extend_texts(texts: DocumentTexts, read: ReadTokens, settings: KNNSettings) -> Contexts | None:
    """Extend texts that are being scored, and return the context of each predicted token.

    The context of a token is the text before it. For a continuous cache, the key vectors are appended too.

    Args:
        texts: the texts up to the previous batch; they are extended in place.
        read: the tokens that the model predicted in this batch, with their keys.
        settings: the settings in force.

    Returns:
        The contexts. None if no component needs earlier text; then nothing is appended.
    """
    if not settings.needs_text:
        return None
    return texts.append_keys(read.keys, read.documents, read.positions)


def predict_windows(reader: TextReader, batch: WindowBatch) -> ReadTokens:
    """Run the model over one batch of windows (parts of documents), and return its predictions."""
    encoded = reader.encoder.encode(batch.input_ids, batch.at, batch.source)
    return _collect_predictions(encoded, reader.encoder.log_probs(encoded.states, batch.gold), batch)


def _predict_window_in_turns(reader: TextReader, batch: WindowBatch) -> Generator[None, None, ReadTokens]:
    """Run the model over one window (part of a document) in several turns; return its predictions.

    A turn is a short piece of work; between two turns a server can do other work.

    Args:
        reader: the object that runs the model.
        batch: a batch with one window.

    Yields:
        None between two turns.
    """
    encoder = reader.encoder
    encoded = yield from encoder.encode_in_parts(batch.input_ids, batch.at, _TURN_TOKENS, batch.source)
    parts = []
    for start in range(0, len(batch.at), _TURN_TOKENS):
        yield
        rows = slice(start, start + _TURN_TOKENS)
        parts.append(encoder.log_probs(encoded.states[rows], batch.gold[rows]))
    log_probs = LogProbs(*map(torch.cat, zip(*parts, strict=True)))
    yield
    return _collect_predictions(encoded, log_probs, batch)


def _collect_predictions(encoded: Encoded, log_probs: LogProbs, batch: WindowBatch) -> ReadTokens:
    """Move the keys and predictions of a batch of windows to the CPU, and return them as `ReadTokens`."""
    return ReadTokens(
        log_probs.gold.cpu(),
        log_probs.best.cpu(),
        log_probs.entropy.cpu(),
        torch.from_numpy(batch.gold),
        encoded.keys.cpu(),
        batch.documents,
        batch.positions,
    )


class EvidenceLookup:
    """Looks up what the components find for tokens (their evidence), a group of tokens at a time.

    A group is as large as memory allows. If whole cells (groups of records with near keys) are searched, the
    size of the next group depends on the number of records that were found for the last group.

    Args:
        store: the store that is searched.
        settings: the settings in force, with the k that `limit_k_to_store` returns.
        form: the part of the evidence that is kept, e.g. record ids or only probabilities of target tokens.
        turn_tokens: largest number of tokens of a group; a group then has at most `_MAX_TURN_NEIGHBORS`
            neighbors. With None only memory limits the groups.
    """

    def __init__(
        self, store: Reader, settings: KNNSettings, form: Form, turn_tokens: int | None = None
    ) -> None:
        self._store, self._settings, self._form = store, settings, form
        self._turn_tokens = turn_tokens
        self._max_neighbors = _MAX_NEIGHBORS if turn_tokens is None else _MAX_TURN_NEIGHBORS
        self._max_tokens = max(1, self._max_neighbors // bound_record_count(store, settings))
        if turn_tokens is not None:
            self._max_tokens = min(turn_tokens, self._max_tokens)
        cache_size = 1
        if form is Form.SOURCES and settings.cache is not None:
            cache_size = settings.cache.size
        self._cache_limit = max(1, _MAX_CACHED_TOKENS // cache_size)

    def __call__(self, read: ReadTokens, contexts: Contexts | None) -> Iterator[TokenScores]:
        """Yield the scores (predictions and evidence) of a group of tokens at a time, in their order.

        Args:
            read: the model's predictions of the tokens.
            contexts: the preceding text of each token; None if no component needs text.
        """
        batch = read.to_batch(self._store.identity.vocab_size, contexts)
        start, count = 0, len(read)
        while start < count:
            parts = -(-(count - start) // min(self._max_tokens, self._cache_limit))
            rows = slice(start, start - (start - count) // parts)
            start = rows.stop
            scores = self._look_up(read, batch, rows)
            yield scores
            self._adapt_group_size(scores)

    def _look_up(self, read: ReadTokens, batch: Batch, rows: slice) -> TokenScores:
        """Look up what the components find for some of the tokens, and return the scores of these tokens.

        Args:
            read: the model's predictions of all tokens.
            batch: the positions of all tokens.
            rows: the slice that selects the tokens.
        """
        if rows.stop - rows.start < len(read):
            read, batch = read.select_rows(rows), batch.select_rows(rows)
        return TokenScores(read, look_up(self._store, self._settings, batch, self._form))

    def _adapt_group_size(self, scores: TokenScores) -> None:
        """Set the size of the next group of tokens from the number of records found for the last group.

        The size does not change if only the k nearest records are kept, without their ids.

        Args:
            scores: the scores of the last group.
        """
        searches = scores.evidence.searches
        cell_sums = [search for search in searches if isinstance(search, CellSums)]
        if cell_sums:
            distances = sum(search.size for search in cell_sums)
            self._max_tokens = max(1, _MAX_CELL_DISTANCES * len(scores) // max(1, distances))
        elif self._form is Form.SOURCES:
            # The first part assumed cells of the largest possible size.
            records = sum(
                search.distances.shape[1] for search in searches if isinstance(search, NeighborSums)
            )
            self._max_tokens = max(self._max_tokens, self._max_neighbors // max(1, records))
            if self._turn_tokens is not None:
                self._max_tokens = min(self._max_tokens, self._turn_tokens)


def _join_batches(predictions: Iterable[ReadTokens], min_tokens: int) -> Iterator[ReadTokens]:
    """Concatenate consecutive batches of predictions until a result has at least `min_tokens` tokens.

    Args:
        predictions: the model's predictions of each batch.
        min_tokens: least number of tokens of a result.

    Yields:
        The results; the last result may have fewer tokens.
    """
    batches: list[ReadTokens] = []
    for read in predictions:
        batches.append(read)
        if sum(map(len, batches)) >= min_tokens:
            yield ReadTokens.concatenate(batches)
            batches = []
    if batches:
        yield ReadTokens.concatenate(batches)
