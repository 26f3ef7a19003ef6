"""The first schema.

Revision: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "knnstore_domains",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_knnstore_domains")),
        sa.UniqueConstraint("name", name=op.f("uq_knnstore_domains_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "knnstore_settings",
        sa.Column("scope", sa.String(length=64), nullable=False),
        sa.Column("domains", sa.JSON(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("scope", name=op.f("pk_knnstore_settings")),
    )
    op.create_table(
        "knnstore_store",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("model_fingerprint", sa.String(), nullable=False),
        sa.Column("tokenizer_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("dim", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(length=16), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("max_length", sa.Integer(), nullable=False),
        sa.Column("stride", sa.Integer(), nullable=False),
        sa.Column("has_prefix", sa.Boolean(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("location", sa.String(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("writer_epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_knnstore_store_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_knnstore_store")),
    )
    op.create_table(
        "knnstore_documents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("domain_id", sa.Integer(), nullable=False),
        sa.Column("external_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("stop", sa.BigInteger(), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('pending', 'live', 'deleting')", name=op.f("ck_knnstore_documents_state")
        ),
        sa.CheckConstraint("0 <= start AND start <= stop", name=op.f("ck_knnstore_documents_positions")),
        sa.ForeignKeyConstraint(
            ["domain_id"], ["knnstore_domains.id"], name=op.f("fk_knnstore_documents_domain_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_knnstore_documents")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_knnstore_documents_domain_id"), "knnstore_documents", ["domain_id"], unique=False
    )
    op.create_index(
        "ix_knnstore_documents_unsettled",
        "knnstore_documents",
        ["state"],
        unique=False,
        sqlite_where=sa.text("state <> 'live'"),
        postgresql_where=sa.text("state <> 'live'"),
    )
    op.create_index(
        "uq_knnstore_documents_live",
        "knnstore_documents",
        ["external_id", "domain_id"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )

    op.create_table(
        "knnstore_document_tags",
        sa.Column("document_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tag", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["knnstore_documents.id"],
            name=op.f("fk_knnstore_document_tags_document_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("document_id", "tag", name=op.f("pk_knnstore_document_tags")),
    )
    op.create_index(op.f("ix_knnstore_document_tags_tag"), "knnstore_document_tags", ["tag"], unique=False)
    op.create_table(
        "knnstore_document_tokens",
        sa.Column(
            "document_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["knnstore_documents.id"],
            name=op.f("fk_knnstore_document_tokens_document_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("document_id", name=op.f("pk_knnstore_document_tokens")),
    )
