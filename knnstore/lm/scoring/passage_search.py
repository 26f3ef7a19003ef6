"""Searching for the stored passages nearest to a text, by its keys or, without keys, by its words."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, record_ids
from knnstore.errors import ConfigError, InputError
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.store import LONGEST_NGRAM, Matches, Provenance, Reader, Selection

_NEIGHBORS_PER_TOKEN = 32
_MAX_GAP = 16  # largest distance in tokens between two consecutive records of a passage
_TOKENS_BEFORE, _TOKENS_AFTER = 24, 12  # of the record with the largest share


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a stored document that a search found."""

    share: float
    """Share of the passage among all results of the search, between 0 and 1."""
    domain: str
    """Name of the document's domain."""
    document: str
    """Id of the document."""
    position: int
    """Index in the document of the token whose record has the largest share."""
    text: str
    """Text around that token."""


class _Hit(NamedTuple):
    """A record that was found, with its share among all results."""

    place: Provenance
    """The document and position of the record."""
    id: int
    """The record's id."""
    share: float


def search(lm: ReadingModel, text: str, knn: KNNSettings | None = None, *, limit: int = 5) -> list[Passage]:
    """Find the stored passages that are nearest to a text.

    The store is searched with the key at each token of the text. Each token has the same share, which is
    divided among its neighbors by their weights in p_kNN (a softmax over distances). The share of a passage
    is the sum over its records.

    A store without keys is searched for the same words. Each token but the first has the same share. It is
    divided among the stored places of this token where the most preceding tokens match.

    Args:
        lm: the model.
        text: the text, not empty; only the end of a text that is longer than a window is used.
        knn: the settings whose selection and temperature are used; default ``lm.knn``.
        limit: largest number of passages, >= 1.

    Returns:
        The passages, the largest share first; empty if nothing was found.

    Raises:
        InputError: the text is empty.
        ConfigError: the model is an encoder-decoder model.
    """
    settings, reader, store = resolve(lm.store, knn or lm.knn), lm.reader, lm.store
    if reader.reads_pairs:
        raise ConfigError("a search needs a causal model, but this is an encoder-decoder model")
    prefix = reader.prefix
    tokens = reader.tokenize(text).tolist()[-(reader.max_length - len(prefix)) :]
    if not tokens:
        raise InputError("the text is empty")
    # 1) Score the stored records, by keys or by words.
    if store.is_keyless:
        totals = _score_records_by_words(store, tokens, settings.selection)
    else:
        row = np.array([[*prefix, *tokens]], np.int64)
        keys = reader.encoder.compute_keys(row, np.arange(len(prefix), row.size)).cpu().numpy()
        totals = _score_records_by_keys(store, keys, settings)
    # 2) Group neighboring records to passages, and choose the passages with the largest shares.
    places = store.provenance(np.array(list(totals), np.int64), before=0, after=0)
    hits = [
        _Hit(place, id, share) for place, (id, share) in zip(places, totals.items(), strict=True) if place
    ]
    groups = sorted(_group_hits(hits), key=lambda group: -sum(hit.share for hit in group))[:limit]
    best = [max(group, key=lambda hit: hit.share) for group in groups]
    # 3) Read the text around the best record of each passage.
    around = store.provenance(
        np.array([hit.id for hit in best], np.int64), before=_TOKENS_BEFORE, after=_TOKENS_AFTER
    )
    return [
        Passage(
            sum(hit.share for hit in group),
            place.domain,
            place.document,
            place.position,
            reader.decode([*place.context.tolist(), place.token, *place.continuation.tolist()]),
        )
        for group, place in zip(groups, around, strict=True)
        if place is not None
    ]


def _score_records_by_keys(store: Reader, keys: Keys, settings: KNNSettings) -> dict[int, float]:
    """Search with each key, and return a score for each found record, by record id.

    Each of the n keys has the weight 1 / n. The weight is divided among the records that the key finds, by
    exp(-distance / T), where T is the temperature.

    Args:
        store: the store.
        keys: query vectors, shape (n, d).
        settings: the settings whose selection and temperature are used.

    Returns:
        The scores. A record that several keys find gets a part from each of them. All scores sum to 1, or
        to less if a key finds no record.
    """
    neighbors, totals = (
        store.search(keys, _NEIGHBORS_PER_TOKEN, settings.selection),
        defaultdict[int, float](float),
    )
    shares = _compute_shares(neighbors.distances, settings.temperature)
    for id, share in zip(neighbors.ids.ravel().tolist(), shares.ravel().tolist(), strict=True):
        if id >= 0:
            totals[id] += share / len(keys)
    return totals


def _score_records_by_words(store: Reader, tokens: Sequence[int], selection: Selection) -> dict[int, float]:
    """Find the stored passages that share the longest sequences of tokens with a text, and score them.

    Every token of the text except the first has one vote. The vote is divided equally among the stored
    occurrences of the token that are preceded by the longest match of the preceding tokens. The score of a
    record is its part of all votes.

    Args:
        store: a store, with or without keys.
        tokens: the text.
        selection: the stored documents that are searched.

    Returns:
        The score of each found record, 0 to 1, by record id.
    """
    matches, totals = (
        Matches.look_up_texts(store.ngrams(selection), [np.array(tokens)], [False]),
        dict[int, float](),
    )
    places = matches.find_occurrences(np.arange(len(tokens) - 1), LONGEST_NGRAM, _NEIGHBORS_PER_TOKEN)
    for occurrences, token in zip(places, tokens[1:], strict=True):
        longest = [place for place in occurrences if place.matched == occurrences[0].matched]
        positions = np.array([place.position for place in longest], np.int64)
        for id in record_ids(positions, np.full(len(longest), token)).tolist():
            totals[id] = totals.get(id, 0.0) + 1 / len(longest) / (len(tokens) - 1)
    return totals


def _compute_shares(distances: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Return exp(-d / T) of each distance, normalized to a sum of 1 in each row.

    The share of an infinite distance is 0; a row of infinite distances has only zeros.

    Args:
        distances: shape (n, k), ascending in each row.
        temperature: T > 0.
    """
    nearest = distances[:, :1].astype(np.float64)
    nearest[~np.isfinite(nearest)] = 0.0
    weights = np.exp((nearest - distances) / temperature)
    shares: NDArray[np.float64] = weights / np.maximum(
        weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny
    )
    return shares


def _group_hits(hits: list[_Hit]) -> list[list[_Hit]]:
    """Group hits (found records) that are close to each other in the same document.

    Two hits that follow each other in a group are at most `_MAX_GAP` tokens apart.

    Args:
        hits: the hits, in any order.

    Returns:
        The groups; each is sorted by position.
    """

    def get_document(hit: _Hit) -> tuple[str, str]:
        return hit.place.domain, hit.place.document

    groups: list[list[_Hit]] = []
    in_order = sorted(hits, key=lambda hit: (*get_document(hit), hit.place.position))
    for _, document_hits in groupby(in_order, key=get_document):
        last: _Hit | None = None
        for hit in document_hits:
            if last is None or hit.place.position - last.place.position > _MAX_GAP:
                groups.append([])
            groups[-1].append(hit)
            last = hit
    return groups
