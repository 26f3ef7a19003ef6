"""A stranger's adapter: everything in one file of half-precision keys, replaced whole by each flush.

It shares no code with the adapters of knnstore and imports only what any adapter may.
"""

import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np

from knnstore.datastore import Capabilities, Metric, Neighbors, validate_k, validate_keys, validate_records
from knnstore.errors import (
    ConfigError,
    DatastoreClosedError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    InvalidVectorError,
    LockedError,
    ReadOnlyError,
)


class OneFileDatastore:
    def __init__(self, directory, dim, metric, *, writable, durable):
        self.dim, self.metric = dim, metric
        self.capabilities = Capabilities(
            exact_search=True, exact_keys=False, persistent=True, shared_writers=False
        )
        self._file, self._writable, self._durable = directory / "records.npz", writable, durable
        self._records, self._stamp, self._open = {}, None, True
        self._mutex = threading.Lock()
        self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR) if writable else None
        try:
            if writable:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except OSError as error:
            self._release()
            if error.errno != errno.EWOULDBLOCK:
                raise
            raise LockedError(f"{directory}: another process writes to it") from error
        except DatastoreMismatchError:
            self._release()
            raise

    @classmethod
    def open(cls, location, *, dim, metric=Metric.L2, mode="a", durable=True, **params):
        if params:
            raise ConfigError(f"unknown parameter {next(iter(params))!r}; accepted: durable")
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        directory = Path(location)
        exists = (directory / "records.npz").exists()
        if mode == "r" and not exists:
            raise DatastoreNotFoundError(f"{directory}: no datastore")
        if mode == "x" and exists:
            raise DatastoreExistsError(f"{directory}: there is a datastore")
        directory.mkdir(parents=True, exist_ok=True)
        store = cls(directory, dim, metric, writable=mode != "r", durable=durable)
        if not exists:
            store.flush()
        return store

    def add(self, ids, keys, groups):
        self._check(writing=True)
        ids, keys, groups = validate_records(ids, keys, groups, self.dim)
        if keys.size and np.abs(keys).max() > np.finfo(np.float16).max:
            raise InvalidVectorError("a key is too great for half precision")
        rounded = keys.astype(np.float16)
        new = {int(i): (key, int(group)) for i, key, group in zip(ids, rounded, groups, strict=True)}
        with self._mutex:
            self._records = {**self._records, **new}

    def search(self, queries, k, *, where=None):
        self._check()
        queries, k = validate_keys(queries, self.dim, what="queries"), validate_k(k)
        found = Neighbors.all_missing(len(queries), k)
        ids, keys, groups = self._arrays(self._records)
        if where is not None:
            by_ids = where.ids.contains(ids)
            chosen = by_ids if where.groups is None else np.isin(groups, list(where.groups))
            ids, keys = ids[chosen], keys[chosen]
        for row, query in enumerate(queries):
            if self.metric == Metric.L2:
                distances = ((keys - query) ** 2).sum(axis=1)
            else:
                distances = -(keys * query).sum(axis=1)
            nearest = np.argsort(distances)[:k]
            found.ids[row, : len(nearest)] = ids[nearest]
            found.distances[row, : len(nearest)] = distances[nearest]
        return found

    def delete(self, ids):
        self._check(writing=True)
        with self._mutex:
            held = np.array(list(self._records), np.int64)
            gone = set(held[ids.contains(held)].tolist())
            self._records = {i: record for i, record in self._records.items() if i not in gone}

    def count(self):
        self._check()
        return len(self._records)

    def iterate(self, *, ids=None, batch_size=8192):
        self._check()
        if batch_size < 1:
            raise ValueError("batch_size must be at least 1")
        all_ids, keys, groups = self._arrays(self._records)
        rows = np.arange(len(all_ids)) if ids is None else np.flatnonzero(ids.contains(all_ids))
        for batch in np.split(rows, range(batch_size, len(rows), batch_size)) if len(rows) else []:
            yield all_ids[batch], keys[batch], groups[batch]

    def flush(self):
        self._check()
        if not self._writable:
            return
        ids, keys, groups = self._arrays(self._records)
        new = self._file.with_suffix(".new")
        with new.open("wb") as stream:
            header = np.array([self.dim, list(Metric).index(self.metric)])
            np.savez(stream, header=header, ids=ids, keys=keys.astype(np.float16), groups=groups)
            if self._durable:
                stream.flush()
                os.fsync(stream.fileno())
        new.replace(self._file)

    def close(self):
        if self._open:
            self.flush()
            self._open = False
            self._release()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def _check(self, *, writing=False):
        if not self._open:
            raise DatastoreClosedError("this handle was closed")
        if writing and not self._writable:
            raise ReadOnlyError("this handle was opened for reading only")
        if not self._writable:
            self._read()

    def _read(self):
        if not self._file.exists():
            return
        stamp = self._file.stat().st_ino, self._file.stat().st_mtime_ns
        if stamp == self._stamp:
            return
        with np.load(self._file) as stored:
            dim, metric = int(stored["header"][0]), list(Metric)[stored["header"][1]]
            if (dim, metric) != (self.dim, self.metric):
                raise DatastoreMismatchError(
                    f"{self._file} has dim {dim}, metric {metric}; asked for {self.dim}, {self.metric}"
                )
            rows = zip(stored["ids"].tolist(), stored["keys"], stored["groups"].tolist(), strict=True)
            self._records = {i: (key, group) for i, key, group in rows}
        self._stamp = stamp

    def _release(self):
        if self._lock is not None:
            os.close(self._lock)

    def _arrays(self, records):
        rows = [(i, *records[i]) for i in sorted(records)]
        ids = np.array([i for i, _, _ in rows], np.int64)
        keys = np.array([key for _, key, _ in rows], np.float32).reshape(-1, self.dim)
        return ids, keys, np.array([group for _, _, group in rows], np.int32)
