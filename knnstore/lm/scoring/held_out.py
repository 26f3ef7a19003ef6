"""Running the model and one search over every token of held-out documents."""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.datastore import Neighbors
from knnstore.documents import TextDocument, documents_of
from knnstore.errors import InputError
from knnstore.lm.components import Form, look_up_texts
from knnstore.lm.contexts import DocumentTexts
from knnstore.lm.reading import BATCH_TOKENS, Batch, Encoded, LogProbs, TextReader, in_chunks
from knnstore.lm.retrieval import columns_of, reachable, retrieve, retrieve_in_step, visit, visits_cells
from knnstore.lm.scoring.scores import TokenScores, together
from knnstore.lm.settings import KNNSettings
from knnstore.progress import Progress
from knnstore.store import KNOWN, Reader, Selection

_NEIGHBORS = BATCH_TOKENS << 10
"""Of all tokens that are searched for at once: fewer with a larger k, so that memory does not grow."""
_DISTANCES = 1 << 26
"""To records of cells, that are in memory at once: 256 MiB. The more, the fewer visits of each cell."""
_RECENT = 1 << 23
"""Tokens before others, that are weighed at once for a cache: 32 MiB for each temperature."""
_QUERIES = 2 * BATCH_TOKENS
"""That visit cells together: the more meet in a cell, the less each costs."""
_TURN_TOKENS = 128
"""That are read in one turn, where others wait; see `score_text_in_turns`."""
_TURN_NEIGHBORS = 1 << 16
"""Of all tokens that are searched for in one turn."""
_TOKENS = 1 << 15
"""Of documents that advance together: what is known of each is in memory at once."""


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
            yield replace(scores, documents=np.array(members, np.int64)[scores.documents])


def grouped(
    documents: Sequence[TextDocument], left_out: Mapping[str, Collection[str]]
) -> list[tuple[list[int], list[str]]]:
    """Put the indices of documents together that leave out the same stored ones, and say which."""
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
    """Run the model and one search over every token of some documents, which are read once, a few at a time.

    Yields:
        The scores of a batch of windows; together every token once.
    """
    shown, before = progress or Progress(), 0
    for ahead in in_chunks(documents):
        for scores in score_texts(store, reader, reader.tokenized(ahead), settings):
            yield replace(scores, documents=scores.documents + before)
            shown.advance(len(scores.gold))
        before += len(ahead)


def score_texts(
    store: Reader,
    reader: TextReader,
    texts: Sequence[NDArray[np.integer[Any]]],
    settings: KNNSettings,
    *,
    apart: bool = False,
) -> Iterator[TokenScores]:
    """Score texts given by their tokens, see `score`; `TokenScores.documents` counts the texts.

    With `apart` each record that counts is among the neighbors, also where cells are summed over.
    """
    settings = replace(settings, k=reachable(store, settings))
    most = max(1, _NEIGHBORS // columns_of(store, settings))
    form = Form.SOURCES if apart else Form.TARGET
    for members in [range(len(texts))] if settings.pointers is None else _few_tokens(texts, most):
        some = [texts[at] for at in members]
        known = follow_documents(reader, some, settings)
        batches = (
            with_texts(store, read_batch(reader, batch, settings), known, settings, form)
            for batch in reader.batches(some)
        )
        parts: Iterator[TokenScores]
        if settings.pointers is None:
            in_cells = visits_cells(store, settings) and not apart
            joined = _joined(batches, _QUERIES if in_cells else 1)
            parts = _score(store, joined, settings, most, apart=apart)
        else:
            parts = _score_in_step(store, list(batches), settings)
        for scores in parts:
            yield replace(scores, documents=scores.documents + members.start)


def score_text_in_turns(
    store: Reader,
    reader: TextReader,
    text: NDArray[np.integer[Any]],
    settings: KNNSettings,
    most: int = _TURN_TOKENS,
) -> Iterator[TokenScores | None]:
    """Score one text as `score_texts` does with `apart`, in turns that each take a short time.

    Windows are read one after another, in parts of 128 tokens, and searched for a few tokens at a time.

    Args:
        store: where to search.
        reader: reads the text.
        text: token ids, shape (n,).
        settings: without pointers.
        most: tokens that are searched for in one turn at most.

    Yields:
        The scores of a few tokens, or None where a turn has ended without any.
    """
    settings = replace(settings, k=reachable(store, settings))
    known = follow_documents(reader, [text], settings)
    for batch in replace(reader, batch_tokens=1).batches([text]):
        yield None
        scores = yield from _read_batch_in_turns(reader, batch, settings)
        scores = with_texts(store, scores, known, settings, Form.SOURCES)
        at_once = min(most, max(1, _TURN_NEIGHBORS // columns_of(store, settings)))
        yield from _score(store, [scores], settings, at_once, apart=True, growing_to=most)


def follow_documents(
    reader: TextReader, texts: Sequence[NDArray[np.integer[Any]]], settings: KNNSettings
) -> DocumentTexts:
    """Prepare to follow texts as they are read, as far back as the settings look."""
    return DocumentTexts(texts, reader.prefix, 0 if settings.cache is None else settings.cache.size)


def read_batch(reader: TextReader, batch: Batch, settings: KNNSettings) -> TokenScores:
    """Run the model over one batch of windows; what is to be searched is marked, nothing is looked up yet."""
    encoded = reader.encoder.encode(batch.input_ids, batch.at)
    return _read(encoded, reader.encoder.log_probs(encoded.states, batch.gold), batch, settings)


def _read_batch_in_turns(
    reader: TextReader, batch: Batch, settings: KNNSettings
) -> Generator[None, None, TokenScores]:
    """Do what `read_batch` does for one window, a few tokens in each turn; yields between turns."""
    encoder = reader.encoder
    encoded = yield from encoder.encode_in_parts(batch.input_ids, batch.at, _TURN_TOKENS)
    found = []
    for start in range(0, len(batch.at), _TURN_TOKENS):
        yield
        part = slice(start, start + _TURN_TOKENS)
        found.append(encoder.log_probs(encoded.states[part], batch.gold[part]))
    log_probs = LogProbs(*map(torch.cat, zip(*found, strict=True)))
    yield
    return _read(encoded, log_probs, batch, settings)


def _read(encoded: Encoded, log_probs: LogProbs, batch: Batch, settings: KNNSettings) -> TokenScores:
    """Put together what the model predicts of a batch; see `read_batch`."""
    keys = encoded.keys.cpu()
    lm_max, lm_entropy = log_probs.best.cpu(), log_probs.entropy.cpu()
    gold, nothing = torch.from_numpy(batch.gold), np.empty((len(keys), 0), np.int64)
    searched = np.full(len(keys), settings.retrieves)
    if settings.skip is not None:
        searched &= settings.skip.searched(keys, lm_max, lm_entropy).numpy()
    return TokenScores(
        lm_log_probs=log_probs.gold.cpu(),
        lm_max=lm_max,
        lm_entropy=lm_entropy,
        searched=searched,
        ids=nothing,
        distances=torch.empty(nothing.shape),
        tokens=torch.from_numpy(nothing),
        gold=gold,
        keys=keys,
        documents=batch.documents,
        positions=batch.positions,
    )


def with_texts(
    store: Reader, scores: TokenScores, known: DocumentTexts, settings: KNNSettings, form: Form
) -> TokenScores:
    """Look up what the components that go by the text know of some tokens.

    Args:
        store: where to look up.
        scores: the tokens of a batch, as they were read.
        known: their texts, which go on to the end of the batch.
        settings: in force.
        form: how much is kept of what is found.
    """
    if not settings.needs_text:
        return scores
    contexts = known.read_on(scores.keys, scores.documents, scores.positions)
    return replace(scores, found=look_up_texts(store, settings, contexts, form))


def _score(
    store: Reader,
    batches: Iterable[TokenScores],
    settings: KNNSettings,
    most: int,
    *,
    apart: bool,
    growing_to: int | None = None,
) -> Iterator[TokenScores]:
    """Search for so many tokens at a time; for more where the cells that they visit turn out to be small.

    Args:
        store: where to search.
        batches: of tokens that were read.
        settings: in force.
        most: tokens of the first search.
        apart: as of `score_texts`.
        growing_to: tokens of any search, each of at most `_TURN_NEIGHBORS`; None lets memory alone limit it.
    """
    neighbors = _NEIGHBORS if growing_to is None else _TURN_NEIGHBORS
    for batch in batches:
        start, count = 0, len(batch.gold)
        reach = max([1, *(one.width for one in batch.found.values())])
        while start < count:
            parts = -(-(count - start) // min(most, max(1, _RECENT // reach)))
            rows = np.arange(start, start - (start - count) // parts)
            found = search_for(
                store, batch if len(rows) == count else batch.rows(rows), settings, apart=apart
            )
            yield found
            start += len(rows)
            if found.visited is not None:
                visited = sum(one.size for one in found.visited)
                most = max(1, _DISTANCES * len(rows) // max(1, visited))
            elif apart:
                # Cells are smaller than they may be.
                most = max(most, neighbors // max(1, found.ids.shape[1]))
                most = most if growing_to is None else min(most, growing_to)


def _joined(batches: Iterable[TokenScores], wanted: int) -> Iterator[TokenScores]:
    """Put batches together until they have so many tokens."""
    held: list[TokenScores] = []
    for batch in batches:
        held.append(batch)
        if sum(len(one.gold) for one in held) >= wanted:
            yield held[0] if len(held) == 1 else together(held)
            held = []
    if held:
        yield together(held)


def search_in_parts(store: Reader, scores: TokenScores, settings: KNNSettings) -> Iterator[TokenScores]:
    """Search for tokens that `read_batch` read, as many at a time as memory allows; without pointers."""
    settings = replace(settings, k=reachable(store, settings))
    most = max(1, _NEIGHBORS // columns_of(store, settings))
    return _score(store, [scores], settings, most, apart=False)


def search_for(
    store: Reader, scores: TokenScores, settings: KNNSettings, *, apart: bool = False
) -> TokenScores:
    """Give tokens their neighbors, those that are to be searched for; see `score_texts`."""
    if not apart and visits_cells(store, settings) and scores.searched.any():
        queries = scores.keys.numpy()[scores.searched]
        visited = visit(store, queries, scores.gold[torch.from_numpy(scores.searched)], settings)
        spread = [one.spread(scores.searched, scores.gold) for one in visited]
        return scores.with_visited(spread, nearest_only=settings.needs_nearest_only)
    found = retrieve(store, scores.keys.numpy(), settings, scores.searched)
    return scores.with_neighbors(found, scores.searched)


def _few_tokens(texts: Sequence[NDArray[np.integer[Any]]], most: int) -> list[range]:
    """Divide texts into runs that advance together, of at most so many texts."""
    runs, tokens = [range(0)], 0
    for at, text in enumerate(texts):
        if tokens + len(text) > _TOKENS or len(runs[-1]) == most:
            runs, tokens = [*runs, range(at, at)], 0
        runs[-1] = range(runs[-1].start, at + 1)
        tokens += len(text)
    return [run for run in runs if len(run)]


def _score_in_step(
    store: Reader, parts: Sequence[TokenScores], settings: KNNSettings
) -> Iterator[TokenScores]:
    """Retrieve with pointers: texts advance together, token by token, so that one search is for many.

    Takes parts of the texts, in any order, and yields the tokens at one position of all texts.
    """
    if not parts:
        return
    whole = together(parts)
    keys = whole.keys.numpy()

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return retrieve(store, keys[rows], settings, whole.searched[rows])

    steps = retrieve_in_step(
        store, keys, whole.gold.numpy(), whole.documents, whole.positions, settings, search
    )
    for rows, (found, searched) in steps:
        yield whole.rows(rows).with_neighbors(found, searched & whole.searched[rows])
