"""Lineage: the stored documents on which settings or weights were fitted.

Weights contain traces of the documents on which they were fitted. Saved settings name such weights in an
object with the fields ``weights`` (the file) and ``traces`` (the lineage). As soon as one of the documents is
removed or replaced, the weights are not used any more, and their file is deleted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from knnstore.catalog import Snapshot
from knnstore.store.selection import Selection


@dataclass(frozen=True, slots=True)
class Lineage:
    """The set of all documents that some domains had at one moment, to detect later that one was removed.

    The set is stored as the number of documents and a bound of their positions. A position is the number of a
    token in the store. Positions are never reused, and later documents have higher positions. So no document
    was removed or replaced as long as the number of documents below the bound is unchanged.
    """

    domains: tuple[str, ...]
    """Names of the domains, sorted; empty for the whole store."""
    documents: int
    """Number of documents that the domains had at that moment."""
    below: int
    """Bound of the positions: all tokens of these documents have positions below this number."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, domains: Iterable[str] = ()) -> Self:
        """Return the lineage (the set) of all documents that some domains have in a snapshot.

        Args:
            snapshot: the documents of the store at one revision.
            domains: names of the domains; empty means the whole store.
        """
        names = tuple(sorted(set(domains)))
        below = int(snapshot.stops.max(initial=0))
        return cls(names, _count_documents_below(snapshot, names, below), below)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a lineage from a dict of its three fields. Other dicts raise TypeError or KeyError."""
        return cls(**{**values, "domains": tuple(values["domains"])})

    def removed_share(self, snapshot: Snapshot) -> float:
        """Return the share of the fitted documents that the store no longer has unchanged, 0 to 1.

        A document counts if it was removed or replaced after the weights were fitted to it.

        Args:
            snapshot: the documents of the store now.

        Returns:
            0 if all documents are unchanged, or if the lineage has no documents.
        """
        if not self.documents:
            return 0.0
        return 1 - _count_documents_below(snapshot, self.domains, self.below) / self.documents

    def is_within_selection(self, selection: Selection) -> bool:
        """Check whether a selection (the documents of a query) contains all documents of the lineage.

        Only then may the query use weights that were fitted on these documents. The result is False for every
        selection with other conditions than domains.
        """
        if Selection(domains=selection.domains) != selection:
            return False
        return selection.domains is None or (
            bool(self.domains) and set(self.domains) <= set(selection.domains)
        )


def _count_documents_below(snapshot: Snapshot, domains: tuple[str, ...], below: int) -> int:
    """Count the documents of some domains whose first token has a position below a bound.

    Args:
        snapshot: the documents of the store at one revision.
        domains: names of the domains; unknown names are ignored. Empty means all domains.
        below: the bound.
    """
    inside = snapshot.starts < below
    if domains:
        groups = [snapshot.domains[name] for name in domains if name in snapshot.domains]
        inside &= np.isin(snapshot.groups, groups)
    return int(inside.sum())
