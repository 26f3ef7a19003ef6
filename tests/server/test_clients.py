"""Requests recorded from clients of OpenAI's protocol, and the rule for fields that ask for nothing.

`assets/clients` has the bodies that each client sent to a server of ours, as JSON: conversations of three
turns, streams, structured answers, every optional field null or at its default. All answers of the assistant
in them were replaced by the same text.
"""

import json
import shutil
import socket
from pathlib import Path

import pytest
from openai import Stream
from openai.types import Completion
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params
from transformers import AutoTokenizer

import knnstore
from tests.server.conftest import Listening, started_as

MODEL = Path(__file__).parents[2] / "examples" / "tiny-lm"
RECORDED = {
    path.stem: json.loads(path.read_text())["requests"]
    for path in sorted((Path(__file__).parent / "assets" / "clients").glob("*.json"))
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}{% if message.name %} {{ message.name }}{% endif %}: "
    "{{ message['content'] }}\n"
    "{% for call in message.tool_calls or [] %}call {{ call.function.name }}"
    "({{ call.function.arguments['city'] }})\n{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
THINKING_TEMPLATE = TEMPLATE.replace(
    "{% for call",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{% endif %}{% for call",
)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    TEXT: {"model": "tiny", "prompt": "A", "max_tokens": 1},
}


def make_home(folder: Path, template: str) -> Path:
    model = Path(shutil.copytree(MODEL, folder / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    lm = knnstore.create(folder / "home", str(model), key=None)
    with lm.store:
        lm.add(["user: What is the capital?\nassistant: It is small."], domain="talks")
    return folder / "home"


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    yield from served(tmp_path_factory.mktemp("clients"), TEMPLATE)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A server with a template that knows what an assistant thought."""
    yield from served(tmp_path_factory.mktemp("thinking"), THINKING_TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A server with a template that knows neither tools nor names."""
    yield from served(tmp_path_factory.mktemp("plain"), PLAIN_TEMPLATE)


def served(folder: Path, template: str):
    for start in started_as(Listening):
        yield start(make_home(folder, template), require_keys=False)


def written_after(server, messages) -> str:
    """The prompt that the template makes of messages: what one token more is written after."""
    asked = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answer = server.call("POST", CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "client", [one if one == "openai" else pytest.param(one, marks=pytest.mark.slow) for one in RECORDED]
)
def test_recorded_requests_are_answered(talking, client):
    strict, lenient = talking.client(_strict_response_validation=True), talking.client()
    for request in RECORDED[client]:
        path, body = request["path"].removeprefix("/v1"), request["body"]
        whole, part = (ChatCompletion, ChatCompletionChunk) if "chat" in path else (Completion, Completion)
        # The types of the package do not know that a streamed text has no `finish_reason` before its end.
        made = lenient if body.get("stream") and part is Completion else strict
        prompts = body.get("prompt") if isinstance(body.get("prompt"), list) else [None]
        if body.get("stream"):
            events = list(made.post(path, cast_to=part, body=body, stream=True, stream_cls=Stream[part]))
            ends = [one.finish_reason for event in events for one in event.choices if one.finish_reason]
            assert len(ends) == len(prompts)
            wants_usage = (body.get("stream_options") or {}).get("include_usage")
            assert bool(wants_usage) == (events[-1].usage is not None)
        else:
            answer = made.post(path, cast_to=whole, body=body)
            assert [one.finish_reason in ("stop", "length") for one in answer.choices] == [True] * len(
                prompts
            )
            assert answer.usage.completion_tokens > 0
            if (body.get("response_format") or {}).get("type") == "json_schema":
                held = [one for one in answer.choices if one.finish_reason == "stop"]
                assert held
                assert all(isinstance(json.loads(one.message.content), dict) for one in held)


def test_a_conversation_of_the_sdk_goes_on(talking):
    client, asked = talking.client(), {"model": "tiny+talks", "max_tokens": 5, "temperature": 0}
    as_objects = [{"role": "user", "content": "What is the capital?"}]
    as_objects_of_all_fields, plain = list(as_objects), list(as_objects)
    for _ in range(3):
        answers = [
            client.chat.completions.create(messages=messages, **asked)
            for messages in (as_objects, as_objects_of_all_fields, plain)
        ]
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        assert len({answer.usage.prompt_tokens for answer in answers}) == 1
        message, more = answers[0].choices[0].message, {"role": "user", "content": "And then?"}
        as_objects += [message, more]
        as_objects_of_all_fields += [message.model_dump(), more]
        plain += [{"role": "assistant", "content": message.content}, more]


NOTHING = {
    "presence_penalty": [0, 0.0, -0.0],
    "frequency_penalty": [0.0],
    "repetition_penalty": [1.0, 1],
    "logit_bias": [{}, {"50": 0}, {"50": 0.0, "7": 0}],
    "top_k": [0, -1],
    "min_p": [0.0],
    "ignore_eos": [False],
    "response_format": [{"type": "text"}, {}],
    "stream_options": [{}, {"include_usage": False}, {"include_usage": None, "include_obfuscation": False}],
    "stop": ["", []],
    "seed": [3],
    "n": [1],
    "stream": [False],
    "user": ["ann", ""],
    "knn": [{}, {"sources": None}, {"lam": None, "domains": None, "weird": None}],
    "weird": [],
}
NOTHING_IN_CHAT = NOTHING | {
    "tools": [[]],
    "functions": [[]],
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "modalities": [["text"], []],
    "audio": [{}],
    "prediction": [],
    "metadata": [{}],
    "store": [False],
    "service_tier": ["auto", "default"],
    "reasoning_effort": ["none"],
    "verbosity": ["medium"],
    "web_search_options": [],
    "moderation": [],
    "safety_identifier": ["someone"],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["in_memory", "24h"],
    "prompt_cache_options": [{"mode": "implicit"}, {"ttl": "30m"}, {}],
    "logprobs": [False],
    "top_logprobs": [0],
    "max_completion_tokens": [1],
}
NOTHING_IN_TEXT = NOTHING | {"best_of": [1], "suffix": [""], "echo": [False], "prompt": [""]}
SOMETHING = {
    "presence_penalty": [0.5, False],
    "frequency_penalty": [-1],
    "repetition_penalty": [1.1],
    "logit_bias": [{"50": 1}, {"50": 0, "7": -100}],
    "top_k": [40],
    "min_p": [0.05],
    "ignore_eos": [True],
    "stream_options": [{"include_usage": True}, {"include_obfuscation": True}, {"weird": 1}],
    "stop": [[""]],
    "knn": [{"weird": 1}],
    "weird": [0, "", [], {}, False],
}
SOMETHING_IN_CHAT = SOMETHING | {
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {}}}]],
    "functions": [[{"name": "f"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "function_call": [{"name": "f"}],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "alloy", "format": "wav"}],
    "prediction": [{"type": "content", "content": "A"}],
    "metadata": [{"a": "b"}],
    "store": [True],
    "service_tier": ["flex", "priority"],
    "reasoning_effort": ["high"],
    "verbosity": ["low"],
    "web_search_options": [{}, {"search_context_size": "low"}],  # an empty one searches, too
    "moderation": [{"model": "m"}],
    "prompt_cache_options": [{"mode": "explicit"}],
    "top_logprobs": [2],
}
SOMETHING_IN_TEXT = SOMETHING | {"best_of": [2]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "nothing", "something"),
    [(CHAT, NOTHING_IN_CHAT, SOMETHING_IN_CHAT), (TEXT, NOTHING_IN_TEXT, SOMETHING_IN_TEXT)],
    ids=["chat", "text"],
)
def test_a_field_that_asks_for_nothing_is_accepted_and_any_other_is_refused_by_name(
    talking, path, nothing, something
):
    for field, values in nothing.items():
        for value in [None, *values]:
            answer = talking.call("POST", path, json={**ASKED[path], field: value})
            assert answer.status_code == 200, (field, value, answer.text)
    for field, values in something.items():
        for value in values:
            answer = talking.call("POST", path, json={**ASKED[path], field: value})
            assert answer.status_code == 400, (field, value, answer.text)
            error = answer.json()["error"]
            assert error["param"].split(".")[0] == field, (field, value, error)
            assert error["message"].startswith(error["param"] + ": "), error
            assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "params"), [(CHAT, chat_params), (TEXT, completion_params)], ids=["chat", "text"]
)
def test_every_field_of_the_protocol_may_be_null_and_none_is_ignored(talking, path, params):
    fields = {*params.CompletionCreateParamsBase.__annotations__, "stream"} - {"model", "messages"}
    answer = talking.call("POST", path, json={**dict.fromkeys(fields), **ASKED[path]})
    assert answer.status_code == 200, answer.text
    for field in fields:
        wrong = {"no": {"such": ["thing"]}}
        answer = talking.call("POST", path, json={**ASKED[path], field: wrong})
        assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, field)


def test_without_a_prompt_a_new_document_is_begun(talking):
    asked = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    answers = [
        talking.call("POST", TEXT, json={**asked, **prompt}).json()["choices"][0]["text"]
        for prompt in ({}, {"prompt": None}, {"prompt": ""})
    ]
    assert len(set(answers)) == 1


MESSAGE_NOTHING = {
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": "",
    "provider_specific_fields": {"refusal": None},
    "weird": None,
}


def test_messages_follow_the_same_rule(talking):
    user = {"role": "user", "content": "A"}
    count = written_after(talking, [user, {"role": "assistant", "content": "B"}, user])
    for nothing in ({field: value} for field, value in MESSAGE_NOTHING.items()):
        assert written_after(talking, [user, {"role": "assistant", "content": "B", **nothing}, user]) == count
    parts = [{"type": "text", "text": "B", "annotations": [], "cache_control": None}]
    assert written_after(talking, [user, {"role": "assistant", "content": parts}, user]) == count
    assert (
        written_after(talking, [user, {"role": "assistant", "content": None, "tool_calls": []}, user])
        <= count
    )
    named = {**user, "name": "ann"}
    assert written_after(talking, [named]) > written_after(talking, [user])
    for message, param in (
        ({"role": "assistant", "refusal": "I cannot"}, "refusal"),
        ({"role": "assistant", "content": "B", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 1}, "content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "content.0.type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content.0.text"),
        ({"role": "user", "content": "B", "weird": 1}, "weird"),
        ({"role": "user", "content": "B", "tool_calls": [{"id": "a"}]}, "tool_calls.0.function"),
        ({"role": "function", "content": "B", "name": "f"}, "role"),
    ):
        answer = talking.call("POST", CHAT, json={**ASKED[CHAT], "messages": [user, message]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"messages.1.{param}"), error
        assert error["message"].startswith(f"messages.1.{param}: ")
        assert "\n" not in error["message"]


@pytest.mark.slow
def test_what_another_server_answered_may_be_sent_back(talking, thinking):
    user, said = {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}
    more = {
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://example.org"}}],
        "provider_specific_fields": {"reasoning_content": "First, A."},
        "reasoning_details": [{"type": "reasoning.text", "text": "First, A."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "First, A.", "signature": "s"}],
    }
    for server in (talking, thinking):
        count = written_after(server, [user, said, user])
        assert written_after(server, [user, {**said, **more}, user]) == count
        for name in ("reasoning_content", "reasoning"):
            thought = written_after(server, [user, {**said, name: "First, A."}, user])
            assert (thought > count) == (server is thinking)
    for field in (*more, "reasoning_content"):
        message = {**user, field: more.get(field, "First, A.")}
        answer = talking.call("POST", CHAT, json={**ASKED[CHAT], "messages": [message]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages.0.{field}")
    long = {**said, "reasoning_content": "A " * 100_000}
    answer = talking.call("POST", CHAT, json={**ASKED[CHAT], "messages": [user, long, user]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_template_gets_what_it_knows_of_a_message(talking, plain):
    user = {"role": "user", "content": "A"}
    assert written_after(talking, [{"role": "developer", "content": "B"}, user]) == written_after(
        talking, [{"role": "system", "content": "B"}, user]
    )
    call = {"name": "weather", "arguments": '{"city": "Ghent Ghent"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    result = {"role": "tool", "content": "rain", "tool_call_id": "c"}
    short = {**call, "arguments": '{"city": "G"}'}
    briefly = {**called, "tool_calls": [{"id": "c", "type": "function", "function": short}]}
    assert written_after(talking, [user, called, result]) > written_after(talking, [user, briefly, result])
    for messages, param in (([user, called], "messages.1.tool_calls"), ([user, result], "messages.1.role")):
        answer = plain.call("POST", CHAT, json={**ASKED[CHAT], "messages": messages})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_answer_without_content_may_stand_in_a_conversation(talking):
    user = {"role": "user", "content": "A"}
    function = {"name": "weather", "arguments": '{"city": "Ghent"}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    result = {"role": "tool", "content": "rain", "tool_call_id": "c"}
    called = {"role": "assistant", "tool_calls": calls}
    lengths = {
        written_after(talking, [user, {**called, **content}, result, user])
        for content in ({"content": None}, {"content": ""}, {}, {"content": None, "reasoning_content": None})
    }
    assert len(lengths) == 1
    empty = {
        written_after(talking, [user, {"role": "assistant", **content}, user])
        for content in ({"content": None}, {"content": ""}, {"content": None, "tool_calls": None})
    }
    assert len(empty) == 1
    assert max(empty) < min(lengths)  # the call and its result are not left out


def test_null_counts_as_not_given_at_our_own_endpoints(talking):
    explained = {
        "model": "tiny+talks",
        "text": "A",
        "after": None,
        "neighbors": None,
        "knn": None,
        "weird": None,
    }
    assert talking.call("POST", "/v1/explain", json=explained).status_code == 200
    tokens = {"model": None, "prompt": "A", "add_special_tokens": None}
    assert talking.call("POST", "/tokenize", json=tokens).status_code == 200
    document = {"id": "d", "text": "A small one.", "note": None}
    added = {"domain": "new", "documents": [document], "tags": None, "weird": None}
    assert talking.call("POST", "/v1/documents", json=added).json()["added"] == 1
    shown = talking.call("GET", "/v1/documents?domain=new").json()["data"][0]
    assert "note" in shown["metadata"]  # what a document has is its own
    for path, body in (("/v1/explain", explained), ("/tokenize", tokens), ("/v1/documents", added)):
        answer = talking.call("POST", path, json={**body, "weird": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weird")


@pytest.mark.parametrize("path", ["/health", "/health/live", "/", "/v1/models", "/v1/models/tiny+talks"])
def test_head_gives_the_head_of_get(talking, path):
    head, get = talking.call("HEAD", path), talking.call("GET", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))
    assert head.headers["content-type"] == get.headers["content-type"]


def test_one_connection_serves_a_head_and_more(talking):
    host, port = talking.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        asked = f"HEAD /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        connection.sendall(asked + asked.replace(b"Host", b"Connection: close\r\nHost"))
        came = b"".join(iter(lambda: connection.recv(4096), b""))
    assert came.count(b"HTTP/1.1 200 OK") == 2
    assert b"ready" not in came  # no body


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/v1/documents", "DELETE, GET, HEAD, OPTIONS, POST"),
        ("/v1/completions", "OPTIONS, POST"),
        ("/v1/models/tiny", "GET, HEAD, OPTIONS"),
    ],
)
def test_other_methods_are_told_which_there_are(talking, path, methods):
    for method in ("PATCH", "OPTIONS"):
        answer = talking.call(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405 if method == "PATCH" else 204, methods)
        assert method == "OPTIONS" or methods in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_a_slash_at_the_end_is_no_other_path(talking):
    for path in ("/health/", "/health/live/", "/v1/models/", "/v1/domains/"):
        plain, slashed = talking.call("GET", path.rstrip("/")), talking.call("GET", path)
        assert (slashed.status_code, slashed.content) == (200, plain.content)
    assert talking.call("POST", TEXT + "/", json=ASKED[TEXT]).status_code == 200
    assert talking.call("GET", "/v1/models/tiny+talks/").status_code == 404  # a domain may be named so


def test_an_unknown_path_is_named_and_one_without_v1_is_told_of_it(talking):
    error = talking.call("POST", "/chat/completions", json={}).json()["error"]
    assert "/v1/chat/completions" in error["message"]
    answer = talking.call("POST", "/v1/embeddings", json={})
    assert (answer.status_code, "/v1/embeddings" in answer.json()["error"]["message"]) == (404, True)
