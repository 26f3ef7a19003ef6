"""Running the model and one search over every token of held-out documents."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.documents import TextDocument, documents_of
from knnstore.errors import InputError
from knnstore.lm.batch import Batch
from knnstore.lm.components import Form, most_records, probes_cells, reachable
from knnstore.lm.contexts import Contexts, DocumentTexts
from knnstore.lm.mixing import CellSums, NeighborSums
from knnstore.lm.mixture import look_up
from knnstore.lm.reading import BATCH_TOKENS, Encoded, LogProbs, TextReader, WindowBatch, in_chunks
from knnstore.lm.scoring.scores import ReadTokens, TokenScores
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import KNOWN, Reader, Selection

_NEIGHBORS = BATCH_TOKENS << 10
"""Neighbors of all tokens that are looked up at once: it bounds memory."""
_DISTANCES = 1 << 26
"""Distances to records of cells in memory at once: 256 MiB. More means that each cell is read less often."""
_RECENT = 1 << 23
"""Earlier tokens that are weighed at once for a cache: 32 MiB for each temperature."""
_QUERIES = 2 * BATCH_TOKENS
"""Queries that probe cells together: the more share a cell, the less each costs."""
_TURN_TOKENS = 128
"""Tokens that are read in one turn while other requests wait; see `score_text_in_turns`."""
_TURN_NEIGHBORS = 1 << 16
"""Neighbors of all tokens that are looked up in one turn."""


class HeldOut(NamedTuple):
    """Documents that are to be predicted."""

    documents: list[TextDocument]
    stored: Mapping[str, frozenset[str]]
    """Content hashes of those that retrieval can reach, each with those of the stored documents that are the
    same text; see `KNOWN`."""

    @classmethod
    def of(
        cls, store: Reader, reader: TextReader, documents: Iterable[object], selection: Selection
    ) -> "HeldOut":
        """Read documents, see `documents_of`, and find those that a search among the selected would reach."""
        listed = list(documents_of(documents))
        exact = store.stored_content((one.content_hash for one in listed), selection)
        overlaps = store.overlaps(reader.tokenized(listed), selection, reader.letters)
        stored = {
            one.content_hash: overlap.documents | ({one.content_hash} & exact)
            for one, overlap in zip(listed, overlaps, strict=True)
            if overlap.share >= KNOWN or one.content_hash in exact
        }
        return cls(listed, stored)

    def refuse_stored(self) -> None:
        """Refuse documents that would find themselves.

        Raises:
            InputError: there is one.
        """
        if self.stored:
            first = next(one for one in self.documents if one.content_hash in self.stored)
            raise InputError(
                f"{len(self.stored):,} of the held-out documents are in the store, {first.id!r} for one, "
                "half of it or more: it would find itself. Give other documents, or leave each out of its "
                "own search (leave_out, --leave-out)"
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
    """Score held-out documents, see `score`.

    Those with a content hash in `left_out` do not retrieve from the stored ones that it gives.
    """
    for members, left in grouped(documents, left_out):
        reached = replace(settings, selection=settings.selection.without(*left))
        for scores in score(store, reader, [documents[at] for at in members], reached, progress):
            yield scores.with_documents(np.array(members, np.int64)[scores.documents])


def grouped(
    documents: Sequence[TextDocument], left_out: Mapping[str, Collection[str]]
) -> list[tuple[list[int], list[str]]]:
    """Group the indices of documents that leave out the same stored ones; returns each with these."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, document in enumerate(documents):
        groups.setdefault(tuple(sorted(left_out.get(document.content_hash, ()))), []).append(at)
    return [(members, list(left)) for left, members in groups.items()]


def score(
    store: Reader,
    reader: TextReader,
    documents: Iterable[TextDocument],
    settings: KNNSettings,
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Run the model and look up the evidence for every token of some documents, read once, a few at a time.

    Yields:
        The scores of some tokens; together every token once.
    """
    shown, before = progress or Progress(), 0
    for ahead in in_chunks(documents):
        for scores in score_texts(store, reader, reader.tokenized(ahead), settings):
            yield scores.with_documents(scores.documents + before)
            shown.advance(len(scores))
        before += len(ahead)


def score_texts(
    store: Reader,
    reader: TextReader,
    texts: Sequence[NDArray[np.integer[Any]]],
    settings: KNNSettings,
    *,
    with_sources: bool = False,
) -> Iterator[TokenScores]:
    """Score texts given by their tokens, see `score`; `TokenScores.documents` counts the texts.

    With `with_sources` the evidence keeps each record that counts, also where cells are summed over.
    """
    settings = replace(settings, k=reachable(store, settings))
    looking_up = LookUpInParts(store, settings, Form.SOURCES if with_sources else Form.TARGET)
    texts_read = follow_documents(reader, texts, settings)
    reads = (read_windows(reader, batch) for batch in reader.batches(texts))
    at_once = _QUERIES if probes_cells(store, settings) and not with_sources else 1
    for read in _joined(reads, at_once):
        yield from looking_up(read, read_on(texts_read, read, settings))


def score_text_in_turns(
    store: Reader,
    reader: TextReader,
    text: NDArray[np.integer[Any]],
    settings: KNNSettings,
    most: int = _TURN_TOKENS,
) -> Iterator[TokenScores | None]:
    """Score one text as `score_texts` does with sources, in turns that each take a short time.

    Windows are read one after another, in parts of 128 tokens, and looked up a few tokens at a time.

    Args:
        store: where to search.
        reader: reads the text.
        text: token ids, shape (n,).
        settings: in force.
        most: tokens that are looked up in one turn at most.

    Yields:
        The scores of a few tokens, or None where a turn has ended without any.
    """
    settings = replace(settings, k=reachable(store, settings))
    looking_up = LookUpInParts(store, settings, Form.SOURCES, most)
    text_read = follow_documents(reader, [text], settings)
    for batch in replace(reader, batch_tokens=1).batches([text]):
        yield None
        read = yield from _read_windows_in_turns(reader, batch)
        yield from looking_up(read, read_on(text_read, read, settings))


def follow_documents(
    reader: TextReader, texts: Sequence[NDArray[np.integer[Any]]], settings: KNNSettings
) -> DocumentTexts:
    """Prepare to follow texts as they are read, as far back as the settings look."""
    return DocumentTexts(texts, reader.prefix, 0 if settings.cache is None else settings.cache.size)


def read_on(texts: DocumentTexts, read: ReadTokens, settings: KNNSettings) -> Contexts | None:
    """Extend texts by the tokens that were read, and return these as contexts; None where none are needed."""
    if not settings.needs_text:
        return None
    return texts.read_on(read.keys, read.documents, read.positions)


def read_windows(reader: TextReader, batch: WindowBatch) -> ReadTokens:
    """Run the model over one batch of windows."""
    encoded = reader.encoder.encode(batch.input_ids, batch.at)
    return _put_together(encoded, reader.encoder.log_probs(encoded.states, batch.gold), batch)


def _read_windows_in_turns(reader: TextReader, batch: WindowBatch) -> Generator[None, None, ReadTokens]:
    """Do what `read_windows` does for one window, a few tokens in each turn; yields between turns."""
    encoder = reader.encoder
    encoded = yield from encoder.encode_in_parts(batch.input_ids, batch.at, _TURN_TOKENS)
    found = []
    for start in range(0, len(batch.at), _TURN_TOKENS):
        yield
        part = slice(start, start + _TURN_TOKENS)
        found.append(encoder.log_probs(encoded.states[part], batch.gold[part]))
    log_probs = LogProbs(*map(torch.cat, zip(*found, strict=True)))
    yield
    return _put_together(encoded, log_probs, batch)


def _put_together(encoded: Encoded, log_probs: LogProbs, batch: WindowBatch) -> ReadTokens:
    """Return what the model predicts of a batch, in the processor's memory."""
    return ReadTokens(
        log_probs.gold.cpu(),
        log_probs.best.cpu(),
        log_probs.entropy.cpu(),
        torch.from_numpy(batch.gold),
        encoded.keys.cpu(),
        batch.documents,
        batch.positions,
    )


class LookUpInParts:
    """Looks up the evidence of tokens, as many at a time as memory allows.

    Where the cells that they probe turn out to be small, later parts have more tokens.

    Args:
        store: where to look up.
        settings: in force, with a k that is `reachable`.
        form: how much is kept of what is found.
        turn_tokens: tokens of any part, each of at most `_TURN_NEIGHBORS`; None lets memory alone limit them.
    """

    def __init__(
        self, store: Reader, settings: KNNSettings, form: Form, turn_tokens: int | None = None
    ) -> None:
        self._store, self._settings, self._form = store, settings, form
        self._turn_tokens = turn_tokens
        self._neighbors = _NEIGHBORS if turn_tokens is None else _TURN_NEIGHBORS
        self._most = max(1, self._neighbors // most_records(store, settings))
        if turn_tokens is not None:
            self._most = min(turn_tokens, self._most)
        reach = 1
        if form is Form.SOURCES and settings.cache is not None:
            reach = settings.cache.size
        self._limit = max(1, _RECENT // reach)

    def __call__(self, read: ReadTokens, contexts: Contexts | None) -> Iterator[TokenScores]:
        """Yield the scores of some tokens after others.

        Args:
            read: the tokens.
            contexts: their positions in texts; None where the settings do not look at these.
        """
        batch = read.batch(self._store.identity.vocab_size, contexts)
        start, count = 0, len(read)
        while start < count:
            parts = -(-(count - start) // min(self._most, self._limit))
            rows = slice(start, start - (start - count) // parts)
            start = rows.stop
            scores = self._look_up(read, batch, rows)
            yield scores
            self._adapt(scores)

    def _look_up(self, read: ReadTokens, batch: Batch, rows: slice) -> TokenScores:
        if rows.stop - rows.start < len(read):
            read, batch = read.select_rows(rows), batch.select_rows(rows)
        return TokenScores(read, look_up(self._store, self._settings, batch, self._form))

    def _adapt(self, scores: TokenScores) -> None:
        """Choose the number of tokens of the next part by what those of the last one found."""
        searches = scores.evidence.searches
        in_cells = [one for one in searches if isinstance(one, CellSums)]
        if in_cells:
            self._most = max(1, _DISTANCES * len(scores) // max(1, sum(one.size for one in in_cells)))
        elif self._form is Form.SOURCES:
            # Cells are smaller than they may be.
            found = sum(one.distances.shape[1] for one in searches if isinstance(one, NeighborSums))
            self._most = max(self._most, self._neighbors // max(1, found))
            if self._turn_tokens is not None:
                self._most = min(self._most, self._turn_tokens)


def _joined(reads: Iterable[ReadTokens], wanted: int) -> Iterator[ReadTokens]:
    """Put batches together until each has so many tokens."""
    held: list[ReadTokens] = []
    for read in reads:
        held.append(read)
        if sum(map(len, held)) >= wanted:
            yield ReadTokens.joined(held)
            held = []
    if held:
        yield ReadTokens.joined(held)
