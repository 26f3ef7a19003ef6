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
        "domains",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_domains")),
        sa.UniqueConstraint("name", name=op.f("uq_domains_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "settings",
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("scope", name=op.f("pk_settings")),
    )
    op.create_table(
        "store",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("model_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("tokenizer_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("dim", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(length=16), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("max_length", sa.Integer(), nullable=False),
        sa.Column("stride", sa.Integer(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("location", sa.String(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("writer_epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_store_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_store")),
    )
    op.create_table(
        "documents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("domain_id", sa.Integer(), nullable=False),
        sa.Column("external_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("stop", sa.BigInteger(), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["domain_id"], ["domains.id"], name=op.f("fk_documents_domain_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_documents")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("documents", schema=None) as batch_op:
        batch_op.create_index(
            "ix_documents_unsettled",
            ["state"],
            unique=False,
            sqlite_where=sa.text("state <> 'live'"),
            postgresql_where=sa.text("state <> 'live'"),
        )
        batch_op.create_index(
            "uq_documents_live",
            ["domain_id", "external_id"],
            unique=True,
            sqlite_where=sa.text("state = 'live'"),
            postgresql_where=sa.text("state = 'live'"),
        )

    op.create_table(
        "document_tags",
        sa.Column("document_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tag", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"], ["documents.id"], name=op.f("fk_document_tags_document_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("document_id", "tag", name=op.f("pk_document_tags")),
    )
    with op.batch_alter_table("document_tags", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_document_tags_tag"), ["tag"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("document_tags", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_document_tags_tag"))

    op.drop_table("document_tags")
    with op.batch_alter_table("documents", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_documents_live",
            sqlite_where=sa.text("state = 'live'"),
            postgresql_where=sa.text("state = 'live'"),
        )
        batch_op.drop_index(
            "ix_documents_unsettled",
            sqlite_where=sa.text("state <> 'live'"),
            postgresql_where=sa.text("state <> 'live'"),
        )

    op.drop_table("documents")
    op.drop_table("store")
    op.drop_table("settings")
    op.drop_table("domains")
