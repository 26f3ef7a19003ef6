"""Writes of the catalog: each method runs one transaction, which fails if a newer writer exists.

A document has three states::

    begin      no row -> pending     positions are allocated; the caller can add records
    publish    pending -> live       the document is acknowledged; the version it replaces becomes deleting
    retire     live -> deleting      readers ignore the document's records
    forget     not live -> no row    the datastore has already deleted the records

The store's lock file prevents a second writer on the same machine only, so a writer to PostgreSQL also holds
an advisory lock on the server. Either lock can be lost silently. The fence, a number in the store's row,
cannot be lost.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, delete, exists, select, text, update
from sqlalchemy import Engine as SqlEngine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.connection import LOCK, render_location, session, translated_errors
from knnstore.catalog.digests import digest_of_bytes, digest_of_store, digest_of_values
from knnstore.catalog.queries import among, document_digest, in_chunks, read_tags, scope_of
from knnstore.catalog.tables import (
    DELETING,
    IS_LIVE,
    IS_UNSETTLED,
    LIVE,
    PENDING,
    ChecksumRow,
    DocumentRow,
    DomainRow,
    SettingRow,
    StoreRow,
    TagRow,
    TokensRow,
)
from knnstore.catalog.types import Engine, NewDocument, PlacedDocument
from knnstore.catalog.vacuum import check_room, vacuum
from knnstore.checks import check_json, check_name
from knnstore.datastore import POSITION_LIMIT
from knnstore.errors import CatalogError, DocumentNotFoundError, FencedError, InputError, LockedError
from knnstore.failpoints import failpoint

_ATTEMPTS_TO_LOCK = 30
_SECONDS_BETWEEN_ATTEMPTS = 0.1


class CatalogWriter:
    """Writer of a catalog. After another writer is created, this writer can no longer commit.

    Every method that changes the catalog raises FencedError if a newer writer exists.

    Args:
        catalog: open catalog; on PostgreSQL, closing it releases the writer's lock.

    Raises:
        LockedError: another process writes to this catalog on PostgreSQL.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._sql = catalog.sql
        if self._sql.dialect.name == "postgresql":
            catalog.opened.callback(_take_writer_lock(self._sql).close)
        taken_over = update(StoreRow).values(writer_epoch=StoreRow.writer_epoch + 1)
        with session(self._sql) as current:
            self._epoch = current.scalars(taken_over.returning(StoreRow.writer_epoch)).one()

    def begin(self, documents: Sequence[NewDocument]) -> list[PlacedDocument]:
        """Allocate positions and insert documents as pending. Also creates missing domains.

        Returns:
            The placed documents, in the order of `documents`.

        Raises:
            InputError: an id, domain, tag or metadata is not valid; nothing is stored.
            CatalogError: the positions are used up; nothing is stored.
        """
        for document in documents:
            _check(document)
        with self._transaction("begin") as current:
            groups = self._get_or_create_domain_ids(current, {document.domain for document in documents})
            total = sum(len(document.tokens) for document in documents)
            allocated = update(StoreRow).values(next_position=StoreRow.next_position + total)
            end = current.scalars(allocated.returning(StoreRow.next_position)).one()
            if end > POSITION_LIMIT:
                raise CatalogError(f"the store has used up its {POSITION_LIMIT} positions; start a new one")
            stops = accumulate((len(document.tokens) for document in documents), initial=end - total)
            rows = [
                DocumentRow(
                    domain_id=groups[document.domain],
                    external_id=document.id,
                    state=PENDING,
                    start=start,
                    stop=stop,
                    content_hash=document.content_hash,
                    attributes=dict(document.metadata),
                )
                for document, (start, stop) in zip(documents, pairwise(stops), strict=True)
            ]
            current.add_all(rows)
            current.flush()
            for row, document in zip(rows, documents, strict=True):
                tokens = document.tokens.astype("<u4").tobytes()
                digest = digest_of_bytes(tokens)
                current.add(TokensRow(document_id=row.id, tokens=tokens, digest=digest))
                row.digest = document_digest(row, document.domain, document.tags, digest)
                current.add_all(TagRow(document_id=row.id, tag=tag) for tag in document.tags)
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def publish(self, rows: Sequence[int], checksums: Mapping[int, str] = MappingProxyType({})) -> None:
        """Make pending documents live. Live documents with the same domain and id become deleting.

        Args:
            rows: primary keys of the documents.
            checksums: checksums of the vector keys by primary key; may cover only some of the documents.

        Raises:
            CatalogError: a document is not pending, or two have the same domain and id; none is published.
        """
        fresh_rows = set(rows)
        with self._transaction("publish") as current:
            for chunk in in_chunks(rows):
                fresh = select(DocumentRow.domain_id, DocumentRow.external_id).where(
                    DocumentRow.id.in_(chunk), DocumentRow.state == PENDING
                )
                identities = {tuple(row) for row in current.execute(fresh)}
                if len(identities) != len(chunk):
                    raise CatalogError(
                        "a document to publish is not pending, or two have the same domain and id"
                    )
                replaced = select(DocumentRow.id, DocumentRow.domain_id, DocumentRow.external_id).where(
                    IS_LIVE, DocumentRow.external_id.in_({id for _, id in identities})
                )
                old = [row for row, *identity in current.execute(replaced) if tuple(identity) in identities]
                if not fresh_rows.isdisjoint(old):  # an earlier chunk of this call published the document
                    raise CatalogError("two documents to publish have the same domain and id")
                current.execute(update(DocumentRow).where(DocumentRow.id.in_(old)).values(state=DELETING))
                current.execute(update(DocumentRow).where(DocumentRow.id.in_(chunk)).values(state=LIVE))
            _add_checksums(current, checksums)
            if rows:
                _reveal(current)

    def note_checksums(self, checksums: Mapping[int, str]) -> None:
        """Store checksums of vector keys, by primary key, of documents that have no checksum yet."""
        with self._transaction("checksums") as current:
            _add_checksums(current, checksums)

    def retire(self, rows: Sequence[int]) -> None:
        """Change live documents to deleting, so that no reader sees them. Ignores rows that are not live."""
        with self._transaction("retire") as current:
            for chunk in in_chunks(rows):
                gone = update(DocumentRow).where(DocumentRow.id.in_(chunk), IS_LIVE).values(state=DELETING)
                if current.scalars(gone.returning(DocumentRow.id)).all():
                    _reveal(current)

    def unsettled(self) -> list[PlacedDocument]:
        """Return the documents that are not live; see `Catalog.unsettled`."""
        return self.catalog.unsettled()

    def forget(self, rows: Sequence[int]) -> None:
        """Delete documents that are not live; ignores live documents.

        Also deletes each domain that has no other document, and all settings that name the domain.
        """
        with self._transaction("forget") as current:
            touched: set[int] = set()
            for chunk in in_chunks(rows):
                gone = delete(DocumentRow).where(DocumentRow.id.in_(chunk), IS_UNSETTLED)
                touched.update(current.scalars(gone.returning(DocumentRow.domain_id)))
            emptied: set[str] = set()
            for chunk in in_chunks(touched):
                left = exists().where(DocumentRow.domain_id == DomainRow.id)
                empty = delete(DomainRow).where(DomainRow.id.in_(chunk), ~left)
                emptied.update(current.scalars(empty.returning(DomainRow.name)))
            for setting in current.scalars(select(SettingRow)) if emptied else ():
                if not emptied.isdisjoint(setting.domains):
                    current.delete(setting)
                    _reveal(current)

    def describe(self, changes: Mapping[int, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Replace the metadata and tags of live documents.

        Args:
            changes: new metadata and tags by primary key.

        Raises:
            InputError: a tag or metadata is not valid; nothing is changed.
            DocumentNotFoundError: a document is not live; nothing is changed.
        """
        wanted = {row: (dict(metadata), sorted(set(tags))) for row, (metadata, tags) in changes.items()}
        for metadata, tags in wanted.values():
            _check_description(metadata, tags)
        with self._transaction("describe") as current:
            if not wanted:
                return
            live = select(DocumentRow.id).where(IS_LIVE)
            if sum(1 for _ in among(current, live, DocumentRow.id, wanted)) < len(wanted):
                raise DocumentNotFoundError("a document was removed before it could be described")
            sound = _sound_documents(current, wanted)
            current.execute(
                update(DocumentRow),
                [{"id": row, "attributes": metadata} for row, (metadata, _) in wanted.items()],
            )
            for chunk in in_chunks(wanted):
                current.execute(delete(TagRow).where(TagRow.document_id.in_(chunk)))
            current.add_all(
                TagRow(document_id=row, tag=tag) for row, (_, tags) in wanted.items() for tag in tags
            )
            _renew_digests(current, sound)
            _reveal(current)

    def rename(self, ids: Mapping[int, str]) -> None:
        """Change the external ids of live documents.

        Args:
            ids: new ids by primary key.

        Raises:
            InputError: an id is not valid, or another document of the domain has it; nothing is changed.
            DocumentNotFoundError: a document is not live; nothing is changed.
        """
        for id in ids.values():
            check_name(id, "a document's id")
        with self._transaction("rename") as current:
            sound = _sound_documents(current, ids)
            for row, id in ids.items():
                renamed = update(DocumentRow).where(DocumentRow.id == row, IS_LIVE).values(external_id=id)
                try:
                    found = current.scalars(renamed.returning(DocumentRow.id)).all()
                except IntegrityError as error:
                    raise InputError(f"there is a document {id!r} in its domain already") from error
                if not found:
                    raise DocumentNotFoundError("a document was removed before it could be renamed")
            _renew_digests(current, sound)
            if ids:
                _reveal(current)

    def save_settings(self, domains: Iterable[str], payload: Mapping[str, Any]) -> None:
        """Save settings for exactly this set of domains, in place of their saved settings.

        Args:
            domains: names of the domains; empty stands for the whole store.
            payload: the settings; {} drops the saved settings.

        Raises:
            InputError: the payload cannot be stored as JSON.
        """
        check_json(payload, "settings")
        scope, names = scope_of(domains)
        with self._transaction("settings") as current:
            if payload:
                # A damaged row cannot be read and updated, so it is deleted.
                current.execute(delete(SettingRow).where(SettingRow.scope == scope))
                current.add(
                    SettingRow(
                        scope=scope,
                        domains=names,
                        payload=dict(payload),
                        digest=digest_of_values(names, payload),
                        saved_at=datetime.now(UTC),
                    )
                )
            else:
                current.execute(delete(SettingRow).where(SettingRow.scope == scope))
            _reveal(current)

    def drop_settings(self, scopes: Sequence[str]) -> None:
        """Delete saved settings by their keys; see `Catalog.damaged_settings`."""
        with self._transaction("settings") as current:
            current.execute(delete(SettingRow).where(SettingRow.scope.in_(scopes)))
            _reveal(current)

    def move(self, engine: Engine, checksums: Mapping[int, str] = MappingProxyType({})) -> None:
        """Change the engine that holds the store's keys, and replace all checksums.

        Args:
            engine: engine that already holds all records.
            checksums: checksum of each document's vector keys, by primary key.
        """
        with self._transaction("move") as current:
            current.execute(delete(ChecksumRow))
            _add_checksums(current, checksums)
            digest = digest_of_store(self.catalog.identity, engine.params)
            current.execute(update(StoreRow).values(**asdict(engine), digest=digest))
            _reveal(current)

    def check_room_to_vacuum(self) -> None:
        """Check that the disk has enough free space for `vacuum`; see `check_room`."""
        check_room(self._sql)

    def vacuum(self) -> list[str]:
        """Erase deleted rows from the database's files. Returns messages about the rest; see `vacuum`."""
        with self._transaction("vacuum"):  # only checks the fence: VACUUM cannot run in a transaction
            pass
        return vacuum(self._sql)

    @contextmanager
    def _transaction(self, name: str) -> Iterator[Session]:
        """Run one transaction. Its first statement checks the fence and takes the database's write lock.

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

    @staticmethod
    def _get_or_create_domain_ids(current: Session, names: set[str]) -> dict[str, int]:
        """Return the ids of domains by name; creates the missing domains."""
        chosen = select(DomainRow.name, DomainRow.id)
        known = {row.name: row.id for row in among(current, chosen, DomainRow.name, names)}
        fresh = [DomainRow(name=name) for name in sorted(names - known.keys())]
        current.add_all(fresh)
        current.flush()
        return known | {row.name: row.id for row in fresh}


def _take_writer_lock(engine: SqlEngine) -> Connection:
    """Take the writer's lock on PostgreSQL. Returns the connection that holds it until it is closed.

    Raises:
        LockedError: another process holds the lock.
    """
    key = {"lock": LOCK, "use": "writer"}
    statement = text("SELECT pg_try_advisory_lock(:lock, hashtext(:use || current_schema()))")
    with translated_errors(engine):
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # a pooled connection would keep the lock after its return to the pool
        for _ in range(_ATTEMPTS_TO_LOCK):  # the server may not yet have noticed that a killed writer is gone
            if connection.scalar(statement, key):
                return connection
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        connection.close()
    raise LockedError(f"another process writes to the catalog in {render_location(engine.url)}; end it first")


def _sound_documents(current: Session, rows: Iterable[int]) -> list[int]:
    """Return the primary keys of the documents that match their digests.

    A change renews only the digests of these documents, so that it does not hide damage in others.
    """
    wanted = list(rows)
    digests = dict(among(current, select(DocumentRow.id, DocumentRow.digest), DocumentRow.id, wanted))
    return [row for row, digest in _digests(current, wanted) if digests[row] == digest]


def _renew_digests(current: Session, rows: Sequence[int]) -> None:
    """Compute and store the digests of documents that the transaction has changed."""
    current.flush()
    current.expire_all()  # the changes were made by statements, not through the session's objects
    values = [{"id": row, "digest": digest} for row, digest in _digests(current, rows)]
    if values:
        current.execute(update(DocumentRow), values)


def _digests(current: Session, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Compute the digests of documents from their present content. Yields primary key and digest."""
    tags = read_tags(current, rows)
    chosen = select(DocumentRow, DomainRow.name, TokensRow.digest).join(DomainRow).join(TokensRow)
    for row, domain, tokens in among(current, chosen, DocumentRow.id, rows):
        yield row.id, document_digest(row, domain, tags.get(row.id, ()), tokens)


def _reveal(current: Session) -> None:
    """Increment the revision; called in every transaction that changes what readers see."""
    current.execute(update(StoreRow).values(revision=StoreRow.revision + 1))


def _add_checksums(current: Session, checksums: Mapping[int, str]) -> None:
    """Insert checksums by primary key of the document."""
    current.add_all(ChecksumRow(document_id=row, keys=keys) for row, keys in checksums.items())


def _check(document: NewDocument) -> None:
    """Raise InputError if a document's id, domain, tags or metadata are not valid."""
    check_name(document.id, "a document's id")
    check_name(document.domain, "a domain's name")
    try:
        _check_description(document.metadata, document.tags)
    except InputError as error:
        raise InputError(f"document {document.id!r}: {error}") from error


def _check_description(metadata: Mapping[str, Any], tags: Iterable[str]) -> None:
    """Raise InputError if metadata or a tag is not valid."""
    check_json(metadata, "its metadata")
    for tag in tags:
        check_name(tag, "a tag")
