"""Qdrant without a server: its engine in this process, on a directory.

::

    DIR/store.json      dim and metric; there when the store is whole
    DIR/qdrant-shard/   the engine's files, open in the one process that writes
    DIR/owner           whose the keys are
    DIR/flushed         a number that grows with each flush
    DIR/changing.lock   held by the writer during a change, by a reader while it copies
    DIR/qdrant-copy-*/  such a copy, for the moment that opening it takes

The engine opens a directory once. So a reader opens a copy, takes a new one when the writer has
flushed, and removes its files at once: they live on, without names, as long as they are open. Where the
directory takes no copy, it is made in the folder for temporary files.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdrant_edge import (
    CountRequest,
    EdgeShard,
    QuantizationSearchParams,
    SearchParams,
    UpdateOperation,
)

from knnstore.datastore import (
    OWNER_FILES,
    Groups,
    Ids,
    Keys,
    Metric,
    Mode,
    Neighbors,
    NoFileError,
    WriterLock,
    check_space,
    publish,
    read_file,
    remove,
    remove_folder,
    sync_directory,
)
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)
from knnstore_qdrant.conditions import Condition
from knnstore_qdrant.copying import COPY, LOCK, no_changing, no_copying, open_copy, remove_copies
from knnstore_qdrant.options import Options
from knnstore_qdrant.points import batch_of, neighbors_of
from knnstore_qdrant.room import NEW_SHARD, room_for, room_to_open, room_to_remove
from knnstore_qdrant.shard import (
    create_shard,
    engine_errors,
    filter_of,
    index_anew,
    is_indexed,
    load_shard,
    nearest,
    page_of,
    points_of,
)

_DESCRIPTION, _SHARD = "store.json", "qdrant-shard"
_OWN_FILES = (
    *(f"{_DESCRIPTION}.tmp", "flushed", "flushed.tmp", LOCK, "writer.json", "writer.lock"),
    *OWNER_FILES,  # last, for `erase_directory`
)


class EmbeddedPoints:
    """The points in a directory."""

    shared_writers = False

    def __init__(self, root: Path, dim: int, metric: Metric, mode: Mode, options: Options) -> None:
        self.exact_search = options.exact
        self.exact_keys = options.datatype == "float32"
        self._root, self._dim, self._metric, self._options = root, dim, metric, options
        self._quantized = None
        if options.quantization != "none":
            self._quantized = QuantizationSearchParams(rescore=True, oversampling=options.oversampling)
        self._switching = threading.Lock()
        self._shard: EdgeShard | None = None
        self._path = root / _SHARD
        self._flushed = ""
        self._changed = False
        self._indexed = True  # as far as is known
        self._lock: WriterLock | None = None
        if mode == "r":
            self._check_description()
            return
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = WriterLock(root)
        try:
            self._open_for_writing(mode)
        except BaseException:
            self._lock.release()
            raise

    def upsert(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points, replacing those whose id is present."""
        size = len(ids) * self._options.point_size(self._dim)
        room_for(self._path, size, f"adding {len(ids):,} points")
        with self._changing() as shard:
            for points in points_of(ids, keys, groups):
                with engine_errors(self._path):
                    shard.update(UpdateOperation.upsert_points(points))

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query."""
        params = SearchParams(
            hnsw_ef=max(k, self._options.ef), exact=exact, quantization=None if exact else self._quantized
        )
        with self._reading() as shard:
            return neighbors_of(nearest(shard, queries, k, condition, params), k, self._metric)

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        chosen = filter_of(condition)
        with self._reading() as shard:
            points = shard.count(CountRequest(exact=True, filter=chosen))
        room_to_remove(self._path, points)
        with self._changing() as shard, engine_errors(self._path):
            shard.update(UpdateOperation.delete_points_by_filter(chosen))

    def count(self) -> int:
        """How many points there are."""
        with self._reading() as shard:
            return shard.count(CountRequest(exact=True))

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`."""
        with self._reading() as shard:
            return batch_of(page_of(shard, first, limit, condition, keys=keys), self._dim, keys=keys)

    def flush(self) -> None:
        """Return when all changes so far survive a power loss, and let readers know."""
        if not self._changed:
            return
        with self._changing() as shard:
            with engine_errors(self._path):
                shard.flush()
            self._flushed = str(int(self._flushed) + 1 if self._flushed.isdecimal() else 1)
            publish(self._root / "flushed", self._flushed.encode(), "flushed")
            self._changed = False

    def optimize(self) -> None:
        """Index all points and reclaim the space of removed ones."""
        before = self._changed
        anew = self.count() * self._options.point_size(self._dim)
        room_for(self._path, NEW_SHARD + anew, "optimizing")
        with self._changing() as shard, engine_errors(self._path):
            if not self._indexed:
                index_anew(shard)
                before = self._indexed = True
            changed = shard.optimize()
            self._changed = before or changed  # else readers need no new copy
        self.flush()

    def verify(self) -> list[str]:
        """Compare the indexes of groups and positions with all points."""
        with self._reading() as shard:
            self._indexed = is_indexed(shard)
        if self._indexed:
            return []
        return [
            f"the indexes of groups or positions in {self._path} are damaged, so that selections miss "
            "records: `knnstore repair` makes them anew"
        ]

    def close(self) -> None:
        """Release the directory."""
        shard, self._shard = self._shard, None
        if self._lock is not None:
            try:
                if shard is not None:
                    with engine_errors(self._path):
                        shard.close()
            finally:
                self._lock.release()

    def _open_for_writing(self, mode: Mode) -> None:
        exists = (self._root / _DESCRIPTION).exists()
        if exists and mode == "x":
            raise DatastoreExistsError(f"a datastore is already at {self._root}")
        strange = {path.name for path in self._root.iterdir()} - {_SHARD, *_OWN_FILES}
        if not exists and strange:
            raise DatastoreMismatchError(f"{self._root} holds {min(strange)!r} and is no store of Qdrant's")
        (self._root / LOCK).touch(mode=0o600)
        if exists:
            self._check_description()
            remove_copies(self._root)
            self._flushed = self._read_flushed()
            with engine_errors(self._path):
                room_to_open(self._path)
            self._shard = load_shard(self._path)
            return
        check_space(self._root, NEW_SHARD, "a store of Qdrant's engine")
        shutil.rmtree(self._path, ignore_errors=True)  # of a creation that was killed
        self._shard = create_shard(self._path, self._dim, self._metric, self._options)
        description = {"format": 1, "engine": "qdrant", "dim": self._dim, "metric": self._metric.value}
        publish(self._root / _DESCRIPTION, json.dumps(description).encode(), "description")

    def _check_description(self) -> None:
        path = self._root / _DESCRIPTION
        try:
            described = json.loads(read_file(path))
            dim, metric = int(described["dim"]), Metric(described["metric"])
        except (FileNotFoundError, NotADirectoryError):
            raise DatastoreNotFoundError(f"no datastore at {self._root}") from None
        except (NoFileError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CorruptDatastoreError(f"{path} is damaged: restore a backup") from error
        if (dim, metric) != (self._dim, self._metric):
            raise DatastoreMismatchError(
                f"{self._root} has dim {dim} and metric {metric}, asked for {self._dim} and {self._metric}"
            )

    def _read_flushed(self) -> str:
        try:
            return read_file(self._root / "flushed").decode("ascii", "replace")
        except (FileNotFoundError, NoFileError):  # the next flush makes it anew
            return ""

    @contextmanager
    def _changing(self) -> Iterator[EdgeShard]:
        """Keep readers from copying during a change."""
        with self._switching, no_copying(self._root):
            assert self._shard is not None
            self._changed = True
            yield self._shard

    @contextmanager
    def _reading(self) -> Iterator[EdgeShard]:
        """The writer's shard, or a reader's newest copy."""
        shard = self._shard
        if self._lock is None:
            with self._switching:
                if self._shard is None or self._flushed != self._read_flushed():
                    self._shard = self._copied()
                shard = self._shard
        assert shard is not None
        with engine_errors(self._path):
            yield shard

    def _copied(self) -> EdgeShard:
        with no_changing(self._root, self._options.timeout):
            flushed = self._read_flushed()
            shard = open_copy(self._path, self._root)
        self._flushed = flushed
        return shard


def erase_directory(root: Path) -> None:
    """Remove what `EmbeddedPoints` keeps in a directory, and the directory when nothing else is in it.

    Raises:
        LockedError: another process writes there.
    """
    if not root.is_dir():
        return
    lock = WriterLock(root)
    try:
        remove(root / _DESCRIPTION)  # from now on nobody takes the rest for a store
        sync_directory(root)
        for folder in filter(Path.exists, (root / _SHARD, *root.glob(f"{COPY}*"))):
            shutil.rmtree(folder)
        sync_directory(root)  # whose they are is known as long as anything is there
        for name in _OWN_FILES:
            remove(root / name)
        remove_folder(root)
        sync_directory(root.parent)
    finally:
        lock.release()
