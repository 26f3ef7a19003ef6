"""The tables of the catalog.

One row per document and none per token: the value of a record rides in its id, so the vector
engine needs nothing from SQL to answer a search. Every name begins with ``knnstore_``: the
database may be shared with other applications.
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

# Without names, Alembic's batch mode cannot drop a constraint on SQLite.
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

# SQLite numbers rows by itself only for a primary key of type INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")

# Of a row that goes with its document.
_DocumentId = Annotated[
    int,
    mapped_column(
        _RowId, ForeignKey("knnstore_documents.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),
]

PENDING, LIVE, DELETING = "pending", "live", "deleting"
"""The states of a document; only the records of a live one count as neighbors."""


def _now() -> datetime:
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """The declarative base; its metadata is what the migrations build."""

    metadata = MetaData(naming_convention=_NAMES)


class StoreRow(Base):
    """The store itself: one row, whose identity never changes."""

    __tablename__ = "knnstore_store"
    __table_args__ = (CheckConstraint("id = 1", name="single_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    store_id: Mapped[str] = mapped_column(String(32))
    """Random, made once: a copy of the store has the same, another store never."""
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)

    # Identity: what a model must match to use the store.
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
    """Digest (BLAKE2b) of the identity and `params`; see `knnstore.catalog.digests`."""

    # Where the keys are; `knnstore move` changes these three in one transaction.
    adapter: Mapped[str] = mapped_column(String)
    location: Mapped[str] = mapped_column(String)
    params: Mapped[dict[str, Any]] = mapped_column(JSON)

    next_position: Mapped[int] = mapped_column(BigInteger, default=0)
    """The 43-bit counter of token positions; only ever grows, so no record id is used twice."""

    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    """Grows in every transaction that changes what readers may see."""

    writer_epoch: Mapped[int] = mapped_column(BigInteger, default=0)
    """The fencing number: grows when a writer opens; a commit of an older writer fails."""


class DomainRow(Base):
    """A domain; its id is the group of its records and is never used again."""

    __tablename__ = "knnstore_domains"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)


class DocumentRow(Base):
    """A document: its state is the commit point of everything that is stored for it."""

    __tablename__ = "knnstore_documents"
    __table_args__ = (
        # A replacement is pending beside the version it replaces, so only live ids are unique.
        Index(
            "uq_knnstore_documents_live",
            "external_id",
            "domain_id",
            unique=True,
            sqlite_where=text("state = 'live'"),
            postgresql_where=text("state = 'live'"),
        ),
        # Recovery and purging look only for the few that are not live.
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
    """Digest of id, domain, tags, metadata and positions; see `knnstore.catalog.digests`."""
    added_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)


# Written out in the statement: only then can the planner use the partial indexes.
IS_LIVE = DocumentRow.state == literal(LIVE, literal_execute=True)
IS_UNSETTLED = DocumentRow.state != literal(LIVE, literal_execute=True)


class TokensRow(Base):
    """The tokens of one document, apart so that no scan of the documents reads them."""

    __tablename__ = "knnstore_document_tokens"

    document_id: Mapped[_DocumentId]
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """Little-endian uint32."""
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest of the tokens; see `knnstore.catalog.digests`."""


class ChecksumRow(Base):
    """What the keys of one document are, where the engine does not check them itself."""

    __tablename__ = "knnstore_document_checksums"

    document_id: Mapped[_DocumentId]
    keys: Mapped[str] = mapped_column(String(80))
    """A precision, a colon, a hash; see `knnstore.store.soundness`."""


class TagRow(Base):
    """One tag of one document."""

    __tablename__ = "knnstore_document_tags"

    document_id: Mapped[_DocumentId]
    tag: Mapped[str] = mapped_column(String, primary_key=True, index=True)


class SettingRow(Base):
    """Retrieval settings saved for a set of domains."""

    __tablename__ = "knnstore_settings"

    scope: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of the domains' names, so that any number of them has one short key."""
    domains: Mapped[list[str]] = mapped_column(JSON)
    """The names, sorted; none stands for the whole store."""
    payload: Mapped[dict[str, Any]] = mapped_column(JSON)
    digest: Mapped[str] = mapped_column(String(32), server_default="")
    """Digest of the domains and the payload; see `knnstore.catalog.digests`."""
    saved_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)


class KeyRow(Base):
    """A key of a server; see `knnstore.catalog.keys`."""

    __tablename__ = "knnstore_keys"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    """The part of the key that is no secret."""
    name: Mapped[str] = mapped_column(String)
    hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the part that is."""
    rights: Mapped[list[str]] = mapped_column(JSON)
    domains: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """None is all."""
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=_now)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    requests: Mapped[int | None]
    """At once; None is any number."""
    tokens: Mapped[int | None]
    """A minute; None is any number."""
