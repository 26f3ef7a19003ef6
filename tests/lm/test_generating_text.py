"""`generate_text` returns what the tokens add to the prompt, of one text or several, up to a stop string."""

from copy import deepcopy

import pytest
import torch
from transformers import set_seed

import knnstore
from knnstore.errors import InputError
from knnstore.lm import KNNSettings, NGramSettings, TokenTable, decode_tokens
from tests.spellings import TEXTS, save_model, small_tokenizer

PROMPTS = ["into", "The harbour ", "東京は é", ""]
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.2}


@pytest.fixture(
    scope="module",
    params=[
        "byte-level",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("llama", "metaspace always", "word pieces", "words")
        ),
    ],
)
def lm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spelled")
    model = save_model(folder / "model", small_tokenizer(request.param))
    with knnstore.create(folder / "home", str(model), key=None) as lm:
        lm.add(TEXTS[:2], domain="texts")
        yield lm


def generated(lm, prompt, seed, **options):
    """The prompt's tokens, and those of each continuation."""
    ids = [*lm.reader.prefix, *lm.reader.tokenize(prompt).tolist()]
    set_seed(seed)
    with torch.no_grad():
        rows = lm.generate(torch.tensor([ids]), **SAMPLED, **options)
    return ids, [row[len(ids) :].tolist() for row in rows]


def difference(lm, before, tokens):
    whole, prompt = (decode_tokens(lm.tokenizer, ids, special=False) for ids in ([*before, *tokens], before))
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


@pytest.mark.slow
def test_a_continuation_is_what_its_tokens_add_to_the_prompt(lm):
    for seed, prompt in enumerate(PROMPTS):
        before, (tokens,) = generated(lm, prompt, seed)
        assert lm.generate_text(prompt, seed=seed, **SAMPLED) == difference(lm, before, tokens)


@pytest.mark.slow
def test_several_continuations_of_a_prompt_are_a_list(lm):
    for seed, prompt in enumerate(PROMPTS[:2]):
        before, rows = generated(lm, prompt, seed, num_return_sequences=3)
        expected = [difference(lm, before, tokens) for tokens in rows]
        assert lm.generate_text(prompt, seed=seed, num_return_sequences=3, **SAMPLED) == expected
    found = lm.generate_text(PROMPTS[:2], seed=0, num_return_sequences=2, **SAMPLED)
    assert [len(one) for one in found] == [2, 2]
    one = lm.generate_text("into", seed=1, num_return_sequences=1, **SAMPLED)
    assert one == lm.generate_text("into", seed=1, **SAMPLED)
    beams = lm.generate_text("into", max_new_tokens=8, num_beams=3, num_return_sequences=2)
    assert beams[0] == lm.generate_text("into", max_new_tokens=8, num_beams=3)


@pytest.mark.slow
def test_a_stop_string_ends_a_continuation_after_the_token_that_completes_it(lm):
    before, (tokens,) = generated(lm, "The harbour", 3)
    text = difference(lm, before, tokens)
    for at in range(0, len(text) - 2, len(text) // 8):
        for stop in (text[at], text[at : at + 2]):
            reached = next(
                length for length in range(len(tokens) + 1) if stop in difference(lm, before, tokens[:length])
            )
            found = lm.generate_text("The harbour", seed=3, stop_strings=["never", stop], **SAMPLED)
            assert found == difference(lm, before, tokens[:reached])
    # Rows end each on its own; the shorter ones are padded.
    _, rows = generated(lm, "The harbour", 3, num_return_sequences=4)
    stop = difference(lm, before, rows[0])[2:4]
    options = {"seed": 3, "num_return_sequences": 4, "pad_token_id": 9, **SAMPLED}
    found = lm.generate_text("The harbour", stop_strings=stop, **options)
    for text, tokens in zip(found, rows, strict=True):
        # A shorter text need not begin the longer one: bytes that end as a character may go on as none.
        lengths = range(len(tokens))
        reached = next((n for n in lengths if stop in difference(lm, before, tokens[:n])), len(tokens))
        while tokens[:reached] and tokens[reached - 1] == options["pad_token_id"]:
            reached -= 1
        assert text == difference(lm, before, tokens[:reached])
    for wrong in ("", ["a", ""], [1]):
        with pytest.raises(InputError, match="stop_strings"):
            lm.generate_text("into", stop_strings=wrong)


def test_drafted_text_ends_at_the_same_stop_string(lm):
    knn = KNNSettings(lam=0.0, ngrams=NGramSettings(3, 0.5))
    text = lm.generate_text("The harbour", 30, knn=knn)
    stop = text[5:7]
    expected = lm.generate_text("The harbour", 30, knn=knn, stop_strings=stop)
    assert stop in expected
    assert lm.generate_text("The harbour", 30, knn=knn, stop_strings=stop, draft=True) == expected


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_rows_of_tokens_are_the_text_where_the_first_token_is_not_predicted(kind, tmp_path):
    tokenizer = deepcopy(small_tokenizer(kind))
    model = save_model(tmp_path / "model", tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    texts = ["into the harbour", "é is a harbour", "東京は日本"]
    with knnstore.create(tmp_path / "home", str(model), key=None) as lm:
        assert lm.reader.prefix == ()
        lm.add(TEXTS[:2], domain="texts")
        table = TokenTable()
        lm.evaluate([{"id": str(at), "text": text} for at, text in enumerate(texts)], table=table)
        rows = list(table.rows(lm.tokenizer))
        for at, text in enumerate(texts):
            first = decode_tokens(lm.tokenizer, lm.reader.tokenize(text)[:1].tolist()).rstrip("\ufffd")
            own = [row for row in rows if row["document"] == str(at)]
            assert first + "".join(row["text"] for row in own) == text
