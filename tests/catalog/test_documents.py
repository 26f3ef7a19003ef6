"""The life of a document: begin, publish, retire, forget."""

from collections.abc import Callable

import numpy as np
import pytest

from knnstore.catalog import Catalog, CatalogWriter, NewDocument
from knnstore.datastore import POSITION_LIMIT
from knnstore.errors import CatalogError, DocumentNotFoundError, InputError

Make = Callable[..., NewDocument]


def add(writer: CatalogWriter, *documents: NewDocument) -> list[int]:
    rows = [placed.row for placed in writer.insert_pending_documents(documents)]
    writer.make_documents_live(rows)
    return rows


def live_ids(catalog: Catalog) -> list[str]:
    return [document.id for document in catalog.documents()]


def test_each_state_in_turn(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    assert catalog.documents() == []
    placed = writer.insert_pending_documents([document("a", tokens=3), document("b", "tax", tokens=4)])
    assert [(p.start, p.stop) for p in placed] == [(0, 3), (3, 7)]
    assert placed[0].group != placed[1].group
    assert live_ids(catalog) == []
    assert writer.unsettled_documents() == placed

    writer.make_documents_live([p.row for p in placed])
    assert live_ids(catalog) == ["a", "b"]
    assert writer.unsettled_documents() == []

    writer.mark_as_deleting([placed[0].row])
    assert live_ids(catalog) == ["b"]
    assert writer.unsettled_documents() == placed[:1]
    assert catalog.tokens(placed[0].row) is None

    writer.delete_documents([placed[0].row])
    assert writer.unsettled_documents() == []
    assert [domain.name for domain in catalog.domains()] == ["tax"]


def test_what_was_stored_comes_back(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    stored = document("a", tokens=4, metadata={"year": 2024}, tags=("x", "y"))
    (row,) = add(writer, stored)
    (found,) = catalog.documents()
    assert (found.id, found.domain, found.tokens) == ("a", "law", 4)
    assert (found.metadata, found.tags) == ({"year": 2024}, ("x", "y"))
    assert found.content_hash == stored.content_hash
    assert found.added_at.endswith("+00:00")
    np.testing.assert_array_equal(catalog.tokens(row), stored.tokens)
    assert catalog.ids_and_domains([row, row + 1]) == {row: ("a", "law")}
    version = catalog.stored_versions("law", ["a", "b"])["a"]
    assert (version.row, version.metadata, version.tags) == (row, {"year": 2024}, {"x", "y"})
    assert catalog.rows_by_content([stored.content_hash, "0" * 64]) == {stored.content_hash: [row]}


def test_replacement_is_atomic(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    (old,) = add(writer, document("a"))
    other = add(writer, document("a", "tax"), document("b"))
    (new,) = (placed.row for placed in writer.insert_pending_documents([document("a", version=2)]))
    assert catalog.rows(id="a", domain="law") == [old]
    writer.make_documents_live([new])
    assert catalog.rows(id="a", domain="law") == [new]
    assert [placed.row for placed in writer.unsettled_documents()] == [old]
    assert set(catalog.rows()) == {new, *other}


def test_publishing_is_all_or_nothing(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    rows = [
        placed.row
        for placed in writer.insert_pending_documents(
            [document("a"), document("b"), document("a", version=2)]
        )
    ]
    with pytest.raises(CatalogError, match="same domain and id"):
        writer.make_documents_live(rows)
    assert live_ids(catalog) == []
    writer.make_documents_live(rows[:2])
    writer.mark_as_deleting(rows[:1])
    with pytest.raises(CatalogError, match="not pending"):
        writer.make_documents_live([rows[2], rows[0]])  # the second is being deleted: its records may be gone
    assert live_ids(catalog) == ["b"]


def test_twins_far_apart_in_one_publication(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    documents = [document(f"d{number}", tokens=1) for number in range(600)]
    rows = [placed.row for placed in writer.insert_pending_documents([*documents, documents[0]])]
    with pytest.raises(CatalogError, match="same domain and id"):
        writer.make_documents_live(rows)
    assert live_ids(catalog) == []


def test_positions_are_never_used_again(writer: CatalogWriter, catalog: Catalog, document: Make) -> None:
    (aborted,) = writer.insert_pending_documents([document("a", tokens=10)])
    writer.delete_documents([aborted.row])
    (again,) = writer.insert_pending_documents([document("a", tokens=10)])
    assert (again.start, again.stop) == (10, 20)
    assert again.row > aborted.row
    assert again.group > aborted.group  # the domain was forgotten with its only document
    with pytest.raises(InputError):
        writer.insert_pending_documents([document("b"), document("")])
    assert writer.insert_pending_documents([document("b", tokens=1)])[0].start == 20


def test_the_counter_ends_before_it_overflows(
    writer: CatalogWriter, catalog: Catalog, document: Make
) -> None:
    with catalog.sql.begin() as connection:
        connection.exec_driver_sql(f"UPDATE knnstore_store SET next_position = {POSITION_LIMIT - 5}")
    (last,) = writer.insert_pending_documents([document("a", tokens=5)])
    assert last.stop << 20 == 1 << 63
    with pytest.raises(CatalogError, match="used up"):
        writer.insert_pending_documents([document("b", tokens=1)])
    assert len(writer.unsettled_documents()) == 1


def test_forget_spares_live_documents(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    rows = add(writer, document("a"))
    writer.delete_documents(rows)
    assert live_ids(catalog) == ["a"]


def test_describe(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    a, b = add(writer, document("a", tags=("old",), metadata={"n": 1}), document("b", tags=("old",)))
    writer.replace_metadata({a: ({"n": 2}, ["new", "new", "more"])})
    described = catalog.documents(id="a")[0]
    assert (described.metadata, described.tags) == ({"n": 2}, ("more", "new"))
    assert catalog.rows_by_tag(["old"]) == {"old": [b]}
    writer.mark_as_deleting([b])
    with pytest.raises(DocumentNotFoundError):
        writer.replace_metadata({a: ({}, []), b: ({}, [])})
    assert catalog.documents(id="a")[0].metadata == {"n": 2}


def test_rename(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    a, b, _ = add(writer, document("a", tags=("t",)), document("b"), document("c", "tax"))
    writer.rename_documents({a: "c"})  # of another domain
    assert sorted(live_ids(catalog)) == ["b", "c", "c"]
    assert catalog.rows(id="c", domain="law") == [a]
    for ids in ({a: "x", b: "x"}, {a: "b"}):
        with pytest.raises(InputError, match=r"its domain already has a document '[bx]'"):
            writer.rename_documents(ids)
    writer.mark_as_deleting([b])
    with pytest.raises(DocumentNotFoundError):
        writer.rename_documents({a: "d", b: "e"})
    assert live_ids(catalog) == ["c", "c"]
    writer.rename_documents({a: "b"})  # which one that is no more had


def test_filters_and_counts(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    add(
        writer,
        document("a", "law", tokens=3, tags=("x",)),
        document("a", "tax", tokens=4, tags=("x", "y")),
        document("b", "law", tokens=5),
    )
    writer.insert_pending_documents([document("c", "law", tokens=100, tags=("x",))])
    listed = [(d.id, d.domain) for d in catalog.documents(tag="x")]
    assert listed == [("a", "law"), ("a", "tax")]
    assert [d.domain for d in catalog.documents(id="a", tag="y")] == ["tax"]
    assert len(catalog.rows(domain="law")) == 2
    assert catalog.documents(domain="nowhere") == []
    assert [(d.name, d.documents, d.tokens) for d in catalog.domains()] == [("law", 2, 8), ("tax", 1, 4)]


def test_open_leases_note_documents_that_are_removed_or_renamed(
    catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    (before,) = add(writer, document("before", "law"))
    open_lease, committed, released = (writer.lease_positions(letter * 32, 10, "/plan") for letter in "abc")
    writer.make_documents_live([], lease=committed.id)
    first, second, third = add(writer, document("a", "law"), document("b", "law"), document("a", "tax"))
    writer.mark_as_deleting([before, first, third])
    writer.rename_documents({second: "c"})
    writer.mark_as_deleting(add(writer, document("a", "law")))  # a second time
    for lease in (open_lease, released):
        assert catalog.withdrawn_ids(lease.id, "law") == {"a", "b", "before"}
        assert catalog.withdrawn_ids(lease.id, "tax") == {"a"}
    assert catalog.withdrawn_ids(committed.id, "law") == set()
    writer.delete_leases([released.id])
    writer.make_documents_live([], lease=open_lease.id)
    for lease in (open_lease, released):
        assert catalog.withdrawn_ids(lease.id, "law") == set()


@pytest.mark.slow
def test_two_thousand_documents_at_once(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    documents = [
        document(f"d{number}", f"domain{number % 7}", tokens=number % 5, tags=("all", f"t{number % 3}"))
        for number in range(2000)
    ]
    placed = writer.insert_pending_documents(documents)
    writer.make_documents_live([p.row for p in placed])
    stops = np.cumsum([len(d.tokens) for d in documents])
    assert [p.stop for p in placed] == stops.tolist()
    listed = {d.id: d for d in catalog.documents()}
    assert list(catalog.ids_and_domains(p.row for p in placed).values()) == [
        (d.id, d.domain) for d in documents
    ]
    assert all(listed[d.id].tags == tuple(sorted(d.tags)) for d in documents)
    assert len(catalog.stored_versions("domain3", [d.id for d in documents])) == len(range(3, 2000, 7))

    snapshot = catalog.snapshot()
    at = snapshot.documents_at(np.arange(-1, stops[-1] + 1))
    expected = [number for number, d in enumerate(documents) for _ in range(len(d.tokens))]
    rows = np.array([p.row for p in placed])[expected]
    np.testing.assert_array_equal(snapshot.rows[at[1:-1]], rows)
    assert at[0] == at[-1] == -1

    writer.mark_as_deleting([p.row for p in placed])
    writer.delete_documents([p.row for p in placed])
    assert catalog.domains() == []
    assert writer.unsettled_documents() == []


def test_domains_without_documents_are_deleted_with_the_last_open_lease(
    catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    first, second = (writer.lease_positions(letter * 32, 10, "/plan") for letter in "ab")
    group = writer.create_domain("law")
    assert writer.create_domain("law") == group
    assert (catalog.domains(), catalog.snapshot().domains) == ([], {})
    writer.delete_leases([second.id])
    assert writer.insert_pending_documents([document("a", "law")])[0].group == group
    empty = writer.create_domain("tax")
    writer.delete_leases([first.id])
    assert writer.create_domain("law") == group  # has a document, which is not yet live
    assert writer.create_domain("tax") > empty  # was deleted; its number is not used again
