"""Choosing which records of a domain stay when it is pruned."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import DROPPED
from knnstore.datastore import Keys, Metric, nearest_rows
from knnstore.progress import Progress

NEAREST = 16
"""Candidates that each record has to be merged with, before more are looked for."""


class Choice(NamedTuple):
    """What becomes of n records."""

    representatives: NDArray[np.int64]
    """Which record stands for each, shape (n,): its own index where it stays, `DROPPED` where none does."""

    scale: float = 1.0
    """By how much those that stay weigh more, standing for any that were dropped."""


def drop_at_random(count: int, left: int, seed: int) -> Choice:
    """Let `left` of `count` records stay at random, all equally likely, and each weigh as much more.

    So a domain that was pruned keeps its part of p_kNN beside others that were not.
    """
    stay = np.random.default_rng(seed).choice(count, left, replace=False, shuffle=False)
    return Choice(_only(stay, count), scale=count / left)


def drop_highest(scores: NDArray[np.floating], left: int) -> Choice:
    """Let the records with the lowest scores stay, of equal ones the first.

    Args:
        scores: shape (n,).
        left: how many shall stay, at most n.
    """
    return Choice(_only(np.argsort(scores, kind="stable")[:left], len(scores)))


def merge_nearest(
    tokens: NDArray[np.int64],
    keys: Keys,
    weights: NDArray[np.floating],
    left: int,
    progress: Progress | None = None,
) -> Choice:
    """Merge the two nearest records that carry the same token, again and again.

    The heavier of the two stays, of equal ones the first, and stands for both. He et al. 2021
    (https://arxiv.org/abs/2109.04212) merge among each record's k nearest, in random order; the nearest
    pairs first cost far less perplexity and stop at any number. What is nearest is measured by Euclidean
    distance, whatever the store's metric: where keys are equal, p_kNN stays as it was. `left` records
    stay, more where each token's last one does. `weights` says how many records each stands for already.
    """
    shown = progress or Progress()
    into = np.arange(len(tokens))
    masses = np.array(weights, np.float64)
    alive = np.arange(len(tokens))
    while len(alive) > max(left, len(np.unique(tokens[alive]))):
        shown.start("comparing", total=len(alive), unit="rec")
        pairs = _nearest_pairs(tokens[alive], keys[alive], shown)
        shown.finish()
        gone, representatives = _merge_pairs(pairs, masses[alive], len(alive) - left)
        into[alive[gone]] = alive[representatives]
        np.add.at(masses, alive[representatives], masses[alive[gone]])
        alive = np.flatnonzero(into == np.arange(len(into)))
    while not np.array_equal(into, into[into]):  # the representative of a representative
        into = into[into]
    return Choice(into)


def _only(stay: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    representatives = np.full(count, DROPPED, np.int64)
    representatives[stay] = stay
    return representatives


def _nearest_pairs(tokens: NDArray[np.int64], keys: Keys, progress: Progress) -> NDArray[np.int64]:
    """Pair each record with the `NEAREST` ones of the same token.

    Returns:
        Pairs (lower index, higher index), shape (m, 2), nearest first.
    """
    found: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
    lengths: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
    order = np.argsort(tokens, kind="stable")
    borders = np.flatnonzero(np.diff(tokens[order])) + 1
    for rows in np.split(order, borders):
        near = min(NEAREST, len(rows) - 1)
        if near > 0:
            some = keys[rows]
            nearest = nearest_rows(some, some, near + 1, Metric.L2)
            itself = nearest.ids == np.arange(len(rows))[:, None]
            others = nearest.without(itself).nearest(near)
            found.append(np.sort(np.stack([np.repeat(rows, near), rows[others.ids.ravel()]], axis=1), axis=1))
            lengths.append(others.distances.ravel())
        progress.advance(len(rows))
    pairs, distances = np.concatenate(found), np.concatenate(lengths)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0], distances))]


def _merge_pairs(
    pairs: NDArray[np.int64], weights: NDArray[np.float64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge at most so many times along pairs, nearest first, while both are there.

    Two records that are each other's nearest are merged by the greedy algorithm whatever it does before, so
    all such pairs are merged at once.

    Returns:
        The records that go and those that each is merged into, nearest pairs first.
    """
    weights = weights.copy()
    ranks = np.arange(len(pairs))
    merges = [np.empty((0, 3), np.int64)]  # rank, who goes, into whom
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
        there = np.ones(len(weights), bool)
        there[gone] = False
        remain = there[pairs[:, 0]] & there[pairs[:, 1]]
        pairs, ranks = pairs[remain], ranks[remain]
    done = np.concatenate(merges)
    _, gone, representatives = done[np.argsort(done[:, 0])[:most]].T
    return gone, representatives
