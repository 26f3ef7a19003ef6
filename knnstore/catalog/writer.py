"""Changes of the catalog: each method runs one transaction, which fails if a newer writer exists.

A document has three states. The methods of `CatalogWriter` change the state of a document's row::

    begin      no row -> pending     positions are allocated; the caller can add records
    publish    pending -> live       readers see the document; the version that it replaces becomes deleting
    retire     live -> deleting      readers ignore the document's records
    forget     not live -> no row    the datastore has already deleted the records

The store's lock file prevents a second writer on the same machine only, so a writer to PostgreSQL also holds
an advisory lock on the server. Either lock can be lost silently. The fencing number in the store's row cannot
be lost: each new writer increments it, and a transaction fails if the number is not the writer's number.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, literal, select, text, update
from sqlalchemy import Engine as SqlEngine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.connection import LOCK, render_location, run_transaction, translate_errors
from knnstore.catalog.digests import hash_bytes, hash_store_identity, hash_values
from knnstore.catalog.queries import (
    build_settings_key,
    compute_document_digest,
    read_tags,
    select_among,
    split_into_chunks,
)
from knnstore.catalog.tables import (
    DELETING,
    IS_LIVE,
    IS_UNSETTLED,
    LIVE,
    PENDING,
    ChecksumRow,
    DocumentRow,
    DomainRow,
    LeaseRow,
    SettingRow,
    StoreRow,
    TagRow,
    TokensRow,
    WithdrawalRow,
)
from knnstore.catalog.types import Engine, Lease, NewDocument, PlacedDocument
from knnstore.catalog.vacuum import check_room, vacuum
from knnstore.checks import check_json, check_name
from knnstore.datastore import POSITION_LIMIT
from knnstore.errors import CatalogError, DocumentNotFoundError, FencedError, InputError, LockedError
from knnstore.failpoints import failpoint

_ATTEMPTS_TO_LOCK = 30
_SECONDS_BETWEEN_ATTEMPTS = 0.1


class CatalogWriter:
    """Makes changes in a catalog (the SQL database of a store).

    Only the newest writer of a catalog can make changes. If a newer writer exists, in this or in another
    process, every method that changes the catalog raises FencedError.

    Args:
        catalog: open catalog. On PostgreSQL, closing the catalog releases the writer's lock on the server.

    Raises:
        LockedError: another process writes to this catalog on PostgreSQL.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        if self._sql.dialect.name == "postgresql":
            catalog.opened.callback(_take_writer_lock(self._sql).close)
        statement = update(StoreRow).values(writer_epoch=StoreRow.writer_epoch + 1)
        with run_transaction(self._sql) as session:
            self._epoch = session.scalars(statement.returning(StoreRow.writer_epoch)).one()

    @property
    def _sql(self) -> SqlEngine:
        return self.catalog.sql

    def lease_positions(self, id: str, count: int, folder: str) -> Lease:
        """Reserve positions for documents that will be added later. Returns the new lease.

        A position is the number of a token in the store, used only once. Positions of a lease that is
        released stay unused.

        Args:
            id: id of the lease, 32 characters; no other lease has it.
            count: number of positions to reserve.
            folder: absolute path of the folder of the plan.

        Raises:
            CatalogError: the positions are used up; nothing is reserved.
        """
        with self._run_transaction("lease") as session:
            stop = _allocate_positions(session, count)
            session.add(LeaseRow(id=id, start=stop - count, stop=stop, folder=folder))
        return Lease(id, stop - count, stop, folder, is_committed=False)

    def delete_leases(self, ids: Iterable[str]) -> None:
        """Delete leases (reserved positions). Documents that were added with a lease stay.

        If no open lease is left, domains without documents are deleted; see `create_domain`.

        Args:
            ids: ids of the leases; unknown ids are ignored.
        """
        with self._run_transaction("release") as session:
            for chunk in split_into_chunks(list(ids)):
                session.execute(delete(LeaseRow).where(LeaseRow.id.in_(chunk)))
                session.execute(delete(WithdrawalRow).where(WithdrawalRow.lease_id.in_(chunk)))
            is_any_open = session.scalar(select(exists().where(LeaseRow.committed_at.is_(None))))
            if not is_any_open:
                has_document = exists().where(DocumentRow.domain_id == DomainRow.id)
                session.execute(delete(DomainRow).where(~has_document))

    def create_domain(self, name: str) -> int:
        """Return the primary key of a domain. A missing domain is inserted.

        Readers do not see a domain without documents. A domain without documents is kept as long as a lease
        is open, so that documents of the lease can get its primary key. But if the domain gets documents and
        all of them are removed, it is deleted, and later documents get another primary key.

        Args:
            name: name of the domain.
        """
        with self._run_transaction("domain") as session:
            return self._get_or_create_domain_ids(session, {name})[name]

    def insert_pending_documents(
        self, documents: Sequence[NewDocument], starts: Sequence[int] | None = None
    ) -> list[PlacedDocument]:
        """Insert documents in the state "pending", invisible to readers, and allocate their positions.

        A position is the number of a token in the store, used only once. Missing domains are created.

        Args:
            documents: documents to store. If a stored document has the same domain and id as one of them, the
                stored document is replaced later, when `make_documents_live` is called.
            starts: position of each document's first token, if the positions were reserved before (see
                `lease_positions`); None allocates new positions.

        Returns:
            Primary key, domain and positions of each document, in the order of `documents`.

        Raises:
            InputError: an id, domain, tag or metadata is not valid; nothing is stored.
            CatalogError: the positions are used up, or positions of `starts` belong to another document;
                nothing is stored.
        """
        for document in documents:
            _check_document(document)
        with self._run_transaction("begin") as session:
            groups = self._get_or_create_domain_ids(session, {document.domain for document in documents})
            lengths = [len(document.tokens) for document in documents]
            if starts is not None:
                _check_positions_unused(session, starts, lengths)
            else:
                total = sum(lengths)
                starts = list(accumulate(lengths, initial=_allocate_positions(session, total) - total))[:-1]
            rows = [
                DocumentRow(
                    domain_id=groups[document.domain],
                    external_id=document.id,
                    state=PENDING,
                    start=start,
                    stop=start + length,
                    content_hash=document.content_hash,
                    attributes=dict(document.metadata),
                )
                for document, start, length in zip(documents, starts, lengths, strict=True)
            ]
            session.add_all(rows)
            session.flush()
            for row, document in zip(rows, documents, strict=True):
                tokens = document.tokens.astype("<u4").tobytes()
                digest = hash_bytes(tokens)
                session.add(TokensRow(document_id=row.id, tokens=tokens, digest=digest))
                row.digest = compute_document_digest(row, document.domain, document.tags, digest)
                session.add_all(TagRow(document_id=row.id, tag=tag) for tag in document.tags)
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def make_documents_live(
        self,
        rows: Sequence[int],
        checksums: Mapping[int, str] = MappingProxyType({}),
        *,
        lease: str | None = None,
    ) -> None:
        """Make pending documents live, so that readers see them.

        If another live document has the same domain and id, it is replaced: the state of the older document
        becomes "deleting", so readers no longer see it.

        Args:
            rows: primary keys of the documents.
            checksums: checksums of the documents' vector keys, by primary key of the document. Documents for
                which no checksum is known are left out.
            lease: id of the lease whose positions the documents have; it becomes committed. None if the
                documents have no lease.

        Raises:
            CatalogError: a document is not pending, two of the documents have the same domain and id, or the
                lease was released or committed meanwhile; no document is published.
        """
        fresh_rows = set(rows)
        with self._run_transaction("publish") as session:
            for chunk in split_into_chunks(rows):
                pending = select(DocumentRow.domain_id, DocumentRow.external_id).where(
                    DocumentRow.id.in_(chunk), DocumentRow.state == PENDING
                )
                identities = {tuple(row) for row in session.execute(pending)}
                if len(identities) != len(chunk):
                    raise CatalogError(
                        "a document to publish is not pending, or two have the same domain and id"
                    )
                replaced = select(DocumentRow.id, DocumentRow.domain_id, DocumentRow.external_id).where(
                    IS_LIVE, DocumentRow.external_id.in_({id for _, id in identities})
                )
                replaced_rows = [
                    row for row, *identity in session.execute(replaced) if tuple(identity) in identities
                ]
                if not fresh_rows.isdisjoint(
                    replaced_rows
                ):  # an earlier chunk of this call published the document
                    raise CatalogError("two documents to publish have the same domain and id")
                session.execute(
                    update(DocumentRow).where(DocumentRow.id.in_(replaced_rows)).values(state=DELETING)
                )
                session.execute(update(DocumentRow).where(DocumentRow.id.in_(chunk)).values(state=LIVE))
            _add_checksums(session, checksums)
            if lease is not None:
                open_lease = update(LeaseRow).where(LeaseRow.id == lease, LeaseRow.committed_at.is_(None))
                statement = open_lease.values(committed_at=datetime.now(UTC)).returning(LeaseRow.id)
                if session.scalars(statement).one_or_none() is None:
                    raise CatalogError("the lease of the documents was released or committed meanwhile")
                session.execute(delete(WithdrawalRow).where(WithdrawalRow.lease_id == lease))
            if rows:
                _increment_revision(session)

    def note_checksums(self, checksums: Mapping[int, str]) -> None:
        """Store checksums of the vector keys of documents.

        Args:
            checksums: checksum of each document's vector keys, by primary key of the document.

        Raises:
            CatalogError: a document has a checksum already; no checksum is stored.
        """
        with self._run_transaction("checksums") as session:
            _add_checksums(session, checksums)

    def mark_as_deleting(self, rows: Sequence[int]) -> None:
        """Change live documents to the state "deleting", so that readers no longer see them.

        Open leases note the ids of the documents, so that their commit does not add the documents again; see
        `Catalog.withdrawn_ids`.

        Args:
            rows: primary keys of the documents. Unknown keys, and keys of documents that are not live, are
                ignored.
        """
        with self._run_transaction("retire") as session:
            for chunk in split_into_chunks(rows):
                _note_withdrawals(session, chunk)
                statement = (
                    update(DocumentRow).where(DocumentRow.id.in_(chunk), IS_LIVE).values(state=DELETING)
                )
                if session.scalars(statement.returning(DocumentRow.id)).all():
                    _increment_revision(session)

    def unsettled_documents(self) -> list[PlacedDocument]:
        """Return the documents that are being added or removed (not live), sorted by position."""
        return self.catalog.unsettled_documents()

    def delete_documents(self, rows: Sequence[int]) -> None:
        """Delete from the catalog documents that are being added or removed, with their tokens and tags.

        If a domain has no document left, the domain is deleted too. Saved settings for a set of domains are
        deleted if one of these domains was deleted.

        Args:
            rows: primary keys of the documents. Unknown keys, and keys of other documents, are ignored.
        """
        with self._run_transaction("forget") as session:
            domain_ids: set[int] = set()
            for chunk in split_into_chunks(rows):
                deletion = delete(DocumentRow).where(DocumentRow.id.in_(chunk), IS_UNSETTLED)
                domain_ids.update(session.scalars(deletion.returning(DocumentRow.domain_id)))
            deleted_domains: set[str] = set()
            for chunk in split_into_chunks(domain_ids):
                has_document = exists().where(DocumentRow.domain_id == DomainRow.id)
                domain_deletion = delete(DomainRow).where(DomainRow.id.in_(chunk), ~has_document)
                deleted_domains.update(session.scalars(domain_deletion.returning(DomainRow.name)))
            for setting in session.scalars(select(SettingRow)) if deleted_domains else ():
                if not deleted_domains.isdisjoint(setting.domains):
                    session.delete(setting)
                    _increment_revision(session)

    def replace_metadata(self, changes: Mapping[int, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Replace the metadata and tags of live documents (completely stored and not removed).

        Args:
            changes: pairs (new metadata, new tags) by primary key of the document. An empty mapping changes
                nothing.

        Raises:
            InputError: a tag or metadata is not valid; nothing is changed.
            DocumentNotFoundError: a document is not live; nothing is changed.
        """
        descriptions = {row: (dict(metadata), sorted(set(tags))) for row, (metadata, tags) in changes.items()}
        for metadata, tags in descriptions.values():
            _check_description(metadata, tags)
        with self._run_transaction("describe") as session:
            if not descriptions:
                return
            live = select(DocumentRow.id).where(IS_LIVE)
            if sum(1 for _ in select_among(session, live, DocumentRow.id, descriptions)) < len(descriptions):
                raise DocumentNotFoundError("a document was removed before it could be described")
            undamaged_rows = _select_undamaged(session, descriptions)
            session.execute(
                update(DocumentRow),
                [{"id": row, "attributes": metadata} for row, (metadata, _) in descriptions.items()],
            )
            for chunk in split_into_chunks(descriptions):
                session.execute(delete(TagRow).where(TagRow.document_id.in_(chunk)))
            session.add_all(
                TagRow(document_id=row, tag=tag) for row, (_, tags) in descriptions.items() for tag in tags
            )
            _renew_digests(session, undamaged_rows)
            _increment_revision(session)

    def rename_documents(self, ids: Mapping[int, str]) -> None:
        """Replace the ids that the user gave to live documents (completely stored and not removed).

        Open leases note the old ids, as if these documents were removed; see `Catalog.withdrawn_ids`.

        Args:
            ids: new id of each document, by primary key of the document.

        Raises:
            InputError: an id is not valid, or another document of the domain has it; nothing is changed.
            DocumentNotFoundError: a document is not live; nothing is changed.
        """
        for id in ids.values():
            check_name(id, "a document's id")
        with self._run_transaction("rename") as session:
            undamaged_rows = _select_undamaged(session, ids)
            for chunk in split_into_chunks(list(ids)):
                _note_withdrawals(session, chunk)
            for row, id in ids.items():
                statement = update(DocumentRow).where(DocumentRow.id == row, IS_LIVE).values(external_id=id)
                try:
                    renamed_rows = session.scalars(statement.returning(DocumentRow.id)).all()
                except IntegrityError as error:
                    raise InputError(f"its domain already has a document {id!r}") from error
                if not renamed_rows:
                    raise DocumentNotFoundError("a document was removed before it could be renamed")
            _renew_digests(session, undamaged_rows)
            if ids:
                _increment_revision(session)

    def save_settings(self, domains: Iterable[str], payload: Mapping[str, Any]) -> None:
        """Save retrieval settings for a set of domains. Settings that were saved for this set are replaced.

        Args:
            domains: names of the domains; empty stands for the whole store.
            payload: the settings, JSON values by name; {} deletes the saved settings.

        Raises:
            InputError: the payload cannot be stored as JSON.
        """
        check_json(payload, "settings")
        scope, names = build_settings_key(domains)
        with self._run_transaction("settings") as session:
            if payload:
                # A damaged row cannot be read and updated, so it is deleted.
                session.execute(delete(SettingRow).where(SettingRow.scope == scope))
                session.add(
                    SettingRow(
                        scope=scope,
                        domains=names,
                        payload=dict(payload),
                        digest=hash_values(names, payload),
                        saved_at=datetime.now(UTC),
                    )
                )
            else:
                session.execute(delete(SettingRow).where(SettingRow.scope == scope))
            _increment_revision(session)

    def drop_settings(self, scopes: Sequence[str]) -> None:
        """Delete saved retrieval settings by their primary keys, also damaged settings.

        Args:
            scopes: primary keys of settings, for example from `Catalog.damaged_settings`. Unknown keys are
                ignored.
        """
        with self._run_transaction("settings") as session:
            session.execute(delete(SettingRow).where(SettingRow.scope.in_(scopes)))
            _increment_revision(session)

    def switch_engine(self, engine: Engine, checksums: Mapping[int, str] = MappingProxyType({})) -> None:
        """Save that another vector engine holds the store's keys, and replace all stored checksums of keys.

        The method copies no keys.

        Args:
            engine: the new engine, which already has all records.
            checksums: checksum of each document's vector keys, by primary key of the document; empty if the
                new engine checks its keys itself.
        """
        with self._run_transaction("move") as session:
            session.execute(delete(ChecksumRow))
            _add_checksums(session, checksums)
            digest = hash_store_identity(self.catalog.identity, engine.params)
            session.execute(update(StoreRow).values(**asdict(engine), digest=digest))
            _increment_revision(session)

    def check_room_to_vacuum(self) -> None:
        """Raise DiskFullError if the disks have too little free space for `vacuum` to rewrite a SQLite file.

        Does nothing on PostgreSQL and for a database in memory.
        """
        check_room(self._sql)

    def vacuum(self) -> list[str]:
        """Erase the bytes of deleted rows from the database's files by rewriting all tables.

        Returns:
            One message for each place, such as PostgreSQL's log, that still has bytes of deleted rows, with
            the reason; empty if no bytes are left.

        Raises:
            FencedError: a newer writer exists.
            StoreUnavailableError: other connections used the database for too long.
            DiskFullError, ReadOnlyError: SQLite cannot write to its disk.
        """
        with self._run_transaction("vacuum"):  # only checks the fence: VACUUM cannot run in a transaction
            pass
        return vacuum(self._sql)

    @contextmanager
    def _run_transaction(self, name: str) -> Iterator[Session]:
        """Run the ``with`` block in one transaction, and yield the SQLAlchemy session of the transaction.

        The transaction is committed at the end of the block. If the block raises an exception, nothing is
        changed. The first statement checks that no newer writer exists, and takes the database's write lock.

        Args:
            name: name of the change. It is part of the names of failpoints, places where tests let the
                process crash: ``catalog.<name>.before``, ``.inside`` and ``.after``.

        Raises:
            FencedError: a newer writer exists.
        """
        failpoint(f"catalog.{name}.before")
        with run_transaction(self._sql) as session:
            is_owner = StoreRow.writer_epoch == self._epoch
            fence_update = (
                update(StoreRow).where(is_owner).values(writer_epoch=self._epoch).returning(StoreRow.id)
            )
            if session.scalars(fence_update).one_or_none() is None:
                raise FencedError("another writer has taken over this store; open it again to write")
            yield session
            failpoint(f"catalog.{name}.inside")
        failpoint(f"catalog.{name}.after")

    @staticmethod
    def _get_or_create_domain_ids(session: Session, names: set[str]) -> dict[str, int]:
        """Return the primary keys of domains by name. Missing domains are inserted.

        Args:
            session: session of the caller's transaction, which the caller commits.
            names: names of the domains.
        """
        statement = select(DomainRow.name, DomainRow.id)
        existing_ids = {row.name: row.id for row in select_among(session, statement, DomainRow.name, names)}
        new_domains = [DomainRow(name=name) for name in sorted(names - existing_ids.keys())]
        session.add_all(new_domains)
        session.flush()
        return existing_ids | {row.name: row.id for row in new_domains}


def _take_writer_lock(engine: SqlEngine) -> Connection:
    """Take the lock on a PostgreSQL server that only one writer of a catalog can hold.

    Returns the connection that holds the lock; closing the connection releases the lock.

    Args:
        engine: SQLAlchemy engine of the catalog's database.

    Raises:
        LockedError: another process still holds the lock after three seconds.
    """
    key = {"lock": LOCK, "use": "writer"}
    statement = text("SELECT pg_try_advisory_lock(:lock, hashtext(:use || current_schema()))")
    with translate_errors(engine):
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # a pooled connection would keep the lock after its return to the pool
        for _ in range(_ATTEMPTS_TO_LOCK):  # the server may not yet have noticed that a killed writer is gone
            if connection.scalar(statement, key):
                return connection
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        connection.close()
    raise LockedError(f"another process writes to the catalog in {render_location(engine.url)}; end it first")


def _select_undamaged(session: Session, rows: Iterable[int]) -> list[int]:
    """Return the primary keys of documents whose values match their stored digests (checksums).

    After a change, only the digests of these documents may be computed again. A new digest of a damaged
    document would hide the damage.

    Args:
        session: session in which the queries run.
        rows: primary keys of the documents to check.
    """
    requested_rows = list(rows)
    digests = dict(
        select_among(session, select(DocumentRow.id, DocumentRow.digest), DocumentRow.id, requested_rows)
    )
    return [row for row, digest in _compute_digests(session, requested_rows) if digests[row] == digest]


def _renew_digests(session: Session, rows: Sequence[int]) -> None:
    """Compute and store the digests (checksums) of documents after the transaction has changed them.

    Args:
        session: session of the transaction.
        rows: primary keys of the changed documents.
    """
    session.flush()
    session.expire_all()  # the changes were made by statements, not through the session's objects
    values = [{"id": row, "digest": digest} for row, digest in _compute_digests(session, rows)]
    if values:
        session.execute(update(DocumentRow), values)


def _compute_digests(session: Session, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Compute the digests (checksums) of documents from their values in the database.

    Args:
        session: session in which the queries run.
        rows: primary keys of the documents.

    Yields:
        Pairs (primary key, digest), in any order.
    """
    tags = read_tags(session, rows)
    statement = select(DocumentRow, DomainRow.name, TokensRow.digest).join(DomainRow).join(TokensRow)
    for row, domain, tokens in select_among(session, statement, DocumentRow.id, rows):
        yield row.id, compute_document_digest(row, domain, tags.get(row.id, ()), tokens)


def _allocate_positions(session: Session, count: int) -> int:
    """Allocate successive positions that were never used, and return the last position plus one.

    Args:
        session: session of the transaction.
        count: number of positions.

    Raises:
        CatalogError: the positions are used up.
    """
    allocated = update(StoreRow).values(next_position=StoreRow.next_position + count)
    stop = session.scalars(allocated.returning(StoreRow.next_position)).one()
    if stop > POSITION_LIMIT:
        raise CatalogError(f"the store has used up its {POSITION_LIMIT} positions; make a new store")
    return stop


def _check_positions_unused(session: Session, starts: Sequence[int], lengths: Sequence[int]) -> None:
    """Check that the positions of new documents are allocated, and that no stored document has them.

    The whole range from the first to the last position of the new documents is checked.

    Args:
        session: session of the transaction.
        starts: position of the first token of each new document.
        lengths: number of tokens of each new document.

    Raises:
        CatalogError: a stored document has a position in the range, or a position was never allocated.
    """
    if not starts:
        return
    stop = max(start + length for start, length in zip(starts, lengths, strict=True))
    overlaps = exists().where(DocumentRow.start < stop, DocumentRow.stop > min(starts))
    if session.scalar(select(overlaps)) or stop > session.scalars(select(StoreRow.next_position)).one():
        raise CatalogError("positions of these documents belong to other documents: nothing is added")


def _note_withdrawals(session: Session, rows: Sequence[int]) -> None:
    """Note for each open lease the ids of live documents that are removed or renamed now.

    Args:
        session: session of the transaction, before the documents change.
        rows: primary keys of the documents.
    """
    for lease in session.scalars(select(LeaseRow).where(LeaseRow.committed_at.is_(None))).all():
        withdrawn = (
            select(literal(lease.id), DomainRow.name, DocumentRow.external_id)
            .join(DomainRow, DomainRow.id == DocumentRow.domain_id)
            .where(DocumentRow.id.in_(rows), IS_LIVE)
        )
        noted = exists().where(
            WithdrawalRow.lease_id == lease.id,
            WithdrawalRow.domain == DomainRow.name,
            WithdrawalRow.external_id == DocumentRow.external_id,
        )
        columns = ["lease_id", "domain", "external_id"]
        session.execute(insert(WithdrawalRow).from_select(columns, withdrawn.where(~noted)))


def _increment_revision(session: Session) -> None:
    """Increment the store's revision (a counter by which readers notice changes).

    Every transaction that changes what readers see calls this function.

    Args:
        session: session of the transaction.
    """
    session.execute(update(StoreRow).values(revision=StoreRow.revision + 1))


def _add_checksums(session: Session, checksums: Mapping[int, str]) -> None:
    """Add rows with checksums of vector keys to a session; its next flush inserts the rows.

    Args:
        session: session of the transaction.
        checksums: checksum of each document's vector keys, by primary key of the document.
    """
    session.add_all(ChecksumRow(document_id=row, keys=keys) for row, keys in checksums.items())


def _check_document(document: NewDocument) -> None:
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
