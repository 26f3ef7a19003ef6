"""Searching for what a mixer weighs: the nearest records of all that is selected, or of parts of it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Neighbors, tokens_of
from knnstore.errors import DomainNotFoundError
from knnstore.lm.mixing import DISTINCT_AMONG, Visited, VisitedCells
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader, Selection

_logger = logging.getLogger(__name__)
_told: set[tuple[str, str, str]] = set()
_MANY_IN_CELL = 8192  # records, as in a small domain that is one cell

Found = TypeVar("Found")


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
        Columns for each search, nearest first, one search's after another's: k of them, fewer where there
        are fewer records; one without any where nothing is searched. What is not selected, or is there no
        more, finds nothing.
    """
    if searched is not None and not searched.all():
        return retrieve(store, queries[searched], settings).spread(searched)

    def search(selection: Selection) -> Neighbors:
        if not visits_cells(store, settings):
            return store.search(queries, reachable(store, settings), selection)
        assert settings.probes is not None
        found = Neighbors.visited(store.visit(queries, settings.probes, selection), len(queries))
        return found.nearest_first(1 if settings.needs_nearest_only else DISTINCT_AMONG)

    parts = [
        _looked_up(store, settings, part, search) for part in settings.mixer.searches(settings.selection)
    ]
    found = [Neighbors.nothing(len(queries), 1) if part is None else part for part in parts]
    width = max((part.ids.shape[1] for part in found), default=1)
    return Neighbors.joined([part.padded(width) for part in found] or [Neighbors.nothing(len(queries), 1)])


def visits_cells(store: Reader, settings: KNNSettings) -> bool:
    """Whether whole cells are visited, and no k nearest searched for."""
    return settings.probes is not None and store.has_cells


def visit(store: Reader, queries: Keys, gold: Tensor, settings: KNNSettings) -> list[Visited]:
    """Visit the cells of each of the settings' mixer's searches.

    Args:
        store: that has cells.
        queries: float32, shape (q, d).
        gold: the token that came after each, int64, shape (q,).
        settings: probes, the mixer and the selection.

    Returns:
        One for each search; what is not selected, or is there no more, finds nothing.
    """
    assert settings.probes is not None

    def visited(selection: Selection) -> list[VisitedCells]:
        assert settings.probes is not None
        return [
            VisitedCells(
                torch.from_numpy(found.queries),
                torch.from_numpy(tokens_of(found.ids)),
                torch.as_tensor(found.distances),
                *(None if of is None else torch.from_numpy(of) for of in (found.log_weights, found.ranks)),
            )
            for found in store.visit(queries, settings.probes, selection)
        ]

    searches = settings.mixer.searches(settings.selection)
    return [Visited(_looked_up(store, settings, part, visited) or [], gold) for part in searches]


def reachable(store: Reader, settings: KNNSettings) -> int:
    """Lower k where there are fewer records than that, so that no memory is taken for what cannot be found.

    Returns:
        At most the settings' k; not less than a gate looks at, so that every mixer chooses as with that.
    """
    if settings.k <= DISTINCT_AMONG or visits_cells(store, settings):
        return settings.k
    searches = settings.mixer.searches(settings.selection)
    counts = [_count(store, part, strict=part is settings.selection) for part in searches]
    return min(settings.k, max([DISTINCT_AMONG, *counts]))


def columns_of(store: Reader, settings: KNNSettings) -> int:
    """How many neighbors `retrieve` finds for each query at most, or how many records it may visit."""
    columns = settings.k
    if visits_cells(store, settings):
        assert settings.probes is not None
        columns = min(settings.probes * _MANY_IN_CELL, _count(store, settings.selection, strict=False) or 1)
    return columns * max(1, len(settings.mixer.searches(settings.selection)))


def _count(store: Reader, selection: Selection, *, strict: bool) -> int:
    try:
        return store.record_count(selection)
    except DomainNotFoundError:
        if strict:
            raise
        return 0  # which `_search` tells of


def _looked_up(
    store: Reader, settings: KNNSettings, part: Selection, look: Callable[[Selection], Found]
) -> Found | None:
    """Look in what is selected, or in a part of it by domains, whose absence is no error but None."""
    if part is settings.selection:
        return look(part)
    selected = settings.selection.domains
    domains = selected if part.domains is None else part.domains
    why = "which is not selected here"
    if selected is None or set(domains or ()) <= set(selected):
        try:
            return look(replace(settings.selection, domains=domains))
        except DomainNotFoundError:  # removed since, perhaps in the middle of a text
            why = "which the store does not have any more"
    domain = ", ".join(part.domains or ())
    known = (str(store.home.path), domain, why)
    if known not in _told:  # once in a process
        _told.add(known)
        _logger.warning(
            "the settings give a weight to the domain %r, %s: the model has that weight now", domain, why
        )
    return None
