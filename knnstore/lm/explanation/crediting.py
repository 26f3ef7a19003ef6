"""Computes p without each retrieved document; see `DocumentEffect`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Ids
from knnstore.lm.explanation.explained import DocumentEffect
from knnstore.lm.mixing import LEAST_PROBABILITY
from knnstore.store import Reader

_LEAST_CHANGE = np.log(1.01)
_AT_ONCE = 1000  # documents
_NOTHING = 1e-6  # of p_kNN: what is left of a sum of 32-bit numbers

Values = NDArray[np.float64]


class Mixed(NamedTuple):
    """The parts of the probabilities of n tokens."""

    positions: NDArray[np.int64]
    """Positions of the tokens in the text, shape (n,)."""
    ids: Ids
    """Ids of the records retrieved by keys, shape (n, k); -1 if missing."""
    weights: Values
    """Their parts of p_kNN, shape (n, k)."""
    hits: NDArray[np.bool_]
    """True for records of the token itself, shape (n, k)."""
    share: Values
    """λ of the keys in the whole mixture, shape (n,)."""
    below: Values
    """Fallback probability, used if every retrieved record is removed, shape (n,)."""
    p: Values
    """Probability in the mixture, shape (n,)."""


class Given(NamedTuple):
    """The parts of p that m places of n-grams give."""

    rows: NDArray[np.int64]
    """Index of the token of each place, shape (m,)."""
    ids: Ids
    p: Values


class Credits:
    """Collects the effects of documents on the tokens of a text.

    Args:
        store: where they were retrieved.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._found: list[tuple[Ids, NDArray[np.int64], NDArray[np.int64], Values, Values]] = []

    def add(self, mixed: Mixed, given: Given) -> None:
        """Add the effects of documents on some tokens."""
        holders = self._store.holders(mixed.ids)
        rows, columns = np.nonzero((holders >= 0) & (mixed.weights > 0))
        counted = mixed.weights[rows, columns]
        hits = counted * mixed.hits[rows, columns]
        there = self._store.holders(given.ids)
        known = there >= 0
        nothing = np.zeros(int(known.sum()))
        numbers = np.concatenate([holders[rows, columns], there[known]])
        base = int(numbers.max(initial=0)) + 1
        # A million of them: to ask for the first of each pair would take another way of sorting, a slow one.
        pairs, of = np.unique(np.concatenate([rows, given.rows[known]]) * base + numbers, return_inverse=True)
        ids = np.empty(len(pairs), np.int64)
        ids[of] = np.concatenate([mixed.ids[rows, columns], given.ids[known]])
        mass, hit, taken = (
            np.bincount(of, values, len(pairs))
            for values in (
                np.concatenate([counted, nothing]),
                np.concatenate([hits, nothing]),
                np.concatenate([np.zeros(len(rows)), given.p[known]]),
            )
        )
        row, number = np.divmod(pairs, base)
        p = mixed.p[row]
        own = (mixed.weights * mixed.hits).sum(1)[row]
        left = mixed.weights.sum(1)[row] - mass
        others = np.where(left > _NOTHING, (own - hit) / np.maximum(left, _NOTHING), mixed.below[row])
        without = np.where(mass > 0, p + mixed.share[row] * (np.clip(others, 0, 1) - own), p) - taken
        without = np.maximum(without, LEAST_PROBABILITY)
        counts = np.abs(np.log(np.maximum(p, LEAST_PROBABILITY) / without)) > _LEAST_CHANGE
        self._found.append(
            (ids[counts], number[counts], mixed.positions[row[counts]], p[counts], without[counts])
        )

    def documents(self) -> Iterator[tuple[DocumentEffect, ...] | None]:
        """Return the effect of each document, the most helpful first.

        Yields:
            None after each thousand documents, whose names are looked up together; then the result, once.
        """
        if not any(len(ids) for ids, *_ in self._found):
            yield ()
            return
        ids, numbers, positions, p, without = map(np.concatenate, zip(*self._found, strict=True))
        order = np.lexsort((positions, numbers))
        starts = np.unique(numbers[order], return_index=True)[1]
        groups, effects = np.split(order, starts[1:]), list[DocumentEffect]()
        for begin in range(0, len(groups), _AT_ONCE):
            if begin:
                yield None
            some = groups[begin : begin + _AT_ONCE]
            places = self._store.provenance(ids[[of[0] for of in some]], before=0, after=0)
            effects += [
                DocumentEffect(
                    place.document,
                    place.domain,
                    tuple(positions[of].tolist()),
                    tuple(without[of].tolist()),
                    float(np.log(np.maximum(p[of], LEAST_PROBABILITY) / without[of]).sum()),
                )
                for place, of in zip(places, some, strict=True)
                if place is not None
            ]
        yield tuple(sorted(effects, key=lambda one: (-one.gain, one.domain, one.document)))
