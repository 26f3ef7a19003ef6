"""What a store needs goes away and comes back, and processes are killed: one reason, then service again."""

import signal
import threading
import time

import httpx
import pytest

import knnstore

SENTENCE = "The council voted to repair the harbour wall before the winter storms."
ASKED = {"model": "tiny+news", "prompt": "The council", "max_tokens": 4, "temperature": 0}


@pytest.mark.slow
def test_a_catalog_that_goes_away_and_comes_back(own_postgres, inside, model_path, tmp_path):
    url = own_postgres.new_database().render_as_string(hide_password=False)
    lm = knnstore.create(tmp_path / "home", str(model_path), catalog=url)
    with lm.store:
        lm.add([{"id": "a", "text": SENTENCE}], domain="news")
    server = inside(tmp_path / "home")
    key = server.key("admin")

    def add(id: str):
        body = {"domain": "news", "documents": [{"id": id, "text": f"{SENTENCE} {id}"}]}
        return server.call("POST", "/v1/documents", key, json=body)

    before = server.call("POST", "/v1/completions", key, json=ASKED).json()["choices"]
    own_postgres.stop()
    for answer in (
        server.call("POST", "/v1/completions", key, json=ASKED),
        server.call("GET", "/v1/documents", key),
        add("b"),
        server.call("DELETE", "/v1/documents", key, params={"domain": "news", "id": "a"}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert "postgres" not in answer.text
    health = server.call("GET", "/health")
    assert (health.status_code, health.json()) == (503, {"status": "store_unavailable"})
    assert server.call("GET", "/health/live").status_code == 200
    own_postgres.resume()
    assert server.call("POST", "/v1/completions", key, json=ASKED).json()["choices"] == before
    assert server.call("GET", "/health").status_code == 200
    assert add("b").json()["added"] == 1
    assert (
        server.call("DELETE", "/v1/documents", key, params={"domain": "news", "id": "a"}).status_code == 200
    )
    listed = server.call("GET", "/v1/documents", key).json()["data"]
    assert [one["id"] for one in listed] == ["b"]
    assert server.serving.lm.store.verify() == []


@pytest.mark.slow
def test_an_engine_that_goes_away_and_comes_back(qdrant_server, inside, model_path, tmp_path):
    place = {"location": qdrant_server.url, "params": {"grpc_port": qdrant_server.grpc_port}}
    lm = knnstore.create(tmp_path / "home", str(model_path), store="qdrant", **place)
    with lm.store:
        lm.add([{"id": "a", "text": SENTENCE}], domain="news")
    server = inside(tmp_path / "home", require_keys=False)
    before = server.call("POST", "/v1/completions", json=ASKED).json()["choices"]
    qdrant_server.stop()
    body = {"domain": "news", "documents": [{"id": "b", "text": f"{SENTENCE} b"}]}
    for answer in (
        server.call("POST", "/v1/completions", json=ASKED),
        server.call("POST", "/v1/documents", json=body),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert server.call("POST", "/v1/completions", json={**ASKED, "model": "tiny"}).status_code == 200
    qdrant_server.start()
    assert server.call("POST", "/v1/completions", json=ASKED).json()["choices"] == before
    assert server.call("POST", "/v1/documents", json=body).json()["added"] == 1
    assert server.serving.lm.store.verify() == []


@pytest.mark.slow
def test_a_server_killed_while_it_adds_has_all_that_was_acknowledged(serve):
    acknowledged: list[str] = []
    for life in range(2):
        server = serve().ready()

        def add(server=server, life=life) -> None:
            for number in range(1000):
                id, text = f"{life}-{number}", f"{SENTENCE} {life} {number}"
                body = {"domain": "killed", "documents": [{"id": id, "text": text}]}
                try:
                    if server.call("POST", "/v1/documents", json=body).status_code == 200:
                        acknowledged.append(id)
                except httpx.TransportError:
                    return

        adding = threading.Thread(target=add)
        adding.start()
        while len(acknowledged) < 5 * (life + 1):
            assert adding.is_alive()
            time.sleep(0.01)
        server.end(signal.SIGKILL)
        adding.join(60)
    server = serve().ready()
    listed = server.call("GET", "/v1/documents", params={"domain": "killed", "limit": 1000}).json()["data"]
    there = [one["id"] for one in listed]
    assert set(acknowledged) <= set(there)
    assert len(there) <= len(acknowledged) + 2  # what was about to be acknowledged
    assert server.call("POST", "/v1/completions", json={**ASKED, "model": "tiny+killed"}).status_code == 200
    assert server.end() == 0
    with knnstore.open(server.home) as store:
        assert store.verify() == []
