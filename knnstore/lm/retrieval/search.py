"""Searching for what a mixer weighs: the nearest records of all that is selected, or of each domain."""

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, Neighbors
from knnstore.errors import DomainNotFoundError
from knnstore.lm.mixing import DISTINCT_AMONG, DomainWeights, Mixer
from knnstore.store import KNNStore, Selection

_logger = logging.getLogger(__name__)
_told: set[tuple[str, str, str]] = set()


def retrieve(store: KNNStore, queries: Keys, k: int, selection: Selection, mixer: Mixer) -> Neighbors:
    """Search once, or for `DomainWeights` in each domain that has a weight.

    Args:
        store: where to search.
        queries: float32, shape (q, d).
        k: how many neighbours, of each domain.
        selection: among which documents.
        mixer: of the settings.

    Returns:
        k columns, nearest first; with weights of domains k for each of `DomainWeights.searched`, one
        domain's after another's. Those of a domain that is gone or not selected are missing.
    """
    if not isinstance(mixer, DomainWeights):
        return store.search(queries, k, selection)
    parts = [_search(store, queries, k, selection, mixer.domains[number]) for number in mixer.searched]
    if not parts:
        return Neighbors.nothing(len(queries), k)
    return Neighbors.joined(parts)


def reachable(store: KNNStore, k: int, selection: Selection, mixer: Mixer) -> int:
    """Lower k where there are fewer records than that, so that no memory is taken for what cannot be found.

    Args:
        store: where to search.
        k: as of `retrieve`, likewise the others.
        selection: among which documents.
        mixer: of the settings.

    Returns:
        At most k; not less than a gate looks at, so that every mixer chooses as it would with k.
    """
    if k <= DISTINCT_AMONG:
        return k
    among = [selection]
    if isinstance(mixer, DomainWeights):
        among = [replace(selection, domains=(mixer.domains[number],)) for number in mixer.searched]
    return min(k, max([DISTINCT_AMONG, *(_count(store, part, mixer) for part in among)]))


def columns_of(k: int, mixer: Mixer) -> int:
    """How many neighbours `retrieve` finds for each query."""
    return k * max(1, len(mixer.searched)) if isinstance(mixer, DomainWeights) else k


def _count(store: KNNStore, selection: Selection, mixer: Mixer) -> int:
    try:
        return store.record_count(selection)
    except DomainNotFoundError:
        if isinstance(mixer, DomainWeights):
            return 0  # which `_search` tells of
        raise


def _search(store: KNNStore, queries: Keys, k: int, selection: Selection, domain: str) -> Neighbors:
    if selection.domains is not None and domain not in selection.domains:
        _tell(store, domain, "which is not selected here")
        return Neighbors.nothing(len(queries), k)
    try:
        return store.search(queries, k, replace(selection, domains=(domain,)))
    except DomainNotFoundError:  # removed since, perhaps in the middle of a text
        _tell(store, domain, "which the store does not have any more")
        return Neighbors.nothing(len(queries), k)


def _tell(store: KNNStore, domain: str, why: str) -> None:
    """Say once in a process that a domain's weight falls to the model."""
    known = (str(store.home.path), domain, why)
    if known not in _told:
        _told.add(known)
        _logger.warning(
            "the settings give a weight to the domain %r, %s: the model has that weight now", domain, why
        )


def search_some(
    store: KNNStore, queries: Keys, searched: NDArray[np.bool_], k: int, selection: Selection, mixer: Mixer
) -> Neighbors:
    """Search for some queries; the others find nothing, so that their λ is 0.

    Args:
        store: where to search.
        queries: shape (n, d).
        searched: for which of them, shape (n,).
        k: neighbours of each.
        selection: among which documents.
        mixer: see `retrieve`.
    """
    if searched.all():
        return retrieve(store, queries, k, selection, mixer)
    return retrieve(store, queries[searched], k, selection, mixer).spread(searched)
