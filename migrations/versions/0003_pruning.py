"""Documents whose records were pruned: which are left, and which stand for others.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "knnstore_document_pruned",
        sa.Column(
            "document_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("records", sa.Integer(), nullable=False),
        sa.Column("scale", sa.Double(), nullable=False),
        sa.Column("survivors", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["knnstore_documents.id"],
            name=op.f("fk_knnstore_document_pruned_document_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("document_id", name=op.f("pk_knnstore_document_pruned")),
    )
