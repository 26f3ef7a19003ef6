"""The catalogue in SQL: what is stored, under which domain and tags, and with which settings."""

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.engine import parse_url
from knnstore.catalog.survivors import DROPPED, PrunedDocument, Survivors
from knnstore.catalog.types import (
    TOKEN_BITS,
    Document,
    Domain,
    Engine,
    Identity,
    NewDocument,
    PlacedDocument,
    Snapshot,
    StoredVersion,
)
from knnstore.catalog.writer import CatalogWriter

__all__ = [
    "DROPPED",
    "TOKEN_BITS",
    "Catalog",
    "CatalogWriter",
    "Document",
    "Domain",
    "Engine",
    "Identity",
    "NewDocument",
    "PlacedDocument",
    "PrunedDocument",
    "Snapshot",
    "StoredVersion",
    "Survivors",
    "parse_url",
]
