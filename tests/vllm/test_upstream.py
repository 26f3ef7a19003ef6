"""Our server in front of vLLM: the same answers as without vLLM, and the same attacks on its scopes."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import knnstore
from knnstore.errors import ConfigError
from knnstore.server.upstream import UpstreamAddress, check_upstream
from tests.server import test_leaks as leaks
from tests.server.conftest import Application, Inside, make_model
from tests.server.conftest import inside as inside
from tests.server.conftest import one_thread as one_thread
from tests.server.conftest import prepared as prepared
from tests.server.test_infilling import make_infilling_home
from tests.vllm.conftest import choose_port, serve_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OPTIONS = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""Options of vLLM; with free whitespace a random model writes nothing else between two parts of JSON."""

Front = Callable[[Path], Application]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> Path:
    """The model of the server's tests with one head, because vLLM's attention needs 32 components a head."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", heads=1)


@pytest.fixture(scope="module")
def front(inside, vllm_python, model_path, tmp_path_factory) -> Iterator[Front]:
    """Starts vLLM over a store, and our server in front of it."""
    with ExitStack() as running:

        def start(home: Path) -> Application:
            log = tmp_path_factory.mktemp("vllm") / "log"
            served = running.enter_context(serve_model(vllm_python, home, log, model_path, *OPTIONS))
            return inside(home, upstream=UpstreamAddress(served.url))

        yield start


@pytest.fixture(scope="module")
def both(front: Front, inside, prepared, tmp_path_factory) -> tuple[Application, Application]:
    """Our server in front of vLLM, and without it, each over a copy of the same store."""
    homes = [shutil.copytree(prepared, tmp_path_factory.mktemp("both") / "home") for _ in range(2)]
    return front(homes[0]), inside(homes[1])


def read_stream(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


COMPLETION = {"model": "tiny+news", "prompt": "The council voted", "temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "tiny"},
        {"model": "tiny+letters+news", "knn": {"lam": 0.9, "k": 5}},
        {"model": "tiny+letters", "knn": {"tags": ["sea"], "lam": 0.8}},
        {"logprobs": 3, "n": 2},
        {"logprobs": 2, "echo": True},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"echo": True, "max_tokens": 0},
        {"prompt": ["Two boats", "In the morning"], "echo": True, "logprobs": 1, "max_tokens": 3},
        {"stop": ["e"], "logprobs": 1},
        {"max_tokens": 60},
        {"knn": {"sources": 2}},
    ],
    ids=str,
)
def test_answers_equal_those_of_the_engine(both, changes) -> None:
    expected, answers = [], []
    for server, kept in ((both[0], answers), (both[1], expected)):
        answer = server.call(
            "POST", "/v1/completions", server.key("predict", "read"), json={**COMPLETION, **changes}
        )
        assert answer.status_code == 200, answer.text
        kept.append(answer.json())
    assert_equal(answers[0]["choices"], expected[0]["choices"])
    assert answers[0]["usage"] == expected[0]["usage"]


def assert_equal(one: Any, other: Any) -> None:
    """Compare JSON values; numbers may differ by rounding, and `second_pass` is of the front alone."""
    if isinstance(other, dict):
        assert set(one) - {"second_pass"} == set(other)
        for name, value in other.items():
            assert_equal(one[name], value)
    elif isinstance(other, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(other, float):
        assert one == pytest.approx(other, abs=2e-4)
    else:
        assert one == other


def test_streams_add_up_to_the_whole_answer_and_sources_say_that_they_are_of_a_second_pass(both) -> None:
    front, _ = both
    key = front.key("predict", "read")
    whole = front.call("POST", "/v1/completions", key, json=COMPLETION).json()
    events = read_stream(front.call("POST", "/v1/completions", key, json={**COMPLETION, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    named = front.call("POST", "/v1/completions", key, json={**COMPLETION, "knn": {"sources": 1}}).json()
    assert named["choices"][0]["knn"]["second_pass"] is True
    explained = front.call("POST", "/v1/explain", key, json={"model": "tiny+news", "text": "The council"})
    assert explained.json()["second_pass"] is True
    assert explained.json()["documents"]


def test_samples_follow_the_seed_and_json_follows_the_schema(both) -> None:
    front, _ = both
    key = front.key("predict")
    sampled = {**COMPLETION, "temperature": 1, "seed": 3, "n": 3}
    texts = [
        [
            choice["text"]
            for choice in front.call("POST", "/v1/completions", key, json=sampled).json()["choices"]
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {**COMPLETION, "response_format": form, "max_tokens": 40, "temperature": 1, "seed": 1}
    answer = front.call("POST", "/v1/completions", key, json=body).json()["choices"][0]
    assert json.loads(answer["text"])["a"] in ("x", "y")
    assert answer["finish_reason"] == "stop"


def test_documents_that_the_front_adds_and_removes_count_at_once(both) -> None:
    front, _ = both
    key = front.key("admin")
    new = [
        {"id": "new", "text": "The secret of the brass key is that it opens the green door."},
        {"id": "other", "text": "Prices of grain rose."},
    ]
    assert front.call("POST", "/v1/documents", key, json={"domain": "own", "documents": new}).is_success
    asked = {"model": "tiny+own", "prompt": "The secret of the", "temperature": 0, "max_tokens": 20}
    asked["knn"] = {"lam": 0.99}
    text = front.call("POST", "/v1/completions", key, json=asked).json()["choices"][0]["text"]
    assert " brass key is that it" in text
    assert front.call("DELETE", "/v1/documents", key, params={"domain": "own", "id": "new"}).is_success
    later = front.call("POST", "/v1/completions", key, json=asked).json()["choices"][0]["text"]
    assert "brass" not in later


@pytest.fixture(scope="module")
def pairs(front: Front, model_path, tmp_path_factory) -> list[leaks.Pair]:
    """A front of all domains, and one with the domains of a key alone."""

    def start(name: str, domains: list[str]) -> Application:
        home = tmp_path_factory.mktemp(name) / "home"
        lm = knnstore.create(home, str(model_path))
        with lm.store:
            for domain in reversed(domains):
                lm.add(leaks.documents(domain), domain=domain, tags=[leaks.TAGS[len(domain) % 3], "sea"])
        return front(home)

    rights, domains = leaks.KEYS[1]
    whole, alone = start("whole", leaks.DOMAINS), start("alone", domains)
    keys = (server.key(*rights, domains=domains) for server in (whole, alone))
    # Sums in another order round differently, as between texts of a domain that is written to.
    return [leaks.Pair(whole, next(keys), alone, next(keys), writes=True)]


def test_no_request_shows_what_a_key_may_not_see(pairs) -> None:
    for pair in pairs:
        for path in leaks.PLAIN:
            difference = pair.differ("GET", path, {})
            assert not difference, difference
    assert leaks.ask(pairs, 0, 300) >= {200, 400, 403, 404}


def test_the_client_cannot_choose_its_own_scope(pairs) -> None:
    pair = pairs[0]
    for more in ({"vllm_xargs": {"knn_domains": "own"}}, {"knn": {"domains": ["own"]}}, {"extra_args": {}}):
        body = {"model": "tiny+letters", "prompt": "The own said", "max_tokens": 5, **more}
        assert pair.whole.call("POST", "/v1/completions", pair.key, json=body).status_code == 400


def test_a_server_that_goes_is_refused_and_its_requests_are_answered_503(
    prepared, vllm_python, model_path, tmp_path
) -> None:
    home = shutil.copytree(prepared, tmp_path / "home")
    port = choose_port()
    address = UpstreamAddress(f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_upstream(address, "any")
    with serve_model(vllm_python, home, tmp_path / "log1", model_path, port=port):
        with pytest.raises(ConfigError, match="another store"):
            check_upstream(address, "any")
        server = Inside(home, upstream=address)
        key = server.key("predict")
        assert server.call("POST", "/v1/completions", key, json=COMPLETION).status_code == 200
    try:
        assert server.call("POST", "/v1/completions", key, json=COMPLETION).status_code == 503
        assert server.call("GET", "/health").json() == {"status": "upstream_unavailable"}
    finally:
        server.close()


@pytest.fixture(scope="module")
def front_with_damage(prepared, vllm_python, model_path, tmp_path_factory) -> Iterator[Inside]:
    """Our server in front of a vLLM whose copy of the store breaks, with ``KNNSTORE_ON_ERROR=fallback``."""
    folder = tmp_path_factory.mktemp("damaged")
    homes = [shutil.copytree(prepared, folder / name) for name in ("front", "vllm")]
    options = {"KNNSTORE_ON_ERROR": "fallback"}
    with serve_model(vllm_python, homes[1], folder / "log", model_path, **options) as served:
        server = Inside(homes[0], upstream=UpstreamAddress(served.url))
        try:
            (homes[1] / "catalog.db").write_bytes(b"damaged" * 10_000)
            yield server
        finally:
            server.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes", [{}, {"echo": True, "logprobs": 1, "max_tokens": 0}, {"stream": True}], ids=str
)
def test_an_answer_without_the_store_says_so(changes, front_with_damage) -> None:
    key = front_with_damage.key("predict")
    answer = front_with_damage.call("POST", "/v1/completions", key, json={**COMPLETION, **changes})
    assert answer.status_code == 200, answer.text
    bodies = read_stream(answer) if changes.get("stream") else [answer.json()]
    reasons = [body["choices"][0].get("stop_reason") for body in bodies]
    assert reasons == [*[None] * (len(bodies) - 1), "knnstore_fallback"]


@pytest.mark.exhaustive
def test_the_middle_of_a_text_is_that_of_the_engine_and_ends_with_a_token_of_the_format(
    inside, vllm_python, tmp_path
) -> None:
    homes = [make_infilling_home(tmp_path / "made", heads=1), tmp_path / "copy"]
    shutil.copytree(*homes)
    with serve_model(vllm_python, homes[0], tmp_path / "log", tmp_path / "made" / "tiny") as served:
        front = Inside(homes[0], upstream=UpstreamAddress(served.url))
        servers = front, inside(homes[1])
        try:
            asked = {**COMPLETION, "suffix": " voted.", "logprobs": 0, "return_tokens_as_token_ids": True}

            def complete() -> list[Any]:
                return [
                    server.call("POST", "/v1/completions", server.key("predict"), json=asked).json()[
                        "choices"
                    ][0]
                    for server in servers
                ]

            whole, expected = complete()
            assert_equal(whole, expected)
            assert whole["finish_reason"] == "length"
            last = int(whole["logprobs"]["tokens"][5].removeprefix("token_id:"))
            for server in servers:
                infilling = replace(server.serving.infilling, ends=frozenset({last}))
                server.serving.infilling = infilling
            middle, expected = complete()
            assert_equal(middle, expected)
            assert middle["finish_reason"] == "stop"
            assert len(middle["text"]) < len(whole["text"])
        finally:
            front.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stored", "reason"), [(True, "another store"), (False, "without a store")])
def test_a_server_that_comes_back_with_another_store_or_none_is_refused(
    stored, reason, prepared, vllm_python, model_path, tmp_path
) -> None:
    home, other = shutil.copytree(prepared, tmp_path / "home"), tmp_path / "other"
    knnstore.create(other, str(model_path)).store.close()
    port = choose_port()
    address = UpstreamAddress(f"http://127.0.0.1:{port}")
    with serve_model(vllm_python, home, tmp_path / "log1", model_path, port=port):
        server = Inside(home, upstream=address)
        key = server.key("predict")
    try:
        wrong = other if stored else None
        with serve_model(vllm_python, wrong, tmp_path / "log2", model_path, port=port):
            with pytest.raises(ConfigError, match=reason):
                check_upstream(address, server.serving.lm.store.id)
            assert server.call("POST", "/v1/completions", key, json=COMPLETION).status_code == 503
    finally:
        server.close()


@pytest.mark.exhaustive
def test_a_key_of_vllm_is_needed_and_not_logged(prepared, vllm_python, model_path, tmp_path, caplog) -> None:
    home = shutil.copytree(prepared, tmp_path / "home")
    with serve_model(vllm_python, home, tmp_path / "log", model_path, VLLM_API_KEY="very-secret") as served:
        with pytest.raises(ConfigError, match="KNNSTORE_UPSTREAM_KEY"):
            check_upstream(UpstreamAddress(served.url), "any")
        server = Inside(home, upstream=UpstreamAddress(served.url, "very-secret"))
        key = server.key("predict")
        assert server.call("POST", "/v1/completions", key, json=COMPLETION).status_code == 200
        server.close()
    assert "very-secret" not in caplog.text
    assert "very-secret" not in repr(UpstreamAddress(served.url, "very-secret"))
