"""Cases of the conformance kit: searching without a filter."""

import numpy as np
import pytest

from knnstore.datastore import Datastore, Metric, SupportsOptimize, record_ids
from knnstore.errors import DimensionMismatchError, InvalidVectorError
from knnstore.testing.base import KitBase, OpenStore, Records, check_search, half, sample, some_queries


class SearchTests(KitBase):
    """Needs: `open`, `add`."""

    @pytest.mark.parametrize("k", [1, 10, 100])
    def test_finds_the_nearest(self, store: Datastore, records: Records, k: int) -> None:
        """The k nearest are found, at distances as the contract defines them, nearest first.

        If this fails, check for a square root (l2), for a similarity that was not negated (ip), and
        for the engine's own order of results.
        """
        check_search(store, records, k, some_queries(20, self.dim))

    def test_finds_itself_first(self, open_store: OpenStore, records: Records) -> None:
        """The nearest to a stored key is that key, at a distance of nearly 0, never below.

        If this fails, check for cancellation in |q|² - 2qx + |x|² and clip its result at 0.
        """
        store = records.put(open_store(metric=Metric.L2))
        found = store.search(records.keys, 1)
        at_home = found.ids[:, 0] == records.ids
        assert at_home.mean() >= (1.0 if store.capabilities.exact_search else 0.98)
        assert (found.distances >= 0).all()
        np.testing.assert_allclose(found.distances[at_home, 0], 0, atol=1e-3)

    def test_far_from_the_origin_distances_hold(self, open_store: OpenStore) -> None:
        """Small distances between keys of great norm are still right.

        If this fails, check for cancellation in |q|² - 2qx + |x|²; subtract a mean or compute the
        distances of the nearest again from differences.
        """
        some = sample(200, self.dim)
        records = Records(some.ids, half(some.keys + 40), some.groups)
        store = records.put(open_store(metric=Metric.L2))
        queries = records.keys[:10] + 0.25
        found = store.search(queries, 5)
        true = ((records.keys[np.searchsorted(records.ids, found.ids)] - queries[:, None]) ** 2).sum(axis=2)
        np.testing.assert_allclose(found.distances, true, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("extra", [1, 700])
    def test_more_than_there_are(self, store: Datastore, records: Records, extra: int) -> None:
        """With k beyond the count everything is found and the rows are padded at the end.

        If this fails, check how the engine pads, or whether it refuses such a k.
        """
        check_search(store, records, len(records) + extra, some_queries(3, self.dim))

    def test_many_neighbors(self, open_store: OpenStore, metric: Metric) -> None:
        """The usual k of a kNN-LM, 1024, works as well.

        If this fails, check the engine's limits on k (hnswlib's `ef` must not be below it).
        """
        records = sample(2000, self.dim, seed=2)
        check_search(records.put(open_store(metric=metric)), records, 1024)

    @pytest.mark.parametrize("k", [0, -1])
    def test_k_below_one_is_refused(self, store: Datastore, records: Records, k: int) -> None:
        """A k of 0 or less is refused.

        If this fails, check that `search` calls `checked_k`.
        """
        with pytest.raises(ValueError):  # noqa: PT011  # its text is the adapter's own
            store.search(records.keys[:1], k)

    def test_no_queries(self, store: Datastore, records: Records) -> None:
        """No queries give no rows.

        If this fails, return early with arrays of shape (0, k).
        """
        check_search(store, records, 3, records.keys[:0])

    def test_same_query_same_answer(self, store: Datastore) -> None:
        """Searching changes nothing: the same query gives the same answer.

        If this fails, check for buffers that are shared between calls.
        """
        queries = some_queries(10, self.dim)
        first, second = store.search(queries, 10), store.search(queries, 10)
        np.testing.assert_array_equal(first.ids, second.ids)
        np.testing.assert_array_equal(first.distances, second.distances)

    def test_one_query_or_many(self, store: Datastore, records: Records) -> None:
        """A query's answer does not depend on the others that it is searched with.

        If this fails, check how results are put back into the rows of their queries.
        """
        queries = some_queries(10, self.dim)
        together = check_search(store, records, 10, queries)
        alone = np.concatenate([store.search(query[None], 10).distances for query in queries])
        if store.capabilities.exact_search:
            np.testing.assert_allclose(alone, together.distances, rtol=1e-4, atol=1e-3)

    def test_queries_are_not_changed(self, store: Datastore) -> None:
        """`search` leaves the caller's array as it is.

        If this fails, look for normalizing or negating in place.
        """
        queries = some_queries(5, self.dim)
        before = queries.copy()
        store.search(queries, 3)
        np.testing.assert_array_equal(queries, before)

    def test_queries_of_another_dim_are_refused(self, store: Datastore, records: Records) -> None:
        """Queries need the store's dim.

        If this fails, check that `search` calls `checked_keys`.
        """
        with pytest.raises(DimensionMismatchError):
            store.search(records.keys[:2, :-1], 3)

    def test_query_that_is_not_finite_is_refused(self, store: Datastore, records: Records) -> None:
        """A query with NaN or an infinity has no neighbors worth the name.

        If this fails, check that `search` calls `checked_keys`.
        """
        for value in (np.nan, np.inf):
            queries = records.keys[:2].copy()
            queries[1, 0] = value
            with pytest.raises(InvalidVectorError):
                store.search(queries, 3)

    def test_equal_keys_are_all_found(self, open_store: OpenStore, records: Records, metric: Metric) -> None:
        """One key under many ids, as a corpus that repeats itself gives, is found under all of them.

        If this fails, check for deduplication, and for graph links that equal keys use up.
        """
        store = records.put(open_store(metric=metric))
        key = records.keys[:1] * 4
        ids = record_ids(10_000 + np.arange(30), np.zeros(30, np.int64))
        duplicates = Records(ids, np.repeat(key, 30, axis=0), np.zeros(30, np.int32))
        duplicates.put(store)
        found = check_search(store, records + duplicates, 30, key)
        assert set(found.ids[0].tolist()) == set(duplicates.ids.tolist())

    def test_optimizing_changes_no_answer(self, store: Datastore, records: Records) -> None:
        """After `optimize` all is still there, what was deleted stays away, and changes still work.

        If this fails, check that the rebuilt index leaves deleted and replaced rows out.
        """
        if not isinstance(store, SupportsOptimize):
            pytest.skip("the store has no optimize()")
        store.delete(records[:100].positions())
        store.optimize()
        records[50:150].put(store)
        check_search(store, records[50:], 20)
        assert store.count() == len(records) - 50
