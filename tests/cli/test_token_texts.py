"""What commands print of generated and scored tokens is the text, whatever way the tokenizer spells."""

import csv
import json

import pytest
import torch
from transformers import set_seed

import knnstore
from knnstore.lm import decode_tokens
from tests.cli.conftest import call, write_rows
from tests.spellings import TEXTS, save_model, small_tokenizer

DOCUMENTS = {f"d-{at}": text[:60] for at, text in enumerate(TEXTS)}
EXACT = ["byte-level", "llama", "metaspace always"]


@pytest.fixture(
    params=[
        "byte-level",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*EXACT[1:], "word pieces")),
    ]
)
def spelled(request, tmp_path, monkeypatch):
    """The current folder: a store for a random model with one of the tokenizers, and documents."""
    monkeypatch.chdir(tmp_path)
    lm = knnstore.create(
        tmp_path / ".knnstore", str(save_model(tmp_path / "model", small_tokenizer(request.param)))
    )
    with lm.store:
        lm.add(TEXTS[:2], domain="texts")
    write_rows(tmp_path / "documents.jsonl", DOCUMENTS)
    return request.param


@pytest.mark.slow
def test_streamed_text_is_the_continuation(spelled):
    tokenizer = small_tokenizer(spelled)
    for prompt in ("into", "東京は é "):
        options = ["--max-new-tokens", "30", "--temperature", "1.3", "--seed", "4"]
        streamed = call("generate", prompt, *options)
        written = call("generate", prompt, *options, "--json").json["continuation"]
        # The runner reads a carriage return and a newline as one newline.
        assert streamed.out == f"{prompt}{written}\n".replace("\r\n", "\n")
        with knnstore.load(".knnstore") as lm:
            begun = [tokenizer.bos_token_id, *lm.reader.tokenize(prompt).tolist()]
            inputs = torch.tensor([begun])
            set_seed(4)
            ids = lm.generate(inputs, max_new_tokens=30, do_sample=True, temperature=1.3)[0].tolist()
        whole, before = (decode_tokens(tokenizer, tokens, special=False) for tokens in (ids, begun))
        assert whole == before + written


def test_rows_of_tokens_are_the_documents(spelled):
    assert call("eval", "documents.jsonl", "--per-token", "tokens.tsv").status == 0
    texts = {}
    with open("tokens.tsv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            name = json.loads(row["document"])
            texts[name] = texts.get(name, "") + json.loads(row["text"])
    tokenizer = small_tokenizer(spelled)
    for name, text in DOCUMENTS.items():
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert texts[name] == decode_tokens(tokenizer, tokens)
        assert spelled not in EXACT or texts[name] == text


@pytest.mark.slow
def test_explained_tokens_are_the_text(spelled):
    for text in DOCUMENTS.values():
        explained = call("explain", text, "--json").json
        if spelled in EXACT:
            assert "".join(token["text"] for token in explained) == text
