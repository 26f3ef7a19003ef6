"""Clusters of near keys: what a pointer leads to besides the one record that it points at.

The records of each domain are divided by the nearest of some centers, which k-means finds among a sample of
them. Made when first asked for and extended as documents are added. Centers are means of keys, and nothing
may keep a trace of what is removed: so they are only in memory, and made anew when a document was removed.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Datastore, IdRanges, Keys, Metric, nearest_rows, positions_of, ranges_of
from knnstore.store.view import View

_SAMPLED = 64
"""Keys for each center, of which it becomes the mean."""
_MOST_CENTERS = 4096
"""Larger domains have larger clusters: to divide n records takes 2 n c dim operations."""
_ROUNDS = 2
_MOST_MEMBERS = 1 << 14
"""Of the clusters that one query is led to, but one cluster at least."""

Positions = NDArray[np.int64]
_NONE = np.empty(0, np.int64)


class Clusters:
    """The clusters of every domain.

    Args:
        size: how many records a cluster has on average, >= 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._domains: dict[int, tuple[int, _DomainClusters]] = {}  # each as of a revision
        self._making = threading.Lock()

    def around(self, view: View, positions: Positions, there: NDArray[np.bool_]) -> Positions:
        """Find the records that share a cluster with some others.

        Args:
            view: what is live.
            positions: of live records, shape (q, m); in each row those that matter most come first.
            there: where there is one, shape (q, m).

        Returns:
            Their positions, shape (q, n), -1 for none.
        """
        groups = np.append(view.snapshot.groups, -1)[view.snapshot.documents_at(positions)]
        of = {domain: self._of(view, domain) for domain in np.unique(groups[there]).tolist()}
        rows = []
        for row, group, mine in zip(positions, groups, there, strict=True):
            parts = [clusters.around(row[mine & (group == domain)]) for domain, clusters in of.items()]
            rows.append(np.concatenate([_NONE, *parts]))
        found = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
        for at, members in enumerate(rows):
            found[at, : len(members)] = members
        return found

    def _of(self, view: View, domain: int) -> "_DomainClusters":
        """The clusters of a domain, with all that is live of it."""
        with self._making:
            revision, known = self._domains.get(domain, (None, None))
            if known is None or revision != view.snapshot.revision:
                known = _up_to_date(known, view, domain, self._size)
                self._domains[domain] = view.snapshot.revision, known
            return known


class _DomainClusters:
    """Some records by ascending position, each labeled with its nearest center.

    All records of `divided` are in a cluster; there were `made_for` of them when the centers were found.
    """

    def __init__(
        self,
        centers: Keys,
        made_for: int,
        divided: IdRanges | None = None,
        positions: Positions = _NONE,
        labels: NDArray[np.int64] = _NONE,
    ) -> None:
        self.made_for, self.divided = made_for, divided or IdRanges()
        self._centers, self._positions, self._labels = centers, positions, labels
        order = np.argsort(labels, kind="stable")
        self._members = positions[order]
        self._starts = np.searchsorted(labels[order], np.arange(len(centers) + 1))

    def extended(self, datastore: Datastore, new: IdRanges) -> "_DomainClusters":
        """The same with more records."""
        positions, labels = [self._positions], [self._labels]
        for ids, keys, _ in datastore.iterate(ids=new):
            positions.append(positions_of(ids))
            labels.append(_labels(keys, self._centers))
        together = np.concatenate(positions)
        order = np.argsort(together, kind="stable")
        return _DomainClusters(
            self._centers, self.made_for, self.divided | new, together[order], np.concatenate(labels)[order]
        )

    def around(self, positions: Positions) -> Positions:
        """The records of the clusters that some records are in, shape (n,)."""
        at = np.searchsorted(self._positions, positions).clip(max=len(self._positions) - 1)
        known = self._positions[at] == positions  # others were pruned
        labels, first = np.unique(self._labels[at[known]], return_index=True)
        labels = labels[np.argsort(first)]
        total = (self._starts[labels + 1] - self._starts[labels]).cumsum()
        labels = labels[: max(1, int(np.searchsorted(total, _MOST_MEMBERS, side="right")))]
        bounds = zip(self._starts[labels].tolist(), self._starts[labels + 1].tolist(), strict=True)
        return np.concatenate([_NONE, *(self._members[start:stop] for start, stop in bounds)])


def _up_to_date(known: _DomainClusters | None, view: View, domain: int, size: int) -> _DomainClusters:
    """The clusters of all that is live of a domain, as they were where nothing went and no more was added."""
    mine = view.snapshot.groups == domain
    live = ranges_of(view.snapshot.starts[mine], view.snapshot.stops[mine])
    records = int(view.snapshot.records[mine].sum())
    if known is None or records > 2 * known.made_for or known.divided - live:
        known = _DomainClusters(_centers(view.datastore, live, records, size), records)
    new = live - known.divided
    return known.extended(view.datastore, new) if new else known


def _centers(datastore: Datastore, live: IdRanges, records: int, size: int) -> Keys:
    """Centers for clusters of a mean size, found by k-means (Lloyd 1982) among every so many records."""
    count = min(_MOST_CENTERS, max(1, round(records / size)))
    every, seen, parts = max(1, records // (_SAMPLED * count)), 0, []
    for ids, keys, _ in datastore.iterate(ids=live):
        parts.append(keys[-seen % every :: every].astype(np.float32))
        seen += len(ids)
    sample = np.concatenate(parts)
    centers = sample[:: max(1, len(sample) // count)][:count].copy()
    for _ in range(_ROUNDS):
        labels = _labels(sample, centers)
        order = np.argsort(labels, kind="stable")
        present, starts = np.unique(labels[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, dtype=np.float64)
        centers[present] = sums / np.diff(starts, append=len(sample))[:, None]
    return centers


def _labels(keys: Keys, centers: Keys) -> NDArray[np.int64]:
    """The nearest center of each key, shape (n,)."""
    return nearest_rows(keys, centers, 1, Metric.L2).ids[:, 0]
