"""Cases of the conformance kit: random histories, compared with a dict after every step."""

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

from knnstore.datastore import TOKEN_LIMIT, Filter, IdRanges, Keys, Metric, ranges_of, record_ids
from knnstore.testing.base import ALL_IDS, KitBase, OpenStore, Records, check_holds, check_neighbors

_POSITIONS = st.integers(0, 19)
_KEYS = st.integers(0, 11)
_GROUPS = st.integers(0, 3)


def _id(position: int) -> int:
    return int(record_ids(np.array(position), np.array(position * 7919 % TOKEN_LIMIT)))


def _of_positions(runs: list[tuple[int, int]]) -> IdRanges:
    return ranges_of(*np.array(runs, np.int64).reshape(-1, 2).T)


class DatastoreStateMachine(RuleBasedStateMachine):
    """Random changes and searches of a small store whose keys often repeat.

    Args:
        open_store: opens the store; every history begins by emptying it.
        metric: how distances are measured.
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
        change = {_id(position): entry for position, entry in entries.items()}
        self._as_records(change).put(self._store)
        self._live.update(change)

    @rule(first=_POSITIONS, count=st.integers(0, 15))
    def delete(self, first: int, count: int) -> None:
        """Delete a run of positions."""
        self._store.delete(_of_positions([(first, first + count)]))
        self._live = {i: live for i, live in self._live.items() if not _id(first) <= i < _id(first + count)}

    @rule(key=_KEYS, k=st.integers(1, 50))
    def search(self, key: int, k: int) -> None:
        """Search everything."""
        self._check_search(key, k, None)

    @rule(key=_KEYS, k=st.integers(1, 12), groups=st.sets(_GROUPS))
    def search_groups(self, key: int, k: int, groups: set[int]) -> None:
        """Search some groups."""
        self._check_search(key, k, self._as_records(self._live).of_groups(*groups))

    @rule(key=_KEYS, k=st.integers(1, 12), runs=st.lists(st.tuples(_POSITIONS, _POSITIONS), max_size=4))
    def search_ids(self, key: int, k: int, runs: list[tuple[int, int]]) -> None:
        """Search some runs of positions."""
        ranges = _of_positions([(min(run), max(run)) for run in runs])
        self._check_search(key, k, Filter(ids=ranges))

    @rule()
    def flush(self) -> None:
        """Make everything durable, which must not be visible."""
        self._store.flush()

    @precondition(lambda self: self._store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close and open again."""
        self._store.close()
        self._store = self._open(metric=self._metric)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The store holds exactly the records of the model."""
        check_holds(self._store, self._as_records(self._live))

    def teardown(self) -> None:
        """Close the store."""
        self._store.close()

    def _check_search(self, key: int, k: int, where: Filter | None) -> None:
        queries = self._keys([key]) + np.float32(0.25)
        found = self._store.search(queries, k, where=where)
        records = self._as_records(self._live).matching(where)
        recall = 1.0 if self._store.capabilities.exact_search else 0.0
        check_neighbors(found, records, queries, k, self._metric, recall=recall)

    def _as_records(self, entries: dict[int, tuple[int, int]]) -> Records:
        return Records(
            np.array(list(entries), np.int64),
            self._keys([key for key, _ in entries.values()]),
            np.array([group for _, group in entries.values()], np.int32),
        )

    def _keys(self, numbers: list[int]) -> Keys:
        table = np.random.default_rng(3).integers(-2, 3, (12, self._store.dim)).astype(np.float32)
        return table[np.array(numbers, np.int64)]


class RandomHistoryTests(KitBase):
    """Needs: everything else that one thread does."""

    def test_random_histories(self, open_store: OpenStore, metric: Metric) -> None:
        """Random sequences of changes and searches never differ from a dict.

        If this fails, run the steps that Hypothesis prints, the shortest that fail, by hand.
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
