"""A continuation is what decoding all tokens adds to decoding the prompt, whatever way a tokenizer spells."""

from functools import cache
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnstore.lm import Detokenizer, TokenTexts, decode_tokens, split_text
from tests.spellings import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    KINDS,
    REAL_KINDS,
    TEXTS,
    real_tokenizer,
    small_tokenizer,
)

WORDS = sorted({word for text in TEXTS for word in text.split()})
FRAGMENTS = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from([" ", "  ", "\n", "\t", ", ", ".", "<tool>", " <left> ", " <right> ", "<mark>", "</s>"]),
    st.sampled_from(["👩‍👩‍👧", "e\u0301", "क्ष", "\u200d", "\x00", "\ufffd", "\ufeff", "𝔘", "🇩🇪", "\u0650"]),
    st.characters(codec="utf-8"),
)
TEXT = st.lists(FRAGMENTS, max_size=12).map("".join)
KIND = st.sampled_from(KINDS)


def tokens_of(tokenizer):
    """Tokens as a model may choose them: of any kind, with many bytes and special ones."""
    ids = st.integers(0, len(tokenizer) - 1)
    rare = [
        at for at, name in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if len(name) > 5
    ]
    halves = [token for char in "€é🙂क" for token in tokenizer(char, add_special_tokens=False)["input_ids"]]
    return st.lists(st.one_of(ids, st.sampled_from([*rare, 0]), st.sampled_from([*halves, 0])), max_size=24)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def common(one, other):
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def pieces_of(texts, before, tokens, *, special=False):
    detokenizer = Detokenizer(texts, before, special=special)
    return [[*map(detokenizer.append_token, tokens)], detokenizer.end()]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(KIND, st.data())
def test_a_continuation_is_the_difference_of_two_decoded_texts(kind, data):
    tokenizer = small_tokenizer(kind)
    texts = TokenTexts(tokenizer)
    before, tokens = data.draw(tokens_of(tokenizer)), data.draw(tokens_of(tokenizer))
    special = data.draw(st.booleans())
    whole, prompt = (decode_tokens(tokenizer, ids, special=special) for ids in ([*before, *tokens], before))
    steps, last = pieces_of(texts, before, tokens, special=special)
    pieces = [*(piece for step in steps for piece in step), *last]
    assert [piece.token for piece in pieces] == tokens
    assert "".join(piece.text for piece in pieces) == whole[common(prompt, whole) :]
    assert Detokenizer(texts, before, special=special).peek(tokens) == whole[common(prompt, whole) :]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(KIND, TEXT, TEXT)
def test_texts_that_decode_to_themselves_are_continued_exactly(kind, prompt, text):
    tokenizer = small_tokenizer(kind)
    before, tokens = encode(tokenizer, prompt), encode(tokenizer, text)
    whole = decode_tokens(tokenizer, [*before, *tokens])
    texts = TokenTexts(tokenizer)
    steps, last = pieces_of(texts, [], [*before, *tokens], special=True)
    data = b"".join(piece.data for step in [*steps, last] for piece in step)
    if kind in (*BYTE_LEVEL, *BYTE_FALLBACK) and "\ufffd" not in whole:
        assert data == whole.encode()
    assert "".join(texts.decode_pieces([*before, *tokens])) == whole
    assert len(texts.decode_pieces(tokens, before)) == len(tokens)
    assert decode_tokens(tokenizer, before) + "".join(texts.decode_pieces(tokens, before)) == whole
    parts = split_text(texts, prompt, before)
    assert len(parts) == len(before)
    if before:
        assert "".join(parts) == prompt


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL_KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_vocabularies_of_real_models_are_spelled_alike(kind, data):
    tokenizer = real_tokenizer(kind)
    texts, count = _real_texts(kind), len(tokenizer)
    ids = st.lists(st.one_of(st.integers(0, count - 1), st.integers(0, 1300)), max_size=20)
    before, tokens, special = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    whole, prompt = (decode_tokens(tokenizer, ids, special=special) for ids in ([*before, *tokens], before))
    steps, last = pieces_of(texts, before, tokens, special=special)
    pieces = [*(piece for step in steps for piece in step), *last]
    assert [piece.token for piece in pieces] == tokens
    assert "".join(piece.text for piece in pieces) == whole[common(prompt, whole) :]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize("text", ["Hello  world", "  two spaces\n\tx", "né 🙂👍🏽 東京", " a", *TEXTS])
def test_texts_of_real_vocabularies_come_back(kind, text):
    tokenizer, texts = real_tokenizer(kind), _real_texts(kind)
    tokens = encode(tokenizer, text)
    assert "\u0120" not in decode_tokens(tokenizer, tokens), "a sign of the byte alphabet is no text"
    steps, last = pieces_of(texts, [], tokens, special=True)
    pieces = [*(piece for step in steps for piece in step), *last]
    assert "".join(piece.text for piece in pieces) == text
    assert b"".join(piece.data for piece in pieces) == text.encode()
    assert "".join(split_text(texts, text, tokens)) == text


@cache
def _real_texts(kind):
    return TokenTexts(real_tokenizer(kind))
