"""Answers that are held to JSON or to a JSON schema."""

import json
import sys
from typing import Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field

from knnstore.server.protocol import ResponseFormat
from knnstore.server.structured import JsonConstraints
from tests.server.test_clients import served
from tests.spellings import small_tokenizer

pytest.importorskip("llguidance")

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
COUNTRY = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["town", "village"]},
        "name": {"type": "string", "maxLength": 3},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "near": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "name", "people", "near"],
    "additionalProperties": False,
}


class Country(BaseModel):
    """The same, as the client's package reads it."""

    kind: Literal["town", "village"]
    name: str = Field(max_length=3)
    people: int = Field(ge=0, le=99)
    near: list[bool] = Field(min_length=1, max_length=3)


def held_to(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    yield from served(tmp_path_factory.mktemp("structured"), TEMPLATE)


@pytest.mark.slow
def test_the_package_parses_an_answer(talking):
    asked = {"model": "tiny+talks", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 90}
    client = talking.client()
    for sampling in ({"temperature": 0}, *({"temperature": 1.5, "seed": seed} for seed in range(2))):
        answer = client.chat.completions.parse(**asked, **sampling, response_format=Country)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Country)
    with client.chat.completions.stream(**asked, seed=1, response_format=Country) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Country)


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_a_text_may_hold_the_names_of_special_and_added_tokens(kind):
    """Spelled with other tokens; llguidance itself offers the named token and then refuses it."""
    tokenizer = small_tokenizer(kind)
    constraints = JsonConstraints(lambda use: use(tokenizer), len(tokenizer), [tokenizer.eos_token_id])
    for text in ("plain", "</s> x", "x</s>", *(f"a {token} b" for token in tokenizer.get_added_vocab())):
        asked = ResponseFormat(type="json_schema", json_schema={"name": "x", "schema": {"const": text}})
        constraint, tokens, is_complete = constraints.make_constraint(asked), [], False
        while not is_complete:
            tokens.append(int(constraint.mask_log_probs(torch.zeros(len(tokenizer))).argmax()))
            is_complete = constraint.advance(tokens[-1])
        assert not {*tokens} & {*tokenizer.get_added_vocab().values()} - {tokenizer.eos_token_id}
        assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True)) == text


@pytest.mark.slow
def test_texts_of_a_random_model_are_held_to_the_schema(server):
    """Each text has its own place in the schema, also in a batch, where others are free."""
    asked = {"model": "tiny+news", "prompt": ["The", "A boat"], "max_tokens": 80, "temperature": 2, "seed": 5}
    client = server.client()
    free = client.completions.create(**asked, n=1).choices
    held = client.completions.create(**asked, n=4, extra_body={"response_format": held_to(COUNTRY)}).choices
    assert len({choice.text for choice in held}) == 8
    for choice in held:
        assert choice.finish_reason == "stop"
        Country.model_validate_json(choice.text, strict=True)
    assert [choice.text for choice in client.completions.create(**asked, n=1).choices] == [
        choice.text for choice in free
    ]


@pytest.mark.slow
def test_a_text_of_no_more_tokens_is_cut(server):
    body = {"model": "tiny", "prompt": "The", "temperature": 0, "response_format": held_to(COUNTRY)}
    whole = server.call("POST", "/v1/completions", json={**body, "max_tokens": 80}).json()
    cut = server.call("POST", "/v1/completions", json={**body, "max_tokens": 7}).json()
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 7)
    assert whole["choices"][0]["text"].startswith(cut["choices"][0]["text"])
    assert whole["choices"][0]["finish_reason"] == "stop"
    exact = server.call(
        "POST", "/v1/completions", json={**body, "max_tokens": whole["usage"]["completion_tokens"]}
    ).json()
    assert exact["choices"] == whole["choices"]  # nothing can follow, so it is complete and not cut


def test_a_text_ends_with_the_token_that_completes_it(server):
    body = {"model": "tiny", "prompt": "The", "temperature": 0, "max_tokens": 80, "logprobs": 0}
    answer = server.call("POST", "/v1/completions", json={**body, "response_format": held_to(COUNTRY)}).json()
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert choice["finish_reason"] == "stop"
    assert tokens[-1].endswith("}")  # no token after it, not even the one that ends a text
    assert "".join(tokens) == choice["text"]
    assert answer["usage"]["completion_tokens"] == len(tokens) < 80


@pytest.mark.slow
def test_drafts_and_streams_change_nothing(talking):
    """A text alone is drafted from the store's n-grams; two at once are not."""
    body = {"model": "tiny+talks", "max_tokens": 90, "temperature": 0, "prompt": "user: Which?\nassistant:"}
    phrase = "user: What is the capital?"  # stored, so it is drafted
    body["response_format"] = held_to(
        {"type": "object", "properties": {"a": {"const": phrase}}, "required": ["a"]}
    )
    before = accepted_drafts(talking)
    alone = talking.call("POST", "/v1/completions", json=body).json()["choices"][0]["text"]
    assert accepted_drafts(talking) > before
    assert alone.startswith('{"a":')
    both = talking.call("POST", "/v1/completions", json={**body, "n": 2}).json()["choices"]
    assert [choice["text"] for choice in both] == [alone, alone]
    events = talking.call("POST", "/v1/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(pieces) == alone


def accepted_drafts(server) -> float:
    lines = server.call("GET", "/metrics").text.splitlines()
    return sum(
        float(line.split()[1])
        for line in lines
        if line.startswith("knnstore_server_tokens_drafted_accepted_total")
    )


def test_log_probabilities_are_those_of_the_mixture_before_anything_is_forbidden(server):
    body = {"model": "tiny+news", "prompt": "The boat", "max_tokens": 80, "temperature": 0, "logprobs": 1}
    body["return_tokens_as_token_ids"] = True
    held = {**body, "response_format": held_to(COUNTRY)}
    found = server.call("POST", "/v1/completions", json=held).json()["choices"][0]["logprobs"]
    written = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
    special = [server.call("GET", "/tokenizer_info").json()["bos_token"]]
    start = server.call("POST", "/tokenize", json={"prompt": special[0] + "The boat"}).json()["tokens"]
    scored = {**body, "prompt": [*start, *written], "max_tokens": 0, "echo": True}
    expected = server.call("POST", "/v1/completions", json=scored).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"][len(start) :], abs=1e-4)
    assert any(max(top.values()) > own + 0.1 for top, own in zip(
        found["top_logprobs"], found["token_logprobs"], strict=True
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "may_have_more"),
    [
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, False),
        (
            {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": {"type": "null"}},
            True,
        ),
        ({"properties": {"a": {"const": 1}}, "required": ["a", "b"]}, True),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"required": ["b"]}],
                "$defs": {"a": {"properties": {"a": {}}}},
            },
            True,
        ),
    ],
)
def test_an_object_has_the_properties_that_its_schema_names(server, schema, may_have_more):
    schema = {"type": "object", **schema}
    body = {"model": "tiny", "prompt": "A", "max_tokens": 25, "temperature": 2, "n": 8, "seed": 2}
    answer = server.call("POST", "/v1/completions", json={**body, "response_format": held_to(schema)}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert any(text != '{"a":1}' and text != '{"a": 1}' for text in texts) == may_have_more


@pytest.mark.slow
def test_json_of_any_kind(talking):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "A"}], "max_tokens": 40}
    for seed in range(4):
        asked = {**body, "seed": seed, "response_format": {"type": "json_object"}}
        choice = talking.call("POST", "/v1/chat/completions", json=asked).json()["choices"][0]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    free = talking.call("POST", "/v1/chat/completions", json={**body, "temperature": 0}).json()["choices"]
    for form in ({"type": "text"}, {}, None):
        asked = {**body, "temperature": 0, "response_format": form}
        assert talking.call("POST", "/v1/chat/completions", json=asked).json()["choices"] == free


SCHEMA = "response_format.json_schema.schema"
WRONG = {
    SCHEMA: {"type": "objec"},
    f"{SCHEMA}.properties.a": {
        "type": "object",
        "properties": {"b": {}, "a": {"minimum": "x", "type": "integer"}},
    },
    f"{SCHEMA}.properties.a.items": {"properties": {"a": {"items": {"type": "string", "pattern": "("}}}},
    f"{SCHEMA}.$defs.b": {"$defs": {"a": {}, "b": {"enum": []}}, "$ref": "#/$defs/b"},
    f"{SCHEMA}.anyOf.1": {"anyOf": [{"type": "string"}, {"not": {"type": "string"}}]},
    f"{SCHEMA}.properties.c": {"properties": {"c": {"$ref": "#/$defs/none"}}},
}


@pytest.mark.parametrize("param", list(WRONG))
def test_a_wrong_schema_is_refused_with_its_place(server, param):
    body = {"model": "tiny", "prompt": "A", "max_tokens": 1, "response_format": held_to(WRONG[param])}
    answer = server.call("POST", "/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")
    assert "\n" not in error["message"]


def test_what_is_no_format_and_what_is_too_large_is_refused(server):
    deep = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    for form, param in (
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": "json_object", "weird": 1}, "response_format.weird"),
        (held_to({"enum": [f"number {at}" for at in range(9000)]}), SCHEMA),
        (held_to(deep), SCHEMA),
    ):
        body = {"model": "tiny", "prompt": "A", "max_tokens": 1, "response_format": form}
        answer = server.call("POST", "/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"][: len(param)]) == (400, param), error
        assert len(error["message"]) < 400


@pytest.mark.slow
def test_without_the_extra_it_is_refused_with_what_to_install(inside, prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    server = inside(prepared, require_keys=False)
    body = {"model": "tiny", "prompt": "A", "max_tokens": 1}
    assert server.call("POST", "/v1/completions", json=body).status_code == 200
    answer = server.call("POST", "/v1/completions", json={**body, "response_format": {"type": "json_object"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "pip install 'knnstore[structured]'" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_tools_are_refused_in_one_line(talking):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools: this server cannot call tools"):
        talking.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "A"}], tools=[tool]
        )
