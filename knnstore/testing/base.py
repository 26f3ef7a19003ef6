"""Fixtures, records and checks that the cases of the conformance kit share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from knnstore.datastore import (
    BATCH_SIZE,
    ID_LIMIT,
    TOKEN_LIMIT,
    Datastore,
    Filter,
    Groups,
    IdRanges,
    Ids,
    Keys,
    Metric,
    Neighbors,
    SupportsGet,
    id_ranges_from_positions,
    positions_from_ids,
    record_ids,
)

ALL_IDS = IdRanges([(0, ID_LIMIT)])
"""Range of all ids that a record can have."""

_RTOL, _ATOL = 1e-4, 1e-3
"""Relative and absolute tolerance for distances computed in float32; smaller than all differences that matter
in the cases."""


OpenStore = Callable[..., Datastore]
"""Function that opens a store at the test's location; the store is closed when the test ends.

Its keyword arguments replace the location, the dim and the params of the kit.
"""


@dataclass(frozen=True, slots=True)
class Records:
    """Records (ids, keys and groups) as arrays. `len`, indexing by rows and `+` are supported.

    A group is the number of the domain that a record belongs to.
    """

    ids: Ids
    """Ids, int64, shape (n,)."""
    keys: Keys
    """Keys, float32, shape (n, dim)."""
    groups: Groups
    """Group (domain number) of each record, int32, shape (n,)."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | NDArray[Any]) -> "Records":
        return Records(self.ids[rows], self.keys[rows], self.groups[rows])

    def __add__(self, other: "Records") -> "Records":
        return Records(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.keys, other.keys]),
            np.concatenate([self.groups, other.groups]),
        )

    def add_to(self, store: Datastore) -> Datastore:
        """Add all records to a store in one call, and return the store."""
        store.add(self.ids, self.keys, self.groups)
        return store

    def select_matching(self, where: Filter | None) -> "Records":
        """Return the records that a filter selects; None selects all."""
        return self if where is None else self[where.ids.contains(self.ids)]

    def cover_positions(self) -> IdRanges:
        """Return ranges of ids that contain every id at the positions of these records.

        An id is made of a position and a token; the ranges contain the ids of all tokens at these positions.
        """
        positions = positions_from_ids(self.ids)
        return id_ranges_from_positions(positions, positions + 1)

    def filter_by_groups(self, *groups: int) -> Filter:
        """Return a filter that selects the records of some groups (domains).

        The filter describes them twice, as a store gets it: by the numbers of the groups, and by ranges of
        ids.

        Args:
            *groups: numbers of the groups; unknown numbers select nothing.
        """
        selected = self[np.isin(self.groups, groups)]
        return Filter(ids=selected.cover_positions(), groups=frozenset(groups))


def round_to_half(array: NDArray[Any]) -> Keys:
    """Round an array to half precision, and return it as float32; every store keeps such values exactly."""
    return array.astype(np.float16).astype(np.float32)


def make_records(n: int, dim: int, *, seed: int = 0, first_position: int = 3) -> Records:
    """Make n random records that resemble a corpus: documents of 50 tokens in four groups.

    The positions of successive documents have gaps between them. Keys are normally distributed, and exact in
    half precision.

    Args:
        n: number of records; may be 0.
        dim: number of components of a key.
        seed: seed of the random tokens and keys.
        first_position: position of the first record.
    """
    rng = np.random.default_rng(seed)
    document = np.arange(n) // 50
    positions = first_position + np.arange(n) + 7 * document
    ids = record_ids(positions, rng.integers(0, TOKEN_LIMIT, n))
    keys = round_to_half(rng.standard_normal((n, dim)))
    return Records(ids.astype(np.int64), keys, (document % 4).astype(np.int32))


def make_queries(q: int, dim: int, *, seed: int = 1) -> Keys:
    """Return q random query vectors, normally distributed, float32, shape (q, dim)."""
    return np.random.default_rng(seed).standard_normal((q, dim)).astype(np.float32)


def compute_distances(queries: Keys, keys: Keys, metric: Metric) -> NDArray[np.float64]:
    """Compute the distance from every query to every key in double precision.

    Args:
        queries: query vectors, shape (q, dim).
        keys: keys, shape (n, dim).
        metric: squared Euclidean distance (L2), or negative inner product (IP).

    Returns:
        The distances, float64, shape (q, n).
    """
    exact_queries, exact_keys = queries.astype(np.float64), keys.astype(np.float64)
    if metric == Metric.IP:
        return np.asarray(-(exact_queries @ exact_keys.T))
    return np.asarray(((exact_queries[:, None] - exact_keys[None]) ** 2).sum(axis=2))


def check_neighbors(
    neighbors: Neighbors, records: Records, queries: Keys, k: int, metric: Metric, *, recall: float = 1.0
) -> None:
    """Check the result of a search against exact distances; raises AssertionError if it is wrong.

    Args:
        neighbors: result of `search`.
        records: all records that the search may find.
        queries: float32, shape (q, dim).
        k: argument of `search`.
        metric: metric of the store.
        recall: fraction of the true neighbors of all queries that must be found; 1 requires an exact answer
            in every row. Equally distant records may replace each other.
    """
    assert neighbors.ids.shape == neighbors.distances.shape == (len(queries), k), "the shape is not (q, k)"
    assert neighbors.ids.dtype == np.int64, f"ids are {neighbors.ids.dtype}, not int64"
    assert neighbors.distances.dtype == np.float32, f"distances are {neighbors.distances.dtype}, not float32"
    expected = min(k, len(records))
    truth = compute_distances(queries, records.keys, metric)
    row_of = {int(i): row for row, i in enumerate(records.ids)}
    hits = 0
    for ids, distances, true in zip(neighbors.ids, neighbors.distances, truth, strict=True):
        valid_count = int((ids != -1).sum())
        assert (ids[valid_count:] == -1).all(), "missing neighbors (-1) are before other neighbors"
        assert (distances[valid_count:] == np.inf).all(), "a missing neighbor's distance is not +inf"
        orphans = [i for i in ids[:valid_count].tolist() if i not in row_of]
        assert not orphans, f"found ids that are not live or not in the filter: {orphans[:5]}"
        assert len(set(ids[:valid_count].tolist())) == valid_count, "an id occurs twice in one row"
        assert (np.diff(distances[:valid_count]) >= 0).all(), "distances do not ascend"
        expected_distances = np.array([true[row_of[int(i)]] for i in ids[:valid_count]])
        np.testing.assert_allclose(
            distances[:valid_count], expected_distances, _RTOL, _ATOL, err_msg="wrong distances"
        )
        furthest = np.partition(true, expected - 1)[expected - 1] if expected else -np.inf
        near_enough = int((expected_distances <= furthest + _ATOL + _RTOL * abs(furthest)).sum())
        assert recall < 1 or near_enough == expected, (
            f"only {near_enough} of the {expected} nearest were found, but `exact_search` is True"
        )
        hits += near_enough
    needed_hits = recall * expected * len(queries)
    assert hits >= needed_hits, (
        f"recall@{k}: {hits} of {expected * len(queries)} found, {needed_hits:.0f} needed"
    )


def check_search(
    store: Datastore, records: Records, k: int, queries: Keys | None = None, *, where: Filter | None = None
) -> Neighbors:
    """Search a store, check the result against exact distances, and return the result.

    A store with `capabilities.exact_search` must find all true neighbors, any other store 90 % of them.

    Args:
        store: store to search.
        records: exactly the records that the store has.
        k: number of neighbors.
        queries: queries; None uses ten random queries.
        where: filter of the search; None searches all records.
    """
    queries = make_queries(10, store.dim) if queries is None else queries
    neighbors = store.search(queries, k, where=where)
    recall = 1.0 if store.capabilities.exact_search else 0.9
    check_neighbors(neighbors, records.select_matching(where), queries, k, store.metric, recall=recall)
    return neighbors


def read_contents(store: Datastore, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE) -> Records:
    """Return all records that `iterate` yields, in the order of ids.

    Args:
        store: the store.
        ids: the ids to read; None reads all records.
        batch_size: largest number of records in a batch of `iterate`.
    """
    batches = store.iterate(ids=ids, batch_size=batch_size)
    return sum((Records(*batch) for batch in batches), make_records(0, store.dim))


def check_holds(store: Datastore, records: Records) -> None:
    """Check that a store has exactly some records, with the same keys and groups.

    Args:
        store: the store.
        records: the records, in any order. Their keys must be exact in half precision.

    Raises:
        AssertionError: the store has other records, keys or groups, or `count` returns another number.
    """
    order = np.argsort(records.ids)
    stored = read_contents(store)
    assert store.count() == len(records), f"count() is {store.count()}, {len(records)} records are live"
    np.testing.assert_array_equal(
        stored.ids, records.ids[order], err_msg="the ids are not those that were stored"
    )
    np.testing.assert_array_equal(
        stored.keys, records.keys[order], err_msg="the keys are not those that were stored"
    )
    np.testing.assert_array_equal(
        stored.groups, records.groups[order], err_msg="the groups are not those that were stored"
    )


class KitBase:
    """The settings and fixtures that all cases of the conformance kit use."""

    datastore_class: ClassVar[type[Datastore]]
    """The adapter under test."""

    params: ClassVar[dict[str, Any]] = {}
    """Parameters of every `open`; values must be representable in JSON."""

    dim: ClassVar[int] = 16
    """Number of components of the keys."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> str | Path:
        """Return the location of the test's datastore, which is empty when the test begins."""
        return tmp_path / "datastore"

    @pytest.fixture
    def unreachable_location(self) -> str | None:
        """Return a location whose server does not answer; None for an engine without a server."""
        return None

    @pytest.fixture
    def open_store(self, location: str | Path) -> Iterator[OpenStore]:
        """Yield a function that opens the datastore under test."""
        with ExitStack() as open_stores:

            def open_store(**overrides: Any) -> Datastore:
                arguments = {"location": location, "dim": self.dim, **self.params, **overrides}
                return open_stores.enter_context(closing(self.datastore_class.open(**arguments)))

            yield open_store

    @pytest.fixture(params=list(Metric), ids=str)
    def metric(self, request: pytest.FixtureRequest) -> Metric:
        """Return a metric; pytest runs each test that uses this fixture once with every metric."""
        return Metric(request.param)

    @pytest.fixture
    def records(self) -> Records:
        """Return the 500 records of most tests: ten documents in four groups."""
        return make_records(500, self.dim)

    @pytest.fixture
    def store(self, open_store: OpenStore, records: Records, metric: Metric) -> Datastore:
        """Return a store with `records`, for each metric."""
        return records.add_to(open_store(metric=metric))


def require_get(store: Datastore) -> SupportsGet:
    """Return the store; skip the test if the store has no method `get`, which reads single records."""
    if not isinstance(store, SupportsGet):
        pytest.skip("the adapter has no get, which is optional")
    return store


def require_persistent(store: Datastore) -> Datastore:
    """Return the store; skip the test if the store keeps no records after it is closed."""
    if not store.capabilities.persistent:
        pytest.skip("capabilities.persistent is False: nothing outlives the handle")
    return store
