"""Keys that an engine does not check itself are compared with checksums in the catalog."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnstore.catalog import Catalog, CatalogWriter
from knnstore.errors import CorruptDatastoreError
from knnstore.store import Home, KNNStore

PRECISIONS = {"float32": np.float32, "float16": np.float16}


def stored_checksums(home: Path) -> dict[int, str]:
    catalog = Catalog.open(Home.open(home).catalog_url)
    try:
        return catalog.key_checksums()
    finally:
        catalog.close()


@pytest.fixture
def qdrant(home, identity, writer_of, request, qdrant_server):
    """Documents on a Qdrant server, keys among them that are hard to round."""
    params = {"datatype": getattr(request, "param", "float32"), "grpc_port": qdrant_server.grpc_port}
    with KNNStore.create(home, identity, store="qdrant", location=qdrant_server.url, params=params) as store:
        writer = writer_of(store)
        writer.add("law", "1", "2")
        awkward = writer.rng.standard_normal((3, 8)) * np.array([[1e-6], [1e-9], [1e4]])
        awkward[:, 0] = -0.0
        with store.ingest([writer._new("law", "odd", 3)]) as group:
            tokens = writer.tokens["law", "odd"].astype(np.int64)
            for row in (2, 0, 1):  # in any order
                group.add(np.zeros(1, int), np.array([row]), tokens[[row]], awkward[[row]].astype(np.float32))
        writer.add("news", "a")
    return writer


@pytest.mark.parametrize("qdrant", PRECISIONS, indirect=True)
def test_whatever_is_done_to_a_store_its_checksums_fit(qdrant, home, qdrant_server) -> None:
    url, ports = qdrant_server.url, {"grpc_port": qdrant_server.grpc_port}
    with KNNStore.open(home, "a") as store:
        qdrant.store = store
        qdrant.add("law", "1", n=30)  # replaced
        store.remove_document("a")
        store.optimize()
        assert store.verify() == []
        store.move("qdrant", url, params={"collection": "half", "datatype": "float16", **ports})
        assert store.verify() == []
        assert len(stored_checksums(home)) == 3
        store.move("hnswlib", "graphs")
        assert store.verify() == []
        assert stored_checksums(home) == {}
        store.move("qdrant", url, params={"collection": "back", **ports})
        assert store.verify() == []
        assert len(stored_checksums(home)) == 3


@pytest.mark.slow
def test_a_store_of_before_gets_its_checksums_from_repair(qdrant, home) -> None:
    with KNNStore.open(home, "a") as store:
        taken = stored_checksums(home)
        CatalogWriter(store._catalog).switch_engine(store.engine)  # leaves none
    with KNNStore.open(home, "a") as store:
        assert store.verify() == []
        assert stored_checksums(home) == {}
        assert store.repair() == []
        assert stored_checksums(home) == taken


@pytest.mark.slow
@pytest.mark.parametrize("at", ["ingest.added", "ingest.flushed", "catalog.publish.inside", "purge.before"])
def test_a_kill_makes_no_sound_store_look_damaged(qdrant, home, writer_of, killed_at, at) -> None:
    def replace() -> None:
        with KNNStore.open(home, "a") as store:
            writer_of(store).add("law", "2", "3")

    assert killed_at(at, replace)
    with KNNStore.open(home, "a") as store:
        assert store.verify() == []
        assert len(stored_checksums(home)) == store.info()["documents"]


def test_keys_of_a_strangers_adapter_are_checked_too(home, identity, writer_of, monkeypatch) -> None:
    """It keeps one file and knows no checksums."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "datastore" / "stranger")
    with KNNStore.create(home, identity, store="stranger") as store:
        writer = writer_of(store)
        writer.add("law", "1", "2")
        writer.add("news", "a")
        assert store.verify() == []
    path = home / "keys" / "records.npz"
    with np.load(path) as stored:
        columns = dict(stored)
    columns["keys"][27].view(np.uint16)[3] ^= 1
    np.savez(path, **columns)
    with KNNStore.open(home) as reader:
        (problem,) = reader.verify()
        assert "'2' of domain 'law' has altered keys" in problem
    with KNNStore.open(home, "a") as store:
        assert len(store.repair()) == 1
        with pytest.raises(CorruptDatastoreError, match="'2' of domain 'law'"):
            store.move("faiss", "elsewhere")
        store.abandon_move()
        store.remove_document("2")
        writer.store = store
        writer.add("law", "2")
        assert store.verify() == []
        store.move("faiss", "elsewhere")
        assert store.verify() == []


@pytest.mark.slow
def test_a_server_gives_back_what_was_summed(home, identity, writer_of, qdrant_server: Any) -> None:
    url = qdrant_server.url
    for datatype in PRECISIONS:
        folder = home.with_name(datatype)
        params = {"collection": datatype, "datatype": datatype}
        with KNNStore.create(folder, identity, store="qdrant", location=url, params=params) as made:
            writer = writer_of(made)
            writer.add("law", "1", "2")
            assert made.verify() == []
            assert len(stored_checksums(folder)) == 2
