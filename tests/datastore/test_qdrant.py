"""The Qdrant adapter: a real server if there is one, its parameters, keys and collections."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from knnstore_qdrant import QdrantDatastore, collection, qdrant_datastore
from knnstore_qdrant.points import Condition, GrpcPoints, condition_from_ranges
from qdrant_client import QdrantClient, models

from knnstore.datastore import TOKEN_LIMIT, Filter, IdRanges
from knnstore.errors import (
    ConfigError,
    DatastoreError,
    DatastoreExistsError,
    DatastoreMismatchError,
    InvalidVectorError,
)
from knnstore.testing import DatastoreTests

DIM = 16
LOGGER = "knnstore_qdrant.qdrant_datastore"


if SERVER := os.environ.get("KNNSTORE_TEST_QDRANT_URL"):

    class TestServer(DatastoreTests):
        """Against a real server; the adapter's own variables hold its API key and say that it is for it."""

        datastore_class = QdrantDatastore

        @pytest.fixture
        def location(self) -> Iterator[str]:
            self.params = {"collection": f"knnstore-test-{uuid4().hex}"}
            yield str(SERVER)
            QdrantDatastore.erase(str(SERVER), **self.params)


BLOCK = TOKEN_LIMIT
EDGES = st.integers(-2, 2)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 4), EDGES, st.integers(0, 4), EDGES), max_size=4), st.booleans())
def test_ranges_of_ids_become_conditions(bounds: list[tuple[int, int, int, int]], few: bool) -> None:
    """A condition is true of exactly the points whose ids are in the ranges, wherever these begin and end."""
    last = 2**63 - 1
    borders = [sorted((max(0, a * BLOCK + b), max(0, c * BLOCK + d))) for a, b, c, d in bounds]
    ranges = IdRanges(
        [(start, stop) for start, stop in borders] + ([] if few else [(last - BLOCK - 3, last)])
    )
    stored = np.array([a * BLOCK + b for a in range(6) for b in range(-3, 4) if a * BLOCK + b >= 0])
    stored = np.append(stored, [last - BLOCK - 3, last - BLOCK, last - 1])

    def holds(condition: Condition) -> np.ndarray:
        positions = stored // BLOCK
        true = np.isin(stored, condition.ids)
        for start, stop in condition.positions:
            true |= (positions >= start) & (positions < stop)
        return true

    condition = condition_from_ranges(ranges, lambda asked: stored[holds(asked)])
    np.testing.assert_array_equal(holds(condition), ranges.contains(stored))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_what_half_precision_cannot_hold_never_becomes_infinite(qdrant_server: Any, metric: Any) -> None:
    """Such a key is refused; such a query finds what is nearest to the greatest number there is."""
    ids, keys, groups = some(20)
    keys[3, 0] = 65504
    params = {"datatype": "float16", "grpc_port": qdrant_server.grpc_port}
    with QdrantDatastore.open(qdrant_server.url, dim=DIM, metric=metric, **params) as store:
        store.add(ids, keys, groups)
        greater = keys[3:4].copy()
        greater[0, 0] = 65520
        with pytest.raises(InvalidVectorError, match=r"65,520, .* float16 allows at most 65,504: .* float32"):
            store.add(ids[:1], greater, groups[:1])
        with pytest.raises(InvalidVectorError):
            store.add(ids[:1], -greater, groups[:1])
        assert store.count() == 20
        for query in (greater, -1000 * greater):
            found, nearest = store.search(query, 5), store.search(np.clip(query, -65504, 65504), 5)
            assert found.ids.tolist() == nearest.ids.tolist()
            assert (found.ids >= 0).all()
            assert np.isfinite(found.distances).all()


def test_a_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Older versions kept keys in a folder; a home that was made by one is told how to go on."""
    keys = tmp_path / "keys"
    for call in (
        QdrantDatastore.erase,
        QdrantDatastore.owner,
        lambda place: QdrantDatastore.open(place, dim=2),
    ):
        with pytest.raises(ConfigError, match=r"needs a server: give its address \(--location http://HOST"):
            call(keys)
    assert not keys.exists()
    (keys / "qdrant-shard").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"^{keys} has keys that an older knnstore .*move --store cells"):
        QdrantDatastore.open(keys, dim=DIM)


def test_parameters(tmp_path: Path) -> None:
    for params, message in (
        ({"m": 1}, "m must be at least 2, got 1"),
        ({"timeout": "5"}, "timeout must be a number"),
        ({"exact": 1}, "exact must be true or false"),
        ({"quantization": "product"}, "one of none, scalar, binary"),
        ({"replicas": 2, "write_consistency": 3}, "write_consistency 3 is more than the 2 replicas"),
        ({"api_key": "secret"}, "has no parameter 'api_key'; accepted: api_key_file"),
    ):
        with pytest.raises(ConfigError, match=message):
            QdrantDatastore.open(tmp_path / "store", dim=DIM, **params)
    assert not (tmp_path / "store").exists()


# -- a server, played by tests/qdrant_server


def some(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of an `add`."""
    keys = np.random.default_rng(0).normal(size=(n, DIM)).astype(np.float32)
    return np.arange(n) * BLOCK, keys, np.zeros(n, np.int32)


@pytest.mark.parametrize(
    "address", ["http://me:sesame@host:6333", "https://host?api-key=sesame", "ftp://sesame", "http://h:port"]
)
def test_addresses(address: str) -> None:
    """Only places are addresses, and what may be a secret is not repeated."""
    with pytest.raises(ConfigError) as refused:
        QdrantDatastore.open(address, dim=DIM)
    assert "sesame" not in str(refused.value)


def test_api_key(qdrant_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key comes from the environment, opens REST and gRPC of the server beside it, and is in no message."""
    with type(qdrant_server)(tmp_path / "locked", api_key="sesame") as server:
        ports = {"grpc_port": server.grpc_port}
        for key, place in (
            ("", server.url),
            ("wrong", server.url),
            ("sesame", ""),
            ("sesame", "http://other:1"),
        ):
            monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", key)
            monkeypatch.setenv("KNNSTORE_QDRANT_URL", place)
            with pytest.raises(DatastoreError, match=f"KNNSTORE_QDRANT_URL .*{server.url}") as refused:
                QdrantDatastore.open(server.url, dim=DIM, **ports)
            assert not {"wrong", "sesame"} & set(str(refused.value).split())
        monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "another sesame")
        monkeypatch.setenv("KNNSTORE_QDRANT_URL", f"http://other:6333 {server.url}/")
        with QdrantDatastore.open(server.url, dim=DIM, **ports) as store:
            assert isinstance(store._points, GrpcPoints)
            store.add(*some(3))
        monkeypatch.setenv("KNNSTORE_QDRANT_URL", server.url)
        with pytest.raises(ConfigError, match="has 2 keys, but KNNSTORE_QDRANT_URL has 1 servers"):
            QdrantDatastore.open(server.url, dim=DIM, **ports)


def test_a_store_gets_no_secret_for_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the file that a store names nor the environment's key of another server reaches its server."""
    secret = tmp_path / "secret"
    secret.write_text("of a file")
    monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "of the environment")
    heard: list[bytes] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(bytes(self.headers))
            self.send_response(401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(ConfigError, match=r"api_key_file .* no longer read: give the key in KNN"):
                QdrantDatastore.open(url, dim=DIM, mode="r", api_key_file=str(secret))
            assert not heard
            with pytest.raises(DatastoreError, match="refuses the API key"):
                QdrantDatastore.open(url, dim=DIM, mode="r")
            assert heard
            assert not any(b" of " in headers or b"api-key" in headers.lower() for headers in heard)
            monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "right")
            monkeypatch.setenv("KNNSTORE_QDRANT_URL", url)
            with pytest.raises(DatastoreError, match="refuses the API key"):
                QdrantDatastore.open(url, dim=DIM, mode="r", api_key_file=str(secret))
            assert b"right" in heard[-1]
            with pytest.raises(ConfigError, match="api_key_file is no longer read"):
                QdrantDatastore.open(url, dim=DIM, mode="x", api_key_file=str(secret))
        finally:
            server.shutdown()


@pytest.mark.slow
def test_the_benchmark_has_a_key_too(
    qdrant_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the adapter and for the client beside it; it is printed nowhere."""
    (tmp_path / "key").write_text("sesame\n")
    monkeypatch.delenv("KNNSTORE_QDRANT_API_KEY", raising=False)
    script = Path(__file__).parents[2] / "benchmarks" / "points.py"
    with type(qdrant_server)(tmp_path / "locked", api_key="sesame") as server:
        where = ["--url", server.url, "--grpc-port", str(server.grpc_port)]
        sizes = ["--rows", "2000", "--batch", "4", "--repeats", "1"]
        command = [sys.executable, script, *sizes, *where, "--api-key-file", tmp_path / "key"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"gRPC", "REST"} == {row["engine"] for row in json.loads(done.stdout)["search"]}
    assert "sesame" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("server", "told"),
    [("1.18.3", 1), ("1.19.0", 0), ("1.21.7", 0), ("1.22.0-dev", 1), ("2.20.0", 1), ("?", 0)],
)
def test_a_server_of_another_time_is_told_of_once(
    qdrant_server: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    told: int,
) -> None:
    """The client works with its own minor version and those beside it; others are used, and named."""
    import qdrant_http

    monkeypatch.setitem(qdrant_http.VERSION, "version", server)
    monkeypatch.setattr(qdrant_datastore, "version", lambda _: "1.20.0")
    qdrant_datastore._compared.clear()
    for _ in range(2):
        QdrantDatastore.open(qdrant_server.url, dim=DIM, grpc_port=qdrant_server.grpc_port).close()
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(said) == told
    assert all(qdrant_server.url in line and server in line and "1.20.0" in line for line in said)


def test_a_server_that_tells_no_version_is_used(qdrant_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    qdrant_datastore._compared.clear()
    qdrant_server.faults.add("error", "info", times=2**62)
    ports = {"grpc_port": qdrant_server.grpc_port, "timeout": 0.3}
    with QdrantDatastore.open(qdrant_server.url, dim=DIM, **ports) as store:
        assert store.count() == 0
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_grpc_only_where_the_same_server_answers(qdrant_server: Any, tmp_path: Path) -> None:
    """Another server at the port for gRPC, even one with a collection of this name, is not asked."""
    with type(qdrant_server)(tmp_path / "other") as other:
        QdrantDatastore.open(other.url, dim=DIM, grpc_port=other.grpc_port).close()
        for port in (other.grpc_port, 1):
            with QdrantDatastore.open(qdrant_server.url, dim=DIM, grpc_port=port) as store:
                assert not isinstance(store._points, GrpcPoints)
                store.add(*some(4))
        with QdrantDatastore.open(other.url, dim=DIM, grpc_port=other.grpc_port) as store:
            assert isinstance(store._points, GrpcPoints)
            assert store.count() == 0


def test_somebody_else_s_collection(qdrant_server: Any) -> None:
    """It is neither used nor removed."""
    client = QdrantClient(qdrant_server.url, check_compatibility=False)
    client.create_collection("knnstore", models.VectorParams(size=DIM, distance=models.Distance.EUCLID))
    client.upsert("knnstore", [models.PointStruct(id=1, vector=[0.0] * DIM)])
    ports = {"grpc_port": qdrant_server.grpc_port}
    with pytest.raises(DatastoreMismatchError, match="not made by knnstore"):
        QdrantDatastore.open(qdrant_server.url, dim=DIM, **ports)
    with pytest.raises(DatastoreExistsError, match="collection=NAME"):
        QdrantDatastore.open(qdrant_server.url, dim=DIM, mode="x", **ports)
    with pytest.raises(DatastoreMismatchError, match="not made by knnstore"):
        QdrantDatastore.erase(qdrant_server.url, **ports)
    with QdrantDatastore.open(qdrant_server.url, dim=DIM, collection="mine", **ports) as store:
        assert store.count() == 0
    QdrantDatastore.erase(qdrant_server.url, collection="mine", **ports)
    QdrantDatastore.erase(qdrant_server.url, collection="mine", **ports)
    assert [found.name for found in client.get_collections().collections] == ["knnstore"]
    client.close()


def test_indexing_is_put_off_during_a_bulk_load(qdrant_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `optimize` or `close`; the next writer ends it if this one was killed."""
    monkeypatch.setattr(collection, "_BULK", 1000)
    client = QdrantClient(qdrant_server.url, check_compatibility=False)

    def threshold() -> object:
        return client.get_collection("knnstore").config.optimizer_config.indexing_threshold

    params = {"indexing_threshold": 500, "grpc_port": qdrant_server.grpc_port}
    ids, keys, groups = some(1200)
    with QdrantDatastore.open(qdrant_server.url, dim=DIM, **params) as store:
        store.add(ids[:900], keys[:900], groups[:900])
        assert threshold() == 500
        store.add(ids[900:], keys[900:], groups[900:])
        assert threshold() == 0
        store.optimize()
        assert threshold() == 500
        assert store.count() == 1200
        off = models.OptimizersConfigDiff(indexing_threshold=0)
        client.update_collection("knnstore", optimizers_config=off)
    QdrantDatastore.open(qdrant_server.url, dim=DIM, **params).close()
    assert threshold() == 500
    client.close()


@pytest.mark.parametrize("prefer_grpc", [False, True])
def test_filters_that_end_within_a_position(qdrant_server: Any, prefer_grpc: bool) -> None:
    """Ids at the borders of a range are looked up where they are too many to be listed."""
    ids = np.array([5, BLOCK - 1, BLOCK, 2 * BLOCK + 7, 3 * BLOCK])
    _, keys, groups = some(5)
    params = {"prefer_grpc": prefer_grpc, "grpc_port": qdrant_server.grpc_port}
    with QdrantDatastore.open(qdrant_server.url, dim=DIM, **params) as store:
        store.add(ids, keys, groups)
        for start, stop in ((6, 2 * BLOCK + 7), (6, 2 * BLOCK + 8), (0, BLOCK - 1), (BLOCK, 3 * BLOCK)):
            expected = ids[(ids >= start) & (ids < stop)]
            found = store.search(keys[:1], 5, where=Filter(IdRanges([(start, stop)]))).ids[0]
            assert sorted(found[found >= 0].tolist()) == expected.tolist()
