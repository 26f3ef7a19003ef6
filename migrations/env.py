"""Alembic's environment: runs the migrations on the connection that knnstore hands over."""

from alembic import context
from sqlalchemy import create_engine, text

from knnstore.catalog.models import Base
from knnstore.catalog.schema import VERSION_TABLE

_ADVISORY_LOCK = 0x6B6E6E73  # one upgrade at a time on a shared server


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:  # `alembic revision --autogenerate`, for developers
        connection = create_engine("sqlite://").connect()
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        context.run_migrations()


run()
