"""Workers that upload keys to a Qdrant server: invisible before the commit, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient

import knnstore
from knnstore import failpoints
from knnstore.datastore import registry
from knnstore.distributed import PlanFolder, ShardUploader, encode_shards, encode_shards_in_processes
from knnstore.errors import (
    ConfigError,
    DatastoreError,
    DatastoreNotFoundError,
    NotOwnerError,
    PlanError,
    StoreUnavailableError,
)
from knnstore.store import KNNStore, Selection
from tests.distributed.test_plans import DOCUMENTS, Workshop, read_store, write_documents

KNNSTORE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


class ServerWorkshop(Workshop):
    """A store whose keys are on a Qdrant server."""

    def __init__(self, path: Path, server: Any, **params: Any) -> None:
        self.server = server
        self.params = {"grpc_port": server.grpc_port, "exact": True, **params}
        super().__init__(path, store="qdrant", location=server.url, params=self.params)

    def upload(self, workers: int = 1) -> list[int]:
        """Encode and upload all shards; return the numbers of the shards that were uploaded."""
        folders = [PlanFolder(self.folder.path) for _ in range(workers)]
        encodings = [
            encode_shards(folder, worker=worker, workers=workers, upload=True)
            for worker, folder in enumerate(folders)
        ]
        return [number for encoding in encodings for number in encoding.uploaded]

    def read_points(self) -> list[tuple[int, Any, list[float]]]:
        """Return id, payload and vector of each point on the server, as another client sees them."""
        client = QdrantClient(self.server.url, check_compatibility=False)
        points, _ = client.scroll(self.params.get("collection", "knnstore"), limit=100_000, with_vectors=True)
        client.close()
        return [(point.id, point.payload, point.vector) for point in points]  # type: ignore[misc]

    def count_upserts(self) -> int:
        """Return the number of requests that sent points since the faults were cleared."""
        return int(self.server.faults.counted()["upsert"])

    def count_records(self) -> int:
        """Return the number of records of the documents."""
        with KNNStore.open(self.home) as store:
            return sum(domain.records for domain in store.domains())


@pytest.fixture
def workshop(tmp_path: Path, qdrant_server: Any) -> ServerWorkshop:
    made = ServerWorkshop(tmp_path, qdrant_server)
    made.add(DOCUMENTS[:3])
    return made


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("rest", marks=pytest.mark.slow)])
def test_uploads_are_invisible_and_the_commit_sends_no_point(
    tmp_path: Path, qdrant_server: Any, protocol: str
) -> None:
    one = Workshop(tmp_path / "one", store="faiss")
    many = ServerWorkshop(tmp_path / "many", qdrant_server, prefer_grpc=protocol == "grpc")
    for shop in (one, many):
        shop.add(DOCUMENTS[:3])
    changed = [{**DOCUMENTS[0], "text": "w20 w21"}, *DOCUMENTS[1:]]
    one.add(changed)
    plan = many.plan(changed)
    assert plan is not None
    (_, live_ids, _), queries, _ = read_store(many.home)
    with KNNStore.open(many.home) as reader:
        before = reader.search(queries, 5)
        assert sorted(many.upload(workers=2)) == [shard.number for shard in plan.shards]
        # 1) Nobody finds what is uploaded, in the whole store or in the domain that it is for.
        points = many.read_points()
        assert len(points) == len(queries) + sum(shard.records for shard in plan.shards)
        uploads = {payload["upload"].rpartition("/")[0] for _, payload, _ in points if "upload" in payload}
        assert uploads == {f"{plan.id}/{shard.number}" for shard in plan.shards}
        for selection in (Selection(), Selection(("news",))):
            neighbors = reader.search(queries, 5, selection)
            assert np.isin(neighbors.ids, live_ids).all()
            np.testing.assert_array_equal(neighbors.distances, before.distances)
        assert many.ids() == {of["id"] for of in DOCUMENTS[:3]}
        assert many.problems() == []
        # 2) The commit counts them, and sends none again.
        qdrant_server.faults.clear()
        assert (many.commit().documents, many.count_upserts()) == (38, 0)
        assert {document.id for document in reader.documents()} == {of["id"] for of in DOCUMENTS}
    assert many.problems() == []
    found, keys, _ = read_store(many.home)
    expected, expected_keys, _ = read_store(one.home)
    assert found[0] == expected[0]
    for values, expected_values in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_allclose(keys, expected_keys, rtol=2e-3, atol=2e-3)


def test_an_interrupted_upload_continues_and_a_second_one_sends_nothing(workshop: ServerWorkshop) -> None:
    plan = workshop.plan()
    assert plan is not None
    failpoints.arm("plan.uploading:2=eio")
    try:
        with pytest.raises(OSError, match="failpoint"):
            workshop.upload()
    finally:
        failpoints.arm(None)
    assert [workshop.folder.is_uploaded(shard) for shard in plan.shards[:2]] == [True, False]
    assert len(workshop.upload()) == len(plan.shards) - 2  # of the second, only the note was missing
    points = workshop.read_points()
    workshop.server.faults.clear()
    assert workshop.upload() == []
    assert (workshop.count_upserts(), workshop.read_points()) == (0, points)
    workshop.commit()
    assert [(id, vector) for id, _, vector in workshop.read_points()] == [(id, of) for id, _, of in points]
    assert workshop.problems() == []


@pytest.mark.slow
def test_processes_of_one_machine_upload(workshop: ServerWorkshop) -> None:
    plan = workshop.plan()
    assert plan is not None
    encode_shards(workshop.folder, worker=0, workers=3)
    encode_shards_in_processes(workshop.folder, 2, upload=True)
    workshop.server.faults.clear()
    encode_shards_in_processes(workshop.folder, 2, upload=True)  # starts none
    assert not workshop.server.faults.calls
    assert (workshop.commit().documents, workshop.count_upserts()) == (37, 0)
    assert workshop.problems() == []


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_the_same_points(workshop: ServerWorkshop) -> None:
    workshop.plan()
    command = [*KNNSTORE, "encode", workshop.folder.path, "--upload"]
    environment = {**os.environ, failpoints.VARIABLE: "plan.uploading:2"}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert workshop.problems() == []
    again = subprocess.run([*command, "--json"], check=True, capture_output=True)
    assert json.loads(again.stdout)["uploaded"] > 0
    workshop.server.faults.clear()
    assert (workshop.commit().documents, workshop.count_upserts()) == (37, 0)
    assert workshop.count_records() == len(workshop.read_points())
    assert workshop.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "upserts"),
    [
        ("plan.uploading:2", 0),
        ("commit.shard:2", 2),  # recovery deletes the points of two shards, whose documents were pending
        ("catalog.publish.inside", None),
        ("catalog.publish.after", 0),
        ("purge.flushed", 0),
        ("commit.after", 0),
        ("plan.released", 0),
    ],
)
def test_every_step_may_be_killed_and_is_then_repeated(
    tmp_path: Path, qdrant_server: Any, killed_at: Callable[[str, Callable[[], object]], bool],
    place: str, upserts: int | None,
) -> None:  # fmt: skip
    workshop = ServerWorkshop(tmp_path, qdrant_server, prefer_grpc=False)  # gRPC does not survive a fork
    workshop.add(DOCUMENTS[:3])
    points = workshop.read_points()
    plan = workshop.plan([*DOCUMENTS[1:2], {**DOCUMENTS[2], "text": "w20 w21"}, *DOCUMENTS[3:]])
    assert plan is not None
    work: Callable[[], object] = workshop.commit
    if place == "plan.released":
        work = workshop.drop
    if place == "plan.uploading:2":
        workshop.encode()
        work = workshop.upload
    else:
        workshop.upload()
    assert killed_at(place, work)
    assert all("half added" in problem for problem in workshop.problems())
    workshop.server.faults.clear()
    if place == "plan.released":
        workshop.drop()
        assert (workshop.read_points(), workshop.problems()) == (points, [])
        return
    if place == "plan.uploading:2":
        workshop.upload()
        workshop.server.faults.clear()
    workshop.commit()
    assert workshop.ids() == {of["id"] for of in DOCUMENTS}
    assert workshop.count_upserts() == (len(plan.shards) if upserts is None else upserts)
    assert workshop.count_records() == len(workshop.read_points())
    assert workshop.problems() == []


@pytest.mark.slow
def test_the_commit_adds_what_is_missing_or_of_other_keys(workshop: ServerWorkshop) -> None:
    """Points that the server has lost, and points of keys that another machine has rounded differently."""
    plan = workshop.plan()
    assert plan is not None
    workshop.upload()
    ids = sorted(id for id, payload, _ in workshop.read_points() if "upload" in payload)
    client = QdrantClient(workshop.server.url, check_compatibility=False)
    client.delete("knnstore", ids[:1])  # of shard 0
    client.close()
    keys = np.array(workshop.folder.open_keys(plan.shards[1]))
    late = PlanFolder(workshop.folder.path)
    late.write_keys(plan.shards[1], np.nextafter(keys, np.inf))
    with ShardUploader(late) as uploader:  # the keys of the first worker stay
        assert uploader.upload(plan.shards[1])
    workshop.server.faults.clear()
    assert workshop.commit().documents == 37
    assert workshop.count_upserts() == 2
    stored = {id: vector for id, _, vector in workshop.read_points()}
    records = plan.shards[1].records
    begin = plan.shards[0].records
    np.testing.assert_array_equal(
        [stored[id] for id in ids[begin : begin + records]], np.nextafter(keys, np.inf)
    )
    assert workshop.problems() == []


@pytest.mark.slow
def test_a_missing_shard_is_named_and_nothing_is_added(workshop: ServerWorkshop) -> None:
    workshop.plan()
    workshop.upload()
    next(workshop.folder.key_files.glob("00001-*.keys")).unlink()
    with pytest.raises(PlanError, match=r"^shard 1 of \d+ is damaged"):
        workshop.commit()
    assert workshop.ids() == {of["id"] for of in DOCUMENTS[:3]}
    assert workshop.upload() == []  # encoded again, to the keys that are uploaded
    assert workshop.commit().documents == 37
    assert workshop.problems() == []


def test_points_of_outdated_documents_are_deleted(workshop: ServerWorkshop) -> None:
    changed = [{**document, "text": f"{document['text']} w19"} for document in DOCUMENTS[:3]]
    workshop.plan([*changed, *DOCUMENTS[3:8]])
    workshop.upload()
    workshop.remove("d1")
    workshop.add([{**DOCUMENTS[5], "text": "w23 w24"}])
    with KNNStore.open(workshop.home, "a") as store:
        store.optimize()
    assert workshop.problems() == []
    workshop.server.faults.clear()
    committed = workshop.commit()
    assert (set(committed.skipped), workshop.count_upserts()) == ({"d1", "d5"}, 0)
    assert len(workshop.read_points()) == workshop.count_records()
    assert workshop.problems() == []


def test_a_worker_that_uploads_after_the_commit_changes_nothing(workshop: ServerWorkshop) -> None:
    """Not even with other keys; what it leaves of an outdated document is named, and repaired."""
    plan = workshop.plan()
    assert plan is not None
    workshop.upload()
    late = PlanFolder(workshop.folder.path)
    documents, target = late.read_documents(plan.shards[0]), plan.target
    keys = np.array(late.open_keys(plan.shards[0]))
    workshop.add([{**DOCUMENTS[3], "text": "w23 w24"}])  # the first document of the plan
    assert workshop.commit().skipped == ("d3",)
    points = workshop.read_points()
    with pytest.raises(PlanError, match="committed or dropped meanwhile"), ShardUploader(late) as uploader:
        uploader.upload(plan.shards[0])
    # It has checked that before, and its request comes now.
    owner, offsets, tokens = late.list_records(documents)
    ids = knnstore.datastore.record_ids(
        late.compute_starts(plan.shards[0], documents)[owner] + offsets, tokens
    )
    assert target is not None
    with target.open(plan.identity, plan.store) as datastore:
        datastore.upload(ids, keys + 1, np.full(len(ids), target.group), "late")
    left = int((owner == 0).sum())
    assert [point for point in workshop.read_points() if point[1].get("upload") != "late"] == points
    assert workshop.problems() == [f"{left} records belong to no document: run `knnstore repair`"]
    with KNNStore.open(workshop.home, "a") as store:
        assert store.repair() == []
    assert workshop.read_points() == points


@pytest.mark.slow
def test_a_commit_that_was_interrupted_is_completed(workshop: ServerWorkshop) -> None:
    """Recovery removes the points of half added documents; they are uploaded again, or added."""
    workshop.plan()
    workshop.upload()
    failpoints.arm("commit.before=eio")
    try:
        with pytest.raises(OSError, match="failpoint"):
            workshop.commit()
    finally:
        failpoints.arm(None)
    assert workshop.ids() == {of["id"] for of in DOCUMENTS[:3]}
    assert workshop.problems() == []
    assert workshop.upload()
    workshop.server.faults.clear()
    assert (workshop.commit().documents, workshop.count_upserts()) == (37, 0)
    assert workshop.problems() == []


@pytest.mark.slow
def test_dropping_a_plan_deletes_its_points_alone(workshop: ServerWorkshop, tmp_path: Path) -> None:
    points = workshop.read_points()
    workshop.plan(DOCUMENTS[:9], domain="first")
    workshop.upload()
    other = PlanFolder(tmp_path / "other")
    workshop.plan(DOCUMENTS[9:], folder=other.path, domain="second")
    encode_shards(other, upload=True)
    with KNNStore.open(workshop.home, "a") as store:
        assert [domain.name for domain in store.domains()] == ["news"]
        assert store.repair() == []  # which leaves open plans alone
    workshop.drop()
    assert workshop.problems() == []
    workshop.server.faults.clear()
    assert (workshop.commit(other.path).documents, workshop.count_upserts()) == (31, 0)
    workshop.plan(DOCUMENTS[:9], domain="third")
    workshop.upload()
    workshop.drop()
    with KNNStore.open(workshop.home, "a") as store:
        store.remove_domain("second")
    assert workshop.read_points() == points


@pytest.mark.slow
def test_a_plan_whose_folder_is_lost_is_named_and_can_be_dropped(workshop: ServerWorkshop) -> None:
    points = workshop.read_points()
    plan = workshop.plan()
    assert plan is not None
    workshop.upload()
    records = sum(shard.records for shard in plan.shards)
    workshop.folder.remove()
    (problem,) = workshop.problems()
    assert problem == (
        f"the folder {workshop.folder.path} of a plan is not on this machine "
        f"({plan.tokens:,} reserved positions, {records:,} uploaded records): if no other machine has it, "
        f"drop the plan with `knnstore plan {workshop.folder.path} --drop`"
    )
    with KNNStore.open(workshop.home, "a") as store:
        assert store.repair() == [problem]  # the folder may be on a disk that comes back
    workshop.drop()
    assert (workshop.problems(), workshop.read_points()) == ([], points)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["erase", "move"])
def test_keys_that_are_erased_or_moved_are_added_from_the_folder(
    workshop: ServerWorkshop, change: str
) -> None:
    plan = workshop.plan()
    assert plan is not None
    workshop.upload()
    with KNNStore.open(workshop.home, "a") as store:
        if change == "erase":
            store.erase()
        else:
            store.move("qdrant", workshop.server.url, params={**workshop.params, "collection": "moved"})
        workshop.params = dict(store.engine.params)
        assert len(workshop.read_points()) == store.datastore.count() == workshop.count_records()
    with pytest.raises(DatastoreNotFoundError, match="encode without uploading"):
        workshop.upload()
    workshop.encode()
    assert workshop.commit().documents == 37
    assert len(workshop.read_points()) == workshop.count_records()
    assert workshop.problems() == []


@pytest.mark.slow
def test_wrong_servers_and_engines_are_refused(workshop: ServerWorkshop, tmp_path: Path) -> None:
    workshop.plan()
    workshop.server.stop()
    with pytest.raises(StoreUnavailableError):
        workshop.upload()
    workshop.server.start()
    adapter: Any = registry.load_adapter("qdrant")
    adapter.claim(workshop.server.url, "another store", grpc_port=workshop.server.grpc_port)
    with pytest.raises(NotOwnerError, match="belong to another store"):
        workshop.upload()
    adapter.erase(workshop.server.url)
    with pytest.raises(DatastoreError):
        workshop.upload()
    assert adapter.owner(workshop.server.url) is None  # nothing was created
    embedded = Workshop(tmp_path / "embedded")
    plan = embedded.plan()
    assert plan is not None
    assert plan.target is None
    with pytest.raises(ConfigError, match="accepts no uploads"):
        encode_shards(embedded.folder, upload=True)


def test_no_key_of_the_server_is_in_the_folder(
    tmp_path: Path, qdrant_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API key comes from the environment of each worker."""
    qdrant_server.stop()
    qdrant_server._api_key = "s3cret-key"
    qdrant_server.start()
    monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "s3cret-key")
    monkeypatch.setenv("KNNSTORE_QDRANT_URL", qdrant_server.url)
    workshop = ServerWorkshop(tmp_path, qdrant_server)
    workshop.plan()
    files = [file for file in workshop.folder.path.rglob("*") if file.is_file()]
    assert len(files) > 3
    assert not any(b"s3cret" in file.read_bytes() for file in files)
    monkeypatch.delenv("KNNSTORE_QDRANT_API_KEY")
    with pytest.raises(DatastoreError, match="refuses the API key, or got none"):
        workshop.upload()
    monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "s3cret-key")
    workshop.upload()
    assert workshop.commit().documents == len(DOCUMENTS)


@pytest.mark.slow
def test_a_server_that_cannot_insert_only_takes_no_uploads(
    tmp_path: Path, qdrant_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version before 1.16 keeps no metadata of collections either."""
    from knnstore_qdrant.collection import Collection

    monkeypatch.setattr(Collection, "_read_mark", staticmethod(lambda _: None))
    workshop = ServerWorkshop(tmp_path, qdrant_server)
    plan = workshop.plan(write_documents(3))
    assert plan is not None
    assert plan.target is None
    with (
        KNNStore.open(workshop.home, "a") as store,
        pytest.raises(ConfigError, match=r"version 1\.16 or later"),
    ):
        datastore: Any = store.datastore
        datastore.upload(np.array([1]), np.zeros((1, datastore.dim), np.float32), np.array([1]), "name")
    workshop.encode()
    assert workshop.commit().documents == 3
