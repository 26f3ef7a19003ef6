"""Many documents and tags: how many SQL statements they take, on SQLite and on PostgreSQL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import URL, event, text

from knnstore.catalog import Identity, NewDocument
from knnstore.errors import DocumentNotFoundError
from knnstore.store import KNNStore, Selection

DOCUMENTS = 1200
TOKENS = 3


@pytest.fixture
def store(home: Path, identity: Identity, catalog_url: URL) -> Iterator[KNNStore]:
    """Document i of domain i % 40 has the tag i // 2 and the tokens i % 1000, i % 1000, 7."""
    url = catalog_url.render_as_string(hide_password=False)
    with KNNStore.create(home, identity, catalog=url) as made:
        tokens = [np.array([i % 1000, i % 1000, 7], np.uint32) for i in range(DOCUMENTS)]
        new = [
            NewDocument(f"{i}", f"{i % 40}", f"{i:064x}", own, {"i": i}, frozenset({f"tag {i // 2}"}))
            for i, own in enumerate(tokens)
        ]
        with made.ingest(new) as group:
            rng = np.random.default_rng(0)
            keys = rng.standard_normal((DOCUMENTS * TOKENS, identity.dim)).astype(np.float32)
            at, position = np.divmod(np.arange(len(keys)), TOKENS)
            group.add(at, position, np.concatenate(tokens).astype(np.int64), keys)
        yield made


@contextmanager
def statements(store: KNNStore) -> Iterator[list[str]]:
    """Collects what is executed, but for what keeps a transaction."""
    executed: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_others: object) -> None:
        if statement != "BEGIN":
            executed.append(statement)

    event.listen(store._catalog.sql, "before_cursor_execute", note)
    try:
        yield executed
    finally:
        event.remove(store._catalog.sql, "before_cursor_execute", note)


HALF = range(0, DOCUMENTS, 2)
MANY: dict[str, tuple[Selection, Callable[[int], bool]]] = {
    "documents": (Selection(documents=tuple(f"{i}" for i in HALF)), lambda i: i % 2 == 0),
    "tags": (Selection(tags=tuple(f"tag {i}" for i in range(550))), lambda i: i < 1100),
    "content": (Selection(exclude=tuple(f"{i:064x}" for i in HALF)), lambda i: i % 2 == 1),
    "all": (
        Selection(
            domains=("3", "4", "5"),
            tags=tuple(f"tag {i}" for i in range(550)),
            documents=tuple(f"{i}" for i in HALF),
        ),
        lambda i: i % 40 == 4 and i < 1100,
    ),
}


@pytest.mark.slow
def test_many_are_selected_by_few_statements(store: KNNStore) -> None:
    numbers = [document.metadata["i"] for document in store.documents()]
    for what, (selection, expected) in MANY.items():
        chosen = [i for i in numbers if expected(i)]
        counts = np.bincount([7] * len(chosen) + [i % 1000 for i in chosen] * 2, minlength=1000)
        with statements(store) as executed:
            assert len(store.lengths(selection)) == len(chosen), what
            assert store.token_counts(selection).tolist() == counts.tolist(), what
        assert len(executed) <= 15, what
    with pytest.raises(DocumentNotFoundError, match="no document 'none' in the store"):
        store.lengths(Selection(documents=(*(f"{i}" for i in range(700)), "none", "neither")))
    held_out = [f"{i:064x}" for i in range(1000, 3000)]
    with statements(store) as executed:
        assert store.find_stored_hashes(held_out) == set(held_out[:200])
    assert len(executed) <= 2
    assert store.find_stored_hashes(held_out[195:205], Selection(domains=("39",))) == {held_out[199]}


@pytest.mark.slow
def test_many_are_verified_and_described_by_few_statements(store: KNNStore) -> None:
    with statements(store) as executed:
        assert store.verify() == []
    assert len(executed) <= 20
    changes = {f"{i}": ({"new": i}, {f"new {i}", "all"}) for i in range(3, DOCUMENTS, 40)}
    with statements(store) as executed:
        store.replace_metadata("3", changes)
    assert len(executed) <= 15
    for document in store.documents(domain="3"):
        assert document.metadata == {"new": int(document.id)}
        assert document.tags == ("all", f"new {document.id}")
    with pytest.raises(DocumentNotFoundError):
        store._changes.writer.replace_metadata({1: ({}, {"a"}), 10**6: ({}, {"b"})})
    assert not store.documents(tag="a")
    assert len(store.documents(tag="tag 0")) == 2


@pytest.mark.parametrize("has_prefix", [True, False])
def test_verify_names_each_wrong_document(
    home: Path, identity: Identity, writer_of: Callable, has_prefix: bool
) -> None:
    """Another token, a record too few or too many, another group, no text or a damaged or longer one."""
    with KNNStore.create(home, replace(identity, has_prefix=has_prefix)) as store:
        writer = writer_of(store)
        new = [writer._new("law", f"{i}", 9) for i in range(30)]
        with store.ingest(new) as group:
            for at, document in enumerate(new):
                tokens = document.tokens.astype(np.int64)
                positions = np.arange(0 if has_prefix else 1, 9)
                if at == 3:
                    tokens[5] += 1
                if at == 7:
                    positions = np.delete(positions, 4)
                if at == 29 and not has_prefix:
                    positions = np.arange(9)
                keys = np.zeros((len(positions), identity.dim), np.float32)
                group.add(np.full(len(positions), at), positions, tokens[positions], keys)
        ids, keys, groups = next(store.datastore.iterate(batch_size=10**6))
        at = (ids >> 20) // 9
        store.datastore.add(ids[at == 12], keys[at == 12], groups[at == 12] + 1)
        store.datastore.flush()
        with store._catalog.sql.begin() as connection:
            connection.execute(text("DELETE FROM knnstore_document_tokens WHERE document_id = 20"))
            change = "UPDATE knnstore_document_tokens SET tokens = {} WHERE document_id = {}"
            connection.execute(text(change.format("CAST(tokens || X'00000000' AS BLOB)", 23)))
            connection.execute(text(change.format("X'010203'", 26)))
        expected = {"3", "7", "12", "19", "22", "25"} | (set() if has_prefix else {"29"})
        assert {line.split("'")[1] for line in store.verify()} == expected


class Overtaken(Selection):
    """A selection during whose comparison another thread asks for another one's counts."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Selection) and self.domains == other.domains
        Overtaken.meanwhile()
        return same

    __hash__ = Selection.__hash__


def test_counts_are_those_of_the_selection_asked_for(
    home: Path, identity: Identity, writer_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KNNStore.create(home, identity) as store:
        writer_of(store).add("3", "1")
        mine, other = Overtaken(domains=("3",)), Selection()
        view = store.view()
        expected = view.token_counts(mine, 1000).tolist()
        monkeypatch.setattr(Overtaken, "meanwhile", lambda: setattr(view, "_counts", (other, np.zeros(1000))))
        assert view.token_counts(mine, 1000).tolist() == expected
