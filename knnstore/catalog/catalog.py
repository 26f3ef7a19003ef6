"""Reads of the catalog: the store's identity, documents, domains, tags and settings."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine as SqlEngine
from sqlalchemy import select
from sqlalchemy.engine import URL

from knnstore.catalog import schema
from knnstore.catalog.conditions import build_condition_clause, parse_condition
from knnstore.catalog.connection import (
    connect,
    identify,
    is_sqlite_file,
    render_location,
    run_read_transaction,
    translate_errors,
)
from knnstore.catalog.digests import hash_values
from knnstore.catalog.queries import (
    DOCUMENTS,
    check_names,
    decode_tokens,
    find_altered,
    find_problems,
    group_rows_by_value,
    read_documents,
    read_domains,
    read_engine,
    read_identity,
    read_rows_by_content,
    read_snapshot,
    read_tags,
    restrict_to_live,
    select_among,
    settings_key,
)
from knnstore.catalog.sqlite import Commits, create_private_file, fail_if_changed, take_in_log
from knnstore.catalog.tables import (
    DELETING,
    IS_LIVE,
    IS_UNSETTLED,
    ChecksumRow,
    DocumentRow,
    DomainRow,
    SettingRow,
    StoreRow,
    TagRow,
    TokensRow,
)
from knnstore.catalog.types import (
    Document,
    Domain,
    Engine,
    Identity,
    PlacedDocument,
    Snapshot,
    StoredVersion,
)
from knnstore.errors import CatalogError

_CHECKED_AT_ONCE = 4000
"""Maximum number of documents that one statement of `Catalog.altered` covers."""


class Catalog:
    """Catalog of one store in one database. Thread-safe.

    Use `create` or `open` to construct it.

    Args:
        engine: SQLAlchemy engine of the database; `close` disposes it.

    Raises:
        StoreNotFoundError: the database holds no store.
        SchemaOutdatedError, SchemaTooNewError: the schema differs from this package's.
        StoreUnavailableError: the database cannot be reached.
        CatalogError: the store's identity is damaged.
    """

    def __init__(self, engine: SqlEngine) -> None:
        self.sql = engine
        with ExitStack() as cleanup:
            cleanup.callback(engine.dispose)
            with translate_errors(engine), engine.connect() as connection:
                schema.check_version(connection)
            with run_read_transaction(engine) as session:
                row = session.get(StoreRow, 1)
                if row is None:
                    raise schema.make_not_found_error(engine.url)
                self.identity = read_identity(row)
                self.store_id = row.store_id
            self._commits = Commits(engine) if is_sqlite_file(engine.url) else None
            # Version of the file (see `Commits.version`), and the revision that was read at this version.
            self._cached_revision: tuple[int | None, int] = (None, 0)
            if self._commits is not None:
                cleanup.callback(self._commits.close)
            self.opened = cleanup.pop_all()

    @classmethod
    def create(cls, url: URL, identity: Identity, engine: Engine, *, store_id: str | None = None) -> Self:
        """Create the tables and the store's row in one transaction, and open the catalog.

        Args:
            url: database to create the catalog in.
            identity: model, key and metric of the store.
            engine: adapter that holds the keys.
            store_id: id of the store; None chooses a random id. An existing store with this id that was
                never written to comes from an interrupted creation, so it is created again.

        Raises:
            StoreExistsError: the database already holds a store.
            StoreUnavailableError: the database cannot be reached.
        """
        if is_sqlite_file(url):
            create_private_file(Path(str(url.database)))
        sql = connect(url)
        with ExitStack() as cleanup:
            cleanup.callback(sql.dispose)
            schema.create_store(sql, identity, engine, store_id)
            cleanup.pop_all()
        return cls(sql)

    @classmethod
    def open(cls, url: URL) -> Self:
        """Open an existing catalog.

        Raises:
            StoreNotFoundError: the database holds no store.
            SchemaOutdatedError, SchemaTooNewError: the schema differs from this package's.
            StoreUnavailableError: the database cannot be reached.
        """
        return cls(schema.connect_existing(url))

    def close(self) -> None:
        """Close the connections; releases the writer's lock if this process holds it."""
        self.opened.close()

    def take_in_log(self) -> None:
        """Copy SQLite's write-ahead log into the database file and empty the log; see `sqlite.take_in_log`.

        Does nothing on PostgreSQL and for a database in memory. If readers block the copy or the disk is
        full, the log stays and no error is raised.
        """
        if is_sqlite_file(self.sql.url):
            take_in_log(self.sql)

    def database(self) -> tuple[str, str]:
        """Return an identifier that a copy of the database does not share, and the location for messages.

        The location is the absolute path of a SQLite file; see `render_location` for other databases.
        """
        url = self.sql.url
        location = render_location(url)
        return identify(self.sql), str(Path(location).resolve()) if is_sqlite_file(url) else location

    def revision(self) -> int:
        """Return the revision: a counter in the database that grows with every change that readers can see.

        Every search calls this method. So the revision is cached until `Commits` notices a commit to the
        SQLite file. On PostgreSQL, and where `Commits` cannot notice commits, each call runs a query.
        """
        version = self._commits.version() if self._commits else None
        cached_version, cached_revision = self._cached_revision
        if version is not None and version == cached_version:
            return cached_revision
        with (
            translate_errors(self.sql),
            self.sql.connect() as connection,  # cheaper than a session
            fail_if_changed(connection.connection.driver_connection),
        ):
            revision = int(connection.execute(select(StoreRow.revision)).scalar_one())
        # The version was read before the revision. So a commit between the two reads makes the cache invalid.
        self._cached_revision = version, revision
        return revision

    def engine(self) -> Engine:
        """Return the adapter that holds the keys; `CatalogWriter.move` changes it."""
        with run_read_transaction(self.sql) as session:
            return read_engine(session)

    def snapshot(self) -> Snapshot:
        """Return an immutable snapshot of all live documents at the current revision.

        Raises:
            CatalogError: the positions of documents overlap or are out of range.
        """
        with run_read_transaction(self.sql) as session:
            return read_snapshot(session, has_prefix=self.identity.has_prefix)

    def documents(
        self,
        *,
        domain: str | None = None,
        domains: Sequence[str] | None = None,
        id: str | None = None,
        tag: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> list[Document]:
        """List live documents in the order in which they were added. Unknown names give an empty list.

        Args:
            domain: name of the documents' domain; None allows all.
            domains: names of domains, each allowed; None allows all.
            id: external id of the documents, which several domains may use; None allows all.
            tag: tag that the documents carry; None allows all.
            offset: number of documents to skip; ignored if `limit` is None.
            limit: maximum number of documents; None returns all.

        Raises:
            InputError: a name is not valid, see `check_name`.
        """
        statement = restrict_to_live(DOCUMENTS, domain=domain, id=id, tag=tag)
        if domains is not None:
            names = check_names(domains, "the domain's name")
            statement = statement.where(DomainRow.name.in_(names))
        if limit is not None:
            statement = statement.offset(offset).limit(limit)
        with run_read_transaction(self.sql) as session:
            return list(read_documents(session, session.execute(statement)).values())

    def documents_of(self, rows: Iterable[int]) -> dict[int, Document]:
        """Return the live documents with the primary keys `rows`, by primary key; other keys are left out."""
        with run_read_transaction(self.sql) as session:
            return read_documents(
                session, select_among(session, restrict_to_live(DOCUMENTS), DocumentRow.id, rows)
            )

    def rows(self, *, domain: str | None = None, id: str | None = None, tag: str | None = None) -> list[int]:
        """Return the primary keys of the live documents with a domain, external id and tag, in any order.

        The arguments mean the same as in `documents`; unknown names give an empty list.
        """
        with run_read_transaction(self.sql) as session:
            statement = restrict_to_live(
                select(DocumentRow.id).join(DomainRow), domain=domain, id=id, tag=tag
            )
            return list(session.scalars(statement))

    def rows_by_id(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by external id; unknown ids are left out.

        An id has several keys if several domains hold a document with this id.
        """
        ids = check_names(ids, "the document's id")
        statement = select(DocumentRow.external_id, DocumentRow.id).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return group_rows_by_value(select_among(session, statement, DocumentRow.external_id, ids))

    def rows_by_tag(self, tags: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by tag; unknown tags are left out."""
        tags = check_names(tags, "the tag")
        statement = select(TagRow.tag, TagRow.document_id).join(DocumentRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return group_rows_by_value(select_among(session, statement, TagRow.tag, tags))

    def rows_where(self, condition: str, groups: Collection[int]) -> list[int]:
        """Return the primary keys of the live documents whose metadata meet a condition, in any order.

        Args:
            condition: condition as text; see `knnstore.catalog.conditions`.
            groups: ids of the domains to search.

        Raises:
            ConfigError: the condition is not valid, or too complex for the database.
        """
        is_met = build_condition_clause(
            parse_condition(condition), DocumentRow.attributes, self.sql.dialect.name
        )
        statement = select(DocumentRow.id).where(IS_LIVE, is_met)
        with run_read_transaction(self.sql) as session:
            return [row for (row,) in select_among(session, statement, DocumentRow.domain_id, groups)]

    def labels(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Return (external id, domain) of live documents by primary key; other rows are left out."""
        columns = DocumentRow.id, DocumentRow.external_id, DomainRow.name
        statement = restrict_to_live(select(*columns).join(DomainRow))
        with run_read_transaction(self.sql) as session:
            return {
                row: (id, domain)
                for row, id, domain in select_among(session, statement, DocumentRow.id, rows)
            }

    def tokens(self, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]] | None:
        """Return the token ids of a live document, uint32, shape (n,); None if the row is not live.

        Raises:
            CatalogError: the tokens are damaged.
        """
        with run_read_transaction(self.sql) as session:
            columns = TokensRow.tokens, TokensRow.digest
            statement = select(*columns).join(DocumentRow).where(DocumentRow.id == row, IS_LIVE)
            stored = session.execute(statement).one_or_none()
        return None if stored is None else decode_tokens(*stored)

    def content_hashes(self, rows: Iterable[int]) -> dict[int, str]:
        """Return the content hashes of live documents by primary key; other rows are left out."""
        statement = select(DocumentRow.id, DocumentRow.content_hash).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return dict(select_among(session, statement, DocumentRow.id, rows))

    def texts(self, rows: Iterable[int]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield primary key and token ids, uint32, shape (n,), of live documents, in any order.

        Rows that are not live are left out.

        Raises:
            CatalogError: the tokens of a document are damaged.
        """
        statement = select(DocumentRow.id, TokensRow.tokens, TokensRow.digest).join(TokensRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            for row, blob, digest in select_among(session, statement, DocumentRow.id, rows):
                yield row, decode_tokens(blob, digest)

    def altered(self, rows: Iterable[int]) -> set[int]:
        """Return the primary keys, among `rows`, of live documents whose stored fields were altered.

        A document was altered if its tokens, tags or other fields do not match their digests, or cannot be
        read. Vector keys are not checked. The result is empty if all documents match.
        """
        altered: set[int] = set()
        ordered = sorted(rows)
        chunks = [
            ordered[start : start + _CHECKED_AT_ONCE] for start in range(0, len(ordered), _CHECKED_AT_ONCE)
        ]
        while chunks:
            chunk = chunks.pop()
            try:
                with run_read_transaction(self.sql) as session:
                    altered |= find_altered(session, chunk[0], chunk[-1])
            except CatalogError:  # a value is unreadable: bisect the chunk to find its document
                middle = len(chunk) // 2
                if middle:
                    chunks += [chunk[:middle], chunk[middle:]]
                else:
                    altered |= set(chunk)
        return altered.intersection(ordered)

    def checksums(self) -> dict[int, str]:
        """Return the stored checksums of the live documents' vector keys, by primary key of the document.

        A document without a stored checksum is left out. So the result is empty if the engine checks its keys
        itself, because the store then saves no checksums.
        """
        statement = select(ChecksumRow.document_id, ChecksumRow.keys).join(DocumentRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return dict(session.execute(statement).all())

    def versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """Return primary key, content hash, metadata and tags of a domain's live documents, by external id.

        Ids that the domain does not hold are left out; an unknown domain gives an empty result.

        Raises:
            InputError: a name is not valid, see `check_name`.
        """
        ids = check_names(ids, "a document's id")
        statement = restrict_to_live(select(DocumentRow).join(DomainRow), domain=domain)
        with run_read_transaction(self.sql) as session:
            rows = [row for (row,) in select_among(session, statement, DocumentRow.external_id, ids)]
            tags = read_tags(session, [row.id for row in rows])
            return {
                row.external_id: StoredVersion(
                    row.id, row.content_hash, row.attributes, frozenset(tags.get(row.id, ()))
                )
                for row in rows
            }

    def rows_by_content(self, hashes: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by content hash; unknown hashes are left out."""
        with run_read_transaction(self.sql) as session:
            return read_rows_by_content(session, hashes)

    def domains(self) -> list[Domain]:
        """Return the domains that have a live document, sorted by name."""
        with run_read_transaction(self.sql) as session:
            return read_domains(session, has_prefix=self.identity.has_prefix)

    def unsettled(self) -> list[PlacedDocument]:
        """Return the documents that are pending or deleting, by position; empty if none.

        A writer is adding or removing these documents, or a crash interrupted a writer.
        """
        statement = select(DocumentRow).where(IS_UNSETTLED).order_by(DocumentRow.start)
        with run_read_transaction(self.sql) as session:
            rows = session.scalars(statement)
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def problems(self) -> list[str]:
        """Check the database. Returns one message per problem; an empty list if the database is sound."""
        with run_read_transaction(self.sql) as session:
            return find_problems(session)

    def retired_content(self) -> set[str]:
        """Return the content hashes of the documents in the state "deleting"."""
        with run_read_transaction(self.sql) as session:
            retired = select(DocumentRow.content_hash).where(IS_UNSETTLED, DocumentRow.state == DELETING)
            return set(session.scalars(retired))

    def settings(self, domains: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Return the settings saved for exactly this set of domains; None if none are saved.

        No domains stand for the whole store.

        Raises:
            CatalogError: the settings are damaged.
        """
        with _explain_damaged_settings(), run_read_transaction(self.sql) as session:
            row = session.get(SettingRow, settings_key(domains)[0])
            return None if row is None else _check_settings_row(row)

    def all_settings(self) -> dict[tuple[str, ...], Mapping[str, Any]]:
        """Return all saved settings by their sorted domains; the key () stands for the whole store.

        Raises:
            CatalogError: settings are damaged.
        """
        with _explain_damaged_settings(), run_read_transaction(self.sql) as session:
            return {
                tuple(row.domains): _check_settings_row(row) for row in session.scalars(select(SettingRow))
            }

    def damaged_settings(self) -> list[str]:
        """Return the keys of saved settings that are damaged; empty if none are.

        A key identifies a set of domains, see `SettingRow.scope`. `CatalogWriter.drop_settings` deletes
        settings by these keys.
        """
        damaged = []
        with run_read_transaction(self.sql) as session:
            scopes = list(session.scalars(select(SettingRow.scope)))
        for scope in scopes:
            try:
                with run_read_transaction(self.sql) as session:
                    row = session.get(SettingRow, scope)
                    if row is not None:
                        _check_settings_row(row)
            except CatalogError:
                damaged.append(scope)
        return damaged


@contextmanager
def _explain_damaged_settings() -> Iterator[None]:
    """Convert a CatalogError in the block to a CatalogError that says how to repair the saved settings."""
    try:
        yield
    except CatalogError as error:
        raise CatalogError(
            "settings that are saved in the catalog are damaged: restore it from a backup, or drop them with "
            "`knnstore calibrate --reset` and calibrate anew"
        ) from error


def _check_settings_row(row: SettingRow) -> Mapping[str, Any]:
    """Return the settings of a row; raises CatalogError if they do not match the row's digest or key."""
    if row.digest != hash_values(row.domains, row.payload) or row.scope != settings_key(row.domains)[0]:
        raise CatalogError("saved settings were altered")
    return row.payload
