"""Searching for what a mixer weighs: the nearest records of all that is selected, or of parts of it."""

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, Neighbors
from knnstore.errors import DomainNotFoundError
from knnstore.lm.mixing import DISTINCT_AMONG
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader, Selection

_logger = logging.getLogger(__name__)
_told: set[tuple[str, str, str]] = set()


def retrieve(
    store: Reader, queries: Keys, settings: KNNSettings, searched: NDArray[np.bool_] | None = None
) -> Neighbors:
    """Make the searches of the settings' mixer.

    Args:
        store: where to search.
        queries: float32, shape (q, d).
        settings: k, the mixer and the selection.
        searched: for which queries, shape (q,); the others find nothing, so that their λ is 0. None is all.

    Returns:
        k columns for each search, nearest first, one search's after another's; one column without any
        where nothing is searched. What is not selected, or is there no more, finds nothing.
    """
    if searched is not None and not searched.all():
        return retrieve(store, queries[searched], settings).spread(searched)
    parts = [_search(store, queries, settings, part) for part in settings.mixer.searches(settings.selection)]
    return Neighbors.joined(parts) if parts else Neighbors.nothing(len(queries), 1)


def reachable(store: Reader, settings: KNNSettings) -> int:
    """Lower k where there are fewer records than that, so that no memory is taken for what cannot be found.

    Returns:
        At most the settings' k; not less than a gate looks at, so that every mixer chooses as with that.
    """
    if settings.k <= DISTINCT_AMONG:
        return settings.k
    searches = settings.mixer.searches(settings.selection)
    counts = [_count(store, part, strict=part is settings.selection) for part in searches]
    return min(settings.k, max([DISTINCT_AMONG, *counts]))


def columns_of(settings: KNNSettings) -> int:
    """How many neighbors `retrieve` finds for each query."""
    return settings.k * max(1, len(settings.mixer.searches(settings.selection)))


def _count(store: Reader, selection: Selection, *, strict: bool) -> int:
    try:
        return store.record_count(selection)
    except DomainNotFoundError:
        if strict:
            raise
        return 0  # which `_search` tells of


def _search(store: Reader, queries: Keys, settings: KNNSettings, part: Selection) -> Neighbors:
    """Search what is selected, or a part of it by domains, whose absence is no error."""
    if part is settings.selection:
        return store.search(queries, settings.k, part)
    selected = settings.selection.domains
    domains = selected if part.domains is None else part.domains
    why = "which is not selected here"
    if selected is None or set(domains or ()) <= set(selected):
        try:
            return store.search(queries, settings.k, replace(settings.selection, domains=domains))
        except DomainNotFoundError:  # removed since, perhaps in the middle of a text
            why = "which the store does not have any more"
    domain = ", ".join(part.domains or ())
    known = (str(store.home.path), domain, why)
    if known not in _told:  # once in a process
        _told.add(known)
        _logger.warning(
            "the settings give a weight to the domain %r, %s: the model has that weight now", domain, why
        )
    return Neighbors.nothing(len(queries), settings.k)
