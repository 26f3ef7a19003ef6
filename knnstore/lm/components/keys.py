"""Keys: the records of the store near the query, weighed by the settings' mixer.

An engine either finds the k nearest records, or sums over all records of the probed cells. This module turns
both into `TokenSums`, so that no other module distinguishes them.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Ids, Neighbors, tokens_of
from knnstore.datastore import Keys as KeyArray
from knnstore.errors import ConfigError, DomainNotFoundError
from knnstore.lm.batch import Batch
from knnstore.lm.components.component import KEYS, Citations, Form, Place, Question
from knnstore.lm.mixing import (
    DISTINCT_AMONG,
    CellSums,
    Contribution,
    Evidence,
    Mixer,
    NeighborSums,
    ProbedCells,
    TokenSums,
    neighbor_features,
    powers_up_to,
)
from knnstore.store import Reader, Selection

_logger = logging.getLogger(__name__)
_told: set[tuple[str, str, str]] = set()
_MANY_IN_CELL = 8192  # records, as in a small domain that is a single cell

T = TypeVar("T")


class KeySettings(Protocol):
    """The fields and properties of `KNNSettings` that the component reads."""

    @property
    def k(self) -> int:
        """Neighbors of each query."""
        ...

    @property
    def probes(self) -> int | None:
        """Cells that each query visits, in a store that has cells, in place of a search for k neighbors."""
        ...

    @property
    def temperature(self) -> float:
        """T, in the unit of the distances."""
        ...

    @property
    def mixer(self) -> Mixer:
        """Chooses λ for each query, and where to search."""
        ...

    @property
    def selection(self) -> Selection:
        """Which documents are retrieved from."""
        ...

    @property
    def gate(self) -> Any:
        """Weighs the component in place of the mixer; None where the mixer does."""
        ...

    @property
    def retrieves(self) -> bool:
        """True if λ can be above 0, so that a search can change a prediction."""
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """True if all weights are chosen from the nearest distance and the model's confidence alone."""
        ...


class Keys:
    """Records from the store."""

    name = KEYS
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2 * len(powers_up_to(DISTINCT_AMONG))

    def look_up(self, reader: Reader, settings: KeySettings, batch: Batch, form: Form) -> list[TokenSums]:
        """Make the searches of the settings' mixer.

        Args:
            reader: the store.
            settings: the settings in force.
            batch: the positions.
            form: how much of the findings is kept.

        Returns:
            The findings of each search, at least one. Padding finds nothing.
        """
        # 1) Search for every position but padding.
        is_text = batch.is_text
        if not settings.retrieves or (is_text is not None and not is_text.any()):
            return [_sums(Neighbors.nothing(len(batch), 1), batch, settings, form)]
        queries = (batch.keys if is_text is None else batch.keys[is_text]).float().cpu().numpy()
        # 2) Sum over whole cells where texts are scored, which have no padding.
        targets = batch.targets if is_text is None and form is not Form.SOURCES else None
        if targets is not None and probes_cells(reader, settings):
            return [*_sum_cells(reader, queries, targets, settings, batch.vocabulary, form)]
        # 3) Keep single records elsewhere.
        found = search_records(reader, queries, settings)
        if is_text is not None:
            found = [one.spread(is_text.numpy()) for one in found]
        return [_sums(one, batch, settings, form) for one in found]

    def contribute(self, settings: KeySettings, found: Evidence, factor: float = 1.0) -> Contribution:
        """Weigh the records by the mixer, which chooses λ and scales T."""
        if settings.gate is not None and len(found.searches) == 1:
            found.prepare([settings.temperature * one for one in self.factors])
        weights, lam, temperature = settings.mixer.weigh(found, settings.temperature * factor)
        return Contribution(weights, lam, found.tokens, found.hits, name=self.name, temperature=temperature)

    def cite(self, question: Question[KeySettings], found: Evidence, weights: Tensor, most: int) -> Citations:
        """Name the nearest records, and records of the target token with most of p_kNN; see `Component`."""
        distances, tokens, ids = found.distances, found.tokens, found.ids
        assert tokens is not None
        wanted, contexts = min(most, weights.shape[1]), question.contexts
        targets = torch.from_numpy(contexts.targets(np.arange(len(contexts))))
        columns = (
            distances.topk(wanted, largest=False).indices,
            (weights * (tokens == targets[:, None])).topk(wanted).indices,
        )
        return Citations(*(_places(ids, distances, weights, one) for one in columns))

    def features(self, found: Evidence, unit: float) -> Tensor:
        """Return distances of the nearest 1, 2, 4, … records, and numbers of different tokens among them."""
        return neighbor_features(found, DISTINCT_AMONG, unit)


def probes_cells(reader: Reader, settings: KeySettings) -> bool:
    """Check whether the settings sum over whole cells instead of the k nearest records."""
    return settings.probes is not None and reader.has_cells


def reachable(reader: Reader, settings: KeySettings) -> int:
    """Lower k where the store holds fewer records, so that no memory is taken for missing ones.

    Returns:
        At most the settings' k, and at least the number of records that a gate uses, so that every mixer
        chooses as with the settings' k.
    """
    if settings.k <= DISTINCT_AMONG or probes_cells(reader, settings):
        return settings.k
    searches = settings.mixer.searches(settings.selection)
    counts = [_count_records(reader, part, strict=part is settings.selection) for part in searches]
    return min(settings.k, max([DISTINCT_AMONG, *counts]))


def most_records(reader: Reader, settings: KeySettings) -> int:
    """Return an upper bound of the number of records that a query finds in all searches together."""
    columns = settings.k
    if probes_cells(reader, settings):
        assert settings.probes is not None
        records = _count_records(reader, settings.selection, strict=False)
        columns = min(settings.probes * _MANY_IN_CELL, records or 1)
    return columns * max(1, len(settings.mixer.searches(settings.selection)))


def search_records(reader: Reader, queries: KeyArray, settings: KeySettings) -> list[Neighbors]:
    """Make the searches of the settings' mixer, and keep single records.

    Args:
        reader: where to search.
        queries: float32, shape (q, d).
        settings: k or probes, the mixer and the selection.

    Returns:
        The records of each search, with the same number of columns for all searches: the k nearest records,
        fewer in a smaller store; or all records of the probed cells, the nearest first. A domain that is not
        selected, or was removed, finds nothing. If the mixer makes no search: one entry without records.
    """

    def search(selection: Selection) -> Neighbors:
        if not probes_cells(reader, settings):
            return reader.search(queries, reachable(reader, settings), selection)
        assert settings.probes is not None
        found = Neighbors.visited(reader.visit(queries, settings.probes, selection), len(queries))
        return found.nearest_first(1 if settings.needs_nearest_only else DISTINCT_AMONG)

    searches = settings.mixer.searches(settings.selection)
    found = [_search_selected(reader, settings, part, search) for part in searches] or [None]
    every = [Neighbors.nothing(len(queries), 1) if one is None else one for one in found]
    width = max(one.ids.shape[1] for one in every)
    return [one.padded(width) for one in every]


def sum_cells(reader: Reader, queries: KeyArray, targets: Tensor, settings: KeySettings) -> CellSums:
    """Sum over the cells of one search, for the target tokens.

    Args:
        reader: a store with cells.
        queries: float32, shape (q, d).
        targets: the next token of each, int64, shape (q,).
        settings: probes, a mixer that makes one search, and the selection.
    """
    (found,) = _sum_cells(reader, queries, targets, settings, 0, Form.TARGET)
    return found


def _sum_cells(
    reader: Reader, queries: KeyArray, targets: Tensor, settings: KeySettings, vocabulary: int, form: Form
) -> list[CellSums]:
    """Make the searches of the settings' mixer, and sum over the probed cells."""
    assert settings.probes is not None

    def probe(selection: Selection) -> list[ProbedCells]:
        assert settings.probes is not None
        return [
            ProbedCells(
                torch.from_numpy(found.queries),
                torch.from_numpy(tokens_of(found.ids)),
                torch.as_tensor(found.distances),
                None if found.ranks is None else torch.from_numpy(found.ranks),
            )
            for found in reader.visit(queries, settings.probes, selection)
        ]

    places = None if form is Form.TARGET else vocabulary
    features = 0 if settings.needs_nearest_only else DISTINCT_AMONG
    searches = settings.mixer.searches(settings.selection)
    every = [_search_selected(reader, settings, part, probe) or [] for part in searches]
    return [CellSums(cells, targets, places, features) for cells in every]


def _sums(found: Neighbors, batch: Batch, settings: KeySettings, form: Form) -> NeighborSums:
    """Convert the findings of a search to tensors, in a form.

    Raises:
        ConfigError: the model does not predict a token that the store holds.
    """
    device = batch.keys.device
    tokens = np.where(found.ids >= 0, tokens_of(found.ids), 0)
    if form is Form.DISTRIBUTION and tokens.max(initial=0) >= batch.vocabulary:
        raise ConfigError(
            f"the store holds token {tokens.max()}, the model's vocabulary has {batch.vocabulary}; "
            "use the model that the store was made with"
        )
    sums = NeighborSums(
        torch.from_numpy(found.distances).to(device),
        torch.from_numpy(tokens).to(device),
        ids=found.ids if form is Form.SOURCES else None,
    )
    if form is not Form.TARGET:
        return sums
    assert batch.targets is not None
    return sums.for_targets(batch.targets, with_distinct=not settings.needs_nearest_only)


def _places(ids: Ids, distances: Tensor, weights: Tensor, columns: Tensor) -> list[list[Place]]:
    """Return the records of n tokens in the given columns, shape (n, m), without missing records."""
    chosen = np.take_along_axis(ids, columns.numpy(), 1)
    values = chosen, tokens_of(chosen), distances.gather(1, columns), weights.gather(1, columns)
    rows = zip(*(of_each.tolist() for of_each in values), strict=True)
    return [
        [
            Place(token, share, Keys.name, distance, id)
            for id, token, distance, share in zip(*row, strict=True)
            if id >= 0
        ]
        for row in rows
    ]


def _count_records(reader: Reader, selection: Selection, *, strict: bool) -> int:
    """Count the records of a selection. An unknown domain raises an error if `strict`; else it counts 0."""
    try:
        return reader.record_count(selection)
    except DomainNotFoundError:
        if strict:
            raise
        return 0


def _search_selected(
    reader: Reader, settings: KeySettings, part: Selection, search: Callable[[Selection], T]
) -> T | None:
    """Search in a part of the settings' selection; return None and warn once if its domain is missing."""
    if part is settings.selection:
        return search(part)
    selected = settings.selection.domains
    domains = selected if part.domains is None else part.domains
    why = "which is not selected here"
    if selected is None or set(domains or ()) <= set(selected):
        try:
            return search(replace(settings.selection, domains=domains))
        except DomainNotFoundError:  # removed since, perhaps in the middle of a text
            why = "which the store does not have any more"
    domain = ", ".join(part.domains or ())
    known = (str(reader.home.path), domain, why)
    if known not in _told:  # once in a process
        _told.add(known)
        _logger.warning(
            "the settings give a weight to the domain %r, %s: the model has that weight now", domain, why
        )
    return None
