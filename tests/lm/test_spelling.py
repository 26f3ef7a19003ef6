"""Text is recognized by its letters, whatever spaces and ends of lines are between them."""

import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import knnstore
from knnstore.documents import TextDocument
from knnstore.errors import InputError
from knnstore.lm.reading import get_token_letters

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "examples" / "tiny-lm"
TEXT = "\n".join((REPOSITORY / "LICENSE").read_text(encoding="utf-8").splitlines()[7:40])


def word_pieces() -> PreTrainedTokenizerFast:
    parts = sorted({piece for word in TEXT.split() for piece in (word[:2], f"##{word[2:]}")})
    pieces = Tokenizer(
        models.WordPiece(vocab={piece: at for at, piece in enumerate(["[U]", *parts])}, unk_token="[U]")
    )
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=pieces)


def with_bars() -> PreTrainedTokenizerFast:
    marked = [f"▁{word}" for word in TEXT.split()]
    pieces = sorted({*marked, *(letter for word in marked for letter in word), "<0x0A>", "<0x09>"})
    bars = Tokenizer(
        models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    bars.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=bars)


@pytest.mark.parametrize("tokenizer", [AutoTokenizer.from_pretrained(MODEL), word_pieces(), with_bars()])
@pytest.mark.parametrize("between", [" ", "  ", "\n", "\n\t"])
def test_letters_are_those_of_the_text(tokenizer, between):
    tokens = tokenizer(between.join(TEXT.split()), add_special_tokens=False, return_tensors="np").input_ids[0]
    assert "".join(map(chr, get_token_letters(tokenizer).from_tokens(tokens))) == "".join(TEXT.split())


@pytest.mark.slow
def test_text_that_is_wrapped_otherwise_counts_as_stored(tmp_path):
    lm = knnstore.create(tmp_path / "home", str(MODEL), key=None)
    again = TextDocument("again", textwrap.fill(TEXT, 50))
    with lm.store:
        lm.add([TEXT], domain="licence")
        with pytest.raises(InputError, match="for example 'again'"):
            lm.calibrate([again])
        assert "1 of 1 documents; 100" in lm.audit([again]).checks[-1].found
