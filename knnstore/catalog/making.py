"""Making a catalogue: its tables and the one row that says what the store is made for."""

from dataclasses import asdict
from datetime import UTC, datetime

from sqlalchemy import Engine as SqlEngine
from sqlalchemy import delete, insert, select

from knnstore.catalog import schema
from knnstore.catalog.connection import exclusive, place
from knnstore.catalog.statements import utc
from knnstore.catalog.tables import StoreRow
from knnstore.catalog.types import Engine, Identity
from knnstore.errors import StoreExistsError
from knnstore.failpoints import failpoint


def make_catalog(sql: SqlEngine, identity: Identity, engine: Engine, created_at: datetime | None) -> None:
    """Make the tables and the store's row, in one transaction; see `Catalog.create`."""
    with exclusive(sql) as connection:
        if not schema.is_empty(connection):
            schema.check(connection)
            there = connection.execute(select(StoreRow.created_at, StoreRow.writer_epoch)).first()
            if there and (utc(there.created_at) != created_at or there.writer_epoch > 0):
                raise StoreExistsError(f"{place(sql.url)} already holds a store's catalogue")
            connection.execute(delete(StoreRow))
        schema.upgrade(connection)
        connection.execute(
            insert(StoreRow).values(
                id=1,
                created_at=created_at or datetime.now(UTC),
                adapter=engine.adapter,
                location=engine.location,
                params=dict(engine.params),
                **asdict(identity),
            )
        )
        failpoint("catalog.create.inside")
