"""Completions with a suffix: the model fills in the middle."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import knnstore
from knnstore.server.infilling import Infilling
from tests.server.conftest import LETTERS, NEWS, Application, make_model

PATH = "/v1/completions"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ASKED = {"model": "tiny", "prompt": "The council", "suffix": " voted.", "temperature": 0, "max_tokens": 12}


def byte_tokenizer(*added: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, and further tokens."""
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.add_special_tokens({"additional_special_tokens": [*added]})
    return made


def spaced_tokenizer(*added: str, by_normalizer: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of characters that puts a space before each text, as those of SentencePiece do."""
    letters = ["▁", "☺", *"abcdefg)", *added]
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    if by_normalizer:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (QWEN, "{0}before{1}after{2}"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}before{1}after{2}"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}before{1}after{2}"),
        (("[PREFIX]", "[SUFFIX]"), "{1}after{0}before"),
    ],
)
def test_the_parts_stand_as_the_model_has_learned_them(names, order) -> None:
    tokenizer = byte_tokenizer(*names, "<|file_sep|>")
    infilling = Infilling.find_tokens(tokenizer, len(tokenizer))
    tokens = infilling.make_prompt(tokenizer, "before", "after")
    assert tokenizer.decode(tokens) == order.format(*names)
    assert infilling.ends == {*tokenizer.convert_tokens_to_ids([*names, "<|file_sep|>"])}


@pytest.mark.parametrize("by_normalizer", [False, True])
def test_a_suffix_gets_no_space_that_it_does_not_have(by_normalizer) -> None:
    names = ("▁<PRE>", "▁<SUF>", "▁<MID>")
    tokenizer = spaced_tokenizer(*names, by_normalizer=by_normalizer)
    infilling = Infilling.find_tokens(tokenizer, len(tokenizer))
    tokens = infilling.make_prompt(tokenizer, "ab", "c)")
    assert tokenizer.convert_ids_to_tokens(tokens) == [names[0], "▁", "a", "b", names[1], "c", ")", names[2]]
    tokens = infilling.make_prompt(tokenizer, "ab", " c)")
    assert tokenizer.convert_ids_to_tokens(tokens)[5:] == ["▁", "c", ")", names[2]]


def test_names_of_special_tokens_in_a_text_are_text() -> None:
    tokenizer = byte_tokenizer(*QWEN)
    infilling = Infilling.find_tokens(tokenizer, len(tokenizer))
    tokens = infilling.make_prompt(tokenizer, "a<|fim_middle|>b", "<|fim_suffix|>")
    special = set(tokenizer.convert_tokens_to_ids([*QWEN]))
    assert [token for token in tokens if token in special] == tokenizer.convert_tokens_to_ids([*QWEN])
    assert (
        tokenizer.decode(tokens) == "<|fim_prefix|>a<|fim_middle|>b<|fim_suffix|><|fim_suffix|><|fim_middle|>"
    )


def test_a_tokenizer_or_a_model_without_the_tokens_cannot() -> None:
    tokenizer = byte_tokenizer(*QWEN)
    assert Infilling.find_tokens(byte_tokenizer(*QWEN[:2]), 10_000) is None
    assert Infilling.find_tokens(tokenizer, len(tokenizer) - 1) is None


def make_infilling_home(folder: Path, **options: int) -> Path:
    """Make a store with two domains, for a model that has the tokens; `options` are those of `make_model`."""
    model_folder = make_model(folder / "tiny", **options)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*QWEN]})
    tokenizer.save_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(model_folder)
    lm = knnstore.create(folder / "home", str(model_folder))
    with lm.store:
        lm.add([{"id": id, "text": text} for id, text in LETTERS.items()], domain="letters")
        lm.add([{"id": id, "text": text} for id, text in NEWS.items()], domain="news")
    return folder / "home"


@pytest.fixture(scope="module")
def server(inside, tmp_path_factory) -> Application:
    return inside(make_infilling_home(tmp_path_factory.mktemp("infilling")), require_keys=False)


def complete(server: Application, **body) -> dict:
    answer = server.call("POST", PATH, json={**ASKED, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", ["tiny", "tiny+letters"])
def test_a_completion_with_a_suffix_is_that_of_the_arranged_tokens(server, model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.serving.lm.store.identity.model)
    texts = [tokenizer(text)["input_ids"] for text in (ASKED["prompt"], ASKED["suffix"])]
    marks = tokenizer.convert_tokens_to_ids([*QWEN])
    arranged = [*server.serving.prefix, marks[0], *texts[0], marks[1], *texts[1], marks[2]]
    expected = complete(server, model=model, prompt=arranged, suffix=None)
    answer = complete(server, model=model)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["prompt_tokens"] == len(arranged) - 1
    both = complete(server, model=model, prompt=["The council"], n=2)
    assert [choice["text"] for choice in both["choices"]] == [expected["choices"][0]["text"]] * 2
    empty = complete(server, model=model, suffix="")
    assert empty["choices"] == complete(server, model=model, suffix=None)["choices"] != expected["choices"]


def test_the_middle_ends_with_a_token_of_the_format(server, monkeypatch) -> None:
    whole = complete(server, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]
    tokens = [int(name.removeprefix("token_id:")) for name in whole["logprobs"]["tokens"]]
    last = tokens[5]
    infilling = server.serving.infilling
    monkeypatch.setattr(
        server.serving,
        "infilling",
        Infilling(infilling.prefix, infilling.suffix, infilling.middle, frozenset({last})),
    )
    assert infill(server, model="tiny")["stop_type"] == "eos"
    choice = complete(server)["choices"][0]
    kept = tokens[: tokens.index(last)]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == server.serving.detokenize(kept)
    assert complete(server, suffix=None)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"echo": True}, "echo", "cannot be repeated"),
        ({"prompt": [1, 2]}, "suffix", "one prompt, which is text"),
        ({"prompt": ["a", "b"]}, "suffix", "one prompt"),
        ({"suffix": "a" * 100_000}, "suffix", "more than"),
        ({"max_tokens": 10_000}, "prompt", "the prompt has 13 and 10000 more are requested"),
    ],
)
def test_what_cannot_be_filled_in_is_refused_by_name(server, changes, field, reason) -> None:
    answer = server.call("POST", PATH, json={**ASKED, **changes})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert reason in error["message"]
    assert error["param"] == field


EDITOR = {
    "input_prefix": "The council", "input_suffix": " voted.", "prompt": "", "n_predict": 12, "id_slot": 0,
    "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False, "stop": [],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 4, "temperature": 0,
    "input_extra": [{"filename": "a.py", "text": "a = 1"}], "response_fields": ["content"],
}  # fmt: skip
"""A request as an editor sends it."""


def infill(server: Application, **body) -> dict:
    answer = server.call("POST", "/infill", json={**EDITOR, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_editor_gets_what_the_completion_has(server) -> None:
    expected = complete(server, model="tiny+letters+news")
    answer = infill(server)
    assert answer == {
        "content": expected["choices"][0]["text"],
        "model": "tiny+letters+news",
        "stop": True,
        "stop_type": "limit",
        "tokens_predicted": 12,
        "tokens_evaluated": expected["usage"]["prompt_tokens"],
    }
    strong = {"knn": {"domains": ["letters"], "lam": 0.9}}
    text = complete(server, model="tiny+letters+news", **strong)["choices"][0]["text"]
    assert infill(server, **strong)["content"] == text != answer["content"]
    assert infill(server, model="tiny")["content"] == complete(server)["choices"][0]["text"]
    assert infill(server, n_predict=0)["content"] == ""
    assert infill(server, n_predict=-1)["tokens_predicted"] == server.serving.window // 2
    sampled = {"temperature": 1, "top_p": 0.9, "seed": 7}
    text = complete(server, **sampled)["choices"][0]["text"]
    assert (
        infill(server, model="tiny", **sampled)["content"] == text != complete(server)["choices"][0]["text"]
    )
    begun = infill(server, prompt="ab")  # the beginning of the middle, which is in the prompt
    assert begun["tokens_evaluated"] > answer["tokens_evaluated"]
    assert begun["content"] != answer["content"]


def test_an_editor_retrieves_from_the_domains_of_its_key(server) -> None:
    key = server.key("predict", domains=["letters"])
    answer = server.call("POST", "/infill", key, json=EDITOR)
    assert answer.json()["model"] == "tiny+letters"
    refused = server.call("POST", "/infill", key, json={**EDITOR, "model": "tiny+news"})
    assert refused.status_code == 404


def test_what_is_far_from_the_cursor_is_left_out(server) -> None:
    window = server.serving.window
    long = {"input_prefix": "x" * 5000 + "The council", "input_suffix": " voted." + "y" * 5000}
    assert infill(server, **long)["tokens_evaluated"] + 12 <= window + 1
    tokenizer = byte_tokenizer(*QWEN)
    infilling = Infilling.find_tokens(tokenizer, len(tokenizer))

    def parts(*texts: str) -> list[str]:
        tokens = infilling.make_prompt(tokenizer, *texts, limit=43)
        assert len(tokens) <= 43
        return (
            tokenizer.decode(tokens)
            .replace("<|fim_suffix|>", "<|fim_prefix|>")
            .replace("<|fim_middle|>", "<|fim_prefix|>")
            .split("<|fim_prefix|>")[1:]
        )

    letters = "abcdefghijklmnopqrstuvwxyz" * 9
    assert parts(letters, letters) == [letters[-30:], letters[:10], ""]
    assert parts("abc", letters) == ["abc", letters[:37], ""]
    assert parts(letters, "abc") == [letters[-37:], "abc", ""]
    assert parts(letters, "abc", "12345") == [letters[-32:], "abc", "12345"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"n_predict": 10_000}, "n_predict"),
        ({"prompt": "a" * 100_000}, "prompt"),  # by its length: it is not tokenized
        ({"knn": {"sources": 1}}, "knn.sources"),
        ({"input_prefix": 1}, "input_prefix"),
        ({"weird": 1}, "weird"),
        ({"stop": [""]}, "stop.0"),
    ],
)
def test_what_an_editor_cannot_have_is_refused_by_name(server, changes, param) -> None:
    answer = server.call("POST", "/infill", json={**EDITOR, **changes})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "tokens, but the prompt has" not in error["message"]


def test_a_model_that_was_not_trained_for_it_is_named(inside, home) -> None:
    answer = inside(home, require_keys=False).call("POST", PATH, json=ASKED)
    assert answer.status_code == 400
    assert "'tiny' cannot fill in the middle" in answer.json()["error"]["message"]
