"""Cases of the conformance kit: signatures, opening and closing, modes, durability and other processes."""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import (
    Capabilities,
    Datastore,
    IdRanges,
    Metric,
    SupportsErase,
    SupportsGet,
    SupportsOwner,
    SupportsVerify,
)
from knnstore.errors import (
    ConfigError,
    DatastoreClosedError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    KnnstoreError,
    LockedError,
    ReadOnlyError,
    StoreUnavailableError,
)
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_search,
    make_queries,
    make_records,
    read_contents,
    require_persistent,
)


class LifecycleTests(KitBase):
    """Cases of the kit for signatures, opening, closing and modes; they use `add`, `count` and `iterate`."""

    def test_has_the_protocol_s_signatures(self, open_store: OpenStore) -> None:
        """Every method has the parameters of the protocol, with the same names, kinds and defaults.

        If this fails, check the spelling of parameters, and which parameters are keyword-only.
        """
        store = open_store()
        assert isinstance(store, Datastore)
        for name, member in vars(Datastore).items():
            if name.startswith("_") or isinstance(member, property):
                continue
            promised = inspect.signature(getattr(Datastore, name)).parameters
            offered = inspect.signature(getattr(type(store), name)).parameters
            for parameter in promised.values():
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    actual = offered.get(parameter.name)
                    assert actual is not None, f"{name}() does not take {parameter.name}"
                    assert (actual.kind, actual.default) == (parameter.kind, parameter.default), (
                        f"{name}(): {actual}"
                    )
            for actual in (offered[extra] for extra in offered if extra not in promised):
                is_optional = actual.kind is actual.VAR_KEYWORD or actual.default is not actual.empty
                assert is_optional, f"{name}() requires {actual}, which no caller passes"

    def test_says_what_it_is(self, open_store: OpenStore, metric: Metric) -> None:
        """`dim` and `metric` are the arguments of `open`, and `capabilities` is a `Capabilities`.

        If this fails, check that all three are properties.
        """
        store = open_store(metric=metric)
        assert (store.dim, store.metric) == (self.dim, metric)
        assert isinstance(store.capabilities, Capabilities)

    def test_new_store_is_empty(self, open_store: OpenStore, metric: Metric) -> None:
        """In a new store `count` returns 0, `iterate` yields nothing, and a search finds nothing.

        If this fails, check the engine's result of a search in an empty index.
        """
        store = open_store(metric=metric)
        check_holds(store, make_records(0, self.dim))
        check_search(store, make_records(0, self.dim), 4, make_queries(3, self.dim))

    def test_create_only_refuses_what_exists(self, open_store: OpenStore, records: Records) -> None:
        """Mode "x" creates a store, and raises an error if the store exists.

        If this fails, check that "x" looks for a store before it writes anything.
        """
        with require_persistent(open_store(mode="x")) as store:
            records.add_to(store)
        with pytest.raises(DatastoreExistsError):
            open_store(mode="x")
        check_holds(open_store(), records)

    def test_location_may_be_a_string(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """A location as a string means the same as the `Path`.

        If this fails, convert the location to a `Path` at the beginning of `open`.
        """
        with require_persistent(open_store(location=str(location))) as store:
            records.add_to(store)
        check_holds(open_store(), records)

    def test_read_only_needs_a_store(self, open_store: OpenStore, location: str | Path) -> None:
        """Mode "r" without a store raises an error, and creates nothing, not even a directory.

        If this fails, check that "r" creates no directory and takes no lock before it looks for a store.
        """
        with pytest.raises(DatastoreNotFoundError):
            open_store(mode="r")
        assert not isinstance(location, Path) or not location.exists()

    def test_read_only_refuses_changes(self, open_store: OpenStore, records: Records) -> None:
        """A handle with mode "r" reads all records and refuses changes.

        If this fails, check that `add` and `delete` check the mode first.
        """
        with require_persistent(open_store()) as store:
            records.add_to(store)
        reader = open_store(mode="r")
        with pytest.raises(ReadOnlyError):
            records.add_to(reader)
        with pytest.raises(ReadOnlyError):
            reader.delete(records.cover_positions())
        check_holds(reader, records)

    def test_another_dim_is_refused(self, open_store: OpenStore) -> None:
        """A store cannot be opened with another dim; the message names both.

        If this fails, check that the dim is stored when the store is created.
        """
        require_persistent(open_store()).close()
        for mode in ("a", "r"):
            with pytest.raises(DatastoreMismatchError, match=rf"(?s)(?=.*{self.dim})(?=.*{self.dim * 2})"):
                open_store(dim=self.dim * 2, mode=mode)

    def test_another_metric_is_refused(self, open_store: OpenStore) -> None:
        """A store cannot be opened with another metric; the message names both.

        If this fails, check that the metric is stored when the store is created.
        """
        require_persistent(open_store(metric=Metric.L2)).close()
        for mode in ("a", "r"):
            with pytest.raises(DatastoreMismatchError, match=r"(?s)(?=.*l2)(?=.*ip)"):
                open_store(metric=Metric.IP, mode=mode)

    def test_unknown_parameter_is_refused(self, open_store: OpenStore) -> None:
        """A parameter that the adapter does not know raises an error; it is not ignored.

        If this fails, check that `open` calls `validate_params`.
        """
        with pytest.raises(ConfigError, match=r"no_such_parameter.*accepted"):
            open_store(no_such_parameter=1)

    def test_dim_below_one_is_refused(self, open_store: OpenStore) -> None:
        """A dim of 0 raises `ConfigError`.

        If this fails, check that `open` compares dim with 1.
        """
        with pytest.raises(ConfigError):
            open_store(dim=0)

    def test_closed_store_refuses_everything(self, open_store: OpenStore, records: Records) -> None:
        """After `close` every operation raises `DatastoreClosedError`; closing again does nothing.

        If this fails, check that each method first checks that the handle is open.
        """
        store = records.add_to(open_store())
        store.close()
        store.close()
        for operation in (
            lambda: records.add_to(store),
            lambda: store.search(records.keys[:1], 1),
            lambda: store.delete(IdRanges([(0, 1)])),
            store.count,
            lambda: next(iter(store.iterate())),
            store.flush,
        ):
            with pytest.raises(DatastoreClosedError):
                operation()
        if isinstance(store, SupportsGet):
            with pytest.raises(DatastoreClosedError):
                store.get(records.ids[:1])

    def test_leaving_the_context_closes(self, open_store: OpenStore) -> None:
        """The context manager yields the store, closes the store after an error, and does not hide the error.

        If this fails, check that `__enter__` returns self and `__exit__` returns None.
        """
        store = open_store()
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(ZeroDivisionError))
            assert stack.enter_context(store) is store
            assert 1 // store.count()
        with pytest.raises(DatastoreClosedError):
            store.count()

    def test_erasing_leaves_nothing_and_takes_nothing_else(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """`erase` removes the datastore; other files in the folder stay.

        If this fails, check that `erase` removes exactly the files that `open` and `add` create, by name.
        """
        if not issubclass(self.datastore_class, SupportsErase):
            pytest.skip(
                "the adapter has no erase, which is optional: a move to another adapter leaves the old keys"
            )
        with require_persistent(open_store()) as store:
            records.add_to(store)
        foreign_file = Path(location) / "not of the datastore" if isinstance(location, Path) else None
        if foreign_file:
            foreign_file.write_text("kept")
        for _ in range(2):  # the first may have been interrupted
            self.datastore_class.erase(location, **self.params)
        with pytest.raises(DatastoreNotFoundError):
            open_store(mode="r")
        if foreign_file:
            assert foreign_file.read_text() == "kept"
            foreign_file.unlink()
        assert open_store(mode="x").count() == 0

    def test_unreachable_server_is_reported(
        self, open_store: OpenStore, unreachable_location: str | None, records: Records
    ) -> None:
        """If the server does not answer, `open` or `add` raises `StoreUnavailableError`.

        If this fails, check that the client's connection errors and timeouts are converted.
        """
        if unreachable_location is None:
            pytest.skip("the fixture unreachable_location is None: this engine has no server")
        with pytest.raises(StoreUnavailableError):
            records.add_to(open_store(location=unreachable_location))


_SCRIPT = Path(__file__).with_name("writer_process.py")


class WriterProcess:
    """Handle of another process that has the store open for writing and does steps on command.

    Args:
        process: the process, just started. The constructor waits until it has opened the store.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._expect_line("opened")

    def do(self, step: str, *bounds: int) -> None:
        """Tell the process to do a step, and wait until it is done; raise AssertionError if it fails.

        Args:
            step: ``add``, ``delete`` or ``flush``.
            *bounds: first row, and the row after the last, of the records that the process adds or deletes;
                none for ``flush``.
        """
        assert self._process.stdin is not None
        print(step, *bounds, file=self._process.stdin, flush=True)
        self._expect_line(step)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def _expect_line(self, word: str) -> None:
        """Read one line from the process, and check that it is `word`.

        Raises:
            AssertionError: the line is another one; the message has the process's stderr.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline().strip()
        assert line == word, f"the writing process failed: {line}\n{self._process.stderr.read()}"


StartWriter = Callable[[], AbstractContextManager[WriterProcess]]
"""Function that starts another process that writes to the test's location.

It returns a context manager, which gives a `WriterProcess` and kills the process at its end.
"""


class DurabilityTests(KitBase):
    """Cases of the kit for changes that must survive closing and killing, and for several processes.

    All cases but one need `capabilities.persistent`.
    """

    @pytest.fixture
    def start_writer(
        self, open_store: OpenStore, location: str | Path, records: Records, tmp_path: Path
    ) -> StartWriter:
        """Return a function that starts another process, which writes to the test's location.

        The function returns a context manager, which gives a `WriterProcess` and kills the process at its
        end. The test is skipped if the store keeps no records after it is closed.
        """
        with require_persistent(open_store()) as store:
            datastore_class = type(store)
        file = tmp_path / "records-of-the-kit.npz"
        np.savez(file, ids=records.ids, keys=records.keys, groups=records.groups)
        job = {
            "datastore": f"{datastore_class.__module__}:{datastore_class.__qualname__}",
            "location": str(location),
            "dim": self.dim,
            "metric": Metric.L2.value,
            "params": self.params,
            "records": str(file),
        }
        # With -P, the script's own folder is not searched before installed packages.
        command = [sys.executable, "-P", str(_SCRIPT), json.dumps(job)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

        @contextmanager
        def start_writer() -> Iterator[WriterProcess]:
            pipe = subprocess.PIPE
            with subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
            ) as process:
                try:
                    yield WriterProcess(process)
                finally:
                    process.kill()

        return start_writer

    def test_persistent_is_true(self, open_store: OpenStore, records: Records) -> None:
        """If `capabilities.persistent` is False, a new handle finds no records of a closed handle.

        If this fails, check that no records are shared through the class or module.
        """
        with open_store() as store:
            if store.capabilities.persistent:
                pytest.skip("capabilities.persistent is True: other cases test it")
            records.add_to(store)
        assert open_store().count() == 0

    def test_its_owner_is_remembered(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """`owner` returns the owner of the last `claim`, which is not stored as a record.

        If this fails, check that `claim` replaces the owner of an earlier `claim`, and that `erase` removes
        the owner.
        """
        adapter = self.datastore_class
        if not issubclass(adapter, SupportsOwner):
            pytest.skip(
                "the adapter has no owner, which is optional: nothing prevents another store from using "
                "the keys"
            )
        assert adapter.owner(location, **self.params) is None
        with require_persistent(open_store()) as store:
            records.add_to(store)
            assert adapter.owner(location, **self.params) is None
            for owner in ("first", "second, \N{LATIN SMALL LETTER E WITH ACUTE}"):
                adapter.claim(location, owner, **self.params)
                assert adapter.owner(location, **self.params) == owner
            check_holds(store, records)
        with open_store() as store:
            store.delete(ALL_IDS)
        with open_store(mode="r") as store:
            assert store.count() == 0
        assert adapter.owner(location, **self.params) == owner
        if issubclass(adapter, SupportsErase):
            adapter.erase(location, **self.params)
            assert adapter.owner(location, **self.params) is None

    def test_closing_keeps_everything(self, open_store: OpenStore, records: Records, metric: Metric) -> None:
        """Additions, replacements and deletions are kept when the store is closed and opened again.

        If this fails, check that `close` flushes.
        """
        changed = Records(records.ids[:20], records.keys[:20] * 2, records.groups[:20] + 1)
        with require_persistent(open_store(metric=metric)) as store:
            records.add_to(store)
            store.flush()
            changed.add_to(store)
            store.delete(records[20:70].cover_positions())
        for mode in ("a", "r"):
            with open_store(metric=metric, mode=mode) as again:
                check_holds(again, changed + records[70:])
                check_search(again, changed + records[70:], 10)

    def test_many_short_sessions(self, open_store: OpenStore, records: Records) -> None:
        """A store that was opened, changed and closed many times has the result of all changes.

        If this fails, check how several handles number their files.
        """
        require_persistent(open_store()).close()
        for start in range(0, 200, 20):
            with open_store() as store:
                records[start : start + 20].add_to(store)
                store.delete(records[start : start + 5].cover_positions())
        is_kept = np.arange(200) % 20 >= 5
        check_holds(open_store(), records[:200][is_kept])

    def test_reader_sees_what_is_flushed(self, open_store: OpenStore, records: Records) -> None:
        """A handle with mode "r" sees each flush of a writer without being opened again.

        If this fails, check that reading methods first look for a newer published state.
        """
        writer = require_persistent(open_store())
        writer.flush()
        reader = open_store(mode="r")
        assert reader.count() == 0
        records[:100].add_to(writer)
        writer.flush()
        check_holds(reader, records[:100])
        writer.delete(records[:50].cover_positions())
        changed = Records(records.ids[50:60], records.keys[50:60] * 2, records.groups[50:60])
        changed.add_to(writer)
        writer.flush()
        expected = changed + records[60:100]
        check_search(reader, expected, 5, records.keys[40:70])
        check_holds(reader, expected)

    def test_flushed_records_survive_kill_9(
        self, open_store: OpenStore, start_writer: StartWriter, records: Records
    ) -> None:
        """After kill -9 all flushed changes are kept, and the unflushed changes can be made again.

        If this fails, check that `flush` writes, calls fsync on files and directory, and only then publishes
        by an atomic rename.
        """
        with start_writer() as writer:
            writer.do("add", 0, 300)
            writer.do("delete", 0, 50)
            writer.do("flush")
            writer.do("add", 300, 400)
            writer.kill()
        store = open_store()
        stored = read_contents(store)
        assert set(records.ids[50:300].tolist()) <= set(stored.ids.tolist()), "flushed records are lost"
        assert set(stored.ids.tolist()) <= set(records.ids[50:400].tolist()), "deleted records are back"
        records[300:400].add_to(store)
        check_holds(store, records[50:400])
        check_search(store, records[50:400], 10)

    def test_checks_keys_is_true(self, open_store: OpenStore, location: str | Path, records: Records) -> None:
        """If `capabilities.checks_keys` is True, `verify` finds a single changed bit of a key or an id.

        If this fails, check that `verify` reads every file from the disk and compares its whole content with
        a checksum, or set `checks_keys` to False: then the store keeps its own checksums.
        """
        with require_persistent(open_store()) as store:
            if not store.capabilities.checks_keys:
                pytest.skip("capabilities.checks_keys is False: the store compares the keys itself")
            records.add_to(store)
        values = [records.ids[7:8], records.keys[7], records.keys[7].astype(np.float16)]
        changes = 0
        for path in [path for path in Path(location).rglob("*") if path.is_file()]:
            intact = path.read_bytes()
            for offset in {intact.find(value.tobytes()) for value in values} - {-1}:
                path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 1]) + intact[offset + 1 :])
                assert self._find_problems(open_store), f"verify misses a changed bit of {path}"
                changes += 1
            path.write_bytes(intact)
        assert self._find_problems(open_store) == [], "verify reports a problem of an intact store"
        if not changes:
            pytest.skip("no file has the bytes of the key or of the id, so no bit of them can be changed")

    @staticmethod
    def _find_problems(open_store: OpenStore) -> list[str]:
        """Return the problems that `verify` reports; or the error message if the store cannot be opened."""
        try:
            with open_store(mode="r") as store:
                assert isinstance(store, SupportsVerify), "the adapter has no verify"
                return store.verify()
        except KnnstoreError as error:
            return [str(error)]

    def test_second_writer(self, open_store: OpenStore, start_writer: StartWriter, records: Records) -> None:
        """A second writing process is refused, or works if `capabilities.shared_writers`.

        If this fails, check that the kernel releases the lock when its process ends, and that readers do not
        need the lock.
        """
        with start_writer() as writer:
            writer.do("add", 0, 100)
            writer.do("flush")
            with open_store(mode="r") as reader:
                shared = reader.capabilities.shared_writers
                check_holds(reader, records[:100])
            if not shared:
                with pytest.raises(LockedError):
                    open_store()
                writer.kill()
            store = records[100:200].add_to(open_store())
            store.flush()
            check_holds(store, records[:200])
