"""Uploading the keys of a plan's shards to the engine of the store, before the documents are committed.

An upload only makes the commit faster: the folder of the plan also keeps the keys. The name of an upload
contains the plan, the shard, and the SHA-256 of the keys. By this name the commit recognizes that the engine
has exactly these keys.
"""

from types import TracebackType
from typing import Self

import numpy as np

from knnstore.datastore import ranges_of, record_ids
from knnstore.distributed.plan_folder import PlanFolder, Shard
from knnstore.errors import ConfigError, PlanError
from knnstore.failpoints import failpoint

_BLOCK_RECORDS = 1 << 14  # records that are uploaded at once


class ShardUploader:
    """Uploads the keys of encoded shards to the engine of the store.

    The constructor connects to the engine. As a context manager, the object closes the connection.

    Args:
        folder: folder of the plan.

    Raises:
        ConfigError: the engine of the store accepts no uploads.
        DatastoreNotFoundError: the location that the plan names has no keys any more.
        NotOwnerError: the keys at this location belong to another store.
        StoreUnavailableError: the engine cannot be reached.
    """

    def __init__(self, folder: PlanFolder) -> None:
        target = folder.plan.target
        if target is None:
            raise ConfigError(
                "the engine of the plan's store accepts no uploads: encode without uploading; the commit "
                "then adds the keys from the folder"
            )
        self._folder = folder
        self._group = target.group
        self._datastore = target.open(folder.identity, folder.plan.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._datastore.close()

    def upload(self, shard: Shard) -> bool:
        """Upload the keys of an encoded shard, and note in the folder of the plan that they are uploaded.

        Returns True if keys were uploaded, and False if the engine has all keys of the shard already.

        Args:
            shard: the shard.

        Raises:
            PlanError: the shard is not encoded or is damaged, or the plan was committed or dropped.
            StoreUnavailableError: the engine cannot be reached.
        """
        folder = self._folder
        if not folder.has_documents():
            raise PlanError(f"the plan in {folder.path} was committed or dropped meanwhile")
        documents, digest = folder.read_documents(shard), folder.read_digest(shard)
        keys, name = folder.open_keys(shard), folder.name_upload(shard, digest)
        start = folder.plan.start + shard.start
        positions = ranges_of(np.array([start]), np.array([start + shard.tokens]))
        if self._datastore.count_uploaded(positions, name, self._group) == shard.records:
            folder.note_upload(shard, digest)
            return False
        owner, offsets, tokens = folder.list_records(documents)
        ids = record_ids(folder.compute_starts(shard, documents)[owner] + offsets, tokens)
        for begin in range(0, len(ids), _BLOCK_RECORDS):
            rows = slice(begin, begin + _BLOCK_RECORDS)
            groups = np.full(len(ids[rows]), self._group, np.int32)
            self._datastore.upload(ids[rows], keys[rows].astype(np.float32, copy=False), groups, name)
            failpoint("plan.uploading")
        self._datastore.flush()
        folder.note_upload(shard, digest)
        return True
