"""Limits of a server's keys.

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for name in ("requests", "tokens"):
        op.add_column("knnstore_keys", sa.Column(name, sa.Integer(), nullable=True))
