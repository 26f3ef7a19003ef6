"""Catalogs for the tests: opened, closed at the end, and filled by hand."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from sqlalchemy import URL

from knnstore.catalog import Catalog, CatalogWriter, Engine, Identity, NewDocument

IDENTITY = Identity("gpt2", "a" * 64, "b" * 64, "ffn_input:11", 768, "l2", 50257, 1024, 512)
ENGINE = Engine("faiss", "keys", {"nprobe": 32})

Opener = Callable[[], Catalog]
Creator = Callable[[URL], Catalog]


@pytest.fixture
def create() -> Iterator[Creator]:
    """Makes a catalog in a database; closed at the end."""
    with ExitStack() as opened:

        def make(url: URL) -> Catalog:
            catalog = Catalog.create(url, IDENTITY, ENGINE)
            opened.callback(catalog.close)
            return catalog

        yield make


@pytest.fixture
def opener(catalog_url: URL, create: Creator) -> Iterator[Opener]:
    """Opens the test's catalog again and again, each time with connections of its own."""
    create(catalog_url)
    with ExitStack() as opened:

        def reopen() -> Catalog:
            catalog = Catalog.open(catalog_url)
            opened.callback(catalog.close)
            return catalog

        yield reopen


@pytest.fixture
def catalog(opener: Opener) -> Catalog:
    return opener()


@pytest.fixture
def writer(catalog: Catalog) -> CatalogWriter:
    return CatalogWriter(catalog)


@pytest.fixture
def document() -> Callable[..., NewDocument]:
    def make(
        id: str,
        domain: str = "law",
        tokens: int = 5,
        metadata: Mapping[str, Any] | None = None,
        tags: tuple[str, ...] = (),
        version: int = 1,
    ) -> NewDocument:
        content = hashlib.sha256(f"{id} {version}".encode("utf-8", "replace")).hexdigest()
        values = np.arange(tokens, dtype=np.uint32) + version
        return NewDocument(id, domain, content, values, metadata or {}, frozenset(tags))

    return make
