"""Tables of the catalog.

Each document has a row, but single tokens have no rows: the id of a record in the vector engine encodes the
position and the id of its token. So a search runs without SQL. The names of all tables begin with
``knnstore_``, because other applications may share the database.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    literal,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# Alembic's batch mode on SQLite can only drop constraints that have names.
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

# SQLite assigns row ids only for a primary key of type INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")

# Primary key of a row that is deleted together with its document.
_DocumentId = Annotated[
    int,
    mapped_column(
        _RowId, ForeignKey("knnstore_documents.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
]

PENDING, LIVE, DELETING = "pending", "live", "deleting"
"""States of a document: being added, completely stored, and being removed.

Only records of live documents are returned as neighbors.
"""


def _get_current_time() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """SQLAlchemy's base class of all tables. The migrations must create exactly these tables."""

    metadata = MetaData(naming_convention=_NAMES)


class StoreRow(Base):
    """Table with a single row, which describes the store. The columns of its identity never change."""

    __tablename__ = "knnstore_store"
    __table_args__ = (CheckConstraint("id = 1", name="single_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    store_id: Mapped[str] = mapped_column(String(32))
    """Random id, assigned at creation; copies of the store share it."""
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)

    # Identity: a model must match these values to use the store.
    model: Mapped[str] = mapped_column(String)
    model_fingerprint: Mapped[str] = mapped_column(String)
    tokenizer_fingerprint: Mapped[str] = mapped_column(String(64))
    key: Mapped[str] = mapped_column(String)
    dim: Mapped[int]
    metric: Mapped[str] = mapped_column(String(16))
    vocab_size: Mapped[int]
    max_length: Mapped[int]
    stride: Mapped[int]
    has_prefix: Mapped[bool]
    projection: Mapped[str | None] = mapped_column(String)
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest (checksum) of the identity and `params`; see `knnstore.catalog.digests`."""

    # Engine: adapter and location of the keys; `knnstore move` changes the three columns in one transaction.
    adapter: Mapped[str] = mapped_column(String)
    location: Mapped[str] = mapped_column(String)
    params: Mapped[dict[str, Any]] = mapped_column(JSON)

    next_position: Mapped[int] = mapped_column(BigInteger, default=0)
    """Position that the next stored token gets. The number never decreases, so no position is used twice."""

    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    """Counter that every transaction increments if it changes what readers see."""

    writer_epoch: Mapped[int] = mapped_column(BigInteger, default=0)
    """Counter that each new writer increments. A writer with an older number cannot commit."""


class DomainRow(Base):
    """Table of domains (named sets of documents).

    The id of a domain is the group number of its records in the vector engine, and is never reused.
    """

    __tablename__ = "knnstore_domains"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)


class DocumentRow(Base):
    """Table of documents, with a row for each document.

    The column `state` decides whether readers see the document with its tokens, tags and records.
    """

    __tablename__ = "knnstore_documents"
    __table_args__ = (
        # A pending replacement has the same id as the live version, so ids are unique among live rows only.
        Index(
            "uq_knnstore_documents_live",
            "external_id",
            "domain_id",
            unique=True,
            sqlite_where=text("state = 'live'"),
            postgresql_where=text("state = 'live'"),
        ),
        # Recovery and purging select rows that are not live, which are few.
        Index(
            "ix_knnstore_documents_unsettled",
            "state",
            sqlite_where=text("state <> 'live'"),
            postgresql_where=text("state <> 'live'"),
        ),
        CheckConstraint("state IN ('pending', 'live', 'deleting')", name="state"),
        CheckConstraint("0 <= start AND start <= stop", name="positions"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    domain_id: Mapped[int] = mapped_column(ForeignKey("knnstore_domains.id"), index=True)
    external_id: Mapped[str] = mapped_column(String)
    state: Mapped[str] = mapped_column(String(8))
    start: Mapped[int] = mapped_column(BigInteger)
    stop: Mapped[int] = mapped_column(BigInteger)
    content_hash: Mapped[str] = mapped_column(String(64))
    attributes: Mapped[dict[str, Any]] = mapped_column("metadata", JSON)
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest (checksum) of id, domain, tags, metadata and positions; see `knnstore.catalog.digests`."""
    added_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)


# The value is a literal in the statement, because the planner cannot match a parameter with a partial index.
IS_LIVE = DocumentRow.state == literal(LIVE, literal_execute=True)
IS_UNSETTLED = DocumentRow.state != literal(LIVE, literal_execute=True)


class TokensRow(Base):
    """Table of the tokens of each document. It is separate so that scans of documents do not read tokens."""

    __tablename__ = "knnstore_document_tokens"

    document_id: Mapped[_DocumentId]
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """Token ids as bytes, little-endian uint32."""
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest (checksum) of the tokens; see `knnstore.catalog.digests`."""


class LeaseRow(Base):
    """Table of leases: positions that are reserved for documents whose keys other processes compute."""

    __tablename__ = "knnstore_leases"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger)
    stop: Mapped[int] = mapped_column(BigInteger)
    folder: Mapped[str] = mapped_column(String)
    """Absolute path of the folder of the plan, on the machine that made the plan."""
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)
    committed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Time when the documents became live; None before."""


class WithdrawalRow(Base):
    """Table of documents that were removed or renamed after an open lease was made.

    The commit of the lease's plan does not add documents with these ids. The rows are deleted with the lease,
    and when it is committed.
    """

    __tablename__ = "knnstore_withdrawals"

    lease_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    domain: Mapped[str] = mapped_column(String, primary_key=True)
    external_id: Mapped[str] = mapped_column(String, primary_key=True)


class ChecksumRow(Base):
    """Table of the checksum of each document's vector keys.

    It is filled only if the vector engine does not check its keys itself.
    """

    __tablename__ = "knnstore_document_checksums"

    document_id: Mapped[_DocumentId]
    keys: Mapped[str] = mapped_column(String(80))
    """Precision, a colon and a hash; see `knnstore.store.soundness`."""


class TagRow(Base):
    """Table of the tags of documents, with a row for each tag of a document."""

    __tablename__ = "knnstore_document_tags"

    document_id: Mapped[_DocumentId]
    tag: Mapped[str] = mapped_column(String, primary_key=True, index=True)


class SettingRow(Base):
    """Table of saved retrieval settings, with a row for each set of domains that has settings."""

    __tablename__ = "knnstore_settings"

    scope: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of the sorted names of the domains, which identifies the set of domains."""
    domains: Mapped[list[str]] = mapped_column(JSON)
    """Names of the domains, sorted; an empty list stands for the whole store."""
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The settings, JSON values by name."""
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest (checksum) of the domains and the payload; see `knnstore.catalog.digests`."""
    saved_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)


class KeyRow(Base):
    """Table of the API keys (passwords with rights) of the store's server; see `knnstore.catalog.keys`."""

    __tablename__ = "knnstore_keys"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    """Public part of the key."""
    name: Mapped[str] = mapped_column(String)
    hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the secret part of the key."""
    rights: Mapped[list[str]] = mapped_column(JSON)
    domains: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Names of the domains that the key can access; None means all domains."""
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_get_current_time)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    requests: Mapped[int | None]
    """Maximum number of concurrent requests; None means unlimited."""
    tokens: Mapped[int | None]
    """Maximum number of tokens a minute; None means unlimited."""
