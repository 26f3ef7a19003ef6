"""Cases of the conformance kit: several threads on one handle."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from knnstore.datastore import Datastore, Metric
from knnstore.testing.base import KitBase, OpenStore, Records, check_holds, sample, true_distances


class ConcurrencyTests(KitBase):
    """Needs: everything else that one thread does."""

    def test_searching_beside_a_writer(self, open_store: OpenStore, records: Records) -> None:
        """Four threads search while one adds, deletes and flushes; each answer is right for some moment.

        If this fails, check what the engine allows beside a change: mostly nothing, so a search must
        either hold a reader's lock or work on data that no change touches.
        """
        store = records.put(open_store(metric=Metric.L2))
        visitors = sample(200, self.dim, seed=8, first_position=50_000)
        deleted: list[int] = []  # these never come back
        done = threading.Event()

        def write() -> None:
            try:
                for start in range(0, 200, 10):
                    part = visitors[start : start + 10]
                    part.put(store)
                    store.flush()
                    store.delete(part[::2].positions())
                    deleted.extend(part.ids[::2].tolist())
                visitors[1::2].put(store)
            finally:
                done.set()

        def search(thread: int) -> int:
            searches = 0
            while searches == 0 or not done.is_set():
                seed = 1000 * thread + searches
                self._check_one_search(store, records, visitors, deleted.copy(), seed=seed)
                searches += 1
            return searches

        with ThreadPoolExecutor(5) as pool:
            searching = [pool.submit(search, thread) for thread in range(4)]
            pool.submit(write).result()
            assert all(future.result() >= 1 for future in searching)
        check_holds(store, records + visitors[1::2])

    def _check_one_search(
        self, store: Datastore, records: Records, visitors: Records, gone: list[int], *, seed: int
    ) -> None:
        """Search for stored keys, with and without a filter, while others come and go."""
        everything = records + visitors
        rows = np.random.default_rng(seed).integers(0, len(records), 4)
        queries = records.keys[rows]
        where = everything.of_groups(2) if seed % 2 else None
        found = store.search(queries, 8, where=where)
        allowed = everything.matching(where)
        assert np.isin(found.ids[found.ids != -1], allowed.ids).all(), "found what was never there"
        assert not np.isin(found.ids, gone).any(), "found what was deleted before the search began"
        for row, ids, distances in zip(rows, found.ids, found.distances, strict=True):
            valid = ids[ids != -1]
            assert len(np.unique(valid)) == len(valid), "an id stands twice in one row"
            at = np.searchsorted(everything.ids, valid)
            true = true_distances(records.keys[row : row + 1], everything.keys[at], Metric.L2)[0]
            np.testing.assert_allclose(distances[: len(valid)], true, rtol=1e-4, atol=1e-3)
            if where is None and store.capabilities.exact_search:
                assert valid[0] == records.ids[row], "a record that never changed was not found"
