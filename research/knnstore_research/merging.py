"""Smaller stores: removing or merging records (He et al. 2021).

https://arxiv.org/abs/2109.04212 merges neighbors that predict the same token. `merge_nearest` merges the
nearest pairs first; `drop_at_random` and `drop_highest` are baselines. Each returns the *weight* of every
record: the number of records that it represents, or 0 if it was removed. A weight w enters p_kNN as
exp(-d/T + log w). `find_weighted` searches the remaining records, for a text that was scored once.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Metric, find_nearest_rows
from knnstore.errors import ConfigError
from knnstore.lm.calibration import ScoredText
from knnstore.lm.reading import TextReader
from knnstore.store import Reader, Selection
from knnstore_research.key_probing import nearest_keys
from knnstore_research.stored_records import StoredRecords

_NEAREST = 16
"""Number of nearest records that each record can be merged with in one round of search."""

Weights = NDArray[np.float64]
"""Number of records that each of n records represents, shape (n,); 0 for a record that was removed."""


def drop_at_random(count: int, left: int, seed: int = 0) -> Weights:
    """Keep `left` of `count` records, chosen at random, and return the weight of every record.

    Returns:
        1 for a record that is kept, 0 for a record that is removed, shape (count,).
    """
    stay = np.random.default_rng(seed).choice(count, left, replace=False, shuffle=False)
    return _weigh_only(stay, count)


def drop_highest(scores: NDArray[np.floating], left: int) -> Weights:
    """Keep the `left` records with the lowest scores, and return the weight of every record (1 or 0).

    Args:
        scores: score of each of n records, shape (n,); among equal scores the first records are kept.
        left: number of records to keep.
    """
    return _weigh_only(np.argsort(scores, kind="stable")[:left], len(scores))


def merge_nearest(tokens: NDArray[np.int64], keys: Keys, left: int) -> Weights:
    """Merge the two nearest records that predict the same token, repeatedly, until `left` records remain.

    The weight of a record is the number of records that it represents. Of two merged records, the record with
    the larger weight remains (the first if the weights are equal), and represents both. At least one record
    of each token remains, even if `left` is smaller.

    Distances are Euclidean, also in a store with inner products, so merging equal keys does not change p_kNN.
    He et al. merge each record with its k nearest records, in random order. Merging the nearest pairs first
    costs far less perplexity, and can stop at any number of records.

    Args:
        tokens: tokens of the records, shape (n,).
        keys: keys of the records, float32, shape (n, d).
        left: number of records to keep, >= 1.

    Returns:
        The weight of each record, shape (n,); 0 for a record that was merged into another one.
    """
    weights = np.ones(len(tokens))
    alive = np.arange(len(tokens))
    while len(alive) > max(left, len(np.unique(tokens[alive]))):
        pairs = _find_nearest_pairs(tokens[alive], keys[alive])
        merges = _merge_pairs(pairs, weights[alive], len(alive) - left)
        for gone, representative in zip(*(alive[rows].tolist() for rows in merges), strict=True):
            weights[representative] += weights[gone]  # in order: a representative may go later
            weights[gone] = 0
        alive = np.flatnonzero(weights)
    return weights


def score_stored(store: Reader, reader: TextReader, selection: Selection) -> NDArray[np.float32]:
    """Compute the model's log-probability of each record's token, for all records of the selected documents.

    Args:
        store: the store.
        reader: runs the model.
        selection: the documents.

    Returns:
        Float32, shape (n,), in the order of the documents and their tokens.
    """
    texts = [store.tokens_by_number(number) for number in store.lengths(selection)]
    documents, positions, log_probs = [], [], []
    for batch in reader.batch_windows(texts):
        states = reader.encoder.encode(batch.input_ids, batch.at).states
        log_probs.append(reader.encoder.target_log_probs(states, batch.gold).cpu().numpy())
        documents.append(batch.documents)
        positions.append(batch.positions)
    order = np.lexsort((np.concatenate(positions), np.concatenate(documents)))
    found: NDArray[np.float32] = np.concatenate(log_probs)[order]
    return found


class WeightedNeighbors(NamedTuple):
    """The k nearest records of n tokens of a text, with their weights."""

    distances: Tensor
    """Distances to the neighbors, float32, shape (n, k), ascending."""
    hits: Tensor
    """True for each neighbor that has the target token, bool, shape (n, k)."""
    weights: Tensor
    """Number of records that each neighbor represents, float32, shape (n, k)."""

    def knn_probs(self, temperature: float) -> Tensor:
        """Compute the probability of each target token by its neighbors (p_kNN), float32, shape (n,).

        Args:
            temperature: T > 0 of the softmax over distances.
        """
        shares = ((self.distances[:, :1] - self.distances) / temperature).exp() * self.weights
        return (shares * self.hits).sum(1) / shares.sum(1)


def find_weighted(records: StoredRecords, weights: Weights, text: ScoredText, k: int) -> WeightedNeighbors:
    """Find the k nearest records with a weight above 0 for each token of a text, by exhaustive search.

    Args:
        records: records of the store.
        weights: weights of the n records; at least one is above 0.
        text: documents that were scored once.
        k: number of neighbors, >= 1; lowered to the number of records with a weight above 0.

    Raises:
        ConfigError: `text` was scored without keys or targets.
    """
    if text.evidence.keys is None or text.targets is None:
        raise ConfigError("the text was scored without keys or targets: score it with score_once")
    left = np.flatnonzero(weights)
    k = min(k, len(left))
    keys = torch.from_numpy(records.keys[left])
    distances, rows = nearest_keys(text.evidence.keys, keys, k, records.metric)
    tokens, weights_left = torch.from_numpy(records.tokens[left]), torch.from_numpy(weights[left]).float()
    return WeightedNeighbors(distances, tokens[rows] == text.targets[:, None], weights_left[rows])


def _weigh_only(stay: NDArray[np.int64], count: int) -> Weights:
    """Return the weight of each record, shape (count,): 1 for the indices in `stay`, 0 for all others."""
    weights = np.zeros(count)
    weights[stay] = 1
    return weights


def _find_nearest_pairs(tokens: NDArray[np.int64], keys: Keys) -> NDArray[np.int64]:
    """Pair each record with its `_NEAREST` nearest records among the records of the same token.

    Args:
        tokens: token of each record, shape (n,).
        keys: key of each record, shape (n, d).

    Returns:
        Pairs (lower index, higher index) of records, int64, shape (m, 2), nearest first; a pair may occur
        twice.
    """
    found: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
    lengths: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
    order = np.argsort(tokens, kind="stable")
    borders = np.flatnonzero(np.diff(tokens[order])) + 1
    for rows in np.split(order, borders):
        near = min(_NEAREST, len(rows) - 1)
        if near > 0:
            token_keys = keys[rows]
            nearest = find_nearest_rows(token_keys, token_keys, near + 1, Metric.L2)
            itself = nearest.ids == np.arange(len(rows))[:, None]
            others = nearest.mask_neighbors(itself).select_nearest(near)
            found.append(np.sort(np.stack([np.repeat(rows, near), rows[others.ids.ravel()]], axis=1), axis=1))
            lengths.append(others.distances.ravel())
    pairs, distances = np.concatenate(found), np.concatenate(lengths)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0], distances))]


def _merge_pairs(
    pairs: NDArray[np.int64], weights: Weights, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose which pairs of records are merged, the nearest pairs first.

    A pair is left out if one of its records was removed by an earlier merge. The result is the same as if one
    pair were merged after another, by ascending distance. For speed, each round merges all pairs whose two
    records are each other's nearest; these merges do not affect each other.

    Args:
        pairs: pairs of records, nearest first, shape (m, 2).
        weights: weight of each record, shape (n,); not changed.
        most: largest number of merges.

    Returns:
        For each merge the record that is removed, and the record that it is merged into; two arrays, nearest
        pairs first.
    """
    weights = weights.copy()
    ranks = np.arange(len(pairs))
    merges = [np.empty((0, 3), np.int64)]  # rank, the record that goes, its representative
    while len(pairs):
        best = np.full(len(weights), ranks[-1] + 1)
        for side in (0, 1):
            np.minimum.at(best, pairs[:, side], ranks)
        mutual = (best[pairs[:, 0]] == ranks) & (best[pairs[:, 1]] == ranks)
        first, second = pairs[mutual].T
        first_stays = weights[first] >= weights[second]
        representatives, gone = np.where(first_stays, first, second), np.where(first_stays, second, first)
        weights[representatives] += weights[gone]
        merges.append(np.stack([ranks[mutual], gone, representatives], axis=1))
        is_left = np.ones(len(weights), bool)
        is_left[gone] = False
        remain = is_left[pairs[:, 0]] & is_left[pairs[:, 1]]
        pairs, ranks = pairs[remain], ranks[remain]
    done = np.concatenate(merges)
    _, gone, representatives = done[np.argsort(done[:, 0])[:most]].T
    return gone, representatives
