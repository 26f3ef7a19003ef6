"""Bodies that no client means to send: one line in the shape of an error, and service goes on."""

import shutil

import pytest

BODIES = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep prompt": b'{"model": "tiny", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deep field": b'{"model": "tiny", "prompt": "a", "knn": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "half a character": b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1, "stop": "\\udfff"}',
    "half a field": b'{"model": "tiny", "prompt": "a", "\\udfff": 1}',
    "half a name": b'{"model": "tiny+\\ud800", "prompt": "a", "max_tokens": 1}',
    "no UTF-8": b'{"model": "\xff", "prompt": "a"}',
    "a number of many digits": b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "no number": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "a name twice": b'{"model": "x", "model": "tiny", "prompt": "a", "max_tokens": 1}',
    "nothing": b"",
    "null": b"null",
}


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory):
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("malformed") / "home")
    return inside(home, require_keys=False)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/documents", "/tokenize"])
@pytest.mark.parametrize("kind", list(BODIES))
def test_is_refused_or_done(server, kind, path):
    headers = {"Content-Type": "application/json"}
    answer = server.call("POST", path, content=BODIES[kind], headers=headers)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        assert len(error["message"]) < 1000


def test_a_body_without_its_header_is_told_of_it(server):
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl --data says by itself
    answer = server.call("POST", "/v1/completions", content=b'{"prompt": "A"}', headers=form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
    assert "content-type: application/json" in answer.json()["error"]["message"]


def test_metadata_that_is_deep_is_refused_and_the_rest_is_read(server):
    deep = b'{"id": "deep", "text": "A.", "m": ' + b"[" * 900 + b"]" * 900 + b"}"
    body = b'{"domain": "deep", "documents": [' + deep + b"]}"
    answer = server.call("POST", "/v1/documents", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert server.call("GET", "/v1/documents").status_code == 200


def test_an_error_is_one_line_whatever_was_sent(server):
    answer = server.call("POST", "/tokenize", json={"prompt": "a", "two\nlines\u202e": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "two\\nlines\\u202e: this server does not know this field"
