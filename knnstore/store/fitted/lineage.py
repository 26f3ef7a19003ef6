"""The documents that something was fitted on, which holds traces of each.

Saved settings name weights that were fitted on the store's own documents in an object with both a ``weights``
and a ``traces``; once a document is removed or replaced, they are used no more and their file is removed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from knnstore.catalog import Snapshot
from knnstore.store.selection import Selection


@dataclass(frozen=True, slots=True)
class Lineage:
    """All documents that some domains held at one moment.

    Positions are never given twice and later documents have higher ones. So these documents are all
    still there as long as there are as many below the position that the next one was to have.
    """

    domains: tuple[str, ...]
    """Names of the domains, sorted; empty for the whole store."""
    documents: int
    """Number of the documents."""
    below: int
    """All positions of the documents are below this one."""

    @classmethod
    def of(cls, snapshot: Snapshot, domains: Iterable[str] = ()) -> Self:
        """Return the documents that these domains hold now, or the whole store if none is named."""
        names = tuple(sorted(set(domains)))
        below = int(snapshot.stops.max(initial=0))
        return cls(names, _count(snapshot, names, below), below)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what was saved as JSON."""
        return cls(**{**values, "domains": tuple(values["domains"])})

    def gone(self, snapshot: Snapshot) -> float:
        """Return the share of the documents that were removed or replaced since; 0 if all are unchanged."""
        if not self.documents:
            return 0.0
        return 1 - _count(snapshot, self.domains, self.below) / self.documents

    def are_within(self, selection: Selection) -> bool:
        """Check whether a selection contains all these documents, so that it may show traces of them."""
        if Selection(domains=selection.domains) != selection:
            return False
        return selection.domains is None or (
            bool(self.domains) and set(self.domains) <= set(selection.domains)
        )


def _count(snapshot: Snapshot, domains: tuple[str, ...], below: int) -> int:
    inside = snapshot.starts < below
    if domains:
        groups = [snapshot.domains[name] for name in domains if name in snapshot.domains]
        inside &= np.isin(snapshot.groups, groups)
    return int(inside.sum())
