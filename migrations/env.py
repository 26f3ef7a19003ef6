"""Alembic's environment: runs the migrations on the connection that knnstore hands over.

To write a migration, change the models and then, with a scratch database::

    alembic -x url=sqlite:///scratch.db upgrade head
    alembic -x url=sqlite:///scratch.db revision --autogenerate --rev-id 0002 -m "What changes"

A schema only moves forward: there are no downgrades.
"""

from alembic import context
from sqlalchemy import Connection

from knnstore.catalog.connection import create_durable_engine, parse_url, run_exclusive_transaction
from knnstore.catalog.schema import VERSION_TABLE
from knnstore.catalog.tables import Base


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,  # SQLite alters a table only by building it anew
    )
    with context.begin_transaction():
        context.run_migrations()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with run_exclusive_transaction(
        create_durable_engine(parse_url(context.get_x_argument(as_dictionary=True)["url"]))
    ) as opened:
        run(opened)
