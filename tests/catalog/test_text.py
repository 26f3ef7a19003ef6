"""Names, ids, tags and metadata as users write them: stored as they are, or refused alike everywhere."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from knnstore.catalog import Catalog, CatalogWriter, NewDocument
from knnstore.checks import MAX_NAME
from knnstore.errors import InputError

Make = Callable[..., NewDocument]

AWKWARD = [
    "'; DROP TABLE knnstore_documents; --",
    '" OR ""="',
    "100%",
    "%(name)s :name ? $1 {x}",
    "a_b%c\\",
    "日本語 🦊 é e\u0301",
    "  spaces\tand\nlines  ",
    "[]",
    "[\"law\"]",
    "NULL",
    "x" * MAX_NAME,
    "🦊" * MAX_NAME,
]  # fmt: skip
REFUSED = ["", "a\0b", "half \ud83e", "x" * (MAX_NAME + 1)]

TEXT = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
one_database = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def publish(writer: CatalogWriter) -> Callable[[NewDocument], int]:
    def add(document: NewDocument) -> int:
        (placed,) = writer.insert_pending_documents([document])
        writer.make_documents_live([placed.row])
        return placed.row

    return add


def test_awkward_text_comes_back(
    catalog: Catalog, writer: CatalogWriter, document: Make, publish: Callable[[NewDocument], int]
) -> None:
    for number, text in enumerate(AWKWARD):
        row = publish(document(text, text, tags=(text,), metadata={text: text}))
        writer.save_settings([text], {"k": number})
        (found,) = catalog.documents(domain=text, id=text, tag=text)
        assert (found.id, found.domain, found.tags, found.metadata) == (text, text, (text,), {text: text})
        assert catalog.ids_and_domains([row]) == {row: (text, text)}
        assert catalog.stored_versions(text, [text])[text].row == row
        assert catalog.snapshot().domains[text] > 0
    assert [catalog.settings([text]) for text in AWKWARD] == [{"k": n} for n in range(len(AWKWARD))]
    assert [domain.name for domain in catalog.domains()] == sorted(AWKWARD)


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_text_that_some_database_cannot_store_is_refused(
    text: str, catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    for act in (
        lambda: writer.insert_pending_documents([document("fine"), document(text)]),
        lambda: writer.insert_pending_documents([document("a", text)]),
        lambda: writer.insert_pending_documents([document("a", tags=("fine", text))]),
        lambda: writer.replace_metadata({1: ({}, [text])}),
        lambda: writer.rename_documents({1: text}),
        lambda: catalog.documents(id=text),
        lambda: catalog.rows(domain=text),
        lambda: catalog.rows_by_tag([text]),
        lambda: catalog.stored_versions("law", [text]),
    ):
        with pytest.raises(InputError) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200
    assert writer.unsettled_documents() == []


@given(metadata=st.dictionaries(TEXT, JSON, max_size=3))
@one_database
def test_metadata_comes_back(
    catalog: Catalog, document: Make, publish: Callable[[NewDocument], int], metadata: dict[str, Any]
) -> None:
    publish(document("a", metadata=metadata))
    assert catalog.documents(id="a")[0].metadata == metadata


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes"], ids=repr)
def test_metadata_that_is_not_json_is_refused(value: object, writer: CatalogWriter, document: Make) -> None:
    with pytest.raises(InputError, match="document 'a': its metadata cannot be stored as JSON"):
        writer.insert_pending_documents([document("a", metadata={"v": value})])
    with pytest.raises(InputError, match="settings cannot be stored as JSON"):
        writer.save_settings([], {"v": value})
    assert writer.unsettled_documents() == []


def test_settings_belong_to_a_set_of_domains(
    catalog: Catalog, writer: CatalogWriter, publish: Callable[[NewDocument], int], document: Make
) -> None:
    rows = [publish(document("a", domain)) for domain in ("law", "tax")]
    many = [f"domain {number}" for number in range(5000)]
    for domains, payload in [
        ([], {"k": 1}),
        (["tax", "law"], {"k": 2}),
        (["law"], {"k": 3}),
        (many, {"k": 4}),
    ]:
        writer.save_settings(domains, {"k": 0})
        writer.save_settings(domains, payload)
    assert catalog.settings() == {"k": 1}
    assert catalog.settings(["law", "tax", "law"]) == {"k": 2}
    assert catalog.settings(["law"]) == {"k": 3}
    assert catalog.settings(many) == {"k": 4}
    assert catalog.settings(["tax"]) is None
    writer.mark_as_deleting(rows[1:])
    writer.delete_documents(rows[1:])
    assert catalog.settings(["law", "tax"]) is None
    assert catalog.settings(["law"]) == {"k": 3}
    assert catalog.settings() == {"k": 1}
