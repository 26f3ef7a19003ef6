"""The test server is a Qdrant server as far as the real client can tell, until it is told to misbehave."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

T = TypeVar("T")

DIM = 8
ERRORS = (ResponseHandlingException, UnexpectedResponse, ResourceExhaustedResponse, grpc.RpcError)
SCRIPT = Path(__file__).parents[1] / "qdrant_server" / "qdrant_server.py"


@contextmanager
def connected(url: str, grpc_port: int, *, prefer_grpc: bool, timeout: int = 5) -> Iterator[QdrantClient]:
    client = QdrantClient(
        url, grpc_port=grpc_port, prefer_grpc=prefer_grpc, timeout=timeout, check_compatibility=False
    )
    yield client
    client.close()


@pytest.fixture(params=["rest", "grpc"])
def client(request: pytest.FixtureRequest, qdrant_server: Any) -> Iterator[QdrantClient]:
    """The real client, over each protocol."""
    is_grpc = request.param == "grpc"
    with connected(qdrant_server.url, qdrant_server.grpc_port, prefer_grpc=is_grpc) as client:
        yield client


def points(n: int) -> list[models.PointStruct]:
    keys = np.random.default_rng(0).standard_normal((n, DIM)).astype(np.float32)
    return [
        models.PointStruct(
            id=(5 + i) << 20 | i % 7, vector=keys[i].tolist(), payload={"group": i % 4, "position": 5 + i}
        )
        for i in range(n)
    ]


def create(client: QdrantClient, distance: models.Distance = models.Distance.EUCLID) -> None:
    vectors = models.VectorParams(size=DIM, distance=distance)
    metadata = {"made": "by a test"}
    hnsw = models.HnswConfigDiff(m=8, payload_m=8)
    client.create_collection("c", vectors, hnsw_config=hnsw, metadata=metadata)


def filled(client: QdrantClient, n: int = 60) -> list[models.PointStruct]:
    create(client)
    stored = points(n)
    assert client.upsert("c", stored).status == models.UpdateStatus.COMPLETED
    return stored


def keyed(key: str, **condition: Any) -> models.FieldCondition:
    return models.FieldCondition(key=key, **condition)


FILTERS = {
    "none": None,
    "group": models.Filter(must=[keyed("group", match=models.MatchValue(value=2))]),
    "groups": models.Filter(must=[keyed("group", match=models.MatchAny(any=[1, 3]))]),
    "others": models.Filter(must_not=[keyed("group", match=models.MatchAny(any=[1, 3]))]),
    "range": models.Filter(must=[keyed("position", range=models.Range(gte=20, lt=30))]),
    "ids": models.Filter(must=[models.HasIdCondition(has_id=[5 << 20, 6 << 20 | 1, 1])]),
    "nested": models.Filter(
        must=[keyed("group", match=models.MatchExcept(**{"except": [0]}))],
        should=[
            models.Filter(must=[keyed("position", range=models.Range(gte=low, lt=low + 7))])
            for low in (10, 40)
        ],
    ),
    "nobody": models.Filter(must=[keyed("group", match=models.MatchValue(value=99))]),
}


@pytest.mark.slow
@pytest.mark.parametrize("distance", [models.Distance.EUCLID, models.Distance.DOT])
def test_answers_as_the_client_in_memory(client: QdrantClient, distance: models.Distance) -> None:
    """The same calls give the same answers, by id and by distance, whatever the filter."""
    memory = QdrantClient(":memory:")
    queries = np.random.default_rng(1).standard_normal((3, DIM)).tolist()
    answers = []
    for each in (memory, client):
        create(each, distance)
        stored = points(60)
        each.upsert("c", stored[:50])
        each.upsert(
            "c", models.Batch(ids=[9, 10], vectors=queries[:2], payloads=[{"group": 0}, {"group": 1}])
        )
        each.upsert("c", [stored[3].model_copy(update={"payload": {"group": 3}}), *stored[50:]])
        each.delete("c", [stored[7].id, stored[8].id, 12345])
        each.delete("c", models.FilterSelector(filter=FILTERS["range"]))
        answers.append(everything(each, queries))
    for part, expected in answers[0].items():
        assert answers[1][part] == expected, part
    memory.close()


def everything(client: QdrantClient, queries: list[list[float]]) -> dict[str, Any]:
    """What each way of reading says."""
    said: dict[str, Any] = {}
    for name, where in FILTERS.items():
        said[f"count {name}"] = client.count("c", count_filter=where, exact=True).count
        page, following = client.scroll("c", where, limit=7, with_vectors=True)
        rest, end = client.scroll("c", where, limit=1000, offset=following) if following else ([], None)
        said[f"scroll {name}"] = [(p.id, p.payload, p.vector and rounded(p.vector)) for p in [*page, *rest]]
        said[f"end {name}"] = following, end
        requests = [models.QueryRequest(query=query, filter=where, limit=12) for query in queries]
        for batch in client.query_batch_points("c", requests):
            said.setdefault(f"query {name}", []).append([(p.id, *rounded([p.score])) for p in batch.points])
        one = client.query_points(
            "c", queries[0], query_filter=where, limit=3, offset=2, with_payload=["group"]
        )
        said[f"one {name}"] = [(p.id, p.payload) for p in one.points]
    said["retrieve"] = {p.id: p.payload for p in client.retrieve("c", [9, 10, 1, 5 << 20])}
    said["exists"] = client.collection_exists("c"), client.collection_exists("d")
    said["all"] = [each.name for each in client.get_collections().collections]
    return said


def rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


def test_describes_collections(client: QdrantClient, qdrant_server: Any) -> None:
    """What was set at creation and later is told, also after a restart."""
    assert client.info().version == "1.20.0"
    create(client)
    tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
    integer = models.IntegerIndexParams(type=models.IntegerIndexType.INTEGER, lookup=False, range=True)
    client.create_payload_index("c", "domain", tenant)
    client.create_payload_index("c", "position", integer)
    client.create_payload_index("c", "group", models.PayloadSchemaType.INTEGER)
    assert client.get_collection("c").status == models.CollectionStatus.GREEN
    client.update_collection("c", optimizers_config=models.OptimizersConfigDiff(indexing_threshold=77))
    statuses = [client.get_collection("c").status for _ in range(2)]
    assert statuses == [models.CollectionStatus.YELLOW, models.CollectionStatus.GREEN]
    for restart in (False, True):
        if restart:
            qdrant_server.restart()
        info = told(lambda: client.get_collection("c"))
        assert isinstance(info.config.params.vectors, models.VectorParams)
        assert (info.config.params.vectors.size, info.config.params.vectors.distance) == (DIM, "Euclid")
        assert info.config.metadata == {"made": "by a test"}
        assert (info.config.hnsw_config.m, info.config.hnsw_config.payload_m) == (8, 8)
        assert info.config.optimizer_config.indexing_threshold == 77
        assert {name: index.data_type for name, index in info.payload_schema.items()} == {
            "domain": "keyword",
            "position": "integer",
            "group": "integer",
        }
        assert info.payload_schema["domain"].params == tenant
        assert info.payload_schema["group"].params is None


def told(ask: Callable[[], T]) -> T:
    """Ask until there is an answer: gRPC reconnects by itself, but not at once."""
    until = time.monotonic() + 120  # which only ends a test that hangs
    while True:
        try:
            return ask()
        except grpc.RpcError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_refuses_what_a_server_refuses(client: QdrantClient) -> None:
    stored = filled(client)
    for mistake, words in (
        (lambda: create(client), "already exists"),
        (lambda: client.count("d"), "Not found: Collection `d`"),
        (lambda: client.upsert("d", stored), "Not found: Collection `d`"),
        (lambda: client.upsert("c", [models.PointStruct(id=1, vector=[1.0])]), "expected dim: 8, got 1"),
        (lambda: client.query_points("c", [1.0, 2.0]), "expected dim: 8, got 2"),
    ):
        with pytest.raises(ERRORS, match=words):
            mistake()
    assert client.count("c").count == len(stored)
    assert client.delete_collection("c")
    assert not client.delete_collection("c")
    assert not client.collection_exists("c")


def test_wants_the_api_key(tmp_path: Path, qdrant_server: Any) -> None:
    with type(qdrant_server)(tmp_path / "guarded", api_key="secret") as guarded:
        for prefer_grpc in (False, True):
            with (
                connected(guarded.url, guarded.grpc_port, prefer_grpc=prefer_grpc) as stranger,
                pytest.raises(ERRORS, match="API key"),
            ):
                stranger.get_collections()
        headers = {"api-key": "secret"}
        client = QdrantClient(guarded.url, headers=headers, check_compatibility=False)
        assert client.get_collections().collections == []
        client.close()


def write(client: QdrantClient) -> models.UpdateResult:
    return client.upsert("c", points(70)[60:])


def test_does_nothing_when_told_so(client: QdrantClient, qdrant_server: Any) -> None:
    stored = filled(client)
    for kind in ("refuse", "error", "busy"):
        qdrant_server.faults.add(kind, "upsert")
        with pytest.raises(ERRORS):
            write(client)
        assert client.count("c").count == len(stored), kind
    qdrant_server.faults.add("busy", "upsert", seconds=3)
    with pytest.raises(ResourceExhaustedResponse) as busy:
        write(client)
    assert busy.value.retry_after_s == 3
    for kind in ("acknowledged", "wait_timeout"):
        qdrant_server.faults.add(kind, "upsert")
        assert write(client).status == kind
        assert client.count("c").count == len(stored), kind
    qdrant_server.faults.add("acknowledged", "upsert", seconds=30)
    assert write(client).status == "acknowledged"
    client.delete("c", [12345])  # updates are done in order
    assert client.count("c").count == len(stored) + 10


@pytest.mark.parametrize("kind", ["cut", "lost"])
def test_does_it_and_does_not_say_so(client: QdrantClient, qdrant_server: Any, kind: str) -> None:
    stored = filled(client)
    qdrant_server.faults.add(kind, "upsert")
    with pytest.raises(ERRORS):
        write(client)
    assert client.count("c").count == len(stored) + 10
    qdrant_server.faults.add(kind, "query", first=2, times=2)
    for attempt in range(1, 5):
        if attempt in (2, 3):
            with pytest.raises(ERRORS):
                client.query_points("c", stored[0].vector)
        else:
            assert client.query_points("c", stored[0].vector).points[0].id == stored[0].id


def test_stalls(qdrant_server: Any, client: QdrantClient) -> None:
    stored = filled(client)
    is_grpc = client.init_options["prefer_grpc"]
    with connected(qdrant_server.url, qdrant_server.grpc_port, prefer_grpc=is_grpc, timeout=1) as hasty:
        qdrant_server.faults.add("stall", "count", seconds=30)
        with pytest.raises(ERRORS):
            hasty.count("c")
    assert client.count("c").count == len(stored)
    short = qdrant_server.faults.add("stall", "count", seconds=0.2)
    assert client.count("c").count == len(stored)
    assert short.seen == 1


def test_comes_back_without_what_it_had(client: QdrantClient, qdrant_server: Any) -> None:
    filled(client)
    client.create_payload_index("c", "group", models.PayloadSchemaType.INTEGER)
    qdrant_server.faults.add("emptied", "query")
    with pytest.raises(ERRORS):
        client.query_points("c", [0.0] * DIM)
    assert client.count("c").count == 0
    assert list(client.get_collection("c").payload_schema) == ["group"]
    qdrant_server.faults.add("gone", "query")
    with pytest.raises(ERRORS):
        client.query_points("c", [0.0] * DIM)
    assert not client.collection_exists("c")


def test_stops_and_comes_back(client: QdrantClient, qdrant_server: Any) -> None:
    stored = filled(client)
    qdrant_server.stop()
    with pytest.raises(ERRORS):
        client.count("c")
    qdrant_server.start()
    assert told(lambda: client.count("c")).count == len(stored)


@pytest.mark.slow
def test_keeps_what_it_completed_when_it_is_killed(tmp_path: Path) -> None:
    """As a process of its own, over both protocols; faults come through HTTP."""
    ports = ["0", "0"]
    for prefer_grpc in (False, True):
        arguments = ["--folder", str(tmp_path / "qdrant"), "--port", ports[0], "--grpc-port", ports[1]]
        command = [sys.executable, str(SCRIPT), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ports = process.stdout.readline().split()
            url = f"http://127.0.0.1:{ports[0]}"
            with connected(url, int(ports[1]), prefer_grpc=prefer_grpc) as client:
                if prefer_grpc:
                    assert client.count("c").count == 60
                    assert client.delete_collection("c")
                filled(client)
                fault = json.dumps({"kind": "error", "endpoint": "count"}).encode()
                urllib.request.urlopen(urllib.request.Request(f"{url}/faults", fault, method="PUT")).close()
                with pytest.raises(ERRORS, match="told to fail"):
                    client.count("c")
            process.kill()
