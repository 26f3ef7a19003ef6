"""Stored passages that are near a text, as the model sees both."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, record_ids
from knnstore.errors import InputError
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.store import LONGEST_NGRAM, Matches, Provenance, Reader, Selection

_NEIGHBORS = 32  # of each token of the text
_NEAR = 16  # tokens between two records of one passage, at most
_BEFORE, _AFTER = 24, 12  # tokens that are shown of it around the record found most


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of a stored document."""

    share: float
    """Of all that was found, between 0 and 1."""
    domain: str
    document: str
    position: int
    """Index in the document of the token that most of it leads to."""
    text: str
    """What stands around that token."""


class _Hit(NamedTuple):
    place: Provenance
    id: int
    share: float


def search(lm: ReadingModel, text: str, knn: KNNSettings | None = None, *, limit: int = 5) -> list[Passage]:
    """Find the stored passages that are nearest to a text.

    The store is searched with the model's state at each token of the text and at its end. Each search gives
    one share, divided among its neighbors as p_kNN is; a passage has the shares of all its records. A store
    without keys is searched for the same words: each token but the first has one share, divided among the
    places where most of the words before it stand before it too.

    Args:
        lm: the model.
        text: not empty; of one that is longer than a window the end counts.
        knn: whose selection and temperature are used; default ``lm.knn``.
        limit: how many passages, >= 1.

    Returns:
        The largest share first; empty where nothing is stored.

    Raises:
        InputError: the text is empty.
    """
    settings, reader, store = resolve(lm.store, knn or lm.knn), lm.reader, lm.store
    prefix = [] if reader.prefix is None else [reader.prefix]
    tokens = reader.tokens(text).tolist()[-(reader.max_length - len(prefix)) :]
    if not tokens:
        raise InputError("the text is empty")
    if store.is_keyless:
        totals = _by_words(store, tokens, settings.selection)
    else:
        row = np.array([[*prefix, *tokens]], np.int64)
        keys = reader.encoder.keys(row, np.arange(len(prefix), row.size)).cpu().numpy()
        totals = _by_keys(store, keys, settings)
    places = store.provenance(np.array(list(totals), np.int64), before=0, after=0)
    hits = [
        _Hit(place, id, share) for place, (id, share) in zip(places, totals.items(), strict=True) if place
    ]
    groups = sorted(_groups(hits), key=lambda group: -sum(hit.share for hit in group))[:limit]
    best = [max(group, key=lambda hit: hit.share) for group in groups]
    around = store.provenance(np.array([hit.id for hit in best], np.int64), before=_BEFORE, after=_AFTER)
    return [
        Passage(
            sum(hit.share for hit in group),
            place.domain,
            place.document,
            place.position,
            reader.text([*place.context.tolist(), place.token, *place.continuation.tolist()]),
        )
        for group, place in zip(groups, around, strict=True)
        if place is not None
    ]


def _by_keys(store: Reader, keys: Keys, settings: KNNSettings) -> dict[int, float]:
    """The share of each record that is near one of some keys, shape (n, d)."""
    found, totals = store.search(keys, _NEIGHBORS, settings.selection), defaultdict[int, float](float)
    shares = _shares(found.distances, settings.temperature)
    for id, share in zip(found.ids.ravel().tolist(), shares.ravel().tolist(), strict=True):
        if id >= 0:
            totals[id] += share / len(keys)
    return totals


def _by_words(store: Reader, tokens: Sequence[int], selection: Selection) -> dict[int, float]:
    """The share of each stored token that is one of these, with the longest run of them before it."""
    matches, totals = Matches.of(store.ngrams(selection), [np.array(tokens)], [False]), dict[int, float]()
    places = matches.occurrences(np.arange(len(tokens) - 1), LONGEST_NGRAM, _NEIGHBORS)
    for found, token in zip(places, tokens[1:], strict=True):
        longest = [one for one in found if one.matched == found[0].matched]
        positions = np.array([one.position for one in longest], np.int64)
        for id in record_ids(positions, np.full(len(longest), token)).tolist():
            totals[id] = 1 / len(longest) / (len(tokens) - 1)
    return totals


def _shares(distances: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """exp(-d / T), of each search its part; shape as of the distances, 0 where they are infinite."""
    nearest = distances[:, :1].astype(np.float64)
    nearest[~np.isfinite(nearest)] = 0.0
    weights = np.exp((nearest - distances) / temperature)
    shares: NDArray[np.float64] = weights / np.maximum(
        weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny
    )
    return shares


def _groups(hits: list[_Hit]) -> list[list[_Hit]]:
    """Hits that stand near each other in a document."""

    def document(hit: _Hit) -> tuple[str, str]:
        return hit.place.domain, hit.place.document

    groups: list[list[_Hit]] = []
    for _, together in groupby(
        sorted(hits, key=lambda hit: (*document(hit), hit.place.position)), key=document
    ):
        last: _Hit | None = None
        for hit in together:
            if last is None or hit.place.position - last.place.position > _NEAR:
                groups.append([])
            groups[-1].append(hit)
            last = hit
    return groups
