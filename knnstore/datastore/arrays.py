"""The array types and small records in the signatures of the `Datastore` protocol.

Arrays: `Ids`, `Keys`, `Groups`, `Distances`. Records: `Metric`, `Filter`, `Capabilities`, `DamagedPart`.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

Ids = NDArray[np.int64]
"""Ids of records (a record is one stored vector), shape (n,), each >= 0.

In search results, id -1 stands where a query has fewer neighbors than the array has columns.
"""

Keys = NDArray[np.float32]
"""Vectors (keys or queries), shape (n, dim), C-contiguous, finite."""

Groups = NDArray[np.int32]
"""Group number of each record, shape (n,), each >= 0.

A group is a set of records that the caller numbers. A store gives one number to all records of a domain.
"""

Distances = NDArray[np.float32]
"""Distances between vectors, float32; a smaller value is nearer.

In search results, +inf stands where a query has fewer neighbors than the array has columns.
"""


class Metric(StrEnum):
    """Measure of distance between two vectors. For both metrics a smaller value is nearer."""

    L2 = "l2"
    """Squared Euclidean distance, >= 0."""

    IP = "ip"
    """The negated inner product of the two vectors; may be negative."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The set of records that a search may find, described by record ids, and possibly also by groups.

    A group is a numbered set of records, for example all records of a domain. If `groups` is not None, `ids`
    and `groups` describe the same records, and an adapter uses the description that is cheaper for its
    engine.
    """

    ids: IdRanges
    """Ids of the records in the set. There may be any number of ranges, in the worst case one per record."""

    groups: frozenset[int] | None = None
    """Numbers of the groups whose records are the records in the set.

    None if the set contains only some of the records of a group.
    """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features that a vector engine claims. The conformance kit tests an adapter's claims."""

    exact_search: bool
    """True if `search` always returns the true nearest neighbors; False if it may miss some of them."""

    exact_keys: bool
    """True if `iterate` returns the float32 values that `add` received; False if it returns these values
    rounded to half precision."""

    persistent: bool
    """True if flushed records survive the end of the process."""

    shared_writers: bool
    """True if several processes may write at the same time; False if only one process may write."""

    checks_keys: bool = False
    """True if `verify` compares every stored byte of keys and ids with a checksum. False if the engine has no
    such checksums; then the store keeps checksums itself."""

    codes: str | None = None
    """Name of the compressed form (code) in which large groups of records store their keys, such as
    ``pq32``. Compressed keys are read back only approximately. None if no key is compressed."""

    coded_from: int | None = None
    """Number of records from which a group's keys are compressed; None if no key is compressed."""


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A part of a datastore, such as a file, whose records are lost or unreadable."""

    name: str
    """The engine's name for the part, unique in the datastore."""

    problem: str
    """One line of text: what is damaged, where, and what the user can do."""

    group: int
    """Group number of the damaged records; all of them belong to one group."""

    ids: IdRanges
    """Ranges of ids that include the ids of all damaged records, and possibly ids of sound records."""
