"""Every token has a record: what said which records pruning has left is gone.

A store that was pruned is refused, and stays as it is. Without what its records stand for it would give other
probabilities than before, and the records that are gone would be taken for lost.

Revision: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

from knnstore.errors import CatalogError

revision = "0009"
down_revision = "0008"

_pruned = sa.table("knnstore_document_pruned", sa.column("document_id"))
_documents = sa.table("knnstore_documents", sa.column("id"), sa.column("domain_id"), sa.column("state"))
_domains = sa.table("knnstore_domains", sa.column("id"), sa.column("name"))


def upgrade() -> None:
    chosen = (
        sa.select(_domains.c.name)
        .distinct()
        .join(_documents, _documents.c.domain_id == _domains.c.id)
        .join(_pruned, _pruned.c.document_id == _documents.c.id)
        .where(_documents.c.state == "live")
    )
    domains = ", ".join(sorted(repr(name) for name in op.get_bind().scalars(chosen)))
    if domains:
        raise CatalogError(
            f"this version does not read stores that were pruned, as the documents of {domains} were: make "
            "the store again from its documents, or go on with the version that pruned it"
        )
    op.drop_table("knnstore_document_pruned")
