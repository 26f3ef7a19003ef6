"""Keys: what each endpoint asks for, and that what a key may not see is not there for it."""

import socket
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import knnstore
from knnstore.catalog import Right
from knnstore.server.access import check_rights_declared
from knnstore.server.app import Options, make_endpoints
from knnstore.server.metrics import Metrics
from knnstore.server.serving import Serving
from tests.forked import run_forked

COMPLETION = {"model": "tiny+news", "prompt": "The council", "max_tokens": 5, "temperature": 0}

CHANGING = ("date", "x-request-id")

NEEDED: dict[tuple[str, str], Right | None] = {
    ("GET", "/health"): None,
    ("GET", "/health/live"): None,
    ("GET", "/openapi.json"): Right.PREDICT,
    ("GET", "/metrics"): Right.ADMIN,
    ("GET", "/v1/models"): Right.PREDICT,
    ("GET", "/v1/models/{name}"): Right.PREDICT,
    ("POST", "/v1/completions"): Right.PREDICT,
    ("POST", "/infill"): Right.PREDICT,
    ("POST", "/v1/chat/completions"): Right.PREDICT,
    ("POST", "/tokenize"): Right.PREDICT,
    ("POST", "/detokenize"): Right.PREDICT,
    ("GET", "/tokenizer_info"): Right.PREDICT,
    ("POST", "/v1/explain"): Right.READ,
    ("GET", "/v1/domains"): Right.READ,
    ("GET", "/v1/documents"): Right.READ,
    ("POST", "/v1/documents"): Right.WRITE,
    ("DELETE", "/v1/documents"): Right.WRITE,
    ("DELETE", "/v1/domains"): Right.WRITE,
}
"""Said here once more, so that a right that changes by mistake is seen."""


@pytest.fixture
def keyed(inside, home):
    """A server that asks for keys, and a key of each right."""
    server = inside(home)
    return server, {right: server.key(right.value) for right in Right}


def test_every_endpoint_asks_for_its_right(keyed):
    server, keys = keyed
    described = server.call("GET", "/openapi.json", keys[Right.ADMIN]).json()["paths"]
    there = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert there == NEEDED.keys()
    unknown = f"knn_{'0' * 12}_{'a' * 43}"
    for (method, declared), needed in NEEDED.items():
        path = declared.replace("{name}", "tiny")
        assert (server.call(method, path).status_code == 401) == (needed is not None), path
        assert (server.call(method, path, unknown).status_code == 401) == (needed is not None)
        for right, key in keys.items():
            allowed = needed in (None, right) or right is Right.ADMIN
            status = server.call(method, path, key, json={} if method == "POST" else None).status_code
            assert (status != 403) == allowed, (method, path, right, status)
            assert status in ((200, 400) if allowed else (403,)), (method, path, right, status)


def test_a_route_that_declares_no_right_is_refused():
    app = make_endpoints(Serving("m"), Metrics(), Options())
    check_rights_declared(app)
    app.get("/more")(lambda: "")
    with pytest.raises(RuntimeError, match="/more does not declare"):
        check_rights_declared(app)
    mounted = FastAPI(openapi_url=None)
    mounted.mount("/below", app)
    with pytest.raises(RuntimeError, match="/below"):
        check_rights_declared(mounted)


def test_naming_sources_needs_the_right_to_read(keyed):
    server, keys = keyed
    asked = {**COMPLETION, "knn": {"sources": 1}}
    assert server.call("POST", "/v1/completions", keys[Right.PREDICT], json=asked).status_code == 403
    assert server.call("POST", "/v1/completions", keys[Right.PREDICT], json=COMPLETION).status_code == 200
    assert server.call("POST", "/v1/completions", keys[Right.ADMIN], json=asked).status_code == 200


def asked_of(server, key: str) -> dict[str, Any]:
    """Everything that a key for letters might learn of, without what is another each time."""
    completion = {**COMPLETION, "logprobs": 5, "echo": True, "knn": {"sources": 3}}
    found: dict[str, Any] = {}

    def ask(name: str, method: str, path: str, **options: Any) -> None:
        answer = server.call(method, path, key, **options)
        body = answer.json()
        for volatile in ("id", "created"):
            if "choices" in body:
                body.pop(volatile)
        for one in body.get("data", []):
            one.pop("added_at", None)
        headers = {
            name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")
        }
        found[name] = answer.status_code, headers, body

    ask("models", "GET", "/v1/models")
    for model in ("tiny", "tiny+letters", "tiny+news", "tiny+nothing", "tiny+letters+news"):
        ask(f"model {model}", "GET", f"/v1/models/{model}")
        ask(f"completion {model}", "POST", "/v1/completions", json={**completion, "model": model})
        ask(f"explain {model}", "POST", "/v1/explain", json={"model": model, "text": "The council voted"})
    for domain in ("letters", "news", "nothing"):
        knn = {"domains": [domain]}
        ask(
            f"knn {domain}",
            "POST",
            "/v1/completions",
            json={**COMPLETION, "model": "tiny+letters", "knn": knn},
        )
        ask(f"documents {domain}", "GET", "/v1/documents", params={"domain": domain, "text": True})
        ask(f"remove {domain}", "DELETE", "/v1/documents", params={"domain": domain, "id": "n-17"})
        ask(
            f"remove all {domain}", "DELETE", "/v1/domains", params={"domain": domain}
        ) if domain != "letters" else None
        rows = [{"id": "new", "text": "A new letter."}]
        ask(f"add {domain}", "POST", "/v1/documents", json={"domain": domain, "documents": rows})
    for tag in ("sea", "old", "hidden"):
        ask(f"tag {tag}", "GET", "/v1/documents", params={"tag": tag})
        tagged = {**completion, "model": "tiny+letters", "knn": {"tags": [tag], "sources": 2}}
        ask(f"tagged {tag}", "POST", "/v1/completions", json=tagged)
    for condition in ("year < 2000", "year exists", "not year = 1990", "year = ", "deep.er = 1"):
        met = {**completion, "model": "tiny+letters", "knn": {"where": condition, "sources": 2}}
        ask(f"where {condition}", "POST", "/v1/completions", json=met)
    ask("all documents", "GET", "/v1/documents", params={"text": True})
    ask("domains", "GET", "/v1/domains")
    return found


def test_what_a_key_may_not_see_is_not_there(inside, tmp_path, model_path):
    """All answers are those of a store that never had the other domains."""
    texts = [f"The harbour was quiet when the council and boat {at} came in." for at in range(4)]
    letters = [{"id": f"l{at}", "text": text, "year": 2020 + at} for at, text in enumerate(texts)]
    news = [
        {
            "id": "n-17",
            "text": "The council voted to repair the harbour wall before the storms.",
            "year": 1990,
        },
        {"id": "l0", "text": "The council said that prices of grain rose.", "deep": {"er": 1, "n": "a\0b"}},
    ]
    answers = []
    for name, hidden in (("both", news), ("letters", [])):
        lm = knnstore.create(tmp_path / name, str(model_path))
        with lm.store:
            if hidden:
                lm.add(hidden, domain="news", tags=["hidden", "sea"])
            lm.add(letters, domain="letters", tags=["sea"])
        server = inside(tmp_path / name)
        answers.append(asked_of(server, server.key("predict", "read", "write", domains=["letters"])))
    both, alone = answers
    for name, answer in alone.items():
        assert both[name] == answer, name
    assert both["completion tiny+letters"][0] == 200
    assert both["completion tiny+news"][0] == both["completion tiny+nothing"][0] == 404
    assert both["where year exists"][0] == 200
    assert both["where year = "][0] == 400
    assert both["remove news"] == both["remove nothing"]
    assert len(both["all documents"][2]["data"]) == 5


@pytest.mark.slow
def test_a_key_works_until_it_is_revoked_and_no_secret_is_logged(serve, home, make_key):
    key = make_key(home, "--right", "predict", "--name", "secret-name")
    server = serve("--require-keys").ready()
    assert server.client(key).completions.create(**COMPLETION).choices[0].text
    late = make_key(home, "--right", "predict")
    assert server.call("GET", "/v1/models", late).status_code == 200
    assert run_forked("--home", str(home), "key", "revoke", key.split("_")[1])[0] == 0
    assert server.call("GET", "/v1/models", key).status_code == 401
    assert server.call("GET", "/v1/models", late).status_code == 200
    assert server.end() == 0
    log = "\n".join(server.lines)
    assert key.split("_")[1] in log
    assert not any(secret in log for secret in (key, late, key[17:], late[17:], "council"))


@pytest.mark.slow
def test_other_addresses_demand_keys(serve, home, make_key):
    status, said = run_forked("--home", str(home), "serve", "--host", "0.0.0.0", "--port", "0")
    assert (status, said.count("\n")) == (1, 1)
    assert "knnstore key add" in said
    make_key(home, "--right", "predict")
    server = serve("--host", "0.0.0.0").ready()
    assert server.call("GET", "/v1/models").status_code == 401
    assert server.call("GET", "/health").status_code == 200


def test_without_keys_only_names_of_this_machine_are_answered(server):
    port = server.url.rpartition(":")[2]
    for host, status in {
        "localhost": 200,
        f"LOCALHOST:{port}": 200,
        "[::1]:80": 200,
        "127.9.8.7": 200,
    }.items():
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == status
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "1.2.3.4",
    ):
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 403, host
    with socket.create_connection(("127.0.0.1", int(port))) as plain:
        plain.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 403 " in plain.recv(100)


def test_no_other_origin_may_read_answers_or_send_documents(server):
    origin = {"Origin": "https://evil.example"}
    asked = {**origin, "Access-Control-Request-Method": "DELETE"}
    preflight = httpx.options(f"{server.url}/v1/documents", headers=asked)
    assert not any(name.startswith("access-control") for name in preflight.headers)
    simple = httpx.post(
        f"{server.url}/v1/documents", headers={**origin, "Content-Type": "text/plain"},
        content=b'{"domain": "d", "documents": [{"id": "a", "text": "b"}]}',
    )  # fmt: skip
    assert simple.status_code == 400
    assert not any(name.startswith("access-control") for name in simple.headers)
