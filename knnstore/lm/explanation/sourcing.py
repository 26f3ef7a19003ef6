"""The places that retrieval found, with their documents and the text around them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import record_ids, tokens_of
from knnstore.lm.explanation.explained import THIS_TEXT, Source
from knnstore.lm.reading import TextReader
from knnstore.store import Occurrence, Provenance, Reader

_BEFORE, _AFTER = 16, 8  # tokens of context, as the store gives


class Found(NamedTuple):
    """A place that was found for a token."""

    token: int
    """That is there."""
    share: float
    """Of p_kNN."""
    part: str
    distance: float | None
    id: int = -1
    """Of the record."""
    matched: int = 0
    place: Provenance | None = None
    """Where it is, if that is known; else the store tells."""


class Sources:
    """Turns places into sources; the text around a record is put together once.

    Args:
        store: where they were found.
        reader: has the tokenizer.
    """

    def __init__(self, store: Reader, reader: TextReader) -> None:
        self._store = store
        self._reader = reader
        self._texts: dict[int, tuple[str, str, str]] = {}

    def of(self, found: Sequence[Sequence[Found]]) -> list[tuple[Source, ...]]:
        """The sources of several tokens, without those whose document is gone."""
        ids = np.unique(np.array([one.id for of_token in found for one in of_token], np.int64))
        places = dict(zip(ids.tolist(), self._store.provenance(ids), strict=True))
        return [
            tuple(
                self._source(place, one)
                for one in of_token
                if (place := one.place or places[one.id]) is not None
            )
            for of_token in found
        ]

    def _source(self, place: Provenance, found: Found) -> Source:
        texts = self._texts.get(found.id)
        if texts is None:
            texts = self._around(place)
            if found.id >= 0:
                self._texts[found.id] = texts
        context, text, continuation = texts
        return Source(
            place.token, text, found.share, found.distance, place.document, place.domain, place.position,
            context, continuation, found.matched, found.part,
        )  # fmt: skip

    def _around(self, place: Provenance) -> tuple[str, str, str]:
        """What stands before a token, the token itself, and what stands after it."""
        before, behind = place.context.tolist(), place.continuation.tolist()
        # As far as its characters are whole; whether a token has a space before it depends on what is there.
        context, known = (
            self._reader.text(part).rstrip("\ufffd") for part in (before, [*before, place.token])
        )
        whole = self._reader.text([*before, place.token, *behind])
        return context, known[len(context) :], whole[len(known) :]


def found_by_keys(
    ids: NDArray[np.int64], distances: Tensor, shares: Tensor, columns: Tensor
) -> list[list[Found]]:
    """Some of the records that were found for n tokens.

    Args:
        ids: of all records, shape (n, k).
        distances: shape (n, k).
        shares: of p_kNN, shape (n, k).
        columns: those that are wanted, shape (n, m).
    """
    chosen = np.take_along_axis(ids, columns.numpy(), 1)
    values = chosen, tokens_of(chosen), distances.gather(1, columns), shares.gather(1, columns)
    rows = zip(*(of_each.tolist() for of_each in values), strict=True)
    return [
        [
            Found(token, share, "keys", distance, id)
            for id, token, distance, share in zip(*row, strict=True)
            if id >= 0
        ]
        for row in rows
    ]


def found_by_ngrams(found: Sequence[Occurrence], token: int, share: float) -> list[Found]:
    """Places where n-grams that end in one token were found, of which all of p_kNN is a share."""
    ids = record_ids(np.array([one.position for one in found], np.int64), np.full(len(found), token))
    return [
        Found(token, share * one.share, "n-grams", None, id, one.matched)
        for id, one in zip(ids.tolist(), found, strict=True)
    ]


def found_here(
    tokens: NDArray[np.uint32], position: int, distances: Tensor, shares: Tensor, count: int
) -> Iterator[Found]:
    """The places of the text itself that have most of one token's p_kNN.

    Distances and shares are of the places before it, shape (m,), the last is its neighbor.
    """
    for column in shares.sort(descending=True, stable=True).indices[:count].tolist():
        if distances[column].isfinite():
            place = _place_here(tokens, position - len(shares) + column, position)
            yield Found(place.token, float(shares[column]), "cache", float(distances[column]), place=place)


def found_by_own_ngrams(
    tokens: NDArray[np.uint32], position: int, found: Sequence[Occurrence], share: float
) -> list[Found]:
    """The places of the text itself where its own n-grams that end in one token stood before."""
    return [
        Found(place.token, share * one.share, "own n-grams", None, matched=one.matched, place=place)
        for one in found
        for place in [_place_here(tokens, one.position, position)]
    ]


def _place_here(tokens: NDArray[np.uint32], at: int, before: int) -> Provenance:
    """A place of the text itself, and what stands around it before another one."""
    behind = tokens[at + 1 : min(at + 1 + _AFTER, before)]
    return Provenance(THIS_TEXT, "", at, int(tokens[at]), tokens[max(0, at - _BEFORE) : at], behind)
