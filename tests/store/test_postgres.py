"""A store on PostgreSQL: one writer on all machines, and a server that crashes in the middle of work."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from knnstore.errors import FencedError, LockedError, StoreUnavailableError
from knnstore.store import KNNStore


@pytest.fixture
def shared(postgres, home, identity):
    """A store whose catalog is on a server; closed at the end."""
    url = postgres.new_database().render_as_string(hide_password=False)
    with KNNStore.create(home, identity, catalog=url) as made:
        yield made


def on_another_machine(home: Path) -> Path:
    """The same home where no lock on a file can be seen."""
    return shutil.copytree(home, home.with_name("another machine"))


def test_a_writer_on_another_machine_is_refused(shared, home, writer_of) -> None:
    writer_of(shared).add("law", "1")
    copy = on_another_machine(home)
    with pytest.raises(LockedError, match="another process writes to the catalog in postgresql"):
        KNNStore.open(copy, "a")
    with KNNStore.open(copy) as reader:
        assert [document.id for document in reader.documents()] == ["1"]
    shared.close()
    KNNStore.open(copy, "a").close()


def test_a_writer_that_was_cut_off_commits_no_more_when_another_took_over(
    postgres, shared, home, writer_of
) -> None:
    writer = writer_of(shared)
    writer.add("law", "1")
    copy = on_another_machine(home)
    new = writer._new("law", "2", 20)
    with (
        pytest.raises(FencedError, match="another writer has taken over") as caught,
        shared.ingest([new]) as group,
    ):
        writer.put(group, 0, new)
        postgres.execute(  # as when the network is cut: the server drops the lock with the connection
            shared.home.catalog_url.database,
            "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database d ON d.oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()",
        )
        KNNStore.open(copy, "a").close()
    assert "\n" not in str(caught.value)
    assert [document.id for document in shared.documents()] == ["1"]
    assert shared.verify() == []


def test_a_server_that_crashes_during_ingest_loses_nothing_acknowledged(
    own_postgres, home, identity, writer_of
) -> None:
    url = own_postgres.new_database().render_as_string(hide_password=False)
    store = KNNStore.create(home, identity, catalog=url)
    reader = KNNStore.open(home)
    writer = writer_of(store)
    writer.add("law", "1", "2")
    before = reader.search(writer.keys["law", "1"], 5)

    new = writer._new("law", "3", 20)
    with pytest.raises(StoreUnavailableError) as caught, store.ingest([new]) as group:
        writer.put(group, 0, new)
        own_postgres.stop()
    assert str(caught.value).startswith("the catalog's database (postgresql")
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreUnavailableError):
        reader.search(writer.keys["law", "1"], 5)
    store.close()  # as a command does that failed

    own_postgres.resume()
    for _ in range(3):  # the handle of before, with its connections of before
        after = reader.search(writer.keys["law", "1"], 5)
        assert np.array_equal(after.ids, before.ids)
    assert {document.id for document in reader.documents()} == {"1", "2"}

    with KNNStore.open(home, "a") as again:  # the second run
        second = writer_of(again)
        second.add("law", "3")
        assert again.verify() == []
        assert again.datastore.count() == 60
        assert (reader.search(second.keys["law", "3"], 1).distances < 1e-4).all()
    reader.close()


@pytest.mark.slow
def test_a_writer_goes_on_when_the_server_came_back_between_two_commits(
    own_postgres, home, identity, writer_of
) -> None:
    url = own_postgres.new_database().render_as_string(hide_password=False)
    with KNNStore.create(home, identity, catalog=url) as store, KNNStore.open(home) as reader:
        writer = writer_of(store)
        for id in ("1", "2"):
            with store.ingest([new := writer._new("law", id, 20)]) as group:
                writer.put(group, 0, new)
                own_postgres.restart()
            assert (reader.search(writer.keys["law", id], 1).distances < 1e-4).all()
        assert store.verify() == []
