"""One writer of a catalog: the last one that was made. Whatever an older one commits after that fails.

The store's own lock keeps a second one from being made, on one machine. So a writer to PostgreSQL holds a
lock on the server as well. Either lock may be lost unnoticed; the fence is not.
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
    """Makes transactions of the newest writer; a lock on PostgreSQL lives until the catalog is closed.

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
        """One fenced transaction; the fence is its first statement, so it takes the write lock.

        Args:
            name: of the failpoints passed on the way, ``catalog.<name>.…``.

        Raises:
            FencedError: a newer writer was made.
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
    """Take the writer's lock on PostgreSQL: it lives as long as the connection returned.

    Raises:
        LockedError: another process holds it.
    """
    key = {"lock": LOCK, "use": "writer"}
    statement = text("SELECT pg_try_advisory_lock(:lock, hashtext(:use || current_schema()))")
    with translated_errors(engine):
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # a lock outlives its connection's return to the pool
        for _ in range(_ATTEMPTS_TO_LOCK):  # the server may still be noticing a killed writer's end
            if connection.scalar(statement, key):
                return connection
            time.sleep(_SECONDS_BETWEEN)
        connection.close()
    raise LockedError(f"another process writes to the catalog in {place(engine.url)}; end it first")
