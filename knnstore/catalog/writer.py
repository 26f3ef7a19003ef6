"""Writing the catalogue: each method is one transaction, fenced against an older writer.

A document goes through three states::

    begin      nothing -> pending    positions allocated, records may be added
    publish    pending -> live       acknowledged; the version it replaces becomes deleting
    retire     live -> deleting      no reader counts its records any more
    forget     the row is removed    after the datastore has deleted the records
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from knnstore.catalog.catalog import Catalog, in_chunks, scope_of
from knnstore.catalog.engine import session
from knnstore.catalog.models import (
    DELETING,
    LIVE,
    PENDING,
    DocumentRow,
    DomainRow,
    SettingRow,
    StoreRow,
    TagRow,
)
from knnstore.catalog.types import TOKEN_BITS, Engine, NewDocument, PlacedDocument
from knnstore.errors import CatalogError, FencedError
from knnstore.failpoints import failpoint

POSITION_LIMIT = 1 << (63 - TOKEN_BITS)
"""Positions are 43-bit: a store takes 8.8e12 tokens in its life, removed ones included."""


class CatalogWriter:
    """The one writer of a catalogue. Making one takes over: any older writer can commit no more."""

    def __init__(self, catalog: Catalog) -> None:
        self._sql = catalog.sql
        with session(self._sql) as current:
            self._epoch = current.scalars(
                update(StoreRow)
                .values(writer_epoch=StoreRow.writer_epoch + 1)
                .returning(StoreRow.writer_epoch)
            ).one()

    @contextmanager
    def _transaction(self, name: str, *, visible: bool = True) -> Iterator[Session]:
        """One fenced transaction; a visible one makes readers look again.

        The fence is the first statement, so it also takes the database's write lock.
        """
        failpoint(f"catalog.{name}.before")
        with session(self._sql) as current:
            mine = current.scalars(
                update(StoreRow)
                .where(StoreRow.writer_epoch == self._epoch)
                .values(revision=StoreRow.revision + int(visible))
                .returning(StoreRow.revision)
            )
            if mine.one_or_none() is None:
                raise FencedError("another writer has taken over this store; open it again to write")
            yield current
            failpoint(f"catalog.{name}.inside")
        failpoint(f"catalog.{name}.after")

    def begin(self, documents: Sequence[NewDocument]) -> list[PlacedDocument]:
        """Allocate positions and insert the documents as pending, in the order given."""
        with self._transaction("begin", visible=False) as current:
            groups = self._groups(current, {document.domain for document in documents})
            total = sum(len(document.tokens) for document in documents)
            end = current.scalars(
                update(StoreRow)
                .values(next_position=StoreRow.next_position + total)
                .returning(StoreRow.next_position)
            ).one()
            if end > POSITION_LIMIT:
                raise CatalogError(f"the store has used up its {POSITION_LIMIT} positions; start a new one")
            rows, start = [], end - total
            for document in documents:
                rows.append(
                    DocumentRow(
                        domain_id=groups[document.domain],
                        external_id=document.id,
                        state=PENDING,
                        start=start,
                        stop=start + len(document.tokens),
                        content_hash=document.content_hash,
                        attributes=dict(document.metadata),
                        tokens=document.tokens.astype("<u4").tobytes(),
                    )
                )
                start += len(document.tokens)
            current.add_all(rows)
            current.flush()
            current.add_all(
                TagRow(document_id=row.id, tag=tag)
                for row, document in zip(rows, documents, strict=True)
                for tag in document.tags
            )
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def publish(self, rows: Sequence[int]) -> None:
        """Make pending documents live; live ones of the same domain and id become deleting."""
        with self._transaction("publish") as current:
            for chunk in in_chunks(rows):
                fresh = select(DocumentRow.domain_id, DocumentRow.external_id).where(
                    DocumentRow.id.in_(chunk)
                )
                identities = {tuple(row) for row in current.execute(fresh)}
                replaced = select(DocumentRow.id, DocumentRow.domain_id, DocumentRow.external_id).where(
                    DocumentRow.state == LIVE,
                    DocumentRow.external_id.in_({id for _, id in identities}),
                )
                old = [row for row, *identity in current.execute(replaced) if tuple(identity) in identities]
                self._set_state(current, old, DELETING)
                self._set_state(current, chunk, LIVE)

    def retire(self, rows: Sequence[int]) -> None:
        """Take live documents away from every reader."""
        with self._transaction("retire") as current:
            for chunk in in_chunks(rows):
                self._set_state(current, chunk, DELETING)

    def unsettled(self) -> list[PlacedDocument]:
        """The documents that are not live: left behind by a crash, replaced or removed."""
        chosen = select(DocumentRow).where(DocumentRow.state != LIVE).order_by(DocumentRow.start)
        with session(self._sql) as current:
            return [
                PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in current.scalars(chosen)
            ]

    def forget(self, rows: Sequence[int]) -> None:
        """Remove rows that are not live, and the domains that no document is left of."""
        with self._transaction("forget") as current:
            for chunk in in_chunks(rows):
                current.execute(
                    delete(DocumentRow).where(DocumentRow.id.in_(chunk), DocumentRow.state != LIVE)
                )
            current.execute(delete(DomainRow).where(DomainRow.id.not_in(select(DocumentRow.domain_id))))

    def describe(self, changes: Mapping[int, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set the metadata and the tags of live documents, by primary key."""
        with self._transaction("describe") as current:
            for row, (metadata, tags) in changes.items():
                current.execute(
                    update(DocumentRow).where(DocumentRow.id == row).values(attributes=dict(metadata))
                )
                current.execute(delete(TagRow).where(TagRow.document_id == row))
                current.add_all(TagRow(document_id=row, tag=tag) for tag in sorted(set(tags)))

    def save_settings(self, domains: Iterable[str], payload: Mapping[str, Any]) -> None:
        """Save settings for exactly this set of domains; the empty set stands for the whole store."""
        with self._transaction("settings") as current:
            current.merge(SettingRow(scope=scope_of(domains), payload=dict(payload)))

    def move(self, engine: Engine) -> None:
        """Point the store at the engine that holds its keys from now on."""
        with self._transaction("move") as current:
            current.execute(
                update(StoreRow).values(
                    adapter=engine.adapter, location=engine.location, params=dict(engine.params)
                )
            )

    @staticmethod
    def _groups(current: Session, names: set[str]) -> dict[str, int]:
        known = {
            row.name: row.id for row in current.scalars(select(DomainRow).where(DomainRow.name.in_(names)))
        }
        fresh = [DomainRow(name=name) for name in sorted(names - known.keys())]
        current.add_all(fresh)
        current.flush()
        return known | {row.name: row.id for row in fresh}

    @staticmethod
    def _set_state(current: Session, rows: Sequence[int], state: str) -> None:
        current.execute(update(DocumentRow).where(DocumentRow.id.in_(rows)).values(state=state))
