"""Stores with one defect each; `test_kit.py` runs the kit on them and wants it to fail.

Most of the defects were met in real engines and adapters.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from stranger_vectors import OneFileDatastore

from knnstore.datastore import Capabilities, Filter, Neighbors
from knnstore.datastore.memory import MemoryDatastore
from knnstore.errors import InvalidVectorError
from knnstore.testing import DatastoreTests


class _RootOfDistance(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        found = super().search(queries, k, where=where)
        return Neighbors(found.ids, np.sqrt(np.abs(found.distances)))


class TestReturnsRootOfDistance(DatastoreTests):
    datastore_class = _RootOfDistance


class _IgnoresFilter(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        return super().search(queries, k)


class TestIgnoresFilter(DatastoreTests):
    datastore_class = _IgnoresFilter


class _EmptyFilterIsNone(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        return super().search(queries, k, where=where if where and where.ids else None)


class TestEmptyFilterIsNone(DatastoreTests):
    datastore_class = _EmptyFilterIsNone


class _OverFetches(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        found = super().search(queries, 2 * k)
        passes = np.ones(found.ids.shape, bool) if where is None else where.ids.contains(found.ids)
        order = np.argsort(~passes, axis=1, kind="stable")[:, :k]
        ids = np.take_along_axis(np.where(passes, found.ids, -1), order, axis=1)
        distances = np.take_along_axis(np.where(passes, found.distances, np.inf), order, axis=1)
        return Neighbors(ids, distances.astype(np.float32))


class TestOverFetchesOnce(DatastoreTests):
    datastore_class = _OverFetches


class _PadsLikeFaiss(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        found = super().search(queries, k, where=where)
        return Neighbors(found.ids, np.minimum(found.distances, np.finfo(np.float32).max))


class TestPadsLikeFaiss(DatastoreTests):
    datastore_class = _PadsLikeFaiss


class _MissesSome(MemoryDatastore):
    def search(self, queries, k, *, where=None):
        found = super().search(queries, k + 1, where=where)
        return Neighbors(found.ids[:, 1:].copy(), found.distances[:, 1:].copy())


class TestSaysExactAndIsNot(DatastoreTests):
    datastore_class = _MissesSome


class _PoorRecall(_MissesSome):
    @property
    def capabilities(self):
        return Capabilities(exact_search=False, exact_keys=True, persistent=False, shared_writers=False)


class TestHasPoorRecall(DatastoreTests):
    datastore_class = _PoorRecall


class _FloatIds(MemoryDatastore):
    def add(self, ids, keys, groups):
        super().add(np.asarray(ids).astype(np.float64).astype(np.int64), keys, groups)


class TestPassesIdsThroughFloats(DatastoreTests):
    datastore_class = _FloatIds


class _KeepsOldGroup(MemoryDatastore):
    def add(self, ids, keys, groups):
        old = {int(i): group for batch in self.iterate() for i, group in zip(batch[0], batch[2], strict=True)}
        kept = [old.get(int(i), group) for i, group in zip(ids, groups, strict=True)]
        super().add(ids, keys, np.array(kept, np.int32))


class TestKeepsOldGroup(DatastoreTests):
    datastore_class = _KeepsOldGroup


class _StoresGoodRows(MemoryDatastore):
    def add(self, ids, keys, groups):
        try:
            super().add(ids, keys, groups)
        except InvalidVectorError:
            good = np.isfinite(keys).all(axis=1)
            super().add(ids[good], keys[good], groups[good])
            raise


class TestStoresGoodRowsOfBadCall(DatastoreTests):
    datastore_class = _StoresGoodRows


class _GetsInItsOwnOrder(MemoryDatastore):
    def get(self, ids):
        return super().get(np.unique(ids))


class TestGetsInItsOwnOrder(DatastoreTests):
    datastore_class = _GetsInItsOwnOrder


class _YieldsItsOwn(MemoryDatastore):
    def iterate(self, *, ids=None, batch_size=8192):
        if ids is None:
            yield self._records.ids, self._records.keys, self._records.groups
        else:
            yield from super().iterate(ids=ids, batch_size=batch_size)


class TestYieldsItsOwnArrays(DatastoreTests):
    datastore_class = _YieldsItsOwn


class _OtherName(MemoryDatastore):
    def search(self, queries, k, *, filter: Filter | None = None):
        return super().search(queries, k, where=filter)


class TestNamesAParameterOtherwise(DatastoreTests):
    datastore_class = _OtherName


class _FlushesNothing(OneFileDatastore):
    def flush(self):
        if not self._file.exists():
            super().flush()


class TestFlushesNothing(DatastoreTests):
    datastore_class = _FlushesNothing


class _ReadsOnce(OneFileDatastore):
    def _read(self):
        if self._stamp is None:
            super()._read()


class TestReadsOnce(DatastoreTests):
    datastore_class = _ReadsOnce


class _SharedWriters(OneFileDatastore):
    capabilities = property(
        lambda _: Capabilities(exact_search=True, exact_keys=False, persistent=True, shared_writers=True),
        lambda *_: None,
    )


class TestSaysSharedAndIsNot(DatastoreTests):
    datastore_class = _SharedWriters


class _SaysItChecks(OneFileDatastore):
    capabilities = property(
        lambda _: Capabilities(
            exact_search=True, exact_keys=False, persistent=True, shared_writers=False, checks_keys=True
        ),
        lambda *_: None,
    )

    def _read(self):
        with suppress(BadZipFile):
            super()._read()

    def verify(self):
        return []


class TestSaysItChecksAndDoesNot(DatastoreTests):
    datastore_class = _SaysItChecks


_shared = {}


class _SharesThroughTheClass(MemoryDatastore):
    @classmethod
    def open(cls, location, **arguments):
        return _shared.setdefault(str(location), super().open(location, **arguments))

    def close(self):
        pass


class TestSharesThroughTheClass(DatastoreTests):
    datastore_class = _SharesThroughTheClass


class _ErasesTheFolder(OneFileDatastore):
    @classmethod
    def erase(cls, location, **params):
        shutil.rmtree(location, ignore_errors=True)


class TestErasesTheFolder(DatastoreTests):
    datastore_class = _ErasesTheFolder


class _KeepsItsFirstOwner(OneFileDatastore):
    @classmethod
    def owner(cls, location, **params):
        file = Path(location) / "owner"
        return file.read_text() if file.exists() else None

    @classmethod
    def claim(cls, location, owner, **params):
        if cls.owner(location) is None:
            (Path(location) / "owner").write_text(owner)


class TestKeepsItsFirstOwner(DatastoreTests):
    datastore_class = _KeepsItsFirstOwner


class _ItsOwnerIsARecord(_KeepsItsFirstOwner):
    def count(self):
        return super().count() + (self._file.parent / "owner").exists()

    @classmethod
    def claim(cls, location, owner, **params):
        (Path(location) / "owner").write_text(owner)


class TestItsOwnerIsARecord(DatastoreTests):
    datastore_class = _ItsOwnerIsARecord


class _VacuumsNothing(OneFileDatastore):
    def delete(self, ids):
        """Keep beside the records what was deleted, as an engine does that only marks it."""
        held = np.array(list(self._records), np.int64)
        with self._file.with_name("deleted").open("ab") as stream:
            stream.write(held[ids.contains(held)].tobytes())
        super().delete(ids)

    def vacuum(self):
        self.flush()


class TestVacuumsNothing(DatastoreTests):
    datastore_class = _VacuumsNothing


class _UploadReplaces(MemoryDatastore):
    takes_uploads = True

    def upload(self, ids, keys, groups, name):
        self.add(ids, keys, groups)

    def count_uploaded(self, ids, name, group):
        return 0


class TestUploadReplaces(DatastoreTests):
    datastore_class = _UploadReplaces


class TestDropsACase(DatastoreTests):
    datastore_class = MemoryDatastore
    test_by_ids = None


class TestOverridesACase(DatastoreTests):
    datastore_class = MemoryDatastore

    def test_by_ids(self):
        pass
