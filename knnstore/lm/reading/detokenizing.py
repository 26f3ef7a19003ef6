"""From tokens to text, piece by piece: one may be part of a character, and its space depends on others."""

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6
"""Tokens before a text that its first pieces are decoded with: a tokenizer may drop a leading space."""

_UNFINISHED = "\ufffd"
"""What bytes are decoded to that are not yet a character."""


class Detokenizer:
    """Turns tokens into text as they come; a character is given out when its last byte is there.

    Args:
        tokenizer: the model's.
        before: tokens that stand before the text.
        special: whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._tokens = list(before[-_CONTEXT:])
        self._first = 0  # of the tokens that are decoded with the next ones
        self._read = len(self._tokens)

    def take(self, token: int) -> str:
        """The text that is finished by one more token; empty while a character lacks bytes."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_UNFINISHED):
            return ""
        self._first, self._read = self._read, len(self._tokens)
        return piece

    def end(self) -> str:
        """What is left at the end of the text, bytes that are no character as U+FFFD."""
        piece = self._pending()
        self._first = self._read = len(self._tokens)
        return piece

    def _pending(self) -> str:
        before = self._decode(self._tokens[self._first : self._read])
        return self._decode(self._tokens[self._first :])[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return decoded(self._tokenizer, tokens, special=self._special) if tokens else ""


def decoded(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """The text of some tokens, with or without special ones."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    )
