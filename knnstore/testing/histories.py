"""Cases of the conformance kit: random histories, and several threads with one handle."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from knnstore.datastore import (
    TOKEN_LIMIT,
    Datastore,
    Filter,
    IdRanges,
    Keys,
    Metric,
    id_ranges_from_positions,
    record_ids,
)
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_neighbors,
    compute_distances,
    make_records,
)

_POSITIONS = st.integers(0, 19)
_KEYS = st.integers(0, 11)
_GROUPS = st.integers(0, 3)


def _record_id(position: int) -> int:
    """Return the id of the record at a position; its token is computed from the position."""
    return int(record_ids(np.array(position), np.array(position * 7919 % TOKEN_LIMIT)))


def _cover_position_runs(runs: list[tuple[int, int]]) -> IdRanges:
    """Return ranges that contain the ids of all records at some positions.

    Args:
        runs: half-open ranges of positions: the first position, and the position after the last.
    """
    return id_ranges_from_positions(*np.array(runs, np.int64).reshape(-1, 2).T)


class DatastoreStateMachine(RuleBasedStateMachine):
    """Makes random changes and searches in a small store with many equal keys, and checks the results.

    The results are compared with a dict that has the records that the store should have.

    Args:
        open_store: function that opens the store. All records of the store are deleted at the start.
        metric: metric of the store.
    """

    def __init__(self, open_store: OpenStore, metric: Metric) -> None:
        super().__init__()
        self._open, self._metric = open_store, metric
        self._store = open_store(metric=metric)
        self._store.delete(ALL_IDS)
        self._live: dict[int, tuple[int, int]] = {}

    @rule(entries=st.dictionaries(_POSITIONS, st.tuples(_KEYS, _GROUPS), max_size=12))
    def add(self, entries: dict[int, tuple[int, int]]) -> None:
        """Add or replace records."""
        change = {_record_id(position): entry for position, entry in entries.items()}
        self._as_records(change).add_to(self._store)
        self._live.update(change)

    @rule(first=_POSITIONS, count=st.integers(0, 15))
    def delete(self, first: int, count: int) -> None:
        """Delete all records at `count` consecutive positions from `first` on."""
        self._store.delete(_cover_position_runs([(first, first + count)]))
        self._live = {
            i: live
            for i, live in self._live.items()
            if not _record_id(first) <= i < _record_id(first + count)
        }

    @rule(key=_KEYS, k=st.integers(1, 50))
    def search(self, key: int, k: int) -> None:
        """Search all records near a key, and check the result.

        Args:
            key: number of the key in the fixed random table.
            k: number of neighbors.
        """
        self._check_search(key, k, None)

    @rule(key=_KEYS, k=st.integers(1, 12), groups=st.sets(_GROUPS))
    def search_groups(self, key: int, k: int, groups: set[int]) -> None:
        """Search the records of some groups near a key, and check the result.

        Args:
            key: number of the key in the fixed random table.
            k: number of neighbors.
            groups: numbers of the groups; may be empty.
        """
        self._check_search(key, k, self._as_records(self._live).filter_by_groups(*groups))

    @rule(key=_KEYS, k=st.integers(1, 12), runs=st.lists(st.tuples(_POSITIONS, _POSITIONS), max_size=4))
    def search_ids(self, key: int, k: int, runs: list[tuple[int, int]]) -> None:
        """Search the records in some ranges of positions near a key, and check the result.

        Args:
            key: number of the key in the fixed random table.
            k: number of neighbors.
            runs: two positions for each range, in any order.
        """
        ranges = _cover_position_runs([(min(run), max(run)) for run in runs])
        self._check_search(key, k, Filter(ids=ranges))

    @rule()
    def flush(self) -> None:
        """Flush the store, which must not change any answer."""
        self._store.flush()

    @precondition(lambda self: self._store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close the store, and open it again."""
        self._store.close()
        self._store = self._open(metric=self._metric)

    @invariant()
    def check_contents(self) -> None:
        """Check that the store has exactly the records that it should have after the changes so far."""
        check_holds(self._store, self._as_records(self._live))

    def teardown(self) -> None:
        """Close the store."""
        self._store.close()

    def _check_search(self, key: int, k: int, where: Filter | None) -> None:
        """Search near a key, and check the result against exact distances.

        All true neighbors must be found only if the store's search is exact.

        Args:
            key: number of the key in the fixed random table, 0 to 11.
            k: number of neighbors.
            where: filter of the search; None searches all records.
        """
        queries = self._get_keys([key]) + np.float32(0.25)
        neighbors = self._store.search(queries, k, where=where)
        records = self._as_records(self._live).select_matching(where)
        recall = 1.0 if self._store.capabilities.exact_search else 0.0
        check_neighbors(neighbors, records, queries, k, self._metric, recall=recall)

    def _as_records(self, entries: dict[int, tuple[int, int]]) -> Records:
        """Convert a dict of (key number, group) by id to records."""
        return Records(
            np.array(list(entries), np.int64),
            self._get_keys([key for key, _ in entries.values()]),
            np.array([group for _, group in entries.values()], np.int32),
        )

    def _get_keys(self, numbers: list[int]) -> Keys:
        """Return the keys with some numbers, 0 to 11, from a fixed random table, float32, shape (n, dim)."""
        table = np.random.default_rng(3).integers(-2, 3, (12, self._store.dim)).astype(np.float32)
        return table[np.array(numbers, np.int64)]


class RandomHistoryTests(KitBase):
    """Cases of the kit with random sequences of changes and searches. Run all other cases first."""

    def test_random_histories(self, open_store: OpenStore, metric: Metric) -> None:
        """After every step of a random sequence, the store has the same records as a dict.

        If this fails, run the steps that Hypothesis prints by hand; they are the shortest that fail.
        """
        run_state_machine_as_test(
            lambda: DatastoreStateMachine(open_store, metric),  # type: ignore[arg-type]
            settings=settings(
                max_examples=15,
                stateful_step_count=15,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class ConcurrencyTests(KitBase):
    """Cases of the kit with several threads and one handle. Run all other cases first."""

    def test_searching_beside_a_writer(self, open_store: OpenStore, records: Records) -> None:
        """Four threads search while another thread adds, deletes and flushes.

        Each result is right for the content of the store at some moment during the search.

        If this fails, check which calls the engine allows during a change. Most engines allow none: a search
        must hold a reader's lock, or use data that no change modifies.
        """
        store = records.add_to(open_store(metric=Metric.L2))
        temporary = make_records(200, self.dim, seed=8, first_position=50_000)
        deleted: list[int] = []  # ids that are never added again
        done = threading.Event()

        def write() -> None:
            try:
                for start in range(0, 200, 10):
                    batch = temporary[start : start + 10]
                    batch.add_to(store)
                    store.flush()
                    store.delete(batch[::2].cover_positions())
                    deleted.extend(batch.ids[::2].tolist())
                temporary[1::2].add_to(store)
            finally:
                done.set()

        def search(thread: int) -> int:
            searches = 0
            while searches == 0 or not done.is_set():
                seed = 1000 * thread + searches
                self._check_one_search(store, records, temporary, deleted.copy(), seed=seed)
                searches += 1
            return searches

        with ThreadPoolExecutor(5) as pool:
            searching = [pool.submit(search, thread) for thread in range(4)]
            pool.submit(write).result()
            assert all(future.result() >= 1 for future in searching)
        check_holds(store, records + temporary[1::2])

    def _check_one_search(
        self, store: Datastore, records: Records, temporary: Records, deleted: list[int], *, seed: int
    ) -> None:
        """Search for stored keys, with a filter if `seed` is odd, and check the result.

        Args:
            store: the store.
            records: records that never change.
            temporary: records that another thread adds and deletes meanwhile.
            deleted: ids that were deleted before this call.
            seed: seed of the random choice of keys.
        """
        everything = records + temporary
        rows = np.random.default_rng(seed).integers(0, len(records), 4)
        queries = records.keys[rows]
        where = everything.filter_by_groups(2) if seed % 2 else None
        neighbors = store.search(queries, 8, where=where)
        matching = everything.select_matching(where)
        assert np.isin(neighbors.ids[neighbors.ids != -1], matching.ids).all(), (
            "found an id that was never added"
        )
        assert not np.isin(neighbors.ids, deleted).any(), (
            "found an id that was deleted before the search began"
        )
        for row, ids, distances in zip(rows, neighbors.ids, neighbors.distances, strict=True):
            valid = ids[ids != -1]
            assert len(np.unique(valid)) == len(valid), "an id occurs twice in one row"
            rows_found = np.searchsorted(everything.ids, valid)
            true_distances = compute_distances(
                records.keys[row : row + 1], everything.keys[rows_found], Metric.L2
            )[0]
            np.testing.assert_allclose(distances[: len(valid)], true_distances, rtol=1e-4, atol=1e-3)
            if where is None and store.capabilities.exact_search:
                assert valid[0] == records.ids[row], "a record that never changed was not found"
