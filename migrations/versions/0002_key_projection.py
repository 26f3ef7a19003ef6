"""Keys may be projected to fewer dimensions: which projection is part of a store's identity.

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("knnstore_store", sa.Column("projection", sa.String(), nullable=True))
