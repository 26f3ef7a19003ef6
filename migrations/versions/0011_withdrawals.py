"""Documents that are removed while a plan is open are noted, so that its commit does not add them again.

Revision: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "knnstore_withdrawals",
        sa.Column("lease_id", sa.String(32), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("external_id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("lease_id", "domain", "external_id", name="pk_knnstore_withdrawals"),
    )
