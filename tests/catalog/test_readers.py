"""What readers see beside a writer, and how one writer takes over from another."""

import threading
from collections.abc import Callable
from itertools import count

import pytest
from sqlalchemy import event

from knnstore.catalog import Catalog, CatalogWriter, Engine, NewDocument, parse_url
from knnstore.errors import FencedError, LockedError

Make = Callable[..., NewDocument]
Opener = Callable[[], Catalog]


def test_the_revision_grows_with_what_readers_see(
    catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    def grows(act: Callable[[], object]) -> bool:
        before = catalog.revision()
        act()
        assert catalog.revision() - before in (0, 1)
        return catalog.revision() > before

    placed = []
    assert not grows(lambda: placed.extend(writer.insert_pending_documents([document("a"), document("b")])))
    a, b = (p.row for p in placed)
    assert grows(lambda: writer.make_documents_live([a]))
    assert grows(lambda: writer.make_documents_live([b]))
    assert grows(lambda: writer.replace_metadata({a: ({}, ["tag"])}))
    assert grows(lambda: writer.rename_documents({a: "c"}))
    assert grows(lambda: writer.mark_as_deleting([a]))
    assert not grows(lambda: writer.mark_as_deleting([a]))
    assert not grows(lambda: writer.delete_documents([a]))
    assert grows(lambda: writer.save_settings(["law"], {"k": 8}))
    assert grows(lambda: writer.mark_as_deleting([b]))
    assert grows(lambda: writer.delete_documents([b]))  # the domain's settings go with it
    assert grows(lambda: writer.switch_engine(Engine("hnswlib", "elsewhere")))
    for nothing in (writer.make_documents_live, writer.mark_as_deleting, writer.delete_documents):
        assert not grows(lambda act=nothing: act([]))
    assert not grows(lambda: writer.replace_metadata({}))
    assert not grows(lambda: writer.rename_documents({}))


def test_the_revision_is_queried_only_after_a_commit(opener: Opener, document: Make) -> None:
    """In a file; a commit is seen at once, of this catalog object and of another."""
    ours, theirs = opener(), opener()
    if ours.sql.dialect.name != "sqlite":
        pytest.skip("the database is on a server, which is asked each time")
    asked: list[str] = []
    event.listen(ours.sql, "before_cursor_execute", lambda *arguments: asked.append(arguments[2]))

    def queries() -> int:
        asked.clear()
        assert len({ours.revision() for _ in range(20)}) == 1
        return len([statement for statement in asked if statement.startswith("SELECT")])

    queries()
    for catalog in (theirs, ours):
        writer = CatalogWriter(catalog)
        for id in "ab":
            before = ours.revision()
            writer.make_documents_live(
                [
                    placed.row
                    for placed in writer.insert_pending_documents([document(id, domain=str(catalog))])
                ]
            )
            assert ours.revision() == before + 1
            assert queries() == 0
        writer.save_settings([], {"k": len(asked)})
        assert queries() == 1
        if catalog is theirs:
            theirs.close()  # with the writer's lock


@pytest.mark.slow
def test_readers_see_one_moment(opener: Opener, document: Make) -> None:
    catalog, reader = opener(), opener()
    writer = CatalogWriter(catalog)
    seen: list[tuple[int, list[int]]] = []
    torn: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            snapshot = reader.snapshot()
            seen.append((snapshot.revision, snapshot.rows.tolist()))
            listed = reader.documents()
            if listed and (len(listed) != 2 or len({(d.metadata["v"], d.tags) for d in listed}) != 1):
                torn.append(listed)

    published = {0: []}
    old: list[int] = []
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for version in count(1):
            if not thread.is_alive() or (version > 60 and len({revision for revision, _ in tuple(seen)}) > 3):
                break
            description = {"metadata": {"v": version}, "tags": (f"v{version}",), "version": version}
            new = [
                p.row
                for p in writer.insert_pending_documents(
                    [document("a", **description), document("b", **description)]
                )
            ]
            writer.make_documents_live(new)
            published[catalog.revision()] = new
            writer.delete_documents(old)
            old = new
    finally:
        done.set()
        thread.join()
    assert torn == []
    assert all(published[revision] == rows for revision, rows in seen)
    assert len({revision for revision, _ in seen}) > 3


def test_an_older_writer_can_commit_no_more(opener: Opener, document: Make) -> None:
    old = CatalogWriter(opener())
    (row,) = (placed.row for placed in old.insert_pending_documents([document("a", tags=("tag",))]))
    old.make_documents_live([row])
    catalog = opener()
    if catalog.sql.dialect.name == "postgresql":
        # The lock keeps a second writer out while the first one's connection lives.
        with pytest.raises(LockedError, match="another process writes"):
            CatalogWriter(catalog)
        with catalog.sql.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
            )
    new = CatalogWriter(catalog)
    before = catalog.revision(), catalog.documents(), new.unsettled_documents()
    for act in (
        lambda: old.insert_pending_documents([document("b")]),
        lambda: old.make_documents_live([row]),
        lambda: old.mark_as_deleting([row]),
        lambda: old.delete_documents([row]),
        lambda: old.replace_metadata({row: ({}, [])}),
        lambda: old.rename_documents({row: "c"}),
        lambda: old.save_settings([], {}),
        lambda: old.switch_engine(Engine("other", "place")),
    ):
        with pytest.raises(FencedError):
            act()
    assert (catalog.revision(), catalog.documents(), new.unsettled_documents()) == before
    assert catalog.settings() is None
    assert new.insert_pending_documents([document("b", tokens=1)])[0].start == 5


def test_closing_releases_the_writers_lock(opener: Opener) -> None:
    first = opener()
    CatalogWriter(first)
    first.close()
    CatalogWriter(opener())


def test_threads_share_one_database_in_memory(create: Callable[..., Catalog], document: Make) -> None:
    catalog = create(parse_url("sqlite://"))
    writer = CatalogWriter(catalog)
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.extend(len(catalog.rows()) for _ in range(200)))
    thread.start()
    for number in range(20):
        writer.make_documents_live(
            [placed.row for placed in writer.insert_pending_documents([document(f"d{number}")])]
        )
    thread.join()
    assert counts == sorted(counts)
    assert len(counts) == 200
    assert len(catalog.rows()) == 20
