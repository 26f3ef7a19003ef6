"""Lineage: the stored documents that settings or weights were fitted on.

Weights contain traces of the documents that they were fitted on. Saved settings name weights of stored
documents in an object with the fields ``weights`` (the file) and ``traces`` (the lineage). Once one of these
documents is removed or replaced, the weights are not used any more and their file is deleted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from knnstore.catalog import Snapshot
from knnstore.store.selection import Selection


@dataclass(frozen=True, slots=True)
class Lineage:
    """Identifies all documents that domains held at one moment, by their number and a bound of positions.

    Each document has its own range of positions. Ranges are never reused, and later documents have higher
    positions. So no document was removed as long as the number of documents below the bound is unchanged.
    """

    domains: tuple[str, ...]
    """Names of the domains, sorted; empty for the whole store."""
    documents: int
    """Number of documents at that moment."""
    below: int
    """All positions of the documents are below this one."""

    @classmethod
    def of(cls, snapshot: Snapshot, domains: Iterable[str] = ()) -> Self:
        """Return the lineage of all documents that domains, or the whole store, hold now."""
        names = tuple(sorted(set(domains)))
        below = int(snapshot.stops.max(initial=0))
        return cls(names, _count_documents_below(snapshot, names, below), below)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Convert a dict of the fields to a lineage. A wrong dict raises TypeError or KeyError."""
        return cls(**{**values, "domains": tuple(values["domains"])})

    def gone(self, snapshot: Snapshot) -> float:
        """Return the share of the documents that were removed or replaced since; 0 if all are unchanged."""
        if not self.documents:
            return 0.0
        return 1 - _count_documents_below(snapshot, self.domains, self.below) / self.documents

    def are_within(self, selection: Selection) -> bool:
        """Check whether a selection contains all these documents, so that it may use what was fitted on them.

        Selections with other conditions than domains give False.
        """
        if Selection(domains=selection.domains) != selection:
            return False
        return selection.domains is None or (
            bool(self.domains) and set(self.domains) <= set(selection.domains)
        )


def _count_documents_below(snapshot: Snapshot, domains: tuple[str, ...], below: int) -> int:
    """Count the documents of domains, or of all domains without names, that begin below a position."""
    inside = snapshot.starts < below
    if domains:
        groups = [snapshot.domains[name] for name in domains if name in snapshot.domains]
        inside &= np.isin(snapshot.groups, groups)
    return int(inside.sum())
