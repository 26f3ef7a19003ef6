"""Moving the keys to another engine: what is moved, what is refused, what is left."""

import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from knnstore import Progress, failpoints
from knnstore.datastore import Capabilities, Metric, registry
from knnstore.errors import ConfigError, DatastoreError, DatastoreExistsError, StoreUnavailableError
from knnstore.store import KNNStore
from knnstore.store.relocation import Moved, relocating
from knnstore.store.relocation import copying as transfer

STRANGER = Path(__file__).parents[1] / "datastore" / "stranger"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that installs an adapter `odd`: the stranger's, an exact one that removes nothing, with
    methods of its own."""

    def install(methods: str = "    pass") -> None:
        site = tmp_path / "site"
        metadata = site / "odd_vectors-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-vectors\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[knnstore.datastores]\nodd = odd_vectors:Odd\n")
        source = "import numpy as np\nfrom stranger_vectors import OneFileDatastore as Base\n"
        (site / "odd_vectors.py").write_text(f"{source}class Odd(Base):\n{methods}\n")
        monkeypatch.syspath_prepend(STRANGER)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "odd_vectors", raising=False)

    return install


class Said(Progress):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.units = 0

    def advance(self, amount: int) -> None:
        self.units += amount

    def say(self, message: str) -> None:
        self.lines.append(message)


def answers(store: KNNStore, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    queries = np.random.default_rng(5).standard_normal((n, 8)).astype(np.float32)
    found = store.search(queries, 30)
    return found.ids, found.distances


def contents(store: KNNStore) -> list[bytes]:
    return [np.concatenate(column).tobytes() for column in zip(*store.datastore.iterate(), strict=True)]


def same(found: tuple[np.ndarray, np.ndarray], before: tuple[np.ndarray, np.ndarray]) -> None:
    assert np.array_equal(found[0], before[0])
    assert np.allclose(found[1], before[1], rtol=1e-5)


def interrupt(store: KNNStore, location: str) -> None:
    """Begin a move whose progress fails in its second batch."""

    class Failing(Progress):
        def advance(self, amount: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.move("faiss", location, progress=Failing())


@pytest.mark.slow
def test_a_move_can_be_killed_anywhere_and_finished_given_up_or_redirected(trials) -> None:
    pytest.importorskip("faiss")
    assert len(trials("move_trials.py", "faiss", "")["trials"]) >= 40


def test_between_exact_engines_every_bit_of_a_key_and_every_answer_stays(store, writer, engine) -> None:
    engine()
    writer.add("law", "1", n=60)
    writer.add("news", "2", n=60)
    before, batches = answers(store), contents(store)
    for adapter, location in (("odd", "a"), ("faiss", "b"), ("odd", "c")):
        moved = store.move(adapter, location)
        assert (moved.records, moved.copied, moved.recall) == (120, 120, 1.0)
        assert contents(store) == batches
        same(answers(store), before)
    assert store.verify() == []


def test_to_another_engine_and_back_every_bit_of_a_key_stays(store, writer, home) -> None:
    pytest.importorskip("hnswlib")
    writer.add("law", "1", n=700)
    writer.add("news", "2", n=700)
    writer.add("law", "1", n=600)  # leaves rows that are dead
    before, batches = answers(store), contents(store)
    for to, location in (("hnswlib", "a"), ("faiss", "b")):
        moved = store.move(to, location)
        assert (moved.records, moved.recall, moved.left) == (1300, 1.0, None)
        assert contents(store) == batches
        same(answers(store), before)
        assert store.verify() == []
        writer.add("new", to)
        store.remove_domain("new")
    assert {path.name for path in home.iterdir() if path.is_dir()} == {"b"}


def test_to_codes_and_back_keys_stay_near_and_it_is_said(store, writer, home) -> None:
    writer.add("law", "1", n=60)
    ids, keys, _ = next(store.datastore.iterate())
    moved = store.move("cells", "a", params={"codes": "int8", "coded_from": 1})
    assert (moved.codes, store.datastore.capabilities.codes) == ("int8", "int8")
    coded = next(store.datastore.iterate())
    np.testing.assert_array_equal(coded[0], ids)
    assert 0 < np.abs(coded[1] - keys).max() < np.abs(keys).max() / 100
    assert store.info()["codes"] == "int8"
    assert store.move("faiss", "b").codes is None
    there = next(store.datastore.iterate())
    np.testing.assert_array_equal(there[1], coded[1].astype(np.float16))
    assert store.verify() == []


def test_codes_of_other_keys_are_told_from_those_of_these() -> None:
    keys = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32) + 9
    noise = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
    able = Capabilities(
        exact_search=False, exact_keys=False, persistent=True, shared_writers=False, codes="pq4"
    )

    def same(others: np.ndarray, able: Capabilities = able) -> bool:
        ids, groups = np.arange(50), np.zeros(50, np.int32)
        return transfer._are_equal((ids, keys, groups), (ids, others, groups), able)

    assert same(keys + 0.3 * noise)
    assert not same(keys + 0.3 * noise, replace(able, codes=None))
    assert not same(keys[::-1])
    assert not same(np.zeros_like(keys))


def test_the_old_keys_go_and_nothing_else_with_them(store, writer, home: Path) -> None:
    writer.add("law", "1")
    (home / "keys" / "notes.txt").write_text("mine")
    (home / "keys" / "segments" / "mine.txt").write_text("mine")
    moved = store.move("faiss", "elsewhere")
    assert moved.left is None
    left = {path.relative_to(home).as_posix() for path in (home / "keys").rglob("*")}
    assert left == {"keys/notes.txt", "keys/segments", "keys/segments/mine.txt"}
    store.move("faiss", "third")
    assert not (home / "elsewhere").exists()
    assert not (home / "move.json").exists()


def test_a_move_that_could_not_be_noted_can_be_tried_again(store, writer, home: Path) -> None:
    writer.add("law", "1")

    def block(failpoint: str) -> None:
        if failpoint == "move.made":  # a folder that holds something cannot be replaced by a file
            (home / "move.json").unlink()
            (home / "move.json" / "mine").mkdir(parents=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relocating, "failpoint", block)
        with pytest.raises(OSError, match=r"move\.json") as caught:
            store.move("faiss", "a")
    shutil.rmtree(home / "move.json")
    assert caught.value.__traceback__  # whoever keeps the error does not keep the lock
    registry.load_adapter("faiss").erase(home / "a")
    assert store.move("faiss", "a").left is None
    assert store.verify() == []


@pytest.mark.parametrize(
    ("goes_on", "location"),
    [
        pytest.param(lambda store: store.move("faiss", "other"), "other", id="same move"),
        pytest.param(lambda store: store.move("faiss", "third"), "third", id="other move"),
        pytest.param(lambda store: store.abandon_move(), "other", id="abandon"),
        pytest.param(lambda store: store.erase(), "other", id="erase"),
    ],
)
def test_after_a_switch_whose_answer_was_lost_the_same_store_goes_on(
    store, writer, home: Path, goes_on: Callable[[KNNStore], object], location: str
) -> None:
    writer.add("law", "1")
    records = store.datastore.count()
    failpoints.arm("move.switched=eio")
    try:
        with pytest.raises(OSError, match=r"move\.switched"):
            store.move("faiss", "other")
    finally:
        failpoints.arm(None)
    moved = goes_on(store)
    if isinstance(moved, Moved):
        assert (moved.after.location, moved.records, moved.left) == (location, records, None)
        assert moved.before.location == ("keys" if location == "other" else "other")
    if moved is not None:
        assert not (home / "keys" / "segments").exists()
        assert not (home / "move.json").exists()
    assert store.info()["location"] == location
    assert store.verify() == []


def test_keys_erased_from_a_folder_that_stays_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss a folder may have the names that it had when it was synced last."""
    pytest.importorskip("faiss")
    kind, keys, sync = registry.load_adapter("faiss"), tmp_path / "keys", os.fsync
    with kind.open(keys, dim=8) as made:
        made.add(np.arange(9), np.ones((9, 8), np.float32), np.zeros(9, np.int32))
        kind.claim(keys, "a store")
    for folder in [keys, *keys.glob("segments")]:
        (folder / "mine.txt").touch()
    synced: dict[int, list[set[str]]] = {}

    def remember(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            synced.setdefault(status.st_ino, []).append(set(os.listdir(descriptor)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    kind.erase(keys)
    for folder in [keys, *keys.glob("segments")]:
        assert synced[folder.stat().st_ino][-1] == {path.name for path in folder.iterdir()}
    last = {"owner", "mine.txt", "writer.lock", "writer.json", "segments"}
    assert any("owner" in names <= last for names in synced[keys.stat().st_ino]), "the owner goes last"


def test_where_the_engine_removes_nothing_the_user_is_told(store, writer, engine, home: Path) -> None:
    engine()
    writer.add("law", "1")
    assert store.move("odd", "a").left is None
    left = store.move("faiss", "b").left
    assert left == "the adapter odd cannot delete keys; delete odd at a yourself"
    assert (home / "a" / "records.npz").exists()
    assert not (home / "move.json").exists()


def test_old_keys_that_cannot_be_erased_now_are_erased_by_a_later_writer(
    store, writer, engine, home, tmp_path, caplog
) -> None:
    down = tmp_path / "down"
    engine(
        "    @classmethod\n"
        "    def erase(cls, location, **params):\n"
        "        import shutil\n"
        "        from pathlib import Path\n"
        "        from knnstore.errors import StoreUnavailableError\n"
        f"        if Path({str(down)!r}).exists():\n"
        "            raise StoreUnavailableError('store unavailable: no answer')\n"
        "        shutil.rmtree(location, ignore_errors=True)"
    )
    writer.add("law", "1")
    store.move("odd", "a")
    down.touch()
    assert (
        store.move("faiss", "b").left
        == "store unavailable: no answer; the next command that writes tries again"
    )
    assert store.info()["unfinished_move"] is None
    store.close()
    KNNStore.open(home, "a").close()  # which must not fail for it
    assert "no answer" in caplog.text
    assert (home / "a").exists()
    down.unlink()
    KNNStore.open(home).close()
    assert (home / "a").exists()
    KNNStore.open(home, "a").close()
    assert not (home / "a").exists()
    assert not (home / "move.json").exists()


def test_what_an_unreachable_engine_keeps_blocks_no_other_move(store, writer, engine, tmp_path) -> None:
    engine(
        "    @classmethod\n"
        "    def erase(cls, location, **params):\n"
        "        raise ConnectionError('no answer')"
    )
    writer.add("law", "1")
    store.move("odd", "a")
    store.move("faiss", "b")
    said = Said()
    assert store.move("faiss", "c", progress=said).left is None
    assert said.lines == [
        "the keys that the earlier move left were not deleted: no answer; delete odd at a yourself"
    ]


def test_keys_that_a_move_did_not_create_stay_and_it_is_said(store, writer, home, caplog) -> None:
    """A move is killed before its target exists, and then someone else uses the place."""
    writer.add("law", "1")
    for number, give_up in enumerate(("abandon", "erase", "move")):
        place, said = f"place{number}", Said()

        def kill(failpoint: str) -> None:
            if failpoint == "move.planned":
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(relocating, "failpoint", kill)
            store.move("faiss", place)
        with registry.load_adapter("faiss").open(home / place, dim=8) as foreign:
            foreign.add(np.arange(9), np.ones((9, 8), np.float32), np.zeros(9, np.int32))
        reason = f"the move did not create faiss at {place}, which has records"
        if give_up == "abandon":
            store.abandon_move()
            assert caplog.messages == [f"the unfinished copy was not deleted: {reason}"]
        elif give_up == "erase":
            assert store.erase(progress=said).unreached == (f"faiss at {place}: {reason}",)
        else:
            store.move("faiss", "elsewhere", progress=said)
            assert said.lines[-1] == f"the keys that the earlier move left were not deleted: {reason}"
        with registry.load_adapter("faiss").open(home / place, dim=8, mode="r") as foreign:
            assert foreign.count() == 9


def test_a_place_that_holds_something_is_refused_and_stays_as_it_is(store, writer, home, tmp_path) -> None:
    writer.add("law", "1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    other = registry.load_adapter("faiss").open(tmp_path / "other", dim=8, metric=Metric.L2, mode="x")
    other.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place in ("notes", "file", "other"):
        with pytest.raises(DatastoreExistsError, match="choose another --location"):
            store.move("faiss", str(tmp_path / place))
    for place in ("keys", "keys/inside", "."):
        with pytest.raises(DatastoreExistsError):
            store.move("faiss", place)
    with pytest.raises(ConfigError):
        store.move("faiss", "elsewhere", params={"color": "red"})
    with pytest.raises(ConfigError):
        store.move("memory", "elsewhere")
    assert store.engine.location == "keys"
    store.close()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before if "home" not in path.parts} == {
        path: content for path, content in before.items() if "home" not in path.parts
    }
    assert not (home / "move.json").exists()


def test_an_interrupted_move_goes_on_with_what_was_added_and_removed_since(store, writer, home) -> None:
    writer.add("law", "1", "2", n=50)
    interrupt(store, "elsewhere")
    assert store.info()["unfinished_move"] == "elsewhere"
    writer.add("law", "3", n=50)
    store.remove_document("1")
    store.close()
    with KNNStore.open(home, "a") as again:
        before, said = answers(again), Said()
        moved = again.move("faiss", "elsewhere", progress=said)
        assert (moved.records, moved.copied) == (100, 50)
        assert said.lines == ["100 of 100 records are already copied"]
        assert said.units == 50 + 100  # copied, compared
        same(answers(again), before)
        assert again.verify() == []
        assert again.info()["unfinished_move"] is None


def test_an_unfinished_move_can_be_given_up_and_blocks_no_other(store, writer, home: Path) -> None:
    writer.add("law", "1")
    interrupt(store, "elsewhere")
    dropped = store.abandon_move()
    assert dropped is not None
    assert dropped.location == "elsewhere"
    assert not (home / "elsewhere").exists()
    assert store.abandon_move() is None
    interrupt(store, "elsewhere")
    said = Said()
    store.move("faiss", "third", progress=said)
    assert said.lines == ["giving up the unfinished move to faiss at elsewhere"]
    assert not (home / "elsewhere").exists()
    assert store.verify() == []


@pytest.mark.slow
def test_to_a_server_that_fails_in_the_middle_and_back(
    store, writer, home, qdrant_server, monkeypatch
) -> None:
    from qdrant_faults import FOREVER

    monkeypatch.setattr(transfer, "BATCH_SIZE", 100)
    writer.add("law", "1", n=400)
    writer.add("news", "2", n=200)
    # Long enough for a machine that is busy: a call that is made twice is a batch less.
    before, batches, params = answers(store), contents(store), {"timeout": 3.0}
    qdrant_server.faults.add("refuse", "upsert", first=4, times=FOREVER)
    with pytest.raises(StoreUnavailableError):
        store.move("qdrant", qdrant_server.url, params=params)
    qdrant_server.faults.clear()
    assert store.engine.location == "keys"
    same(answers(store), before)
    moved = store.move("qdrant", qdrant_server.url, params=params)
    assert (moved.copied, moved.records, moved.recall) == (300, 600, 1.0)
    assert contents(store) == batches
    same(answers(store), before)
    assert not (home / "keys").exists()
    with pytest.raises(DatastoreExistsError, match="already at"):
        store.move("qdrant", qdrant_server.url, params={"timeout": 2.0})
    assert store.move("faiss", "back").left is None
    assert store.move("qdrant", qdrant_server.url).copied == 600  # for the collection was removed
    store.move("faiss", "again")
    same(answers(store), before)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (
            "    def iterate(self, **options):\n"
            "        for ids, keys, groups in super().iterate(**options):\n"
            "            keys[0, 0] += 1\n"
            "            yield ids, keys, groups",
            "the copy differs from its source",
        ),
        (
            "    def add(self, ids, keys, groups):\n        super().add(ids[1:], keys[1:], groups[1:])",
            "the copy differs from its source",
        ),
        (
            "    def search(self, queries, k, *, where=None):\n"
            "        found = super().search(-queries, k, where=where)\n"
            "        return found",
            "the copy does not find the nearest records",
        ),
    ],
)
def test_a_copy_that_is_not_the_same_is_not_switched_to(store, writer, engine, method, problem) -> None:
    engine(method)
    writer.add("law", "1", n=2000)
    before = answers(store)
    with pytest.raises(DatastoreError, match=f"{problem}.*--abandon"):
        store.move("odd", "elsewhere")
    assert store.engine.location == "keys"
    same(answers(store), before)


def test_the_recall_of_an_approximate_engine_is_reported(store, writer, engine) -> None:
    engine(
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        from dataclasses import replace\n"
        "        self.capabilities = replace(self.capabilities, exact_search=False)\n"
        "    def search(self, queries, k, *, where=None):\n"
        "        found = super().search(queries, k, where=where)\n"
        "        found.ids[:, k - k // 4:], found.distances[:, k - k // 4:] = -1, np.inf\n"
        "        return found"
    )
    writer.add("law", "1", n=2000)
    moved = store.move("odd", "elsewhere")
    assert (moved.recall, moved.neighbors) == (0.75, 1024)


@pytest.mark.slow
def test_searches_go_on_while_the_keys_are_moved(store, writer, home) -> None:
    writer.add("law", "1", n=200)
    expected = answers(store)[0]
    stop, searched, problems = threading.Event(), [0], []

    def search(reader: KNNStore) -> None:
        try:
            while not stop.is_set():
                assert np.array_equal(answers(reader)[0], expected)
                searched[0] += 1
        except BaseException as error:
            problems.append(error)

    with KNNStore.open(home) as reader:
        threads = [threading.Thread(target=search, args=(handle,)) for handle in (reader, store)]
        for thread in threads:
            thread.start()
        try:
            for number in count():
                if problems or (number >= 8 and searched[0] > 8):
                    break
                store.move("faiss", f"place{number}")
                KNNStore.open(home).close()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert problems == []


def test_a_store_without_records_moves_too(store) -> None:
    moved = store.move("faiss", "elsewhere")
    assert (moved.records, moved.recall, moved.neighbors) == (0, None, 0)
