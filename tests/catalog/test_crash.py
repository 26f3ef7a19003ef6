"""A writer killed at any of its failpoints leaves the state before or the state after, nothing between."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, select

import knnstore.catalog.writer
from knnstore.catalog import Catalog, CatalogWriter, Engine, NewDocument
from knnstore.catalog.connection import run_read_transaction
from knnstore.catalog.tables import DomainRow
from knnstore.errors import StoreNotFoundError

Make = Callable[..., NewDocument]
KilledAt = Callable[[str, Callable[[], None]], bool]

PLACES = ("before", "inside", "after")
SOURCE = Path(str(knnstore.catalog.writer.__file__)).read_text()
TRANSACTIONS = re.findall(r'self\._run_transaction\("(\w+)"\)', SOURCE)


def state(catalog: Catalog, writer: CatalogWriter) -> tuple[Any, ...]:
    return (
        catalog.revision(),
        catalog.documents(),
        catalog.domains(),
        catalog.settings(),
        catalog.engine(),
        catalog.key_checksums(),
        writer.unsettled_documents(),
        catalog.leases(),
        list_domain_rows(catalog),
    )


def list_domain_rows(catalog: Catalog) -> list[str]:
    """Return the names of all domains, also of those without documents, which readers do not see."""
    with run_read_transaction(catalog.sql) as session:
        return sorted(session.scalars(select(DomainRow.name)))


def test_every_transaction_is_tried() -> None:
    assert set(TRANSACTIONS) - {"vacuum"} == set(ACTIONS)  # that one changes nothing


ACTIONS: dict[str, Callable[[CatalogWriter, dict[str, int], Make], object]] = {
    "begin": lambda writer, rows, make: writer.insert_pending_documents(
        [make("new", "new", tags=("t",)), make("live")]
    ),
    "publish": lambda writer, rows, make: writer.make_documents_live([rows["pending"], rows["replacement"]]),
    "checksums": lambda writer, rows, make: writer.note_checksums({rows["live"]: "float32:" + "0" * 64}),
    "lease": lambda writer, rows, make: writer.lease_positions("b" * 32, 10, "/plan"),
    "release": lambda writer, rows, make: writer.delete_leases(["a" * 32]),
    "domain": lambda writer, rows, make: writer.create_domain("empty"),
    "retire": lambda writer, rows, make: writer.mark_as_deleting([rows["live"]]),
    "forget": lambda writer, rows, make: writer.delete_documents([rows["pending"]]),
    "describe": lambda writer, rows, make: writer.replace_metadata({rows["live"]: ({"new": 1}, ["new"])}),
    "rename": lambda writer, rows, make: writer.rename_documents({rows["live"]: "renamed"}),
    "settings": lambda writer, rows, make: writer.save_settings([], {"k": 2}),
    "move": lambda writer, rows, make: writer.switch_engine(Engine("other", "place", {"p": 1})),
}


@pytest.mark.parametrize(
    "place", [one if one == "inside" else pytest.param(one, marks=pytest.mark.slow) for one in PLACES]
)
@pytest.mark.parametrize("name", ACTIONS)
def test_killed_while_writing(
    name: str, place: str, catalog_url: URL, create: Callable[[URL], Catalog], document: Make,
    killed_at: KilledAt,
) -> None:  # fmt: skip
    catalog = create(catalog_url)
    writer = CatalogWriter(catalog)
    live, pending, replacement = (
        document("live", tags=("old",)),
        document("pending", "tax"),
        document("live", version=2),
    )
    rows = dict(
        zip(
            ("live", "pending"),
            (p.row for p in writer.insert_pending_documents([live, pending])),
            strict=True,
        )
    )
    writer.make_documents_live([rows["live"]])
    rows["replacement"] = writer.insert_pending_documents([replacement])[0].row
    writer.save_settings([], {"k": 1})
    writer.lease_positions("a" * 32, 10, "/plan")
    before = state(catalog, writer)
    catalog.close()

    def work() -> None:
        ACTIONS[name](CatalogWriter(Catalog.open(catalog_url)), rows, document)

    assert killed_at(f"catalog.{name}.{place}", work)

    catalog = Catalog.open(catalog_url)
    writer = CatalogWriter(catalog)
    if place == "after":
        assert state(catalog, writer) != before
    else:
        assert state(catalog, writer) == before
        ACTIONS[name](writer, rows, document)
        assert state(catalog, writer) != before
    catalog.close()


@pytest.mark.slow
def test_killed_while_creating(
    catalog_url: URL, create: Callable[[URL], Catalog], killed_at: KilledAt
) -> None:
    assert killed_at("catalog.create.inside", lambda: create(catalog_url).close())
    with pytest.raises(StoreNotFoundError):
        Catalog.open(catalog_url)
    assert create(catalog_url).revision() == 0
