"""Cases of the conformance kit: searching, filters, and visiting cells (which is optional)."""

from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from knnstore.datastore import (
    Datastore,
    Filter,
    IdRanges,
    Metric,
    SupportsCells,
    SupportsOptimize,
    Visit,
    Visits,
    record_ids,
    split_visits,
)
from knnstore.errors import DimensionMismatchError, InvalidVectorError
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_search,
    compute_distances,
    make_queries,
    make_records,
    round_to_half,
)


class SearchTests(KitBase):
    """Cases of the kit for searching without a filter; they use `add`."""

    @pytest.mark.parametrize("k", [1, 10, 100])
    def test_finds_the_nearest(self, store: Datastore, records: Records, k: int) -> None:
        """The k nearest records are found, with the distances that `Metric` defines, nearest first.

        If this fails, check for a square root (l2), for a similarity that was not negated (ip), and for the
        engine's own order of results.
        """
        check_search(store, records, k, make_queries(20, self.dim))

    def test_finds_itself_first(self, open_store: OpenStore, records: Records) -> None:
        """The nearest neighbor of a stored key is this key, at a distance of almost 0, never negative.

        If this fails, check for cancellation in |q|² - 2qx + |x|² and clip its result at 0.
        """
        store = records.add_to(open_store(metric=Metric.L2))
        neighbors = store.search(records.keys, 1)
        is_itself = neighbors.ids[:, 0] == records.ids
        assert is_itself.mean() >= (1.0 if store.capabilities.exact_search else 0.98)
        assert (neighbors.distances >= 0).all()
        np.testing.assert_allclose(neighbors.distances[is_itself, 0], 0, atol=1e-3)

    def test_far_from_the_origin_distances_hold(self, open_store: OpenStore) -> None:
        """Small distances between keys of large norm are accurate.

        If this fails, check for cancellation in |q|² - 2qx + |x|²; subtract a mean, or compute the distances
        of the nearest keys again from differences.
        """
        template = make_records(200, self.dim)
        records = Records(template.ids, round_to_half(template.keys + 40), template.groups)
        store = records.add_to(open_store(metric=Metric.L2))
        queries = records.keys[:10] + 0.25
        neighbors = store.search(queries, 5)
        true = ((records.keys[np.searchsorted(records.ids, neighbors.ids)] - queries[:, None]) ** 2).sum(
            axis=2
        )
        np.testing.assert_allclose(neighbors.distances, true, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("extra", [1, 700])
    def test_more_than_there_are(self, store: Datastore, records: Records, extra: int) -> None:
        """With a k larger than the number of records, all records are found and rows are padded at the end.

        If this fails, check how the engine pads, or whether it refuses a large k.
        """
        check_search(store, records, len(records) + extra, make_queries(3, self.dim))

    def test_many_neighbors(self, open_store: OpenStore, metric: Metric) -> None:
        """The usual k of a kNN-LM, 1024, works.

        If this fails, check the engine's limits on k (hnswlib's `ef` must not be below k).
        """
        records = make_records(2000, self.dim, seed=2)
        check_search(records.add_to(open_store(metric=metric)), records, 1024)

    @pytest.mark.parametrize("k", [0, -1])
    def test_k_below_one_is_refused(self, store: Datastore, records: Records, k: int) -> None:
        """A k of 0 or less raises ValueError.

        If this fails, check that `search` calls `validate_k`.
        """
        with pytest.raises(ValueError):  # noqa: PT011  # its text is the adapter's own
            store.search(records.keys[:1], k)

    def test_no_queries(self, store: Datastore, records: Records) -> None:
        """No queries give no rows.

        If this fails, return early with arrays of shape (0, k).
        """
        check_search(store, records, 3, records.keys[:0])

    def test_same_query_same_answer(self, store: Datastore) -> None:
        """Searching changes nothing: the same query gives the same result again.

        If this fails, check for buffers that are shared between calls.
        """
        queries = make_queries(10, self.dim)
        first, second = store.search(queries, 10), store.search(queries, 10)
        np.testing.assert_array_equal(first.ids, second.ids)
        np.testing.assert_array_equal(first.distances, second.distances)

    def test_one_query_or_many(self, store: Datastore, records: Records) -> None:
        """The result of a query does not depend on the other queries of the batch.

        If this fails, check how results are assigned to the rows of their queries.
        """
        queries = make_queries(10, self.dim)
        batch_result = check_search(store, records, 10, queries)
        single_distances = np.concatenate([store.search(query[None], 10).distances for query in queries])
        if store.capabilities.exact_search:
            np.testing.assert_allclose(single_distances, batch_result.distances, rtol=1e-4, atol=1e-3)

    def test_queries_are_not_changed(self, store: Datastore) -> None:
        """`search` leaves the caller's array as it is.

        If this fails, look for normalizing or negating in place.
        """
        queries = make_queries(5, self.dim)
        before = queries.copy()
        store.search(queries, 3)
        np.testing.assert_array_equal(queries, before)

    def test_queries_of_another_dim_are_refused(self, store: Datastore, records: Records) -> None:
        """Queries with another dim than the store raise an error.

        If this fails, check that `search` calls `validate_keys`.
        """
        with pytest.raises(DimensionMismatchError):
            store.search(records.keys[:2, :-1], 3)

    def test_query_that_is_not_finite_is_refused(self, store: Datastore, records: Records) -> None:
        """A query with NaN or an infinity raises an error.

        If this fails, check that `search` calls `validate_keys`.
        """
        for value in (np.nan, np.inf):
            queries = records.keys[:2].copy()
            queries[1, 0] = value
            with pytest.raises(InvalidVectorError):
                store.search(queries, 3)

    def test_equal_keys_are_all_found(self, open_store: OpenStore, records: Records, metric: Metric) -> None:
        """If many records have the same key, as in a corpus that repeats itself, all of them are found.

        If this fails, check for deduplication, and for graph links that equal keys use up.
        """
        store = records.add_to(open_store(metric=metric))
        key = records.keys[:1] * 4
        ids = record_ids(10_000 + np.arange(30), np.zeros(30, np.int64))
        duplicates = Records(ids, np.repeat(key, 30, axis=0), np.zeros(30, np.int32))
        duplicates.add_to(store)
        neighbors = check_search(store, records + duplicates, 30, key)
        assert set(neighbors.ids[0].tolist()) == set(duplicates.ids.tolist())

    def test_optimizing_changes_no_answer(self, store: Datastore, records: Records) -> None:
        """After `optimize` the store has the same records, finds no deleted record, and can be changed.

        If this fails, check that the rebuilt index leaves deleted and replaced rows out.
        """
        if not isinstance(store, SupportsOptimize):
            pytest.skip("the store has no optimize()")
        store.delete(records[:100].cover_positions())
        store.optimize()
        records[50:150].add_to(store)
        check_search(store, records[50:], 20)
        assert store.count() == len(records) - 50


class FilterTests(KitBase):
    """Cases of the kit for searching with a filter; they use `add` and `search` without a filter."""

    @pytest.mark.parametrize("matching", [500, 250, 25, 1, 0])
    def test_by_ids(self, store: Datastore, records: Records, matching: int) -> None:
        """A filter by ids is respected, whether it matches all, many, few or no records.

        If this fails with few records, check that the engine's own filter does not run out of candidates. An
        exact scan of a small set is both right and fast.
        """
        check_search(store, records, 30, where=Filter(ids=records[:matching].cover_positions()))

    @pytest.mark.parametrize("groups", [(0,), (1, 3), (0, 1, 2, 3), (77,), (2, 77)])
    def test_by_groups(self, store: Datastore, records: Records, groups: tuple[int, ...]) -> None:
        """A filter by groups is respected; groups that do not exist match nothing.

        If this fails, check unknown groups, and that the results of several groups are merged by distance.
        """
        check_search(store, records, 10, where=records.filter_by_groups(*groups))

    def test_both_names_give_the_same(self, store: Datastore, records: Records) -> None:
        """A filter with groups and ids gives the same result as a filter with only the ids.

        If this fails, check how the groups of records are updated when records are added.
        """
        by_both = records.filter_by_groups(1, 2)
        by_groups = store.search(make_queries(10, self.dim), 10, where=by_both)
        by_ids = check_search(store, records, 10, where=Filter(ids=by_both.ids))
        if store.capabilities.exact_search:
            np.testing.assert_allclose(by_groups.distances, by_ids.distances, rtol=1e-4, atol=1e-3)

    def test_filter_of_no_ids(self, store: Datastore, records: Records) -> None:
        """An empty filter matches nothing; it does not mean "no filter".

        If this fails, look for `if where.ids:` or `if where.groups:` without `is not None`.
        """
        for where in (Filter(ids=IdRanges()), Filter(ids=IdRanges(), groups=frozenset())):
            check_search(store, records, 3, where=where)

    def test_filter_of_all_ids(self, store: Datastore, records: Records) -> None:
        """One range over all possible ids matches everything.

        If this fails, look for an array with one entry per id.
        """
        check_search(store, records, 10, where=Filter(ids=ALL_IDS))

    def test_all_but_one_document(self, store: Datastore, records: Records) -> None:
        """A filter that leaves out one document, as for scoring a stored document, leaves out nothing else.

        If this fails, check filters that match almost all records.
        """
        where = Filter(ids=ALL_IDS - records[100:150].cover_positions())
        check_search(store, records, 20, records.keys[100:110], where=where)

    def test_single_ids(self, store: Datastore, records: Records) -> None:
        """A filter can select single records.

        The id of a record is made of the position and the token. The filter selects some tokens of a position
        and leaves out others.

        If this fails, check the borders of half-open ranges.
        """
        check_search(store, records, 20, where=Filter(ids=IdRanges.from_ids(records.ids[::3])))

    def test_many_ranges(self, store: Datastore, records: Records) -> None:
        """A filter with thousands of ranges, most of them without a record, is respected.

        If this fails, check the engine's limit on the length of a filter.
        """
        elsewhere = record_ids(200_000 + 2 * np.arange(2000), np.zeros(2000, np.int64))
        where = Filter(ids=IdRanges.from_ids(elsewhere) | IdRanges.from_ids(records.ids[1::2]))
        check_search(store, records, 20, where=where)

    def test_fewer_match_than_asked_for(self, store: Datastore, records: Records) -> None:
        """If fewer than k records match, all of them are found and the row is padded.

        If this fails, check that the search continues until k records are found or all were compared.
        """
        check_search(store, records, 20, where=Filter(ids=IdRanges.from_ids(records.ids[40:47])))
        check_search(store, records[:0], 4, where=Filter(ids=IdRanges([(1, 2)])))

    def test_deleted_and_moved_records_do_not_leak(self, store: Datastore, records: Records) -> None:
        """A search with a filter finds neither deleted records nor records that moved to another group.

        If this fails, check that deletions and replacements also apply to searches with a filter.
        """
        store.delete(records[:50].cover_positions())
        moved = Records(records.ids[200:250], records.keys[200:250], np.full(50, 1, np.int32))
        moved.add_to(store)
        expected = records[50:200] + moved + records[250:]
        for group in (0, 1):
            check_search(store, expected, 60, records.keys[190:210], where=expected.filter_by_groups(group))


_ALL_CELLS = 1 << 16
"""Number of probes that is larger than the number of cells of any test."""


class CellsStore(Datastore, SupportsCells, Protocol):
    """A datastore that divides its keys into cells, and has a method `visit`."""


def _scatter_distances(visits: list[Visits], records: Records, queries: int) -> NDArray[np.float32]:
    """Convert the result of `visit` to a matrix of distances, float32, shape (q, n), a column per record.

    The entry is +inf if the query was not compared with the record. Raises AssertionError if a visit has
    wrong shapes or dtypes or an unknown id, or if a query was compared with a record twice.

    Args:
        visits: result of `visit`.
        records: all records that may be visited.
        queries: number of queries, q.
    """
    distances = np.full((queries, len(records)), np.inf, np.float32)
    column_of = {int(id): column for column, id in enumerate(records.ids)}
    for visit in split_visits(visits):
        shape = len(visit.queries), len(visit.ids)
        assert visit.distances.shape == shape, f"distances are {visit.distances.shape}, not {shape}"
        assert visit.distances.dtype == np.float32, f"distances are {visit.distances.dtype}, not float32"
        strays = [id for id in visit.ids.tolist() if id not in column_of]
        assert not strays, f"visited ids that are not live or not in the filter: {strays[:5]}"
        cell = np.ix_(visit.queries, np.array([column_of[id] for id in visit.ids.tolist()]))
        assert np.isinf(distances[cell]).all(), "a query gets a record twice"
        distances[cell] = visit.distances
    return distances


class VisitTests(KitBase):
    """Cases of the kit for comparing queries with whole cells (`visit`).

    They use `add`, `delete`, `flush`.
    """

    @pytest.fixture
    def cells(self, metric: Metric, request: pytest.FixtureRequest) -> CellsStore:
        """Return the fixture `store`; an engine without cells skips the test without opening a store."""
        if not hasattr(self.datastore_class, "visit"):
            pytest.skip("the adapter has no visit, which is optional")
        store: CellsStore = request.getfixturevalue("store")
        return store

    @pytest.mark.parametrize("matching", [500, 30, 1])
    def test_all_cells_hold_all_that_matches(
        self, cells: CellsStore, records: Records, matching: int
    ) -> None:
        """With as many probes as cells, each query is compared with every matching record.

        If this fails, check cells that are far from all queries, and records that were added last.
        """
        queries, matched = make_queries(10, self.dim), records[:matching]
        visits = cells.visit(queries, _ALL_CELLS, where=Filter(ids=matched.cover_positions()))
        distances = _scatter_distances(visits, matched, 10)
        truth = compute_distances(queries, matched.keys, cells.metric)
        np.testing.assert_allclose(distances, truth, 1e-4, 1e-3, err_msg="wrong distances")

    def test_ranks_are_those_of_the_nearest_cells(self, cells: CellsStore, records: Records) -> None:
        """If visits have ranks, the cells with a rank below p are the cells of a visit with p probes."""
        queries = make_queries(100, self.dim)
        visits = split_visits(cells.visit(queries, 4))
        for probes in (1, 3) if all(visit.ranks is not None for visit in visits) else ():
            nearer = [
                Visits.from_visit(Visit(visit.queries[near], visit.ids, visit.distances[near]))
                for visit in visits
                for near in [np.asarray(visit.ranks) < probes]
            ]
            fewer = _scatter_distances(cells.visit(queries, probes), records, 100)
            np.testing.assert_allclose(
                _scatter_distances(nearer, records, 100), fewer, 1e-4, 1e-3, err_msg="wrong ranks"
            )

    @pytest.mark.parametrize("groups", [(0,), (1, 3), (2, 77)])
    def test_by_groups(self, cells: CellsStore, records: Records, groups: tuple[int, ...]) -> None:
        """A filter by groups is respected, with one probe and with all cells; groups share the probes.

        If this fails, check how the nearest cells of several groups are chosen.
        """
        where, queries = records.filter_by_groups(*groups), make_queries(10, self.dim)
        matched = records.select_matching(where)
        for probes in (1, _ALL_CELLS):
            distances = _scatter_distances(cells.visit(queries, probes, where=where), matched, 10)
            assert np.isfinite(distances).any(axis=1).all(), "a query gets no record"
        assert np.isfinite(distances).all(), "a search of all cells misses records of the groups"

    def test_more_probes_add_cells(self, cells: CellsStore, records: Records) -> None:
        """Each additional probe adds records and removes none; the first probe already gives a record.

        If this fails, check that cells without a matching record do not count as probes.
        """
        queries, where = make_queries(10, self.dim), Filter(ids=records[200:260].cover_positions())
        was_visited = np.zeros((10, 60), bool)
        for probes in range(1, 9):
            visits = cells.visit(queries, probes, where=where)
            is_visited = np.isfinite(_scatter_distances(visits, records[200:260], 10))
            assert is_visited.any(axis=1).all(), "a query gets no record"
            assert (is_visited | ~was_visited).all(), (
                "a query with more probes misses records that it got with fewer"
            )
            was_visited = is_visited

    def test_what_is_gone_is_visited_no_more(self, cells: CellsStore, records: Records) -> None:
        """Deleted records are not visited, and replaced records only once, before and after a flush.

        If this fails, check cells that are cached between visits.
        """
        queries = make_queries(5, self.dim)
        cells.visit(queries, _ALL_CELLS)
        cells.delete(records[:100].cover_positions())
        records[100:150].add_to(cells)
        for flushed in (False, True):
            if flushed:
                cells.flush()
            assert np.isfinite(_scatter_distances(cells.visit(queries, _ALL_CELLS), records[100:], 5)).all()
        cells.delete(records.cover_positions())
        assert cells.visit(queries, 4) == []

    def test_nothing_asked_and_nothing_there(self, cells: CellsStore) -> None:
        """Without queries or matching records, nothing is visited.

        If this fails, check empty arrays.
        """
        assert (
            _scatter_distances(cells.visit(make_queries(0, self.dim), 4), make_records(0, self.dim), 0).size
            == 0
        )
        assert cells.visit(make_queries(3, self.dim), 4, where=Filter(ids=IdRanges())) == []

    def test_bad_arguments(self, cells: CellsStore) -> None:
        """Queries are checked as in a search, and the number of probes must be at least 1.

        If this fails, call `validate_keys` and `validate_k`.
        """
        with pytest.raises(DimensionMismatchError):
            cells.visit(make_queries(3, self.dim + 1), 4)
        with pytest.raises(InvalidVectorError):
            cells.visit(np.full((1, self.dim), np.nan, np.float32), 4)
        with pytest.raises(ValueError, match="probes"):
            cells.visit(make_queries(3, self.dim), 0)
