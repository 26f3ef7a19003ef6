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
    reading,
    render_location,
    translated_errors,
)
from knnstore.catalog.digests import digest_of_values
from knnstore.catalog.queries import (
    DOCUMENTS,
    among,
    by_value,
    checked_names,
    live_documents,
    read_altered,
    read_documents,
    read_domains,
    read_engine,
    read_identity,
    read_problems,
    read_rows_by_content,
    read_snapshot,
    read_tags,
    scope_of,
    unpacked,
)
from knnstore.catalog.sqlite import Commits, make_private, take_in_log, unchanged
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
        with ExitStack() as opened:
            opened.callback(engine.dispose)
            with translated_errors(engine), engine.connect() as connection:
                schema.check(connection)
            with reading(engine) as current:
                row = current.get(StoreRow, 1)
                if row is None:
                    raise schema.not_found(engine.url)
                self.identity = read_identity(row)
                self.store_id = row.store_id
            self._commits = Commits(engine) if is_sqlite_file(engine.url) else None
            self._known: tuple[int | None, int] = (None, 0)  # version of the file, and the revision at it
            if self._commits is not None:
                opened.callback(self._commits.close)
            self.opened = opened.pop_all()

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
            make_private(Path(str(url.database)))
        sql = connect(url)
        with ExitStack() as failed:
            failed.callback(sql.dispose)
            schema.make(sql, identity, engine, store_id)
            failed.pop_all()
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
        """Copy SQLite's write-ahead log into the database file and empty it; see `sqlite.take_in_log`.

        Does nothing on PostgreSQL and for a database in memory.
        """
        if is_sqlite_file(self.sql.url):
            take_in_log(self.sql)

    def database(self) -> tuple[str, str]:
        """Return an identifier that a copy of the database does not share, and the location for messages."""
        url = self.sql.url
        location = render_location(url)
        return identify(self.sql), str(Path(location).resolve()) if is_sqlite_file(url) else location

    def revision(self) -> int:
        """Return the revision, which grows with every change that readers can see.

        Every search calls this, so the revision is cached until another commit changes the file, where
        `Commits` can tell.
        """
        version = self._commits.version() if self._commits else None
        known_for, known = self._known
        if version is not None and version == known_for:
            return known
        with (
            translated_errors(self.sql),
            self.sql.connect() as connection,  # cheaper than a session
            unchanged(connection.connection.driver_connection),
        ):
            revision = int(connection.execute(select(StoreRow.revision)).scalar_one())
        self._known = version, revision  # the version was read first, so a later commit invalidates the pair
        return revision

    def engine(self) -> Engine:
        """Return the adapter that holds the keys; `CatalogWriter.move` changes it."""
        with reading(self.sql) as current:
            return read_engine(current)

    def snapshot(self) -> Snapshot:
        """Return the live documents at the current revision."""
        with reading(self.sql) as current:
            return read_snapshot(current, has_prefix=self.identity.has_prefix)

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
        chosen = live_documents(DOCUMENTS, domain=domain, id=id, tag=tag)
        if domains is not None:
            names = checked_names(domains, "the domain's name")
            chosen = chosen.where(DomainRow.name.in_(names))
        if limit is not None:
            chosen = chosen.offset(offset).limit(limit)
        with reading(self.sql) as current:
            return list(read_documents(current, current.execute(chosen)).values())

    def documents_of(self, rows: Iterable[int]) -> dict[int, Document]:
        """Return live documents by primary key; rows that are not live are left out."""
        with reading(self.sql) as current:
            return read_documents(current, among(current, live_documents(DOCUMENTS), DocumentRow.id, rows))

    def rows(self, *, domain: str | None = None, id: str | None = None, tag: str | None = None) -> list[int]:
        """Return the primary keys of the live documents that `documents` lists."""
        with reading(self.sql) as current:
            chosen = live_documents(select(DocumentRow.id).join(DomainRow), domain=domain, id=id, tag=tag)
            return list(current.scalars(chosen))

    def rows_by_id(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by external id; unknown ids are left out."""
        ids = checked_names(ids, "the document's id")
        chosen = select(DocumentRow.external_id, DocumentRow.id).where(IS_LIVE)
        with reading(self.sql) as current:
            return by_value(among(current, chosen, DocumentRow.external_id, ids))

    def rows_by_tag(self, tags: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by tag; unknown tags are left out."""
        tags = checked_names(tags, "the tag")
        chosen = select(TagRow.tag, TagRow.document_id).join(DocumentRow).where(IS_LIVE)
        with reading(self.sql) as current:
            return by_value(among(current, chosen, TagRow.tag, tags))

    def rows_where(self, condition: str, groups: Collection[int]) -> list[int]:
        """Return the primary keys of the live documents whose metadata meet a condition.

        Args:
            condition: condition as text; see `knnstore.catalog.conditions`.
            groups: ids of the domains to search.

        Raises:
            ConfigError: the condition is not valid, or too complex for the database.
        """
        is_met = build_condition_clause(
            parse_condition(condition), DocumentRow.attributes, self.sql.dialect.name
        )
        chosen = select(DocumentRow.id).where(IS_LIVE, is_met)
        with reading(self.sql) as current:
            return [row for (row,) in among(current, chosen, DocumentRow.domain_id, groups)]

    def labels(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Return (external id, domain) of live documents by primary key; other rows are left out."""
        columns = DocumentRow.id, DocumentRow.external_id, DomainRow.name
        chosen = live_documents(select(*columns).join(DomainRow))
        with reading(self.sql) as current:
            return {row: (id, domain) for row, id, domain in among(current, chosen, DocumentRow.id, rows)}

    def tokens(self, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]] | None:
        """Return the token ids of a live document, uint32, shape (n,); None if the row is not live.

        Raises:
            CatalogError: the tokens are damaged.
        """
        with reading(self.sql) as current:
            columns = TokensRow.tokens, TokensRow.digest
            chosen = select(*columns).join(DocumentRow).where(DocumentRow.id == row, IS_LIVE)
            found = current.execute(chosen).one_or_none()
        return None if found is None else unpacked(*found)

    def content_hashes(self, rows: Iterable[int]) -> dict[int, str]:
        """Return the content hashes of live documents by primary key; other rows are left out."""
        chosen = select(DocumentRow.id, DocumentRow.content_hash).where(IS_LIVE)
        with reading(self.sql) as current:
            return dict(among(current, chosen, DocumentRow.id, rows))

    def texts(self, rows: Iterable[int]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yield primary key and token ids, uint32, shape (n,), of live documents, in any order.

        Rows that are not live are left out.

        Raises:
            CatalogError: the tokens of a document are damaged.
        """
        chosen = select(DocumentRow.id, TokensRow.tokens, TokensRow.digest).join(TokensRow).where(IS_LIVE)
        with reading(self.sql) as current:
            for row, blob, digest in among(current, chosen, DocumentRow.id, rows):
                yield row, unpacked(blob, digest)

    def altered(self, rows: Iterable[int]) -> set[int]:
        """Return the primary keys of the live documents that do not match their digests."""
        altered: set[int] = set()
        ordered = sorted(rows)
        waiting = [ordered[at : at + _CHECKED_AT_ONCE] for at in range(0, len(ordered), _CHECKED_AT_ONCE)]
        while waiting:
            chunk = waiting.pop()
            try:
                with reading(self.sql) as current:
                    altered |= read_altered(current, chunk[0], chunk[-1])
            except CatalogError:  # a value is unreadable: bisect the chunk to find its document
                middle = len(chunk) // 2
                if middle:
                    waiting += [chunk[:middle], chunk[middle:]]
                else:
                    altered |= set(chunk)
        return altered.intersection(ordered)

    def checksums(self) -> dict[int, str]:
        """Return the checksums of the live documents' vector keys, by primary key.

        The result is empty if the engine checks its keys itself.
        """
        chosen = select(ChecksumRow.document_id, ChecksumRow.keys).join(DocumentRow).where(IS_LIVE)
        with reading(self.sql) as current:
            return dict(current.execute(chosen).all())

    def versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """Return the live versions of a domain's documents by external id; unknown ids are left out."""
        ids = checked_names(ids, "a document's id")
        chosen = live_documents(select(DocumentRow).join(DomainRow), domain=domain)
        with reading(self.sql) as current:
            rows = [row for (row,) in among(current, chosen, DocumentRow.external_id, ids)]
            tags = read_tags(current, [row.id for row in rows])
            return {
                row.external_id: StoredVersion(
                    row.id, row.content_hash, row.attributes, frozenset(tags.get(row.id, ()))
                )
                for row in rows
            }

    def rows_by_content(self, hashes: Iterable[str]) -> dict[str, list[int]]:
        """Return the primary keys of live documents by content hash; unknown hashes are left out."""
        with reading(self.sql) as current:
            return read_rows_by_content(current, hashes)

    def domains(self) -> list[Domain]:
        """Return the domains that have a live document, sorted by name."""
        with reading(self.sql) as current:
            return read_domains(current, has_prefix=self.identity.has_prefix)

    def unsettled(self) -> list[PlacedDocument]:
        """Return the documents that are not live: a writer adds or removes them, or a crash left them."""
        chosen = select(DocumentRow).where(IS_UNSETTLED).order_by(DocumentRow.start)
        with reading(self.sql) as current:
            rows = current.scalars(chosen)
            return [PlacedDocument(row.id, row.domain_id, row.start, row.stop) for row in rows]

    def problems(self) -> list[str]:
        """Check the database. Returns one message per problem; none if the database is sound."""
        with reading(self.sql) as current:
            return read_problems(current)

    def retired_content(self) -> set[str]:
        """Return the content hashes of the documents in the state "deleting"."""
        with reading(self.sql) as current:
            retired = select(DocumentRow.content_hash).where(IS_UNSETTLED, DocumentRow.state == DELETING)
            return set(current.scalars(retired))

    def settings(self, domains: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """Return the settings saved for exactly this set of domains; None if none are saved.

        No domains stand for the whole store.

        Raises:
            CatalogError: the settings are damaged.
        """
        with _naming_settings(), reading(self.sql) as current:
            row = current.get(SettingRow, scope_of(domains)[0])
            return None if row is None else _sound_payload(row)

    def all_settings(self) -> dict[tuple[str, ...], Mapping[str, Any]]:
        """Return all saved settings by their sorted domains; the key () stands for the whole store.

        Raises:
            CatalogError: settings are damaged.
        """
        with _naming_settings(), reading(self.sql) as current:
            return {tuple(row.domains): _sound_payload(row) for row in current.scalars(select(SettingRow))}

    def damaged_settings(self) -> list[str]:
        """Return the keys of damaged settings, which `CatalogWriter.drop_settings` takes."""
        damaged = []
        with reading(self.sql) as current:
            scopes = list(current.scalars(select(SettingRow.scope)))
        for scope in scopes:
            try:
                with reading(self.sql) as current:
                    row = current.get(SettingRow, scope)
                    if row is not None:
                        _sound_payload(row)
            except CatalogError:
                damaged.append(scope)
        return damaged


@contextmanager
def _naming_settings() -> Iterator[None]:
    """Convert a CatalogError to one that blames the saved settings and says how to repair them."""
    try:
        yield
    except CatalogError as error:
        raise CatalogError(
            "settings that are saved in the catalog are damaged: restore it from a backup, or drop them with "
            "`knnstore calibrate --reset` and calibrate anew"
        ) from error


def _sound_payload(row: SettingRow) -> Mapping[str, Any]:
    """Return the saved settings; raises CatalogError if they do not match their digest or key."""
    if row.digest != digest_of_values(row.domains, row.payload) or row.scope != scope_of(row.domains)[0]:
        raise CatalogError("saved settings were altered")
    return row.payload
