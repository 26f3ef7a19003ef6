"""Requests made from the server's own description: none is a fault of the server, errors have their shape."""

import shutil
from collections import Counter
from typing import Any

import hypothesis
import pytest

schemathesis = pytest.importorskip("schemathesis")
GenerationMode = schemathesis.GenerationMode

pytestmark = pytest.mark.slow

MODELS = ["tiny", "tiny+news", "tiny+letters+news", "tiny+x"]
DOMAINS = ["news", "letters", "new", "x"]


@pytest.fixture(scope="module")
def described(inside, prepared, tmp_path_factory):
    """A server, and its description, narrowed so that most requests are short and about what is there."""
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("described") / "home")
    server = inside(home, require_keys=False)
    described = server.call("GET", "/openapi.json").json()
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        given = schema.get("properties", {})
        given |= {
            name: {"type": "integer", "minimum": -1, "maximum": 4}
            for name in ("max_tokens", "n")
            if name in given
        }
        given |= {"model": {"enum": MODELS}} if "model" in given else {}
        given |= {"domain": {"enum": DOMAINS}} if "domain" in given else {}
    document = {name: {"type": "string", "minLength": 1, "maxLength": 40} for name in ("id", "text")}
    schemas["NewDocuments"]["properties"]["documents"] |= {
        "items": {"type": "object", "required": [*document], "properties": document}, "maxItems": 2,
    }  # fmt: skip
    return server, schemathesis.openapi.from_dict(described)


def ask(described, count: int, modes=tuple(GenerationMode)) -> Counter[tuple[str, int]]:
    """Send so many requests of each kind to each endpoint; how often each status came."""
    server, schema = described
    statuses: Counter[tuple[str, int]] = Counter()

    def answered(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://inside")
        body = {name: sent[name] for name in ("json", "data", "params") if sent.get(name) is not None}
        if isinstance(body.get("data"), bytes | str):
            body["content"] = body.pop("data")
        headers = {
            name: value
            for name, value in (sent.get("headers") or {}).items()
            if value.isprintable() and value.isascii()
        }
        answer = server.call(case.method, sent["url"].removeprefix("http://inside"), headers=headers, **body)
        statuses[case.operation.label, answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert "\n" not in error["message"]

    for result in schema.get_all_operations():
        options = hypothesis.settings(
            max_examples=count, deadline=None, derandomize=True, database=None,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        for mode in modes:
            try:
                options(hypothesis.given(result.ok().as_strategy(generation_mode=mode))(answered))()
            except hypothesis.errors.Unsatisfiable:  # nothing can be wrong with it
                continue
    return statuses


def test_requests_to_some_endpoints(described):
    server, schema = described
    some = schema.include(path=["/v1/documents", "/tokenize"])
    statuses = ask((server, some), 3, [GenerationMode.POSITIVE])
    assert {label for label, _ in statuses} == {
        "GET /v1/documents", "POST /v1/documents", "DELETE /v1/documents", "POST /tokenize",
    }  # fmt: skip
    assert statuses["POST /v1/documents", 200]


@pytest.mark.parametrize(
    ("examples", "least"), [(30, 500), pytest.param(270, 5000, marks=pytest.mark.exhaustive)]
)
def test_many_requests_to_all_endpoints(described, examples, least):
    statuses = ask(described, examples)
    assert {200, 400, 404} <= {status for _, status in statuses}
    assert statuses.total() >= least
    assert described[0].call("GET", "/health").status_code == 200
