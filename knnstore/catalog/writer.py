"""Writing the catalog: each method is one transaction, fenced against an older writer.

A document goes through three states::

    begin      nothing -> pending    positions allocated, records may be added
    publish    pending -> live       acknowledged; the version it replaces becomes deleting
    retire     live -> deleting      no reader counts its records any more
    forget     the row is removed    after the datastore has deleted the records
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from sqlalchemy import delete, exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.digests import digest_of_bytes, digest_of_store, digest_of_values
from knnstore.catalog.fencing import Fence
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
from knnstore.errors import CatalogError, DocumentNotFoundError, InputError


class CatalogWriter:
    """The one writer of a catalog. Making one takes over: any older writer can commit no more.

    Raises:
        LockedError: another process writes to this catalog on PostgreSQL.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._sql = catalog.sql
        self._transaction = Fence(catalog).transaction

    def begin(self, documents: Sequence[NewDocument]) -> list[PlacedDocument]:
        """Allocate positions and insert the documents as pending, in the order given.

        Raises:
            InputError: an id, domain, tag or metadata cannot be stored; nothing was.
        """
        for document in documents:
            _check(document)
        with self._transaction("begin") as current:
            groups = self._groups(current, {document.domain for document in documents})
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
        """Make pending documents live; live ones of the same domain and id become deleting.

        Args:
            rows: the documents' primary keys.
            checksums: of the keys of some of them.

        Raises:
            CatalogError: one is not pending, or two have the same domain and id; none is published.
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
                if not fresh_rows.isdisjoint(old):  # published just now, in an earlier chunk
                    raise CatalogError("two documents to publish have the same domain and id")
                current.execute(update(DocumentRow).where(DocumentRow.id.in_(old)).values(state=DELETING))
                current.execute(update(DocumentRow).where(DocumentRow.id.in_(chunk)).values(state=LIVE))
            _add_checksums(current, checksums)
            if rows:
                _reveal(current)

    def note_checksums(self, checksums: Mapping[int, str]) -> None:
        """Keep the checksums of documents that have none, by primary key."""
        with self._transaction("checksums") as current:
            _add_checksums(current, checksums)

    def retire(self, rows: Sequence[int]) -> None:
        """Take live documents away from every reader; rows that are not live stay as they are."""
        with self._transaction("retire") as current:
            for chunk in in_chunks(rows):
                gone = update(DocumentRow).where(DocumentRow.id.in_(chunk), IS_LIVE).values(state=DELETING)
                if current.scalars(gone.returning(DocumentRow.id)).all():
                    _reveal(current)

    def unsettled(self) -> list[PlacedDocument]:
        """The documents that are not live; see `Catalog.unsettled`."""
        return self.catalog.unsettled()

    def forget(self, rows: Sequence[int]) -> None:
        """Remove rows that are not live, and every domain that thereby has none, with its settings."""
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
        """Set the metadata and the tags of live documents, by primary key.

        Raises:
            InputError: a tag or metadata cannot be stored.
            DocumentNotFoundError: one is not live; none was changed.
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
        """Give live documents other ids, by primary key.

        Raises:
            InputError: an id cannot be stored, or another document of the domain has it; none was changed.
            DocumentNotFoundError: one is not live; none was changed.
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
        """Save settings for exactly this set of domains, none of which is the whole store; {} drops them."""
        check_json(payload, "settings")
        scope, names = scope_of(domains)
        with self._transaction("settings") as current:
            if payload:
                current.execute(delete(SettingRow).where(SettingRow.scope == scope))  # it may be damaged
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
        """Drop saved settings by their keys; see `Catalog.damaged_settings`."""
        with self._transaction("settings") as current:
            current.execute(delete(SettingRow).where(SettingRow.scope.in_(scopes)))
            _reveal(current)

    def move(self, engine: Engine, checksums: Mapping[int, str] = MappingProxyType({})) -> None:
        """Point the store at the engine that holds its keys from now on.

        Args:
            engine: holds all records.
            checksums: of the keys of each document, by primary key, in place of all former ones.
        """
        with self._transaction("move") as current:
            current.execute(delete(ChecksumRow))
            _add_checksums(current, checksums)
            digest = digest_of_store(self.catalog.identity, engine.params)
            current.execute(update(StoreRow).values(**asdict(engine), digest=digest))
            _reveal(current)

    def check_room_to_vacuum(self) -> None:
        """Refuse what `vacuum` finds no room for; see `check_room`."""
        check_room(self._sql)

    def vacuum(self) -> list[str]:
        """Free the database's files of what was deleted; returns what still holds it, see `vacuum`."""
        with self._transaction("vacuum"):  # fenced
            pass
        return vacuum(self._sql)

    @staticmethod
    def _groups(current: Session, names: set[str]) -> dict[str, int]:
        chosen = select(DomainRow.name, DomainRow.id)
        known = {row.name: row.id for row in among(current, chosen, DomainRow.name, names)}
        fresh = [DomainRow(name=name) for name in sorted(names - known.keys())]
        current.add_all(fresh)
        current.flush()
        return known | {row.name: row.id for row in fresh}


def _sound_documents(current: Session, rows: Iterable[int]) -> list[int]:
    """Return which documents have the digest that they should have: only these may get another."""
    wanted = list(rows)
    digests = dict(among(current, select(DocumentRow.id, DocumentRow.digest), DocumentRow.id, wanted))
    return [row for row, digest in _digests(current, wanted) if digests[row] == digest]


def _renew_digests(current: Session, rows: Sequence[int]) -> None:
    """Write the digests of documents that were changed on purpose."""
    current.flush()
    current.expire_all()  # rows were changed by statements of their own
    values = [{"id": row, "digest": digest} for row, digest in _digests(current, rows)]
    if values:
        current.execute(update(DocumentRow), values)


def _digests(current: Session, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield primary key and digest of documents as they are now."""
    tags = read_tags(current, rows)
    chosen = select(DocumentRow, DomainRow.name, TokensRow.digest).join(DomainRow).join(TokensRow)
    for row, domain, tokens in among(current, chosen, DocumentRow.id, rows):
        yield row.id, document_digest(row, domain, tags.get(row.id, ()), tokens)


def _reveal(current: Session) -> None:
    """Make readers look again: called in every transaction that changes what they may see."""
    current.execute(update(StoreRow).values(revision=StoreRow.revision + 1))


def _add_checksums(current: Session, checksums: Mapping[int, str]) -> None:
    current.add_all(ChecksumRow(document_id=row, keys=keys) for row, keys in checksums.items())


def _check(document: NewDocument) -> None:
    check_name(document.id, "a document's id")
    check_name(document.domain, "a domain's name")
    try:
        _check_description(document.metadata, document.tags)
    except InputError as error:
        raise InputError(f"document {document.id!r}: {error}") from error


def _check_description(metadata: Mapping[str, Any], tags: Iterable[str]) -> None:
    check_json(metadata, "its metadata")
    for tag in tags:
        check_name(tag, "a tag")
