"""Cases of the conformance kit: what outlives the handle, and other processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import Metric, SupportsErase, SupportsOwner, SupportsVerify
from knnstore.errors import KnnstoreError, LockedError
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_search,
    contents,
    require_persistent,
)

_SCRIPT = Path(__file__).with_name("writer_process.py")


class WriterProcess:
    """A process that has the store open for writing; see `knnstore.testing.writer_process`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._expect("opened")

    def do(self, step: str, *bounds: int) -> None:
        """Have it `add`, `delete` (rows from, to) or `flush`, and wait until that is done."""
        assert self._process.stdin is not None
        print(step, *bounds, file=self._process.stdin, flush=True)
        self._expect(step)

    def kill(self) -> None:
        """Kill it as `kill -9` does."""
        self._process.kill()
        self._process.wait()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        said = self._process.stdout.readline().strip()
        assert said == word, f"the writing process failed: {said}\n{self._process.stderr.read()}"


StartWriter = Callable[[], AbstractContextManager[WriterProcess]]


class DurabilityTests(KitBase):
    """Needs: everything else that one thread does. All but one need `capabilities.persistent`."""

    @pytest.fixture
    def start_writer(
        self, open_store: OpenStore, location: str | Path, records: Records, tmp_path: Path
    ) -> StartWriter:
        """A function that starts a process which writes to the test's location."""
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
        # -P: the script's own folder must not come before installed packages.
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
        """If `capabilities.persistent` is False, a new handle finds nothing of an old one.

        If this fails, check that no records are shared through the class or module.
        """
        with open_store() as store:
            if store.capabilities.persistent:
                pytest.skip("capabilities.persistent is True: other cases test it")
            records.put(store)
        assert open_store().count() == 0

    def test_its_owner_is_remembered(
        self, open_store: OpenStore, location: str | Path, records: Records
    ) -> None:
        """Whoever claims a datastore last is its owner for all handles, and is never taken for a record.

        If this fails, check that `claim` replaces what an earlier one wrote, and that `erase` removes it.
        """
        adapter = self.datastore_class
        if not issubclass(adapter, SupportsOwner):
            pytest.skip("it has no owner, which is optional: nothing keeps another store from its keys")
        assert adapter.owner(location, **self.params) is None
        with require_persistent(open_store()) as store:
            records.put(store)
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
        """Additions, replacements and deletions are there when the store is opened again.

        If this fails, check that `close` flushes.
        """
        changed = Records(records.ids[:20], records.keys[:20] * 2, records.groups[:20] + 1)
        with require_persistent(open_store(metric=metric)) as store:
            records.put(store)
            store.flush()
            changed.put(store)
            store.delete(records[20:70].positions())
        for mode in ("a", "r"):
            with open_store(metric=metric, mode=mode) as again:
                check_holds(again, changed + records[70:])
                check_search(again, changed + records[70:], 10)

    def test_many_short_sessions(self, open_store: OpenStore, records: Records) -> None:
        """A store that was opened, changed and closed many times holds the sum of the changes.

        If this fails, check the numbering of files over several handles.
        """
        require_persistent(open_store()).close()
        for start in range(0, 200, 20):
            with open_store() as store:
                records[start : start + 20].put(store)
                store.delete(records[start : start + 5].positions())
        kept = np.arange(200) % 20 >= 5
        check_holds(open_store(), records[:200][kept])

    def test_reader_sees_what_is_flushed(self, open_store: OpenStore, records: Records) -> None:
        """A handle of mode "r" sees each flush of a writer without being opened again.

        If this fails, check that reading methods look for a newer published state first.
        """
        writer = require_persistent(open_store())
        writer.flush()
        reader = open_store(mode="r")
        assert reader.count() == 0
        records[:100].put(writer)
        writer.flush()
        check_holds(reader, records[:100])
        writer.delete(records[:50].positions())
        changed = Records(records.ids[50:60], records.keys[50:60] * 2, records.groups[50:60])
        changed.put(writer)
        writer.flush()
        now = changed + records[60:100]
        check_search(reader, now, 5, records.keys[40:70])
        check_holds(reader, now)

    def test_flushed_records_survive_kill_9(
        self, open_store: OpenStore, start_writer: StartWriter, records: Records
    ) -> None:
        """After kill -9 everything flushed is there, and replaying what was not flushed completes it.

        If this fails, check that `flush` writes, calls fsync on files and directory, and only then
        publishes by an atomic rename.
        """
        with start_writer() as writer:
            writer.do("add", 0, 300)
            writer.do("delete", 0, 50)
            writer.do("flush")
            writer.do("add", 300, 400)
            writer.kill()
        store = open_store()
        held = contents(store)
        assert set(records.ids[50:300].tolist()) <= set(held.ids.tolist()), "flushed records are lost"
        assert set(held.ids.tolist()) <= set(records.ids[50:400].tolist()), "deleted records are back"
        records[300:400].put(store)
        check_holds(store, records[50:400])
        check_search(store, records[50:400], 10)

    def test_checks_keys_is_true(self, open_store: OpenStore, location: str | Path, records: Records) -> None:
        """If `capabilities.checks_keys`, `verify` notices one altered bit in any file, of a key or of an id.

        If this fails, check that `verify` reads every file from the disk and compares all of it with a
        checksum, or leave `checks_keys` False: then the store keeps checksums of its own.
        """
        with require_persistent(open_store()) as store:
            if not store.capabilities.checks_keys:
                pytest.skip("capabilities.checks_keys is False: the store compares the keys itself")
            records.put(store)
        kept = [records.ids[7:8], records.keys[7], records.keys[7].astype(np.float16)]
        found = 0
        for path in [path for path in Path(location).rglob("*") if path.is_file()]:
            intact = path.read_bytes()
            for at in {intact.find(value.tobytes()) for value in kept} - {-1}:
                path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
                assert self._verified(open_store), f"verify does not notice that a bit of {path} was changed"
                found += 1
            path.write_bytes(intact)
        assert self._verified(open_store) == [], "verify finds something wrong with a store that is whole"
        if not found:
            pytest.skip("no file holds the key or the id as they are: what is checked cannot be told")

    @staticmethod
    def _verified(open_store: OpenStore) -> list[str]:
        """What `verify` finds, or why the store cannot even be opened."""
        try:
            with open_store(mode="r") as store:
                assert isinstance(store, SupportsVerify), "it has no verify"
                return store.verify()
        except KnnstoreError as error:
            return [str(error)]

    def test_second_writer(self, open_store: OpenStore, start_writer: StartWriter, records: Records) -> None:
        """A second writing process is refused, or works if `capabilities.shared_writers`.

        If this fails, check that the lock is one that the kernel drops when its process dies, and
        that readers do not ask for it.
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
            store = records[100:200].put(open_store())
            store.flush()
            check_holds(store, records[:200])
