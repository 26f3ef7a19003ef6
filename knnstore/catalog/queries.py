"""Queries of the catalog that `Catalog` and `CatalogWriter` share.

The `read_` functions run queries in the caller's session and check the rows. The others build statements, or
convert values.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Row, Select, case, func, select, text
from sqlalchemy.orm import InstrumentedAttribute, Session

from knnstore.catalog.digests import (
    digest_of_bytes,
    digest_of_document,
    digest_of_store,
)
from knnstore.catalog.tables import IS_LIVE, DocumentRow, DomainRow, StoreRow, TagRow, TokensRow
from knnstore.catalog.types import Document, Domain, Engine, Identity, Snapshot
from knnstore.checks import check_name
from knnstore.datastore import POSITION_LIMIT, TOKEN_LIMIT, Metric
from knnstore.errors import CatalogError

MANY = 500
"""Maximum number of values bound in one statement, far below SQLite's limit."""

DOCUMENTS = select(DocumentRow, DomainRow.name).join(DomainRow).order_by(DocumentRow.start)
"""Statement that selects documents with the names of their domains, in the order of their positions."""


def in_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Split values into lists of at most `MANY`; empty input gives no list."""
    listed = list(values)
    return (listed[at : at + MANY] for at in range(0, len(listed), MANY))


def among(
    current: Session,
    chosen: Select[*tuple[Any, ...]],
    column: InstrumentedAttribute[Any],
    values: Iterable[Any],
) -> Iterator[Row[*tuple[Any, ...]]]:
    """Yield the rows of a statement where `column` has one of `values`; runs it once per `MANY` values."""
    for chunk in in_chunks(values):
        yield from current.execute(chosen.where(column.in_(chunk)))


def by_value(rows: Iterable[Any]) -> dict[str, list[int]]:
    """Group primary keys by value. Each row is a pair of a value and a primary key."""
    found: dict[str, list[int]] = {}
    for value, row in rows:
        found.setdefault(value, []).append(row)
    return found


def checked_names(names: Iterable[str], what: str) -> list[str]:
    """Return the names as a list.

    Raises:
        InputError: a name is not valid, see `check_name`; the message calls it `what`.
    """
    listed = list(names)
    for name in listed:
        check_name(name, what)
    return listed


def utc(moment: datetime) -> datetime:
    """Convert a stored time to UTC. SQLite drops the time zone, so a time without one is taken as UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)


def scope_of(domains: Iterable[str]) -> tuple[str, list[str]]:
    """Return the key of the settings for a set of domains, and the names of the domains, sorted.

    The key is the SHA-256 of the sorted names. No domains stand for the whole store.
    """
    names = sorted(set(domains))
    return hashlib.sha256(json.dumps(names).encode()).hexdigest(), names


def live_documents(
    chosen: Select[*tuple[Any, ...]],
    *,
    domain: str | None = None,
    id: str | None = None,
    tag: str | None = None,
) -> Select[*tuple[Any, ...]]:
    """Restrict a statement over documents and domains to live documents.

    Args:
        chosen: statement to restrict.
        domain: name of the documents' domain; None allows all.
        id: external id of the documents; None allows all.
        tag: tag that the documents carry; None allows all.

    Raises:
        InputError: a name is not valid, see `check_name`.
    """
    chosen = chosen.where(IS_LIVE)
    if domain is not None:
        check_name(domain, "the domain's name")
        chosen = chosen.where(DomainRow.name == domain)
    if id is not None:
        check_name(id, "the document's id")
        chosen = chosen.where(DocumentRow.external_id == id)
    if tag is not None:
        check_name(tag, "the tag")
        chosen = chosen.where(DocumentRow.id.in_(select(TagRow.document_id).where(TagRow.tag == tag)))
    return chosen


def read_tags(current: Session, rows: Iterable[int]) -> dict[int, list[str]]:
    """Return the tags of documents by primary key; documents without tags are left out."""
    tags: dict[int, list[str]] = {}
    for row, tag in among(current, select(TagRow.document_id, TagRow.tag), TagRow.document_id, rows):
        tags.setdefault(row, []).append(tag)
    return tags


def read_rows_by_content(current: Session, hashes: Iterable[str]) -> dict[str, list[int]]:
    """Return the primary keys of the live documents with each content hash; absent hashes are left out."""
    wanted = set(hashes)
    chosen = select(DocumentRow.content_hash, DocumentRow.id).where(IS_LIVE)
    # Content hashes have no index, so each statement scans all documents. Many hashes share one scan.
    if len(wanted) > MANY:
        return by_value(row for row in current.execute(chosen) if row[0] in wanted)
    return by_value(among(current, chosen, DocumentRow.content_hash, wanted))


def read_documents(current: Session, rows: Iterable[Any]) -> dict[int, Document]:
    """Return documents by primary key. Each row is a pair of a document and its domain's name."""
    listed = list(rows)
    tags = read_tags(current, [row.id for row, _ in listed])
    return {
        row.id: Document(
            id=row.external_id,
            domain=name,
            tokens=row.stop - row.start,
            tags=tuple(sorted(tags.get(row.id, ()))),
            metadata=row.attributes,
            content_hash=row.content_hash,
            added_at=utc(row.added_at).isoformat(),
        )
        for row, name in listed
    }


def read_domains(current: Session, *, has_prefix: bool) -> list[Domain]:
    """Return the domains that have a live document, sorted by name."""
    tokens = func.sum(DocumentRow.stop - DocumentRow.start)
    records = func.sum(records_of_document(has_prefix=has_prefix))
    chosen = (
        select(DomainRow.name, func.count(), tokens, records)
        .select_from(DomainRow)
        .join(DocumentRow)
        .where(IS_LIVE)
        .group_by(DomainRow.name)
    )
    rows = current.execute(chosen).all()
    domains = [Domain(name, *map(int, sums)) for name, *sums in rows]
    if read_engine(current).is_keyless:
        domains = [replace(domain, records=0) for domain in domains]
    return sorted(domains, key=attrgetter("name"))  # not in SQL: databases order text differently


def read_engine(current: Session) -> Engine:
    """Return the adapter that holds the keys, with its location and parameters.

    Raises:
        CatalogError: the stored values are damaged.
    """
    row = current.get_one(StoreRow, 1)
    texts = all(isinstance(text, str) and "\0" not in text for text in (row.adapter, row.location))
    if not (texts and isinstance(row.params, dict)):
        raise CatalogError(
            "the catalog is damaged: it does not say where the keys are; restore it from a backup"
        )
    return Engine(row.adapter, row.location, row.params)


def read_identity(row: StoreRow) -> Identity:
    """Return the store's identity.

    The type and range of each value are checked, because SQLite stores any value in any column.

    Raises:
        CatalogError: a value is invalid, or the digest of the identity and the engine's parameters differs.
    """
    values = {name: getattr(row, name) for name in Identity.__slots__}
    for name, kind in get_type_hints(Identity).items():
        if not isinstance(values[name], kind) or (kind is int and not 0 < values[name] <= TOKEN_LIMIT):
            raise CatalogError(f"the catalog is damaged: {name} of the store; restore it from a backup")
    if values["metric"] not in {metric.value for metric in Metric}:
        raise CatalogError("the catalog is damaged: metric of the store; restore it from a backup")
    identity = Identity(**values)
    if not isinstance(row.params, dict) or row.digest != digest_of_store(identity, row.params):
        raise CatalogError(
            "the catalog is damaged: what the store was made for, or its engine's "
            "parameters, were altered; restore it from a backup"
        )
    return identity


def read_snapshot(current: Session, *, has_prefix: bool) -> Snapshot:
    """Return the live documents at one revision. The session must be one of `reading`.

    Raises:
        CatalogError: the positions of documents overlap or are out of range.
    """
    records = records_of_document(has_prefix=has_prefix)
    documents = (
        select(DocumentRow.id, DocumentRow.domain_id, DocumentRow.start, DocumentRow.stop, records)
        .where(IS_LIVE)
        .order_by(DocumentRow.start, DocumentRow.stop)  # an empty document precedes one with the same start
    )
    domains = select(DomainRow.name, DomainRow.id).where(
        DomainRow.id.in_(select(DocumentRow.domain_id).where(IS_LIVE))
    )
    revision = current.scalars(select(StoreRow.revision)).one()
    values = chain.from_iterable(current.execute(documents))
    table = np.fromiter(values, np.int64).reshape(-1, 5).T.copy()
    table.setflags(write=False)
    _, _, starts, stops, _ = table
    borders = np.stack([starts, stops], axis=1).ravel()
    if (np.diff(borders, prepend=0) < 0).any() or (borders > POSITION_LIMIT).any():
        raise CatalogError("the catalog is damaged: positions of documents overlap; restore it from a backup")
    rows, groups, starts, stops, counts = table
    engine, names = read_engine(current), dict(current.execute(domains).all())
    if engine.is_keyless:
        counts = np.zeros_like(counts)
    return Snapshot(revision, engine, rows, groups, starts, stops, counts, names)


def records_of_document(*, has_prefix: bool) -> ColumnElement[int]:
    """Build the SQL expression for a document's number of records."""
    tokens = DocumentRow.stop - DocumentRow.start
    # Without a prefix, the first token has no predecessor and so no record.
    return tokens if has_prefix else case((tokens > 0, tokens - 1), else_=tokens)


def read_problems(current: Session) -> list[str]:
    """Check the database. Returns one message per problem; none if the database is sound.

    Runs SQLite's integrity check, and checks that the position counter is beyond every used position.
    """
    found = []
    if current.get_bind().dialect.name == "sqlite":
        said = "\n".join(current.scalars(text("PRAGMA integrity_check(5)")))
        found = [line for line in said.splitlines() if line not in ("ok", "*** in database main ***")]
    last_used = select(func.max(DocumentRow.stop)).scalar_subquery()
    given, used = current.execute(select(StoreRow.next_position, last_used)).one()
    if not (used or 0) <= given <= POSITION_LIMIT:
        found.append("positions would be given twice")
    return [f"the catalog is damaged, restore it from a backup: {line}" for line in found]


def unpacked(blob: bytes, digest: str) -> NDArray[np.uint32]:
    """Decode a document's tokens to uint32, shape (n,).

    Raises:
        CatalogError: the stored bytes do not match their digest.
    """
    if not isinstance(blob, bytes) or digest_of_bytes(blob) != digest:
        raise CatalogError(
            "the tokens of a document are damaged: `knnstore verify` names it; remove it and add it again"
        )
    return np.frombuffer(blob, "<u4")


def read_altered(current: Session, first: int, last: int) -> set[int]:
    """Find live documents whose digests do not match, with primary keys from `first` to `last`.

    Returns their primary keys. The digests cover tokens, tags and the other fields, not the vector keys.
    """
    chosen = (
        select(DocumentRow, DomainRow.name, TokensRow)
        .outerjoin(DomainRow, DomainRow.id == DocumentRow.domain_id)
        .outerjoin(TokensRow, TokensRow.document_id == DocumentRow.id)
        .where(IS_LIVE, DocumentRow.id.between(first, last))
        .execution_options(yield_per=100)  # limits how many texts are in memory
    )
    tags: dict[int, list[str]] = {}
    chosen_tags = select(TagRow.document_id, TagRow.tag).where(TagRow.document_id.between(first, last))
    for document, tag in current.execute(chosen_tags):
        tags.setdefault(document, []).append(tag)
    altered = set()
    for row, domain, tokens in current.execute(chosen):
        sound = (
            tokens is not None
            and tokens.digest == digest_of_bytes(tokens.tokens)
            and row.digest == document_digest(row, domain, tags.get(row.id, ()), tokens.digest)
        )
        if not sound:
            altered.add(row.id)
    return altered


def document_digest(row: DocumentRow, domain: str, tags: Iterable[str], tokens: str) -> str:
    """Compute the digest of a document from its row, domain name, tags and the digest of its tokens."""
    return digest_of_document(
        id=row.external_id,
        domain=domain,
        start=row.start,
        stop=row.stop,
        content_hash=row.content_hash,
        metadata=row.attributes,
        tags=tags,
        tokens=tokens,
    )
