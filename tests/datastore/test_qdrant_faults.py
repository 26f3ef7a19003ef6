"""Qdrant over real HTTP and gRPC: the conformance kit, and a server that misbehaves at every call."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from knnstore_qdrant import QdrantDatastore
from knnstore_qdrant.collection import Attempts

from knnstore.datastore import Metric, Neighbors
from knnstore.errors import DatastoreError, DatastoreNotFoundError, StoreUnavailableError
from knnstore.testing import DatastoreTests
from knnstore.testing.base import ALL_IDS, Records, check_holds, check_neighbors, make_queries, make_records

T = TypeVar("T")

DIM = 8
STALLED = 600.0
"""Seconds that a call stalls: whoever waited for its end would be answered, and not say what is expected."""

ONCE = ["refuse", "error", "busy", "cut", "lost", "acknowledged", "wait_timeout", "stall"]
FOREVER = 2**62


class ServerTests(DatastoreTests):
    datastore_class = QdrantDatastore
    prefer_grpc: ClassVar[bool] = False

    @pytest.fixture
    def location(self, qdrant_server: Any) -> str:
        self.params = {"prefer_grpc": self.prefer_grpc, "grpc_port": qdrant_server.grpc_port}
        return qdrant_server.url

    @pytest.fixture
    def unreachable_location(self) -> str:
        return "http://127.0.0.1:1"


@pytest.mark.slow
@pytest.mark.exhaustive  # the faults below are met over both
class TestOverRest(ServerTests):
    pass


@pytest.mark.slow
class TestOverGrpc(ServerTests):
    prefer_grpc = True


class Spoilt:
    """A store on a server that misbehaves.

    Args:
        server: which.
        params: of the adapter.
    """

    def __init__(self, server: Any, params: dict[str, Any]) -> None:
        self.server, self.params = server, params
        self.failed = 0
        """How many operations were answered with `StoreUnavailableError`."""

    def open(self, **params: Any) -> QdrantDatastore:
        return QdrantDatastore.open(self.server.url, dim=DIM, **self.params, **params)

    def spoil(self, kind: str, first: int, times: int = 1) -> Any:
        """Misbehave from the nth call on, and nowhere else."""
        self.failed = 0
        self.server.faults.clear()
        return self.server.faults.add(kind, first=first, times=times, seconds=STALLED * (kind == "stall"))

    def attempt(self, work: Callable[[], T]) -> T:
        """Do it, or else be told in time that the store is unavailable, and do it when it is well again."""
        try:
            return work()
        except StoreUnavailableError as error:
            self.failed += 1
            message = str(error)
        assert "unavailable" in message
        self.server.faults.clear()
        self.server.finish_abandoned_calls()
        return work()


@pytest.fixture(params=["rest", "grpc"])
def spoilt(request: pytest.FixtureRequest, qdrant_server: Any) -> Spoilt:
    """A store over each protocol."""
    is_grpc = request.param == "grpc"
    return Spoilt(qdrant_server, {"prefer_grpc": is_grpc, "grpc_port": qdrant_server.grpc_port})


def test_speaks_the_protocol_that_was_asked_for(spoilt: Spoilt) -> None:
    """So that the tests below are of both."""
    records = make_records(20, DIM)
    with spoilt.open() as store:
        records.add_to(store)
        store.search(records.keys, 3)
        check_holds(store, records)
        store.delete(ALL_IDS)
        calls = spoilt.server.faults.calls
        protocol = "grpc" if spoilt.params["prefer_grpc"] else "rest"
        for endpoint in ("upsert", "query", "delete", "count", "scroll"):
            assert {used for used, called in calls if called == endpoint} == {protocol}, endpoint


def use(spoilt: Spoilt, store: QdrantDatastore) -> None:
    """Change a store that is empty, and read it in every way; each answer must be right."""
    records, queries = make_records(120, DIM), make_queries(3, DIM)
    changed = Records(records.ids[:20], records.keys[:20] + 1, records.groups[:20])
    uploaded = make_records(10, DIM, first_position=1000)
    now = changed + records[40:] + uploaded

    def search() -> Neighbors:
        return store.search(queries, 10, where=now.filter_by_groups(1, 2))

    spoilt.attempt(lambda: records.add_to(store))
    spoilt.attempt(lambda: changed.add_to(store))
    spoilt.attempt(lambda: store.delete(records[20:40].cover_positions()))
    spoilt.attempt(lambda: store.upload(uploaded.ids, uploaded.keys, uploaded.groups, "name"))
    assert spoilt.attempt(lambda: store.count_uploaded(ALL_IDS, "name", 0)) == len(uploaded)
    spoilt.attempt(store.flush)
    found = spoilt.attempt(search)
    check_neighbors(found, now.select_matching(now.filter_by_groups(1, 2)), queries, 10, Metric.L2)
    assert spoilt.attempt(store.count) == len(now)
    spoilt.attempt(lambda: check_holds(store, now))
    spoilt.server.faults.clear()
    check_holds(store, now)
    store.delete(ALL_IDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONCE)
def test_one_fault_at_every_call(spoilt: Spoilt, kind: str) -> None:
    """Nothing is lost, nothing is counted as written that was not, and no answer is wrong or short."""
    with spoilt.open() as store:
        for first in itertools.count(1):
            fault = spoilt.spoil(kind, first)
            use(spoilt, store)
            if fault.seen < first:
                break
    assert first > (3 if kind in ("acknowledged", "wait_timeout") else 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuse", "busy", "lost", "acknowledged", "stall"])
def test_down_from_any_call_on(spoilt: Spoilt, kind: str) -> None:
    """Whatever is asked of it says so, within its time."""
    with spoilt.open() as store:
        for first in itertools.count(1):
            fault = spoilt.spoil(kind, first, FOREVER)
            use(spoilt, store)
            if spoilt.failed == 0:
                break
    assert fault.seen < first
    assert first > (3 if kind == "acknowledged" else 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONCE)
def test_one_fault_at_every_call_of_creating(spoilt: Spoilt, kind: str) -> None:
    """The store is there once, with what makes it a store, whichever answer was lost."""
    records = make_records(10, DIM)
    for first in itertools.count(1):
        fault = spoilt.spoil(kind, first)
        collection = f"{kind}{first}"
        with spoilt.attempt(lambda name=collection: spoilt.open(collection=name)) as store:
            is_over = fault.seen < first
            spoilt.server.faults.clear()
            records.add_to(store)
            check_holds(store, records)
        if is_over:
            break
    assert first > (2 if kind in ("acknowledged", "wait_timeout") else 4)


def test_a_search_says_in_time_that_the_store_is_unavailable(spoilt: Spoilt) -> None:
    """It gives neither wrong neighbors nor fewer nor none, also to a handle that is already open."""
    records, queries = make_records(60, DIM), make_queries(4, DIM)
    with spoilt.open() as store:
        records.add_to(store)
        right = store.search(queries, 20)
        for kind in ONCE:
            if kind in ("acknowledged", "wait_timeout"):
                continue
            spoilt.spoil(kind, 1, FOREVER)
            with pytest.raises(StoreUnavailableError, match="unavailable"):
                store.search(queries, 20)
            spoilt.server.faults.clear()
            assert np.array_equal(store.search(queries, 20).ids, right.ids), kind
        spoilt.server.stop()
        with pytest.raises(StoreUnavailableError, match="unavailable"):
            store.search(queries, 20)
        spoilt.server.start()
        assert np.array_equal(store.search(queries, 20).ids, right.ids)


def test_a_server_that_lost_its_collection_is_not_an_empty_store(spoilt: Spoilt) -> None:
    """Reading says that there is no store; only opening for writing makes a new one."""
    records, queries = make_records(60, DIM), make_queries(4, DIM)
    with spoilt.open() as store, spoilt.open(mode="r") as reader:
        records.add_to(store)
        spoilt.spoil("gone", 1)
        for handle in (reader, store):
            with pytest.raises(DatastoreError):
                handle.search(queries, 5)
            with pytest.raises(DatastoreError):
                handle.count()
        with pytest.raises(DatastoreError):
            records.add_to(store)
    with pytest.raises(DatastoreNotFoundError):
        spoilt.open(mode="r")


def test_the_deadline_of_a_call_ends_with_the_call() -> None:
    attempts = Attempts("server", 60.0)
    assert attempts.read(attempts.seconds_left) < 60.0
    assert attempts.seconds_left() == 60.0
