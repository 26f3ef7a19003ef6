"""A Ray cluster on this machine: the same store as one process makes, also if actors are killed."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from knnstore import failpoints
from knnstore.distributed import PlanFolder, encode_shards
from knnstore.distributed.ray import add
from knnstore.errors import ConfigError, InputError, PlanError
from tests.distributed.test_plans import (
    DOCUMENTS,
    PAIRS,
    Workshop,
    check_same_store,
    save_pair_model,
    write_documents,
)
from tests.distributed.test_uploads import ServerWorkshop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*")]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """Start a Ray cluster with two CPUs."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def find_actors() -> list[int]:
    """Return the process ids of the actors that encode."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"MapBatches(_ActorEncoder)" in file.read_bytes():
                pids.append(int(file.parent.name))
        except OSError:  # the process has ended
            continue
    return pids


def test_the_same_store_as_one_process_makes(tmp_path: Path) -> None:
    one, many = Workshop(tmp_path / "one"), Workshop(tmp_path / "many")
    rows = [{**document, "place": None if at % 2 else "Leith"} for at, document in enumerate(DOCUMENTS)]
    dataset = ray.data.from_arrow(pyarrow.Table.from_pylist(rows))
    one.add([{name: of for name, of in row.items() if of is not None} for row in rows])
    added = add(dataset, many.home, domain="news", tags=["fresh"], workers=2, shard_tokens=100)
    assert (added.documents, added.was_committed) == (40, False)
    check_same_store(many.home, one.home)
    again = add(dataset, many.home, domain="news", tags=["fresh"])
    assert (again.documents, again.tokens) == (0, 0)
    assert many.problems() == []
    assert not (many.home / "plan").exists()


def test_pairs_are_encoded_with_their_sources(tmp_path: Path) -> None:
    model = save_pair_model(tmp_path / "model")
    one, many = Workshop(tmp_path / "one", model=model), Workshop(tmp_path / "many", model=model)
    one.add(PAIRS)
    added = add(ray.data.from_items(PAIRS), many.home, domain="news", tags=["fresh"], shard_tokens=60)
    assert added.documents == len(PAIRS)
    check_same_store(many.home, one.home)


def test_actors_that_are_killed_are_replaced(tmp_path: Path) -> None:
    one, many = Workshop(tmp_path / "one"), Workshop(tmp_path / "many")
    documents = write_documents(300, seed=1)
    one.add(documents)
    killed: list[int] = []

    def kill_actors() -> None:
        """Kill an actor after each of the first shards."""
        while len(killed) < 3 and not is_done.wait(0.01):
            if len(list((tmp_path / "plan/keys").glob("*.json"))) > len(killed):
                for pid in set(find_actors()) - set(killed):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break

    is_done = threading.Event()
    killer = threading.Thread(target=kill_actors)
    killer.start()
    try:
        added = add(
            ray.data.from_items(documents), many.home, domain="news", tags=["fresh"],
            folder=tmp_path / "plan", shard_tokens=200, batch_tokens=256,
        )  # fmt: skip
    finally:
        is_done.set()
        killer.join()
    assert len(killed) == 3
    assert added.documents == 300
    check_same_store(many.home, one.home)
    assert many.problems() == []


def test_actors_upload_to_a_server(tmp_path: Path, qdrant_server: Any) -> None:
    many = ServerWorkshop(tmp_path, qdrant_server)
    dataset = ray.data.from_items(DOCUMENTS)
    many.plan(folder=many.home / "plan", shard_tokens=100)
    encode_shards(PlanFolder(many.home / "plan"), worker=0, workers=2)  # complete, and not uploaded
    failpoints.arm("commit.shard=eio")
    try:
        with pytest.raises(OSError, match="failpoint"):
            add(dataset, many.home, domain="news", tags=["fresh"], workers=2, shard_tokens=100, upload=True)
    finally:
        failpoints.arm(None)
    uploaded = {payload["upload"] for _, payload, _ in many.read_points()}
    folder = PlanFolder(many.home / "plan")
    assert all(map(folder.is_uploaded, folder.plan.shards))
    assert len(uploaded) == len(folder.plan.shards) - 1  # those of the first shard were deleted
    assert add(dataset, many.home, domain="news", tags=["fresh"], upload=True).documents == len(DOCUMENTS)
    assert many.problems() == []


def test_an_error_is_one_line_and_the_same_call_continues(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    dataset = ray.data.from_items(DOCUMENTS)
    stranger = shutil.copytree(Workshop.model, tmp_path / "stranger")
    weights = load_file(stranger / "model.safetensors")
    save_file(
        {name: torch.clone(of) + 1 for name, of in weights.items()},
        stranger / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(PlanError, match=r"^[^\n]+; run the same call again to continue$"):
        add(dataset, workshop.home, domain="news", model=str(stranger))
    assert workshop.ids() == set()
    assert add(dataset, workshop.home, domain="news").documents == len(DOCUMENTS)
    assert workshop.problems() == []


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    with pytest.raises(InputError, match="text"):
        add(ray.data.from_items([{"id": "a", "body": "x"}]), workshop.home, domain="news")
    with pytest.raises(ConfigError, match="at least 1"):
        add(ray.data.from_items(DOCUMENTS), workshop.home, domain="news", workers=0)
    with pytest.raises(ConfigError, match="the Ray cluster has 2 CPUs, and a worker needs 3"):
        add(ray.data.from_items(DOCUMENTS), workshop.home, domain="news", cpus_per_worker=3)
    assert workshop.ids() == set()
    skipped: list[str] = []
    rows = [*DOCUMENTS, {"id": "empty", "text": "", "year": 0}]
    added = add(
        ray.data.from_items(rows), workshop.home, domain="other", folder=tmp_path / "second",
        on_bad=lambda error: skipped.append(str(error)),
    )  # fmt: skip
    assert (added.documents, len(skipped)) == (40, 1)
