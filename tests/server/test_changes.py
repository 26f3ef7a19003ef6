"""Documents are added, listed and removed while texts go on, whatever takes long about them."""

import asyncio
import shutil
import threading

import numpy as np
import pytest

from knnstore.lm.reading import new_documents
from knnstore.server import document_changes
from knnstore.store import Selection
from tests.server.conftest import Inside
from tests.server.test_turns import STREAM, Client, until

TEXT = "The council voted to repair the harbour wall before the winter storms. " * 6


@pytest.fixture
def server(inside, prepared, tmp_path_factory) -> Inside:
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("changes") / "home")
    return inside(home, require_keys=False)


class Held:
    """A function that waits, in whatever thread calls it, until the test lets it go on."""

    def __init__(self, function) -> None:
        self._function = function
        self.begun, self.free = threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs):
        self.begun.set()
        assert self.free.wait(240)
        return self._function(*args, **kwargs)


def change(server, method: str, path: str, **options):
    return asyncio.ensure_future(server.client.request(method, path, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokenizing", "adding", "removing", "removing a domain"])
def test_texts_go_on_while_the_store_is_changed(server, monkeypatch, kind):
    store = server.serving.lm.store
    target, name = {
        "tokenizing": (new_documents, "chunk_documents"),
        "adding": (store, "ingest"),
        "removing": (store, "remove_document"),
        "removing a domain": (store, "remove_domain"),
    }[kind]
    held = Held(getattr(target, name))
    monkeypatch.setattr(target, name, held)

    async def ask() -> None:
        stream = Client(server, "/v1/completions", STREAM)
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 2)
        if kind.startswith("removing"):
            where = {"domain": "letters", **({"id": "first"} if kind == "removing" else {})}
            path = "/v1/documents" if kind == "removing" else "/v1/domains"
            changing = change(server, "DELETE", path, params=where)
        else:
            documents = [{"id": "new", "text": TEXT}]
            changing = change(server, "POST", "/v1/documents", json={"domain": "n", "documents": documents})
        await until(held.begun.is_set)
        before = stream.events
        await until(lambda: stream.events >= before + 20)
        assert not changing.done()
        held.free.set()
        assert (await changing).status_code == 200
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())


def test_a_document_that_is_read_in_turns_has_the_keys_of_one_that_is_not(server, monkeypatch):
    def add(domain: str) -> None:
        body = {"domain": domain, "documents": [{"id": domain, "text": TEXT}]}
        assert server.call("POST", "/v1/documents", json=body).json()["added"] == 1

    add("whole")
    monkeypatch.setattr(document_changes, "_TURN_TOKENS", 20)
    turns: list[int] = []
    observe = server.serving.engine._observe
    server.serving.engine._observe = lambda turn: (turns.append(turn.turns), observe(turn))
    add("parts")
    store = server.serving.lm.store
    whole, parts = (
        np.concatenate([one.keys for one in store.records(Selection(domains=(name,)))])
        for name in ("whole", "parts")
    )
    assert sum(turns) > len(whole) / 20
    np.testing.assert_allclose(parts, whole, atol=2e-3, rtol=2e-3)  # stored with 16 bits
    assert store.verify() == []


def test_a_document_counts_against_a_keys_limit_while_it_is_read(inside, prepared, tmp_path, monkeypatch):
    server = inside(shutil.copytree(prepared, tmp_path / "home"))
    from knnstore.catalog import Right

    key = server.keys.add([Right.WRITE, Right.READ], tokens=30)[1]
    optimize = Held(server.serving.lm.store.optimize)  # the last of adding, when its tokens were read
    monkeypatch.setattr(server.serving.lm.store, "optimize", optimize)
    headers = {"Authorization": f"Bearer {key}"}

    async def ask() -> None:
        def add(id: str):
            body = {"domain": "n", "documents": [{"id": id, "text": TEXT}]}
            return change(server, "POST", "/v1/documents", json=body, headers=headers)

        first = add("first")
        await until(optimize.begun.is_set)
        second = await add("second")
        assert second.status_code == 429, second.text
        optimize.free.set()
        assert (await first).status_code == 200

    server.loop.run_until_complete(ask())


@pytest.mark.slow
def test_a_page_reads_no_more_documents_than_it_shows(server, monkeypatch):
    from knnstore.catalog import catalog

    documents = [{"id": f"d{n}", "text": f"Text {n}."} for n in range(20)]
    server.call("POST", "/v1/documents", json={"domain": "many", "documents": documents})
    read, read_documents = [], catalog.read_documents

    def counted(current, rows):
        listed = list(rows)
        read.append(len(listed))
        return read_documents(current, listed)

    monkeypatch.setattr(catalog, "read_documents", counted)

    def page(**params):
        return server.call("GET", "/v1/documents", params=params).json()

    found = page(domain="many", limit=5, offset=10)
    assert [one["id"] for one in found["data"]] == [f"d{n}" for n in range(10, 15)]
    assert found["has_more"]
    assert not page(domain="many", limit=10, offset=10)["has_more"]
    assert [one["domain"] for one in page(id="d3")["data"]] == ["many"]
    assert max(read) <= 11


def test_a_page_of_long_documents_ends_where_the_answer_would_be_too_large(server):
    documents = [{"id": f"d{n}", "text": TEXT} for n in range(6)]
    server.call("POST", "/v1/documents", json={"domain": "long", "documents": documents})
    server.serving.limits = type(server.serving.limits)(answer_bytes=2000)
    ids: list[str] = []
    more = True
    while more:
        params = {"domain": "long", "text": True, "offset": len(ids)}
        page = server.call("GET", "/v1/documents", params=params).json()
        assert 1 <= len(page["data"]) < 6
        ids += [one["id"] for one in page["data"]]
        more = page["has_more"]
    assert ids == [f"d{n}" for n in range(6)]
