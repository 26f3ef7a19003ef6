"""What answers say of tokens adds up to their text, whatever way the model's tokenizer spells."""

import json
from itertools import accumulate

import pytest

import knnstore
from knnstore.lm import decode_tokens
from tests.spellings import TEXTS, save_model, small_tokenizer

TEMPLATE = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant:"
PROMPTS = ["東京は é🙂", "It's (quiet), and", " two  spaces <tool>y</s>z "]


class Served:
    """An application over a store without keys for a random model with one of the tokenizers."""

    def __init__(self, kind, inside, folder) -> None:
        self.kind = kind
        self.tokenizer = small_tokenizer(kind)
        self.tokenizer.chat_template = TEMPLATE
        model = save_model(folder / "model", self.tokenizer)
        lm = knnstore.create(folder / "home", str(model), key=None)
        with lm.store:
            lm.add(TEXTS[:2], domain="texts")
        self.inside = inside(folder / "home", require_keys=False)

    def post(self, path, **body):
        answer = self.inside.call("POST", path, json={"model": "tiny", "temperature": 1.2, **body})
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()["choices"]
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return [choice for event in events for choice in json.loads(event)["choices"]]

    def ids(self, choice):
        return [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens):
        return decode_tokens(self.tokenizer, tokens, special=False)

    def difference(self, prompt, tokens):
        """What decoding all tokens adds, from the first character that differs."""
        whole, before = self.decode([*prompt, *tokens]), self.decode(prompt)
        while not whole.startswith(before):
            before = before[:-1]
        return whole[len(before) :]


@pytest.fixture(
    scope="module",
    params=[
        "byte-level",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("llama", "metaspace always", "word pieces")
        ),
    ],
)
def served(request, inside, tmp_path_factory):
    return Served(request.param, inside, tmp_path_factory.mktemp("served"))


def by_index(choices):
    found = {}
    for choice in choices:
        found.setdefault(choice["index"], []).append(choice)
    return found


def check_tokens(choice):
    """The tokens of log-probabilities are the text, and each place lists every token once."""
    listed = choice["logprobs"]
    assert "".join(listed["tokens"]) == choice["text"]
    assert listed["text_offset"] == [0, *accumulate(map(len, listed["tokens"][:-1]))][: len(listed["tokens"])]
    for token, log_prob, top in zip(
        listed["tokens"], listed["token_logprobs"], listed["top_logprobs"], strict=True
    ):
        if top is not None:
            assert top[token] == log_prob
            assert len(top) in (4, 5)
            assert sorted(top.values())[-4:] == sorted(top.values(), reverse=True)[3::-1]


def prompts_of(served):
    """Texts, and tokens that end inside a character or are no character."""
    halves = [served.encode(text)[:-1] for text in ("a harbour é", "the 🙂", "€")]
    return [*PROMPTS, *(ids for ids in halves if ids)]


@pytest.mark.slow
@pytest.mark.parametrize("echo", [False, True])
def test_completions_are_what_their_tokens_decode_to(served, echo):
    asked = {"max_tokens": 24, "n": 2, "seed": 5, "logprobs": 4, "echo": echo}
    for prompt in prompts_of(served):
        whole = served.post("/v1/completions", prompt=prompt, **asked)
        named = served.post("/v1/completions", prompt=prompt, return_tokens_as_token_ids=True, **asked)
        streamed = by_index(served.post("/v1/completions", prompt=prompt, stream=True, **asked))
        given = served.encode(prompt) if isinstance(prompt, str) else prompt
        for choice, ids in zip(whole, map(served.ids, named), strict=True):
            check_tokens(choice)
            written = ids[len(given) :] if echo else ids
            assert len(written) == 24 or choice["finish_reason"] == "stop"
            if choice["finish_reason"] == "stop":
                assert written.pop() == served.tokenizer.eos_token_id
            text = served.difference(given, written)
            if not echo:
                assert choice["text"] == text
            elif isinstance(prompt, str):
                assert choice["text"] == prompt + text
            else:
                assert choice["text"] == served.decode([*given, *written])
            parts = streamed[choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [one for part in parts for one in part["logprobs"][name]] == choice["logprobs"][name]
        for choice, ids in zip(whole, named, strict=True):
            for names, numbers in zip(
                choice["logprobs"]["top_logprobs"], ids["logprobs"]["top_logprobs"], strict=True
            ):
                assert names is None or list(names.values()) == list(numbers.values())


def test_a_prompt_alone_is_given_back_with_its_tokens(served):
    for prompt in prompts_of(served):
        choice = served.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=4)[0]
        check_tokens(choice)
        assert choice["text"] == (prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt))


@pytest.mark.slow
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_end_with_the_text_where_a_stop_string_ends_it(served, echo):
    asked = {"prompt": "The harbour", "max_tokens": 30, "seed": 2, "logprobs": 4}
    text = served.post("/v1/completions", **asked)[0]["text"]
    for at in range(0, len(text) - 3, len(text) // 6):
        stop = text[at : at + 3]
        choice = served.post("/v1/completions", **asked, stop=[stop], echo=echo)[0]
        assert choice["text"] == "The harbour" * echo + text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        check_tokens(choice)
        parts = served.post("/v1/completions", **asked, stop=stop, echo=echo, stream=True)
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [one for part in parts for one in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


@pytest.mark.slow
def test_bytes_of_chat_tokens_are_their_own(served):
    asked = {
        "messages": [{"role": "user", "content": "é🙂"}], "max_tokens": 30, "n": 4, "seed": 1,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = served.post("/v1/chat/completions", **asked)
    streamed = by_index(served.post("/v1/chat/completions", **asked, stream=True))
    own = {}
    for choice in whole:
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
        assert "".join(one["token"] for one in content) == text
        data = bytes(byte for one in content for byte in one["bytes"])
        if served.kind == "byte-level":  # as Python decodes it
            assert data.decode(errors="replace") == text
        elif "\ufffd" not in text:
            assert data.decode() == text
        for one in content:
            assert one["token"] in [other["token"] for other in one["top_logprobs"]]
            others = (other for other in one["top_logprobs"] if other["token"] != one["token"])
            own |= {other["token"]: bytes(other["bytes"]) for other in others}
        parts = streamed[choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == text
        assert [one for part in parts for one in part["logprobs"]["content"]] == content
    halves = {name: data for name, data in own.items() if name.startswith("bytes:")}
    assert all(name == "bytes:" + "".join(f"\\x{one:02x}" for one in data) for name, data in halves.items())
    assert all(name in halves or data.decode() == name for name, data in own.items())
    if served.kind in ("byte-level", "llama"):
        assert halves
