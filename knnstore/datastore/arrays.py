"""The arrays and small records that the `Datastore` protocol speaks in."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

Ids = NDArray[np.int64]
"""Record ids, shape (n,), each >= 0. In results -1 stands for a missing neighbor."""

Keys = NDArray[np.float32]
"""Vectors, shape (n, dim), C-contiguous, finite."""

Groups = NDArray[np.int32]
"""The group of each record, shape (n,), each >= 0."""

Distances = NDArray[np.float32]
"""Distances, smaller is nearer; in results +inf stands for a missing neighbor."""


class Metric(StrEnum):
    """How near two vectors are. Smaller is nearer for both."""

    L2 = "l2"
    """Squared Euclidean distance, >= 0."""

    IP = "ip"
    """The negated inner product."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A set of records, named twice; an adapter uses whichever name is cheap for its engine."""

    ids: IdRanges
    """Exactly the records with these ids; in the worst case one range for each, so any number of them."""

    groups: frozenset[int] | None = None
    """If not None: the same set is exactly the records of these groups."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; the conformance kit tests that each statement is true."""

    exact_search: bool
    """`search` returns the true nearest neighbors."""

    exact_keys: bool
    """`iterate` returns the very float32 values given to `add` (else rounded to half precision)."""

    persistent: bool
    """What was flushed is there after the process ends."""

    shared_writers: bool
    """Several processes may add at once (else the second one is refused)."""

    checks_keys: bool = False
    """`verify` compares every stored byte of keys and ids with a checksum (else the store keeps some of its
    own)."""

    codes: str | None = None
    """What keys are kept as where there are many, as ``pq32``: they come back near what was given, and no
    more is said. None where `exact_keys` says all."""

    coded_from: int | None = None
    """Records from which on a group is so many."""


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """Records that are lost, or that cannot be read."""

    name: str
    """What the engine calls it."""

    problem: str
    """What is wrong, where, and what to do, in one line."""

    group: int
    """The group of its records."""

    ids: IdRanges
    """Among which its records are."""
