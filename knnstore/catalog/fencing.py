"""Fencing of catalog writers: only the newest writer can commit; commits of older writers fail.

The store's lock file prevents a second writer on the same machine only, so a writer to PostgreSQL also holds
an advisory lock on the server. Either lock may be lost without notice; the fence cannot be lost.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text, update
from sqlalchemy.orm import Session

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.connection import LOCK, place, session, translated_errors
from knnstore.catalog.tables import StoreRow
from knnstore.errors import FencedError, LockedError
from knnstore.failpoints import failpoint

_ATTEMPTS_TO_LOCK = 30
_SECONDS_BETWEEN = 0.1


class Fence:
    """Transactions that fail once a newer writer exists.

    Creating a fence ends the rights of every older writer. On PostgreSQL it also takes the writer's lock,
    which is released when the catalog is closed.

    Raises:
        LockedError: another process writes to this catalog on PostgreSQL.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._sql = catalog.sql
        if self._sql.dialect.name == "postgresql":
            catalog.opened.callback(_lock(self._sql).close)
        taken_over = update(StoreRow).values(writer_epoch=StoreRow.writer_epoch + 1)
        with session(self._sql) as current:
            self._epoch = current.scalars(taken_over.returning(StoreRow.writer_epoch)).one()

    @contextmanager
    def transaction(self, name: str) -> Iterator[Session]:
        """Run one fenced transaction. Its first statement checks the fence and takes the write lock.

        Args:
            name: middle part of the failpoint names, ``catalog.<name>.before``, ``.inside`` and ``.after``.

        Raises:
            FencedError: a newer writer exists.
        """
        failpoint(f"catalog.{name}.before")
        with session(self._sql) as current:
            mine = StoreRow.writer_epoch == self._epoch
            fence = update(StoreRow).where(mine).values(writer_epoch=self._epoch).returning(StoreRow.id)
            if current.scalars(fence).one_or_none() is None:
                raise FencedError("another writer has taken over this store; open it again to write")
            yield current
            failpoint(f"catalog.{name}.inside")
        failpoint(f"catalog.{name}.after")


def _lock(engine: Engine) -> Connection:
    """Take the writer's lock on PostgreSQL. Returns the connection that holds it until it is closed.

    Raises:
        LockedError: another process holds it.
    """
    key = {"lock": LOCK, "use": "writer"}
    statement = text("SELECT pg_try_advisory_lock(:lock, hashtext(:use || current_schema()))")
    with translated_errors(engine):
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # a pooled connection would keep the lock after its return to the pool
        for _ in range(_ATTEMPTS_TO_LOCK):  # the server may not yet have noticed that a killed writer is gone
            if connection.scalar(statement, key):
                return connection
            time.sleep(_SECONDS_BETWEEN)
        connection.close()
    raise LockedError(f"another process writes to the catalog in {place(engine.url)}; end it first")
