"""What the tokens of a tokenizer are spelled with."""

import re

from transformers import PreTrainedTokenizerBase

from knnstore.store import Letters

_SPACES = re.compile(r"[\sĠĊĉč▁]|^##|^<0x(?:09|0A|0D|20)>$")
"""Spaces and ends of lines, as byte-level tokenizers, SentencePiece and byte fallback write them."""


def letters_of(tokenizer: PreTrainedTokenizerBase) -> Letters:
    """The letters of each token as the vocabulary has it, without spaces."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return Letters([_SPACES.sub("", name or "") for name in names])
