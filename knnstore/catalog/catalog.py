"""Reading the catalog, the SQL database of a store: its identity, documents, domains, tags and settings.

A document is *live* from the moment when it is completely stored until it is removed. Only live documents
are visible to readers. Its *external id* is the id that the user chose, unique in its domain; its *primary
key* is the number of its row in the database.
"""

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
    create_durable_engine,
    identify_database,
    is_sqlite_file,
    render_location,
    run_read_transaction,
    translate_errors,
)
from knnstore.catalog.digests import hash_values
from knnstore.catalog.queries import (
    DOCUMENTS,
    build_settings_key,
    check_names,
    decode_tokens,
    filter_live_documents,
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
    select_among,
)
from knnstore.catalog.sqlite import Commits, create_private_file, fail_if_changed, take_in_log
from knnstore.catalog.tables import (
    DELETING,
    IS_LIVE,
    IS_UNSETTLED,
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
from knnstore.catalog.types import (
    Document,
    Domain,
    Engine,
    Identity,
    Lease,
    PlacedDocument,
    Snapshot,
    StoredVersion,
)
from knnstore.errors import CatalogError

_CHECKED_AT_ONCE = 4000
"""Maximum number of documents that one statement of `Catalog.find_damaged_documents` covers."""


class Catalog:
    """The SQL database of one store, opened for reading. Thread-safe.

    The catalog holds the store's documents, domains, tags, tokens, settings and API keys. The vector keys are
    in the datastore. `CatalogWriter` makes changes. Use `create` or `open` to construct a catalog. A document
    is *live* if it is completely stored and not removed; most methods return only live documents.

    Args:
        engine: SQLAlchemy engine of the database; `close` disposes it.

    Raises:
        StoreNotFoundError: the database holds no store.
        SchemaOutdatedError, SchemaTooNewError: the tables were made by an older or newer version of knnstore.
        StoreUnavailableError: the database cannot be reached.
        CatalogError: the store's identity (its model and parameters) is damaged.
    """

    def __init__(self, engine: SqlEngine) -> None:
        self._engine: SqlEngine | None = engine
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
            # Version of the file (see `Commits.read_data_version`), and the revision that was read at this
            # version.
            self._cached_revision: tuple[int | None, int] = (None, 0)
            if self._commits is not None:
                cleanup.callback(self._commits.close)
            self.opened = cleanup.pop_all()

    @classmethod
    def create(cls, url: URL, identity: Identity, engine: Engine, *, store_id: str | None = None) -> Self:
        """Create the tables and the description of a new store in one transaction, and open the catalog.

        The catalog is the SQL database of the store.

        Args:
            url: database in which the tables are created.
            identity: model and parameters of the store, which never change.
            engine: vector engine that holds the keys: name, location and parameters.
            store_id: id of the store; None chooses a random id. If the database already holds a store with
                this id that was never opened for writing, its creation was interrupted, and the store is
                created again.

        Raises:
            StoreExistsError: the database already holds another store, or the store with this id was opened
                for writing before.
            StoreUnavailableError: the database cannot be reached.
        """
        if is_sqlite_file(url):
            create_private_file(Path(str(url.database)))
        sql = create_durable_engine(url)
        with ExitStack() as cleanup:
            cleanup.callback(sql.dispose)
            schema.create_store(sql, identity, engine, store_id)
            cleanup.pop_all()
        return cls(sql)

    @classmethod
    def open(cls, url: URL) -> Self:
        """Open the catalog of an existing store.

        Args:
            url: database of the catalog.

        Raises:
            StoreNotFoundError: the database holds no store.
            SchemaOutdatedError, SchemaTooNewError: the tables were made by an older or newer version of
                knnstore.
            StoreUnavailableError: the database cannot be reached.
        """
        return cls(schema.connect_existing(url))

    def close(self) -> None:
        """Close all connections to the database. Any later use raises CatalogError.

        On PostgreSQL, this also releases the writer's lock if a `CatalogWriter` of this catalog holds it.
        """
        self.opened.close()
        self._engine = None

    @property
    def sql(self) -> SqlEngine:
        """SQLAlchemy engine of the database. Raises CatalogError if the catalog was closed."""
        if self._engine is None:
            raise CatalogError("the store is closed: open it again")
        return self._engine

    def take_in_log(self) -> None:
        """Copy SQLite's write-ahead log (file ``-wal``) into the database file, and empty the log.

        Does nothing on PostgreSQL and for a database in memory. If readers block the copy or the disk is
        full, the log is not changed, and no error is raised.
        """
        if is_sqlite_file(self.sql.url):
            take_in_log(self.sql)

    def identify_database(self) -> tuple[str, str]:
        """Return an identifier of the database, and the location of the database as text for messages.

        A copy of the database has another identifier. The location of a SQLite file is its absolute path. The
        location of a database in memory is ":memory:". The location of a PostgreSQL database is its URL
        without options and with *** in place of the password.
        """
        url = self.sql.url
        location = render_location(url)
        return identify_database(self.sql), str(Path(location).resolve()) if is_sqlite_file(url) else location

    def revision(self) -> int:
        """Return the store's revision: a counter that grows with every change that readers can see.

        Every search calls this method. On SQLite, the revision is cached until another connection commits a
        change to the file. On PostgreSQL, each call runs a query.
        """
        version = self._commits.read_data_version() if self._commits else None
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
        """Return the name, location and parameters of the vector engine that holds the store's keys.

        `CatalogWriter.move` changes this engine.
        """
        with run_read_transaction(self.sql) as session:
            return read_engine(session)

    def snapshot(self) -> Snapshot:
        """Return the positions and domains of all live documents, as immutable arrays.

        A position is the number of a token in the store. Live documents are completely stored and not
        removed. All values belong to the same revision (state of the store).

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
        """List live documents that match all arguments, in the order in which they were added.

        Live documents are completely stored and not removed. Unknown names give an empty list.

        Args:
            domain: name of the documents' domain; None allows all domains.
            domains: names of several allowed domains; None allows all domains, and an empty sequence gives an
                empty list. If `domain` is given too, documents must match both arguments.
            id: id that the user gave the documents; several domains may have a document with this id. None
                allows all ids.
            tag: tag that the documents carry; None allows documents with any tags or none.
            offset: number of documents to skip; ignored if `limit` is None.
            limit: maximum number of documents; None returns all.

        Raises:
            InputError: a name is not valid, see `check_name`.
        """
        statement = filter_live_documents(DOCUMENTS, domain=domain, id=id, tag=tag)
        if domains is not None:
            names = check_names(domains, "the domain's name")
            statement = statement.where(DomainRow.name.in_(names))
        if limit is not None:
            statement = statement.offset(offset).limit(limit)
        with run_read_transaction(self.sql) as session:
            return list(read_documents(session, session.execute(statement)).values())

    def documents_by_row(self, rows: Iterable[int]) -> dict[int, Document]:
        """Return a dict from primary key to the description of the document, for live documents.

        A live document is completely stored and not removed. Its primary key is the number of its row in the
        database.

        Args:
            rows: primary keys; keys of unknown or removed documents are left out of the result.
        """
        with run_read_transaction(self.sql) as session:
            return read_documents(
                session, select_among(session, filter_live_documents(DOCUMENTS), DocumentRow.id, rows)
            )

    def rows(self, *, domain: str | None = None, id: str | None = None) -> list[int]:
        """Return the primary keys (row numbers in the database) of live documents, in any order.

        A live document is completely stored and not removed. The documents must match all arguments. Unknown
        names give an empty list.

        Args:
            domain: name of the documents' domain; None allows all domains.
            id: id that the user gave the documents; None allows all ids.

        Raises:
            InputError: a name is not valid, see `check_name`.
        """
        with run_read_transaction(self.sql) as session:
            statement = filter_live_documents(select(DocumentRow.id).join(DomainRow), domain=domain, id=id)
            return list(session.scalars(statement))

    def rows_by_id(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Return a dict from document id to the primary keys of the live documents with this id.

        A live document is completely stored and not removed. Its primary key is the number of its row in the
        database.

        Args:
            ids: ids that the user gave the documents.

        Returns:
            For each id the primary keys of its documents: several keys if several domains have a document
            with this id. Unknown ids are left out.
        """
        ids = check_names(ids, "the document's id")
        statement = select(DocumentRow.external_id, DocumentRow.id).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return group_rows_by_value(select_among(session, statement, DocumentRow.external_id, ids))

    def rows_by_tag(self, tags: Iterable[str]) -> dict[str, list[int]]:
        """Return a dict from tag to the primary keys of the live documents that carry the tag.

        A live document is completely stored and not removed. Its primary key is the number of its row in the
        database.

        Args:
            tags: tags (labels of documents). Tags that no live document has are left out of the result.

        Raises:
            InputError: a tag is not valid, see `check_name`.
        """
        tags = check_names(tags, "the tag")
        statement = select(TagRow.tag, TagRow.document_id).join(DocumentRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return group_rows_by_value(select_among(session, statement, TagRow.tag, tags))

    def rows_where(self, condition: str, groups: Collection[int]) -> list[int]:
        """Return the primary keys of the live documents whose metadata meet a condition, in any order.

        A live document is completely stored and not removed.

        Args:
            condition: condition as text, for example ``year >= 2020``; see `knnstore.catalog.conditions`.
            groups: primary keys of the domains whose documents are tested; empty gives an empty list.

        Raises:
            ConfigError: the condition is not valid, or too complex for the database.
        """
        is_met = build_condition_clause(
            parse_condition(condition), DocumentRow.attributes, self.sql.dialect.name
        )
        statement = select(DocumentRow.id).where(IS_LIVE, is_met)
        with run_read_transaction(self.sql) as session:
            return [row for (row,) in select_among(session, statement, DocumentRow.domain_id, groups)]

    def ids_and_domains(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Return a dict from primary key to the pair (id, name of the domain), for live documents.

        The id is the id that the user gave the document. A live document is completely stored and not
        removed.

        Args:
            rows: primary keys; keys of unknown or removed documents are left out of the result.
        """
        columns = DocumentRow.id, DocumentRow.external_id, DomainRow.name
        statement = filter_live_documents(select(*columns).join(DomainRow))
        with run_read_transaction(self.sql) as session:
            return {
                row: (id, domain)
                for row, id, domain in select_among(session, statement, DocumentRow.id, rows)
            }

    def tokens(self, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]] | None:
        """Return the token ids of a live document, uint32, shape (n,).

        A live document is completely stored and not removed. Returns None if no live document has the primary
        key `row`.

        Raises:
            CatalogError: the tokens do not match their digest.
        """
        with run_read_transaction(self.sql) as session:
            columns = TokensRow.tokens, TokensRow.digest
            statement = select(*columns).join(DocumentRow).where(DocumentRow.id == row, IS_LIVE)
            stored = session.execute(statement).one_or_none()
        return None if stored is None else decode_tokens(*stored)

    def content_hashes(self, rows: Iterable[int]) -> dict[int, str]:
        """Return a dict from primary key to the SHA-256 of the document's text, for live documents.

        A live document is completely stored and not removed.

        Args:
            rows: primary keys; keys of unknown or removed documents are left out of the result.
        """
        statement = select(DocumentRow.id, DocumentRow.content_hash).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return dict(select_among(session, statement, DocumentRow.id, rows))

    def metadata(self, rows: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return a dict from primary key to the metadata (JSON values by name) of live documents.

        A live document is completely stored and not removed.

        Args:
            rows: primary keys; keys of unknown or removed documents are left out of the result.
        """
        statement = select(DocumentRow.id, DocumentRow.attributes).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return dict(select_among(session, statement, DocumentRow.id, rows))

    def iterate_tokens(self, rows: Iterable[int]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield pairs (primary key, token ids) of live documents, in any order.

        A live document is completely stored and not removed. The token ids are uint32, shape (n,).

        Args:
            rows: primary keys; keys of unknown or removed documents are left out.

        Raises:
            CatalogError: the tokens of a document do not match their digest.
        """
        statement = select(DocumentRow.id, TokensRow.tokens, TokensRow.digest).join(TokensRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            for row, blob, digest in select_among(session, statement, DocumentRow.id, rows):
                yield row, decode_tokens(blob, digest)

    def find_damaged_documents(self, rows: Iterable[int]) -> set[int]:
        """Check documents for damage, and return the primary keys of the damaged documents.

        A document is damaged if its tokens, tags or other fields do not match their digests (checksums), or
        cannot be read. Vector keys are not checked. The result is empty if no document is damaged.

        Args:
            rows: primary keys of the documents to check. Keys of documents that are not live (being added,
                being removed or unknown) are ignored.
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

    def key_checksums(self) -> dict[int, str]:
        """Return a dict from primary key to the stored checksum of the document's vector keys.

        The dict has the live documents (completely stored and not removed) with a stored checksum. It is
        empty if the vector engine checks its keys itself, because then the store saves no checksums.
        """
        statement = select(ChecksumRow.document_id, ChecksumRow.keys).join(DocumentRow).where(IS_LIVE)
        with run_read_transaction(self.sql) as session:
            return dict(session.execute(statement).all())

    def stored_versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """Return primary key, SHA-256 of the text, metadata and tags of some live documents of a domain.

        A live document is completely stored and not removed.

        Args:
            domain: name of the domain; an unknown domain gives an empty result.
            ids: ids that the user gave the documents. Ids that the domain does not have are left out.

        Returns:
            A dict from document id to these values.

        Raises:
            InputError: a name is not valid, see `check_name`.
        """
        ids = check_names(ids, "a document's id")
        statement = filter_live_documents(select(DocumentRow).join(DomainRow), domain=domain)
        with run_read_transaction(self.sql) as session:
            rows = [row for (row,) in select_among(session, statement, DocumentRow.external_id, ids)]
            tags = read_tags(session, [row.id for row in rows])
            return {
                row.external_id: StoredVersion(
                    row.id, row.start, row.content_hash, row.attributes, frozenset(tags.get(row.id, ()))
                )
                for row in rows
            }

    def rows_by_content(self, hashes: Iterable[str]) -> dict[str, list[int]]:
        """Return a dict from hash to the primary keys of the live documents whose text has this SHA-256.

        A live document is completely stored and not removed.

        Args:
            hashes: SHA-256 of texts, hexadecimal. Hashes without a document are left out of the result.
        """
        with run_read_transaction(self.sql) as session:
            return read_rows_by_content(session, hashes)

    def domains(self) -> list[Domain]:
        """Return the domains that have a live document, with their totals, sorted by name.

        A live document is completely stored and not removed.
        """
        with run_read_transaction(self.sql) as session:
            return read_domains(session, has_prefix=self.identity.has_prefix)

    def unsettled_documents(self) -> list[PlacedDocument]:
        """Return the documents that are being added or removed, sorted by position.

        These documents have the state "pending" (being added) or "deleting" (being removed). Either a writer
        works on them now, or a crash interrupted a writer. The list is empty if there are no such documents.
        """
        statement = select(DocumentRow).where(IS_UNSETTLED).order_by(DocumentRow.start)
        with run_read_transaction(self.sql) as session:
            rows = session.scalars(statement)
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def leases(self) -> list[Lease]:
        """Return the leases of the store, newest first; see `CatalogWriter.lease_positions`."""
        with run_read_transaction(self.sql) as session:
            rows = session.scalars(select(LeaseRow).order_by(LeaseRow.start.desc()))
            return [
                Lease(row.id, row.start, row.stop, row.folder, row.committed_at is not None) for row in rows
            ]

    def withdrawn_ids(self, lease: str, domain: str) -> set[str]:
        """Return the old ids of documents that were removed or renamed after a lease was made.

        The commit of the lease must not add documents with these ids.

        Args:
            lease: id of an open lease; other leases give an empty set.
            domain: name of the domain.
        """
        statement = select(WithdrawalRow.external_id).where(
            WithdrawalRow.lease_id == lease, WithdrawalRow.domain == domain
        )
        with run_read_transaction(self.sql) as session:
            return set(session.scalars(statement))

    def find_problems(self) -> list[str]:
        """Check the database for damage, and return messages about the problems.

        On SQLite, the database's integrity check is run. On any database, the counter from which new
        documents get their positions is checked: it must not give a position that a stored document has.

        Returns:
            One message for each problem; an empty list if the database is sound.
        """
        with run_read_transaction(self.sql) as session:
            return find_problems(session)

    def retired_content_hashes(self) -> set[str]:
        """Return the SHA-256 of the text of each document that is removed but not completely deleted yet.

        Such a document has the state "deleting": readers do not see it, but its records may still exist in
        the vector engine.
        """
        with run_read_transaction(self.sql) as session:
            retired = select(DocumentRow.content_hash).where(IS_UNSETTLED, DocumentRow.state == DELETING)
            return set(session.scalars(retired))

    def settings(self, domains: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Return the retrieval settings that are saved for a set of domains; None if none are saved.

        Settings that are saved for a larger or smaller set are not returned.

        Args:
            domains: names of the domains, in any order; an empty sequence stands for the whole store.

        Raises:
            CatalogError: the settings are damaged.
        """
        with _explain_damaged_settings(), run_read_transaction(self.sql) as session:
            row = session.get(SettingRow, build_settings_key(domains)[0])
            return None if row is None else _check_settings_row(row)

    def all_settings(self) -> dict[tuple[str, ...], Mapping[str, Any]]:
        """Return a dict from set of domains to the retrieval settings that are saved for this set.

        A set is a sorted tuple of domain names; the empty tuple stands for the whole store.

        Raises:
            CatalogError: some saved settings are damaged.
        """
        with _explain_damaged_settings(), run_read_transaction(self.sql) as session:
            return {
                tuple(row.domains): _check_settings_row(row) for row in session.scalars(select(SettingRow))
            }

    def damaged_settings(self) -> list[str]:
        """Return the primary keys of saved retrieval settings that are damaged; empty if none are.

        The primary key of saved settings is a SHA-256 of the names of their domains.
        `CatalogWriter.drop_settings` deletes settings by their primary keys.
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
    """Replace a CatalogError of the ``with`` block by an error that says how to repair the saved settings.

    Raises:
        CatalogError: the block raised a CatalogError.
    """
    try:
        yield
    except CatalogError as error:
        raise CatalogError(
            "the settings saved in the catalog are damaged: restore the catalog from a backup, or delete "
            "them with `knnstore calibrate --reset` and calibrate again"
        ) from error


def _check_settings_row(row: SettingRow) -> Mapping[str, Any]:
    """Check that the saved settings in a row are not damaged, and return the settings.

    Args:
        row: row of the table of settings.

    Raises:
        CatalogError: the settings do not match the row's digest (checksum), or the row's key does not match
            the names of its domains.
    """
    if row.digest != hash_values(row.domains, row.payload) or row.scope != build_settings_key(row.domains)[0]:
        raise CatalogError("saved settings were altered")
    return row.payload
