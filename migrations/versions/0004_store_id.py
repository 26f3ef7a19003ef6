"""Each store has an id, by which its keys and its moves know it.

A store that is there gets one made of what it was born with: a copy of it that is upgraded elsewhere gets
the same.

Revision: 0004
Revises: 0003
"""

import hashlib
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_store = sa.table(
    "knnstore_store",
    sa.column("store_id", sa.String),
    sa.column("created_at", sa.DateTime(timezone=True)),
    sa.column("model_fingerprint", sa.String),
)


def upgrade() -> None:
    with op.batch_alter_table("knnstore_store") as batch:
        batch.add_column(sa.Column("store_id", sa.String(32), nullable=True))
    connection = op.get_bind()
    born = connection.execute(sa.select(_store.c.created_at, _store.c.model_fingerprint)).first()
    if born is not None:
        text = f"{_utc(born.created_at).isoformat()} {born.model_fingerprint}"
        connection.execute(sa.update(_store).values(store_id=hashlib.sha256(text.encode()).hexdigest()[:32]))
    with op.batch_alter_table("knnstore_store") as batch:
        batch.alter_column("store_id", existing_type=sa.String(32), nullable=False)


def _utc(moment: datetime) -> datetime:
    """SQLite drops the zone."""
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
