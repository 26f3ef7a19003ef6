"""Digests of what is stored, by which damage is noticed.

What is there gets the digests of what it is now. A row that cannot be read gets an empty one, which nothing
has: `knnstore verify` then names it.

Revision: 0008
Revises: 0007
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from alembic import op

from knnstore.catalog.digests import hash_bytes, hash_document_fields, hash_values

revision = "0008"
down_revision = "0007"

_IDENTITY = (
    *("model_fingerprint", "tokenizer_fingerprint", "key", "dim", "metric", "vocab_size", "max_length"),
    *("stride", "projection"),
)
_AT_ONCE = 200

_store = sa.table(
    "knnstore_store",
    *(sa.column(name) for name in _IDENTITY),
    sa.column("has_prefix", sa.Boolean),
    sa.column("params", sa.JSON),
    sa.column("digest"),
)
_documents = sa.table(
    "knnstore_documents",
    *(sa.column(name) for name in ("id", "domain_id", "external_id", "start", "stop", "content_hash")),
    sa.column("metadata", sa.JSON),
    sa.column("digest"),
)
_domains = sa.table("knnstore_domains", sa.column("id"), sa.column("name"))
_tokens = sa.table(
    "knnstore_document_tokens",
    sa.column("document_id"),
    sa.column("tokens", sa.LargeBinary),
    sa.column("digest"),
)
_tags = sa.table("knnstore_document_tags", sa.column("document_id"), sa.column("tag"))
_pruned = sa.table(
    "knnstore_document_pruned",
    *(sa.column(name) for name in ("document_id", "records", "scale")),
    sa.column("survivors", sa.LargeBinary),
    sa.column("digest"),
)
_settings = sa.table(
    "knnstore_settings",
    *(sa.column(name) for name in ("scope", "digest")),
    *(sa.column(name, sa.JSON) for name in ("domains", "payload")),
)


def upgrade() -> None:
    for table in (_store, _documents, _tokens, _pruned, _settings):
        column = sa.Column("digest", sa.String(32), nullable=False, server_default="")
        op.add_column(table.name, column)
    connection = op.get_bind()
    _fill(connection, _tokens, _tokens.c.document_id, lambda row: hash_bytes(row.tokens))
    _fill(
        connection,
        _pruned,
        _pruned.c.document_id,
        lambda row: hash_values(row.records, float(row.scale), hash_bytes(row.survivors)),
    )
    _fill(connection, _settings, _settings.c.scope, lambda row: hash_values(row.domains, row.payload))
    _fill_documents(connection)
    for row in connection.execute(sa.select(_store)):
        values = {name: getattr(row, name) for name in (*_IDENTITY, "has_prefix")}
        connection.execute(sa.update(_store).values(digest=hash_values(values, row.params)))


def _fill(connection: Any, table: Any, key: Any, digest: Callable[[Any], str]) -> None:
    keys = list(connection.scalars(sa.select(key)))
    _fill_rows(connection, table, key, keys, sa.select(table), lambda _, rows: map(digest, rows))


def _fill_documents(connection: Any) -> None:
    key = _documents.c.id
    chosen = (
        sa.select(
            key,
            *(_documents.c[name] for name in ("external_id", "start", "stop", "content_hash")),
            # As text: SQLAlchemy would end all rows for one that is not JSON.
            sa.cast(_documents.c.metadata, sa.Text).label("metadata"),
            _domains.c.name,
            _tokens.c.digest.label("tokens"),
        )
        .join(_domains, _domains.c.id == _documents.c.domain_id)
        .outerjoin(_tokens, _tokens.c.document_id == key)
    )

    def digests(keys: list[Any], rows: Iterable[Any]) -> Iterable[str]:
        tags: dict[int, list[str]] = {}
        for row, tag in connection.execute(sa.select(_tags).where(_tags.c.document_id.in_(keys))):
            tags.setdefault(row, []).append(tag)
        for row in rows:
            yield hash_document_fields(
                id=row.external_id,
                domain=row.name,
                start=row.start,
                stop=row.stop,
                content_hash=row.content_hash,
                metadata=json.loads(row.metadata),
                tags=tags.get(row.id, ()),
                tokens=row.tokens,
            )

    _fill_rows(connection, _documents, key, list(connection.scalars(sa.select(key))), chosen, digests)


def _ends_the_transaction(error: Exception) -> bool:
    """Check whether SQLite could not write or had no memory.

    SQLite may then have rolled the whole transaction back. Any further statement would be committed alone.
    """
    name = str(getattr(getattr(error, "orig", None), "sqlite_errorname", ""))
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_READONLY"))


def _fill_rows(
    connection: Any, table: Any, key: Any, keys: list[Any], chosen: Any, digests: Callable[..., Iterable[str]]
) -> None:
    """Fill in the digests of some rows at once, or of each alone where one of them cannot be read."""
    changed = sa.update(table).where(key == sa.bindparam("of_row")).values(digest=sa.bindparam("its_digest"))

    def fill(some: list[Any]) -> None:
        rows = connection.execute(chosen.where(key.in_(some))).all()
        found = [getattr(row, key.name) for row in rows]
        values = [
            {"of_row": row, "its_digest": digest}
            for row, digest in zip(found, digests(some, rows), strict=True)
        ]
        if values:
            connection.execute(changed, values)

    for at in range(0, len(keys), _AT_ONCE):
        some = keys[at : at + _AT_ONCE]
        try:
            fill(some)
        except Exception as error:  # whatever a damaged value leads to
            # SQLite alone takes any value in any column.
            if connection.dialect.name != "sqlite" or _ends_the_transaction(error):
                raise
            for one in some:
                with suppress(Exception):
                    fill([one])
