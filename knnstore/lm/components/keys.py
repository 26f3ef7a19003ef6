"""The component `Keys`: the records of the store near the query, weighted by the settings' mixer.

An engine (the datastore of the keys) either finds the k nearest records, or sums over all records of the
probed cells. This module turns both into `TokenSums`, so that no other module distinguishes them.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import DeviceVisits, Ids, Neighbors, tokens_from_ids
from knnstore.datastore import Keys as KeyArray
from knnstore.errors import ConfigError, DomainNotFoundError
from knnstore.lm.batch import Batch
from knnstore.lm.components.component import KEYS, Citations, Form, Place, Question
from knnstore.lm.mixing import (
    DISTINCT_AMONG,
    CellSums,
    Contribution,
    DeviceSums,
    Evidence,
    Mixer,
    NeighborSums,
    ProbedCells,
    TokenSums,
    compute_neighbor_features,
    list_powers_of_two,
)
from knnstore.lm.transfers import upload
from knnstore.store import Reader, Selection

_logger = logging.getLogger(__name__)
_warned_domains: set[tuple[str, str, str]] = set()
_ASSUMED_CELL_RECORDS = 8192  # records, as in a small domain that is a single cell

T = TypeVar("T")
"""The type of a search result."""


class KeySettings(Protocol):
    """The fields and properties of `KNNSettings` that the component reads."""

    @property
    def k(self) -> int:
        """Number of neighbors that are retrieved for each query."""
        ...

    @property
    def probes(self) -> int | None:
        """Number of cells that are searched for each query; None searches for the k nearest records.

        A cell is a group of records with near keys. Ignored in a store without cells.
        """
        ...

    @property
    def temperature(self) -> float:
        """T of the softmax over distances, in the unit of the distances."""
        ...

    @property
    def mixer(self) -> Mixer:
        """The rule that chooses the weight λ for each query, and the documents that are searched."""
        ...

    @property
    def selection(self) -> Selection:
        """The documents that are searched."""
        ...

    @property
    def gate(self) -> Any:
        """Network that chooses the weights of all components in place of the mixer, or None."""
        ...

    @property
    def retrieves(self) -> bool:
        """True if the weight λ of the keys can be above 0, so that a search can change a prediction.

        False if λ is always 0; then no search is needed.
        """
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """True if all weights are chosen from the nearest distance and the model's confidence alone.

        False if the choice also depends on other neighbors.
        """
        ...


class Keys:
    """The component that searches the store for the records whose keys are near the query vector."""

    name = KEYS
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2 * len(list_powers_of_two(DISTINCT_AMONG))

    def look_up(self, reader: Reader, settings: KeySettings, batch: Batch, form: Form) -> list[TokenSums]:
        """Search the store near each position's query vector, and return the found tokens and distances.

        The mixer (the rule that chooses the weight λ) decides which searches are needed, for example one for
        each domain.

        Args:
            reader: the store.
            settings: the settings in force.
            batch: the positions.
            form: the part of the result that is kept.

        Returns:
            The result of each search, at least one. Padding positions have no records. If λ is always 0, or
            if every position is padding, nothing is searched, and one result without records is returned.

        Raises:
            ConfigError: `form` is a distribution, and the store contains a token that the model does not
                predict.
        """
        # 1) Search for every position but padding.
        is_text = batch.is_text
        if not settings.retrieves or (is_text is not None and not is_text.any()):
            return [_convert_to_sums(Neighbors.all_missing(len(batch), 1), batch, settings, form)]
        # 2) Sum over whole cells on the device where text is generated and the engine's keys are there.
        if form is Form.DISTRIBUTION and batch.targets is None and settings.probes is not None:
            sums = _sum_on_device(reader, settings, batch)
            if sums is not None:
                return [*sums]
        queries = (batch.keys if is_text is None else batch.keys[is_text]).float().cpu().numpy()
        # 3) Sum over whole cells where texts are scored, which have no padding.
        targets = batch.targets if is_text is None and form is not Form.SOURCES else None
        if targets is not None and probes_cells(reader, settings):
            return [*_sum_cells(reader, queries, targets, settings, batch.vocabulary, form)]
        # 4) Keep single records elsewhere.
        found = search_records(reader, queries, settings)
        if is_text is not None:
            found = [neighbors.scatter_rows(is_text.numpy()) for neighbors in found]
        return [_convert_to_sums(neighbors, batch, settings, form) for neighbors in found]

    def contribute(self, settings: KeySettings, found: Evidence, factor: float = 1.0) -> Contribution:
        """Compute each position's token distribution from the retrieved records, and its weight λ.

        In the mixture, this distribution has the weight λ, and the model (with all earlier components) has
        1 - λ. The mixer of the settings is the rule that chooses λ and the temperature T of the distribution.
        It receives the temperature of the settings, multiplied by `factor`.

        Args:
            settings: the settings to use.
            found: the search results and the model's confidence at n positions.
            factor: number by which the temperature of the settings is multiplied.
        """
        if settings.gate is not None and len(found.searches) == 1:
            found.precompute_weights([settings.temperature * each for each in self.factors])
        weights, lam, temperature = settings.mixer.weigh(found, settings.temperature * factor)
        return Contribution(weights, lam, found.tokens, found.hits, name=self.name, temperature=temperature)

    def cite(self, question: Question[KeySettings], found: Evidence, weights: Tensor, most: int) -> Citations:
        """List the nearest records, and the records of the target token with the largest weights.

        Args:
            question: the n positions; their contexts contain the target tokens.
            found: the search results, with record ids.
            weights: share of each retrieved record in the prediction, shape (n, columns).
            most: largest number of nearest records, and of records of the target token, for each position.
        """
        distances, tokens, ids = found.distances, found.tokens, found.ids
        assert tokens is not None
        wanted, contexts = min(most, weights.shape[1]), question.contexts
        targets = torch.from_numpy(contexts.target_tokens(np.arange(len(contexts))))
        columns = (
            distances.topk(wanted, largest=False).indices,
            (weights * (tokens == targets[:, None])).topk(wanted).indices,
        )
        return Citations(*(_list_places(ids, distances, weights, selected) for selected in columns))

    def features(self, found: Evidence, unit: float) -> Tensor:
        """Compute inputs for the gate network: distances to the nearest records, and numbers of tokens.

        The columns are asinh(distance / `unit`) of the records with rank 1, 2, 4, …; then log(1 + number of
        different tokens) among the nearest 1, 2, 4, … records.

        Args:
            found: the search results at n positions.
            unit: a typical distance. Distances are divided by it, so that features do not depend on the scale
                of the model's keys.

        Returns:
            Float32, shape (n, width).
        """
        return compute_neighbor_features(found, DISTINCT_AMONG, unit)


def probes_cells(reader: Reader, settings: KeySettings) -> bool:
    """Check whether the settings retrieve all records of some cells instead of the k nearest records.

    A cell is a part of a domain's records whose keys are near each other. True if the settings have `probes`
    and the store has cells.
    """
    return settings.probes is not None and reader.has_cells


def limit_k_to_store(reader: Reader, settings: KeySettings) -> int:
    """Return the number of neighbors to search for: the settings' k, or less if fewer records are selected.

    A lower number saves memory. The number is never reduced below `DISTINCT_AMONG`, because weights are
    chosen from this number of records.

    Args:
        reader: the store.
        settings: the settings in force.

    Returns:
        k itself if it is at most `DISTINCT_AMONG`, or if whole cells (groups of records with near keys) are
        searched. Otherwise the smaller of k and the number of records that are searched, but not less than
        `DISTINCT_AMONG`. If the mixer makes several searches, the one with most records counts.

    Raises:
        DomainNotFoundError: a selected domain does not exist.
    """
    if settings.k <= DISTINCT_AMONG or probes_cells(reader, settings):
        return settings.k
    searches = settings.mixer.searches(settings.selection)
    counts = [_count_records(reader, part, strict=part is settings.selection) for part in searches]
    return min(settings.k, max([DISTINCT_AMONG, *counts]))


def bound_record_count(reader: Reader, settings: KeySettings) -> int:
    """Estimate the largest number of records that one query retrieves in all its searches together.

    Without cells, the number is k times the number of searches. If the settings retrieve whole cells (groups
    of records with near keys), a search counts `_ASSUMED_CELL_RECORDS` records for each cell, but not more
    than the selected documents have.

    Args:
        reader: the store.
        settings: the settings in force.
    """
    columns = settings.k
    if probes_cells(reader, settings):
        assert settings.probes is not None
        records = _count_records(reader, settings.selection, strict=False)
        columns = min(settings.probes * _ASSUMED_CELL_RECORDS, records or 1)
    return columns * max(1, len(settings.mixer.searches(settings.selection)))


def search_records(reader: Reader, queries: KeyArray, settings: KeySettings) -> list[Neighbors]:
    """Run every search that the settings ask for, and return the ids and distances of the records.

    The mixer of the settings (the rule that chooses the weight λ) decides which searches are needed, for
    example one in each domain.

    Args:
        reader: the store.
        queries: query vectors, float32, shape (q, d).
        settings: the settings in force, with k or the number of cells (groups of records with near keys) to
            search, the mixer and the selection of documents.

    Returns:
        One result for each search; all results have the same number of columns. A result has the k nearest
        records of each query, or fewer in a smaller store. If cells are searched, it has all records of the
        cells that the query probes, with the nearest records first. For a domain that is not selected or was
        removed, the result has no records. If the mixer asks for no search, one result without records is
        returned.
    """

    def search_selection(selection: Selection) -> Neighbors:
        """Return for each query the nearest records of a selection, or the records in the searched cells."""
        if not probes_cells(reader, settings):
            return reader.search(queries, limit_k_to_store(reader, settings), selection)
        assert settings.probes is not None
        found = Neighbors.from_visits(reader.visit(queries, settings.probes, selection), len(queries))
        return found.sort_nearest(1 if settings.needs_nearest_only else DISTINCT_AMONG)

    searches = settings.mixer.searches(settings.selection)
    found = [_search_within_selection(reader, settings, part, search_selection) for part in searches] or [
        None
    ]
    every = [Neighbors.all_missing(len(queries), 1) if hits is None else hits for hits in found]
    width = max(hits.ids.shape[1] for hits in every)
    return [hits.pad_columns(width) for hits in every]


def sum_cells(reader: Reader, queries: KeyArray, targets: Tensor, settings: KeySettings) -> CellSums:
    """Run one search, and sum the weights of all records in the cells that each query searches.

    A cell is a group of records with near keys. The records of the query's target token also have a sum of
    their own.

    Args:
        reader: a store with cells.
        queries: query vectors, float32, shape (q, d).
        targets: the target token of each query, int64, shape (q,).
        settings: the settings in force, with the number of searched cells, the selection, and a mixer (rule
            that chooses λ) that asks for exactly one search.

    Returns:
        The sums, from which the probability of each target token can be computed at any temperature.
    """
    (found,) = _sum_cells(reader, queries, targets, settings, 0, Form.TARGET)
    return found


def _sum_cells(
    reader: Reader, queries: KeyArray, targets: Tensor, settings: KeySettings, vocabulary: int, form: Form
) -> list[CellSums]:
    """Run every search that the settings ask for, and sum over all records of the searched cells.

    The mixer of the settings (the rule that chooses the weight λ) decides which searches are needed. A cell
    is a group of records with near keys.

    Args:
        reader: a store with cells.
        queries: query vectors, float32, shape (q, d).
        targets: the target token of each query, int64, shape (q,).
        settings: the settings in force, with the number of searched cells, the mixer and the selection of
            documents.
        vocabulary: number of tokens that the model predicts; not used if `form` is `Form.TARGET`.
        form: `Form.TARGET` sums for the target tokens only, `Form.DISTRIBUTION` for all tokens.

    Returns:
        The sums of each search. The sums are 0 for a domain that is not selected or was removed.
    """
    assert settings.probes is not None

    def probe_selection(selection: Selection) -> list[ProbedCells]:
        """Return the records of a selection that are in the searched cells, as tensors."""
        assert settings.probes is not None
        return [
            ProbedCells(
                torch.from_numpy(found.queries),
                torch.from_numpy(tokens_from_ids(found.ids)),
                torch.as_tensor(found.distances),
                None if found.ranks is None else torch.from_numpy(found.ranks),
            )
            for found in reader.visit(queries, settings.probes, selection)
        ]

    places = None if form is Form.TARGET else vocabulary
    features = 0 if settings.needs_nearest_only else DISTINCT_AMONG
    searches = settings.mixer.searches(settings.selection)
    every = [_search_within_selection(reader, settings, part, probe_selection) or [] for part in searches]
    return [CellSums(cells, targets, places, features) for cells in every]


def _sum_on_device(reader: Reader, settings: KeySettings, batch: Batch) -> list[DeviceSums] | None:
    """Run every search that the settings ask for on the device of the batch, without waiting for the device.

    Args:
        reader: the store.
        settings: the settings in force, with the number of searched cells, the mixer and the selection of
            documents.
        batch: the positions. Padding finds no records.

    Returns:
        The sums of each search. None if a search cannot be run this way, as in a store without cells, or has
        no records.

    Raises:
        ConfigError: the store contains a token that the model does not predict.
    """

    def probe_selection(selection: Selection) -> DeviceVisits | None:
        """Return the records of a selection that are in the searched cells."""
        assert settings.probes is not None
        return reader.visit_on_device(batch.keys.float(), settings.probes, selection)

    sums = list[DeviceSums]()
    features = 1 if settings.needs_nearest_only else DISTINCT_AMONG
    for part in settings.mixer.searches(settings.selection):
        visits = _search_within_selection(reader, settings, part, probe_selection)
        if visits is None:
            return None
        _check_largest_token(visits.largest_token, batch)
        if batch.is_text is not None:
            visits.distances.masked_fill_(upload(~batch.is_text, batch.keys.device)[:, None], torch.inf)
        sums.append(DeviceSums(visits, batch.vocabulary, features))
    return sums or None


def _check_largest_token(largest: int, batch: Batch) -> None:
    """Raise ConfigError if a record's token is outside the vocabulary of the batch.

    Args:
        largest: largest token of the found records. On a GPU it may be the largest token of all records,
            because to read the found tokens the program would have to wait for the GPU.
        batch: the batch.
    """
    if largest >= batch.vocabulary:
        raise ConfigError(
            f"the store contains token {largest}, but the model's vocabulary has {batch.vocabulary} tokens; "
            "use the model that the store was made with"
        )


def _convert_to_sums(found: Neighbors, batch: Batch, settings: KeySettings, form: Form) -> NeighborSums:
    """Convert the records of a search to `NeighborSums`, which hold tensors on the device of the batch.

    Args:
        found: the records that a search found for n queries.
        batch: the n positions; with targets if `form` is `Form.TARGET`.
        settings: the settings in force.
        form: how much of each record the result keeps: its token (`DISTRIBUTION`), its token and id
            (`SOURCES`), or only whether its token is the target token (`TARGET`).

    Raises:
        ConfigError: `form` is a distribution, and the store contains a token that the model does not predict.
    """
    device = batch.keys.device
    tokens = np.where(found.ids >= 0, tokens_from_ids(found.ids), 0)
    if form is Form.DISTRIBUTION:
        _check_largest_token(int(tokens.max(initial=0)), batch)
    sums = NeighborSums(
        torch.from_numpy(found.distances).to(device),
        torch.from_numpy(tokens).to(device),
        ids=found.ids if form is Form.SOURCES else None,
    )
    if form is not Form.TARGET:
        return sums
    assert batch.targets is not None
    return sums.reduce_to_targets(batch.targets, with_distinct=not settings.needs_nearest_only)


def _list_places(ids: Ids, distances: Tensor, weights: Tensor, columns: Tensor) -> list[list[Place]]:
    """Convert selected columns of n rows of records to lists of `Place`, without missing records.

    Args:
        ids: record ids, shape (n, k); negative if missing.
        distances: distances of the records, shape (n, k).
        weights: share of each record in the prediction, shape (n, k).
        columns: the columns to list for each row, int64, shape (n, m).
    """
    chosen = np.take_along_axis(ids, columns.numpy(), 1)
    values = chosen, tokens_from_ids(chosen), distances.gather(1, columns), weights.gather(1, columns)
    rows = zip(*(matrix.tolist() for matrix in values), strict=True)
    return [
        [
            Place(token, share, Keys.name, distance, id)
            for id, token, distance, share in zip(*row, strict=True)
            if id >= 0
        ]
        for row in rows
    ]


def _count_records(reader: Reader, selection: Selection, *, strict: bool) -> int:
    """Return the number of records of the selected documents.

    Args:
        reader: the store.
        selection: the selection.
        strict: True to raise an error if a selected domain does not exist; False to return 0 then.

    Raises:
        DomainNotFoundError: a selected domain does not exist, and `strict` is True.
    """
    try:
        return reader.record_count(selection)
    except DomainNotFoundError:
        if strict:
            raise
        return 0


def _search_within_selection(
    reader: Reader, settings: KeySettings, part: Selection, search: Callable[[Selection], T]
) -> T | None:
    """Search one of the selections that the mixer asks for, if the user has selected its domains.

    The mixer is the rule that chooses the weight λ. It may ask for several searches, e.g. one in each domain.
    The search is also limited to the tags, documents and metadata that the user has selected.

    Args:
        reader: the store.
        settings: the settings in force; `settings.selection` is what the user has selected.
        part: a selection from the mixer: `settings.selection` itself, or a selection of domains only.
        search: function that runs the search on the selection that it receives.

    Returns:
        The result of `search`. None if a domain of `part` is not selected by the user or was removed from the
        store; then a warning is logged, once in a process for each store, domain and reason.
    """
    if part is settings.selection:
        return search(part)
    selected = settings.selection.domains
    domains = selected if part.domains is None else part.domains
    why = "which is not selected"
    if selected is None or set(domains or ()) <= set(selected):
        try:
            return search(replace(settings.selection, domains=domains))
        except DomainNotFoundError:  # removed since, perhaps in the middle of a text
            why = "which is no longer in the store"
    domain = ", ".join(part.domains or ())
    known = (str(reader.home.path), domain, why)
    if known not in _warned_domains:  # once in a process
        _warned_domains.add(known)
        _logger.warning(
            "the settings give a weight to the domain %r, %s: the model gets this weight", domain, why
        )
    return None
