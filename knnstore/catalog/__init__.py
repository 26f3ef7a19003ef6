"""Catalog in SQL: identity, documents, domains, tags, settings and API keys of a store."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from sqlalchemy import URL

    from knnstore.catalog.catalog import Catalog
    from knnstore.catalog.conditions import check_condition, list_condition_fields
    from knnstore.catalog.connection import (
        PASSWORD_VARIABLE,
        identify_file,
        mask_password,
        parse_url,
        remove_password,
        render_location,
        sqlite_url,
    )
    from knnstore.catalog.differing import Difference, classify_change, find_other_ids
    from knnstore.catalog.keys import AccessKey, AccessKeys, Right
    from knnstore.catalog.schema import upgrade_catalog
    from knnstore.catalog.types import (
        KEYLESS,
        PAIR_MARK,
        Document,
        Domain,
        Engine,
        Identity,
        Lease,
        NewDocument,
        PlacedDocument,
        Snapshot,
        StoredVersion,
    )
    from knnstore.catalog.writer import CatalogWriter
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "KEYLESS",
    "PAIR_MARK",
    "PASSWORD_VARIABLE",
    "URL",
    "AccessKey",
    "AccessKeys",
    "Catalog",
    "CatalogWriter",
    "Difference",
    "Document",
    "Domain",
    "Engine",
    "Identity",
    "Lease",
    "NewDocument",
    "PlacedDocument",
    "Right",
    "Snapshot",
    "StoredVersion",
    "check_condition",
    "classify_change",
    "find_other_ids",
    "identify_file",
    "list_condition_fields",
    "mask_password",
    "parse_url",
    "remove_password",
    "render_location",
    "sqlite_url",
    "upgrade_catalog",
]
