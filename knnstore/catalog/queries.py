"""Queries of the catalog (the SQL database of a store) that `Catalog` and `CatalogWriter` share.

The functions whose names begin with `read_` run queries in the caller's session, and check the results. The
other functions build statements or convert values. *Live* documents are completely stored and not removed.
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
    hash_bytes,
    hash_document_fields,
    hash_store_identity,
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


def split_into_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Divide values into lists of at most 500 values, and yield the lists.

    The order of the values is kept. Without values, nothing is yielded.
    """
    listed = list(values)
    return (listed[start : start + MANY] for start in range(0, len(listed), MANY))


def select_among(
    session: Session,
    statement: Select[*tuple[Any, ...]],
    column: InstrumentedAttribute[Any],
    values: Iterable[Any],
) -> Iterator[Row[*tuple[Any, ...]]]:
    """Run a SELECT statement, restricted to rows with certain values in a column, and yield the rows.

    There may be too many values for one statement, so the statement runs once for every 500 values. The rows
    are therefore not ordered as a whole, even if the statement has an ORDER BY.

    Args:
        session: session in which the statement runs.
        statement: SELECT statement to restrict.
        column: column that must have one of the values.
        values: allowed values; if empty, no statement runs and no row is yielded.
    """
    for chunk in split_into_chunks(values):
        yield from session.execute(statement.where(column.in_(chunk)))


def group_rows_by_value(rows: Iterable[Any]) -> dict[str, list[int]]:
    """Convert pairs (value, primary key) to a dict from each value to the list of its primary keys.

    The keys of a value are in the order of the pairs.

    Args:
        rows: pairs (value, primary key), for example rows of a query.
    """
    keys_by_value: dict[str, list[int]] = {}
    for value, row in rows:
        keys_by_value.setdefault(value, []).append(row)
    return keys_by_value


def check_names(names: Iterable[str], noun: str) -> list[str]:
    """Check that names are valid, and return them as a list in the same order.

    Args:
        names: names to check, for example of domains.
        noun: noun for a name in the error message, for example "the tag".

    Raises:
        InputError: a name is not valid, see `check_name`.
    """
    listed = list(names)
    for name in listed:
        check_name(name, noun)
    return listed


def convert_to_utc(moment: datetime) -> datetime:
    """Convert a time that was read from the database to UTC.

    A time without a time zone is taken as UTC, because SQLite does not store the time zone.
    """
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)


def build_settings_key(domains: Iterable[str]) -> tuple[str, list[str]]:
    """Return the primary key under which settings for a set of domains are saved, and the sorted names.

    The primary key is the SHA-256 of the sorted names in JSON, 64 hexadecimal digits.

    Args:
        domains: names of the domains; duplicates count once. Empty stands for the whole store.
    """
    names = sorted(set(domains))
    return hashlib.sha256(json.dumps(names).encode()).hexdigest(), names


def filter_live_documents(
    statement: Select[*tuple[Any, ...]],
    *,
    domain: str | None = None,
    id: str | None = None,
    tag: str | None = None,
) -> Select[*tuple[Any, ...]]:
    """Restrict a SELECT statement to live documents that match all arguments, and return the new statement.

    Live documents are completely stored and not removed.

    Args:
        statement: statement that selects from the tables of documents and domains; it is not changed.
        domain: name of the documents' domain; None allows all domains.
        id: id that the user gave the documents; None allows all ids.
        tag: tag that the documents carry; None allows documents with any tags or none.

    Raises:
        InputError: a name is not valid, see `check_name`.
    """
    statement = statement.where(IS_LIVE)
    if domain is not None:
        check_name(domain, "the domain's name")
        statement = statement.where(DomainRow.name == domain)
    if id is not None:
        check_name(id, "the document's id")
        statement = statement.where(DocumentRow.external_id == id)
    if tag is not None:
        check_name(tag, "the tag")
        statement = statement.where(DocumentRow.id.in_(select(TagRow.document_id).where(TagRow.tag == tag)))
    return statement


def read_tags(session: Session, rows: Iterable[int]) -> dict[int, list[str]]:
    """Return a dict from primary key to the tags of the document, in any order.

    Args:
        session: session in which the query runs.
        rows: primary keys of documents; documents without tags are left out of the result.
    """
    tags: dict[int, list[str]] = {}
    for row, tag in select_among(session, select(TagRow.document_id, TagRow.tag), TagRow.document_id, rows):
        tags.setdefault(row, []).append(tag)
    return tags


def read_rows_by_content(session: Session, hashes: Iterable[str]) -> dict[str, list[int]]:
    """Return a dict from hash to the primary keys of the live documents whose text has this SHA-256.

    A live document is completely stored and not removed.

    Args:
        session: session in which the query runs.
        hashes: SHA-256 of texts, hexadecimal. Hashes without a document are left out of the result.
    """
    unique_hashes = set(hashes)
    statement = select(DocumentRow.content_hash, DocumentRow.id).where(IS_LIVE)
    # Content hashes have no index, so each statement scans all documents. Many hashes share one scan.
    if len(unique_hashes) > MANY:
        return group_rows_by_value(row for row in session.execute(statement) if row[0] in unique_hashes)
    return group_rows_by_value(select_among(session, statement, DocumentRow.content_hash, unique_hashes))


def read_documents(session: Session, rows: Iterable[Any]) -> dict[int, Document]:
    """Convert database rows to `Document` objects, and return a dict from primary key to object.

    Args:
        session: session in which the tags of the documents are read.
        rows: pairs (row of the document, name of its domain), as the statement `DOCUMENTS` selects them.
    """
    listed = list(rows)
    tags = read_tags(session, [row.id for row, _ in listed])
    return {
        row.id: Document(
            id=row.external_id,
            domain=name,
            tokens=row.stop - row.start,
            tags=tuple(sorted(tags.get(row.id, ()))),
            metadata=row.attributes,
            content_hash=row.content_hash,
            added_at=convert_to_utc(row.added_at).isoformat(),
        )
        for row, name in listed
    }


def read_domains(session: Session, *, has_prefix: bool) -> list[Domain]:
    """Return the domains that have a live document, sorted by name, with their totals.

    A live document is completely stored and not removed. The totals are numbers of documents, tokens and
    records. A record is a stored token with its vector key; in a store without keys, the number of records is
    0.

    Args:
        session: session in which the queries run.
        has_prefix: True if the first token of a document has a record, because the model puts a prefix token
            before every document.
    """
    tokens = func.sum(DocumentRow.stop - DocumentRow.start)
    records = func.sum(count_records_clause(has_prefix=has_prefix))
    statement = (
        select(DomainRow.name, func.count(), tokens, records)
        .select_from(DomainRow)
        .join(DocumentRow)
        .where(IS_LIVE)
        .group_by(DomainRow.name)
    )
    rows = session.execute(statement).all()
    domains = [Domain(name, *map(int, sums)) for name, *sums in rows]
    if read_engine(session).is_keyless:
        domains = [replace(domain, records=0) for domain in domains]
    return sorted(domains, key=attrgetter("name"))  # not in SQL: databases order text differently


def read_engine(session: Session) -> Engine:
    """Read name, location and parameters of the vector engine that holds the store's keys.

    Args:
        session: session in which the query runs.

    Raises:
        CatalogError: the stored values are damaged.
    """
    row = session.get_one(StoreRow, 1)
    are_texts = all(isinstance(text, str) and "\0" not in text for text in (row.adapter, row.location))
    if not (are_texts and isinstance(row.params, dict)):
        raise CatalogError(
            "the catalog is damaged: it does not say where the keys are; restore it from a backup"
        )
    return Engine(row.adapter, row.location, row.params)


def read_identity(row: StoreRow) -> Identity:
    """Convert the store's row to its identity: the model and the parameters for which it was created.

    The type and range of each value are checked, because SQLite stores any value in any column.

    Args:
        row: the only row of the table of the store.

    Raises:
        CatalogError: a value is invalid, or the digest of the identity and the engine's parameters differs.
    """
    values = {name: getattr(row, name) for name in Identity.__slots__}
    for name, kind in get_type_hints(Identity).items():
        if not isinstance(values[name], kind) or (kind is int and not 0 < values[name] <= TOKEN_LIMIT):
            raise CatalogError(
                f"the catalog is damaged: {name} of the store is not valid; restore it from a backup"
            )
    if values["metric"] not in {metric.value for metric in Metric}:
        raise CatalogError(
            "the catalog is damaged: metric of the store is not valid; restore it from a backup"
        )
    identity = Identity(**values)
    if not isinstance(row.params, dict) or row.digest != hash_store_identity(identity, row.params):
        raise CatalogError(
            "the catalog is damaged: the store's model and settings, or its engine's "
            "parameters, were altered; restore it from a backup"
        )
    return identity


def read_snapshot(session: Session, *, has_prefix: bool) -> Snapshot:
    """Read the positions and domains of all live documents as immutable arrays.

    A live document is completely stored and not removed.

    Args:
        session: session of `run_read_transaction`, so that all queries see the same state of the database.
        has_prefix: True if the first token of a document has a record, because the model puts a prefix token
            before every document.

    Raises:
        CatalogError: the positions of documents overlap or are out of range.
    """
    records = count_records_clause(has_prefix=has_prefix)
    documents = (
        select(DocumentRow.id, DocumentRow.domain_id, DocumentRow.start, DocumentRow.stop, records)
        .where(IS_LIVE)
        .order_by(DocumentRow.start, DocumentRow.stop)  # an empty document precedes one with the same start
    )
    domains = select(DomainRow.name, DomainRow.id).where(
        DomainRow.id.in_(select(DocumentRow.domain_id).where(IS_LIVE))
    )
    revision = session.scalars(select(StoreRow.revision)).one()
    values = chain.from_iterable(session.execute(documents))
    table = np.fromiter(values, np.int64).reshape(-1, 5).T.copy()
    table.setflags(write=False)
    _, _, starts, stops, _ = table
    borders = np.stack([starts, stops], axis=1).ravel()
    if (np.diff(borders, prepend=0) < 0).any() or (borders > POSITION_LIMIT).any():
        raise CatalogError("the catalog is damaged: positions of documents overlap; restore it from a backup")
    rows, groups, starts, stops, counts = table
    engine, names = read_engine(session), dict(session.execute(domains).all())
    if engine.is_keyless:
        counts = np.zeros_like(counts)
    return Snapshot(revision, engine, rows, groups, starts, stops, counts, names)


def count_records_clause(*, has_prefix: bool) -> ColumnElement[int]:
    """Build the SQL expression for the number of records of a document.

    A document has one record for each token that has a predecessor.

    Args:
        has_prefix: True if the model puts a prefix token before every document, so that all tokens have a
            predecessor. False if the first token of a document has no predecessor.
    """
    tokens = DocumentRow.stop - DocumentRow.start
    # Without a prefix, the first token has no predecessor and so no record.
    return tokens if has_prefix else case((tokens > 0, tokens - 1), else_=tokens)


def find_problems(session: Session) -> list[str]:
    """Check the database for damage, and return one message for each problem.

    The function runs SQLite's integrity check (PostgreSQL has none), which reports at most 5 problems. It
    also checks the counter from which the next new document gets its positions: it must not be below the end
    of a stored document, and not above `POSITION_LIMIT`. The list is empty if no problem is found.

    Args:
        session: session in which the queries run.
    """
    problems = []
    if session.get_bind().dialect.name == "sqlite":
        report = "\n".join(session.scalars(text("PRAGMA integrity_check(5)")))
        problems = [line for line in report.splitlines() if line not in ("ok", "*** in database main ***")]
    last_used = select(func.max(DocumentRow.stop)).scalar_subquery()
    next_position, last_stop = session.execute(select(StoreRow.next_position, last_used)).one()
    if next_position < (last_stop or 0):
        problems.append("positions would be used twice")
    if next_position > POSITION_LIMIT:
        problems.append("the counter of positions is above its limit")
    return [f"the catalog is damaged, restore it from a backup: {line}" for line in problems]


def decode_tokens(blob: bytes, digest: str) -> NDArray[np.uint32]:
    """Convert the stored bytes of a document's tokens to token ids: a read-only array, uint32, shape (n,).

    Args:
        blob: stored bytes, four for each token.
        digest: stored digest (checksum) of the bytes.

    Raises:
        CatalogError: the stored bytes do not match their digest.
    """
    if not isinstance(blob, bytes) or hash_bytes(blob) != digest:
        raise CatalogError(
            "the tokens of a document are damaged: `knnstore verify` names it; remove it and add it again"
        )
    return np.frombuffer(blob, "<u4")


def find_altered(session: Session, first: int, last: int) -> set[int]:
    """Return the primary keys of live documents whose stored values do not match their digests (checksums).

    A document is live if it was stored completely and has not been removed. The digests cover tokens, tags
    and the other fields, not the vector keys. If a stored value has a wrong type, an exception is raised,
    which `run_transaction` converts to CatalogError.

    Args:
        session: session in which the queries run.
        first: smallest primary key to check.
        last: largest primary key to check.
    """
    statement = (
        select(DocumentRow, DomainRow.name, TokensRow)
        .outerjoin(DomainRow, DomainRow.id == DocumentRow.domain_id)
        .outerjoin(TokensRow, TokensRow.document_id == DocumentRow.id)
        .where(IS_LIVE, DocumentRow.id.between(first, last))
        .execution_options(yield_per=100)  # limits how many texts are in memory
    )
    tags: dict[int, list[str]] = {}
    tags_statement = select(TagRow.document_id, TagRow.tag).where(TagRow.document_id.between(first, last))
    for document, tag in session.execute(tags_statement):
        tags.setdefault(document, []).append(tag)
    altered = set()
    for row, domain, tokens in session.execute(statement):
        is_intact = (
            tokens is not None
            and tokens.digest == hash_bytes(tokens.tokens)
            and row.digest == compute_document_digest(row, domain, tags.get(row.id, ()), tokens.digest)
        )
        if not is_intact:
            altered.add(row.id)
    return altered


def compute_document_digest(row: DocumentRow, domain: str, tags: Iterable[str], tokens: str) -> str:
    """Compute the digest (checksum) of a document from the fields of its row, 32 hexadecimal digits.

    Args:
        row: the document's row; its stored digest is not used.
        domain: name of the document's domain.
        tags: tags of the document, in any order.
        tokens: stored digest of the document's tokens.
    """
    return hash_document_fields(
        id=row.external_id,
        domain=domain,
        start=row.start,
        stop=row.stop,
        content_hash=row.content_hash,
        metadata=row.attributes,
        tags=tags,
        tokens=tokens,
    )
