"""Checksums of the keys of each document, for engines that have none.

Revision: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "knnstore_document_checksums",
        sa.Column(
            "document_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("keys", sa.String(80), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["knnstore_documents.id"],
            name=op.f("fk_knnstore_document_checksums_document_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("document_id", name=op.f("pk_knnstore_document_checksums")),
    )
