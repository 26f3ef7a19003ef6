"""Tokens that the tokenizer has and the model lacks, and token ids that nobody has, are answered with 400."""

import json

import pytest
import torch
from transformers import AutoTokenizer

import knnstore

SAID = "token 299 ('<new>') at position 1 is not among the model's 299 tokens"


@pytest.fixture(scope="module")
def wide(model_path, inside, tmp_path_factory):
    """An application whose tokenizer has a word that the model does not have, and a key for all of it."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    assert len(tokenizer) == 299
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    base = knnstore.lm.load_model(str(model_path)).model
    base.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with knnstore.create(folder / "home", str(folder / "model")) as lm:
        lm.add([{"id": "a", "text": "The harbour wall."}], domain="d")
    found = inside(folder / "home")
    key = found.key("read", "write", "predict")

    def post(path, **body):
        named = body if "documents" in body else {"model": "tiny", **body}
        headers = {"Content-Type": "application/json"}
        return found.call("POST", path, key, content=json.dumps(named), headers=headers)

    return post


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "e<new>", "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["fine", "e<new>"], "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "e<new>"}]}),
        ("/v1/explain", {"text": "e<new>"}),
    ],
)
def test_a_text_with_a_token_that_the_model_lacks(wide, path, body) -> None:
    answer = wide(path, **body)
    assert answer.status_code == 400, answer.text
    assert SAID in answer.json()["error"]["message"]


def test_the_other_documents_are_stored(wide) -> None:
    rows = [{"id": id, "text": text} for id, text in (("b", "One."), ("c", "e<new>"), ("d", "Two."))]
    answer = wide("/v1/documents", domain="d", documents=rows)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("document 'c' (document 2): " + SAID)
    assert message.endswith("; 2 of 3 documents are stored")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt: the list is empty"),
        ([-1], "prompt: token id -1 at position 0 is negative"),
        ([[5], [6, -2]], "prompt: list 1: token id -2 at position 1 is negative"),
        ([[]], "prompt: list 0: the list of token ids is empty"),
        ([[5], []], "prompt: list 1: the list of token ids is empty"),
        ([5, "a"], "prompt: item 1 is a string, not a token id"),
        (["a", 5], "prompt: item 0 is a string, not a token id"),
        ([1.5], "prompt: item 0 is a number, not a token id"),
        ([True], "prompt: item 0 is a boolean, not a token id"),
        ([[5], 6], "prompt: list 1 is an integer, but the first item is a list of token ids"),
        ({}, "prompt: a text, a list of texts, a list of token ids, or a list of such lists, not an object"),
        ([299], "token 299 ('<new>') at position 0 is not among the model's 299 tokens"),
        ([7, 10**30], f"token {10**30} at position 1 is not among the model's 299 tokens"),
    ],
)
def test_a_prompt_that_is_no_prompt(wide, prompt, said) -> None:
    answer = wide("/v1/completions", prompt=prompt, max_tokens=1)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(said)
    assert answer.json()["error"]["param"] == "prompt"


def test_tokens_that_nobody_has_are_not_turned_into_text(wide) -> None:
    answer = wide("/detokenize", tokens=[4, 99_999])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert "token 99999 at position 1" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_values_that_are_no_json_are_refused(wide) -> None:
    rows = [{"id": "n", "text": "One.", "score": float("nan")}]
    answer = wide("/v1/documents", domain="d", documents=rows)
    assert (answer.status_code, "NaN" in answer.text) == (400, True)
    assert "null" in answer.text


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_gives_nan_says_so(model_path, inside, tmp_path, stream) -> None:
    with knnstore.create(tmp_path / "home", str(model_path)) as lm:
        lm.add([{"id": "a", "text": "The harbour wall."}], domain="d")
    found = inside(tmp_path / "home")
    with torch.no_grad():
        found.serving.lm.base.transformer.ln_f.bias[0] = float("nan")
    body = {"model": "tiny", "prompt": "The", "max_tokens": 2, "stream": stream}
    answer = found.call("POST", "/v1/completions", found.key("predict"), json=body)
    assert "NaN or infinite" in answer.text
    assert stream or answer.status_code == 500
