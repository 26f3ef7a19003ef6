"""The array types and small records in the signatures of the `Datastore` protocol.

Arrays: `Ids`, `Keys`, `Groups`, `Distances`. Records: `Metric`, `Filter`, `Capabilities`, `DamagedPart`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

Ids = NDArray[np.int64]
"""Record ids, shape (n,), each >= 0. In search results -1 marks a missing neighbor."""

Keys = NDArray[np.float32]
"""Vectors (keys or queries), shape (n, dim), C-contiguous, finite."""

Groups = NDArray[np.int32]
"""The group of each record, shape (n,), each >= 0."""

Distances = NDArray[np.float32]
"""Distances; a smaller value is nearer. In search results +inf marks a missing neighbor."""


class Metric(StrEnum):
    """Measure of distance between two vectors. For both metrics a smaller value is nearer."""

    L2 = "l2"
    """Squared Euclidean distance, >= 0."""

    IP = "ip"
    """The negated inner product."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A set of records to which a search is restricted, described by ids and perhaps by groups.

    An adapter uses the description that is cheaper for its engine.
    """

    ids: IdRanges
    """Ids of the records in the set. There may be any number of ranges, in the worst case one per record."""

    groups: frozenset[int] | None = None
    """Groups whose records are exactly the same set; None if the set is not a union of groups."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine. The conformance kit tests that each value is true."""

    exact_search: bool
    """`search` returns the true nearest neighbors."""

    exact_keys: bool
    """`iterate` returns the same float32 values that `add` got; if False, values rounded to half precision.
    """

    persistent: bool
    """Flushed records survive the end of the process."""

    shared_writers: bool
    """Several processes may add records at the same time; if False, the second writer is refused."""

    checks_keys: bool = False
    """`verify` compares every stored byte of keys and ids with a checksum. If False, the store keeps
    checksums itself."""

    codes: str | None = None
    """Name of the codes in which large groups store their keys, as ``pq32``. Such keys are read back only
    approximately. None if `exact_keys` describes all keys."""

    coded_from: int | None = None
    """Number of records from which a group counts as large and is coded; None without codes."""


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A part of a datastore, such as a file, whose records are lost or unreadable."""

    name: str
    """The engine's name for the part, unique in the datastore."""

    problem: str
    """The problem, its place, and the remedy, in one line."""

    group: int
    """The group of the records."""

    ids: IdRanges
    """Ids that include all ids of the damaged records; other ids may be among them."""
