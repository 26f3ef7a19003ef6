"""Tokens to text and bytes. All that shows tokens uses this module.

`decode_tokens` decodes a text. `TokenTexts` knows the text and the bytes of each token of a tokenizer.
`Detokenizer` decodes a text token by token. `split_text` says which part of a given text each of its tokens
stands for. `letters_of` gives the letters of each token without spaces.

A continuation is what decoding all tokens adds to decoding the prompt's tokens. It cannot be decoded alone: a
tokenizer may drop the space at the beginning of a text.
"""

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from knnstore.store import Letters

_CONTEXT = 8
"""Tokens before a continuation that are decoded with it, at least; more where their text is not certain."""

_REPLACEMENT = "\ufffd"
"""Stands in decoded text for bytes that are not, or not yet, a character."""

_SPACES = re.compile(r"[\sĠĊĉč▁]|^##|^<0x(?:09|0A|0D|20)>$")
"""Spaces and line ends as byte-level tokenizers, SentencePiece and byte fallback write them."""

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token that is one byte, in vocabularies with byte fallback."""


def decode_tokens(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """Decode a text.

    Spaces are not cleaned up, whatever the tokenizer's ``clean_up_tokenization_spaces`` says: that would
    change the text, and depends on what follows.

    Args:
        tokenizer: the model's.
        tokens: the token ids; none give an empty text.
        special: whether special tokens appear in the text.
    """
    if not len(tokens):
        return ""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    )


class TokenPiece(NamedTuple):
    """What one token adds to a text."""

    token: int
    text: str
    """Empty for a token that ends inside a character; the last token of the character has all of it."""
    data: bytes
    """The token's own bytes, also where they are only a part of a character."""


class TokenTexts:
    """The text and bytes of each token of a tokenizer. Results are cached; use one for many tokens.

    Args:
        tokenizer: the model's; it is used by the caller's thread only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, bool] = {}
        self._skipped: dict[int, bool] = {}

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Decode a text; see `decode_tokens`."""
        return decode_tokens(self.tokenizer, tokens, special=special)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text.

        With byte-level tokenizers and byte fallback they need not be characters. A special token has the
        bytes of its name.
        """
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def name_of(self, token: int) -> str:
        r"""Return a token's text in the middle of a text, or ``bytes:\xe2\x80`` for part of a character.

        A token that the tokenizer does not have, as in a model with a larger vocabulary, is ``token_id:N``.
        """
        if not self._name(token):
            return f"token_id:{token}"
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_skipped(self, token: int) -> bool:
        """Check whether a token is a special one that texts without special tokens leave out."""
        found = self._skipped.get(token)
        if found is None:
            is_added = token in self._added or token in self._special
            found = is_added and not self.decode([token], special=False)
            self._skipped[token] = found
        return found

    def is_fallback_byte(self, token: int) -> bool:
        """Check whether a token is one byte of byte fallback, as ``<0xE2>``.

        Tokenizers decode a run of such tokens at once, and none of its bytes is a character where one is not.
        """
        found = self._fallback_bytes.get(token)
        if found is None:
            name = self._name(token)
            found = bool(_FALLBACK_BYTE.fullmatch(name)) and name not in self.decode([token])
            self._fallback_bytes[token] = found
        return found

    @cached_property
    def is_byte_level(self) -> bool:
        """Check whether a token's name writes each of its bytes as one letter, as GPT-2's does."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return hasattr(self.tokenizer, "byte_decoder")
        return "ByteLevel" in _types_of(json.loads(decoder.__getstate__()))

    def pieces(self, tokens: Sequence[int], before: Sequence[int] = (), *, special: bool = True) -> list[str]:
        """Return what each token adds to the text of those before it.

        Together they are what decoding ``[*before, *tokens]`` adds to decoding `before`. The last token of a
        character has all of it; bytes that never become a character come out as U+FFFD.
        """
        if not before and special:
            # Most texts are just the texts of their tokens, without the space that the first one may lose.
            try:
                texts = [self.bytes_of(token).decode() for token in tokens]
            except UnicodeDecodeError:
                texts = []
            whole, joined = self.decode(tokens), "".join(texts)
            if texts and joined.endswith(whole) and len(joined) - len(whole) <= len(texts[0]):
                return [texts[0][len(joined) - len(whole) :], *texts[1:]]
        detokenizer = Detokenizer(self, before, special=special)
        pieces = [piece for token in tokens for piece in detokenizer.take(token)]
        return [piece.text for piece in (*pieces, *detokenizer.end())]

    # -- how the tokenizer spells

    def _name(self, token: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(token) or ""

    def _find_bytes(self, token: int) -> bytes:
        name = self._name(token)
        if not name:
            return b""
        if self.is_byte_level:
            letters = [_BYTES_OF_LETTERS.get(letter) for letter in name]
            is_bytes = all(byte is not None for byte in letters)
            return bytes(byte for byte in letters if byte is not None) if is_bytes else name.encode()
        if self.is_fallback_byte(token):
            return bytes([int(name[3:5], 16)])
        before, whole = self.decode(self._anchor), self.decode([*self._anchor, token])
        return whole[_common_length(before, whole) :].encode(errors="replace")

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(getattr(self.tokenizer, "added_tokens_decoder", ()))

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token of letters, after which a token has the text that it has inside a text; or nothing."""
        for token in range(len(self.tokenizer) - 1, -1, -1):
            if token in self._added:
                continue
            once, twice = self.decode([token]), self.decode([token, token])
            if once.strip().isalnum() and once == once.rstrip() and twice.startswith(once) and twice != once:
                return [token]
        return []


class Detokenizer:
    """Decodes a text token by token; what is given out never changes.

    A token's text comes when it is certain. Incomplete characters wait for their last byte. With byte
    fallback a run of bytes waits for its end, because one wrong byte makes all of them U+FFFD. All texts
    together are what decoding ``[*before, *tokens]`` adds to decoding `before`. Few tokenizers change a text
    that was given out, depending on what follows; then comes what follows the first difference.

    Args:
        texts: of the model's tokenizer.
        before: tokens before the text. Their own incomplete bytes count as given.
        special: whether special tokens appear in the text.
    """

    def __init__(self, texts: TokenTexts, before: Sequence[int] = (), *, special: bool = False) -> None:
        self._texts = texts
        self._special = special
        self._partial = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens, self._given = self._context(before)
        self._settled = len(self._tokens)
        if texts.is_byte_level:
            for token in self._tokens:
                self._read_bytes(token)

    def take(self, token: int) -> list[TokenPiece]:
        """Take the next token and return the tokens whose text is certain now; none while one waits."""
        self._tokens.append(token)
        if not self._is_shown(token):
            is_waiting = len(self._tokens) - self._settled > 1
        elif self._texts.is_byte_level:
            is_waiting = self._read_bytes(token)
        else:
            is_waiting = self._texts.is_fallback_byte(token)
        if is_waiting:
            return []
        whole = self._decode(self._tokens)
        if whole.endswith(_REPLACEMENT) and not self._texts.is_byte_level:
            return []
        return self._settle(whole)

    def end(self) -> list[TokenPiece]:
        """Return the tokens that wait; bytes that are no character become U+FFFD."""
        self._partial.reset()
        return self._settle(self._decode(self._tokens)) if self._settled < len(self._tokens) else []

    def peek(self, tokens: Sequence[int]) -> str:
        """Return the text that would come if the text ended after these further tokens; change nothing."""
        whole = self._decode([*self._tokens, *tokens])
        return whole[_common_length(self._given, whole) :]

    def _context(self, before: Sequence[int]) -> tuple[list[int], str]:
        """Return the last of these tokens, from where a character begins and with some text; and the text."""
        size = _CONTEXT
        while True:
            tokens = list(before[-size:])
            text = self._decode(tokens)
            is_certain = text and text[0] != _REPLACEMENT and not self._texts.is_fallback_byte(tokens[0])
            if is_certain or size >= len(before):
                return tokens, text
            size *= 2

    def _settle(self, whole: str) -> list[TokenPiece]:
        """Give out the tokens that wait.

        Args:
            whole: the text of all tokens that are kept.
        """
        waiting = self._tokens[self._settled :]
        new = whole[_common_length(self._given, whole) :]
        # The next text is decoded after this one, if that gives what decoding after all would give.
        text = self._decode(waiting) if new else ""
        if text and (self._texts.is_byte_level or text[0] != _REPLACEMENT):
            self._tokens, self._given = waiting, text
        else:
            self._given = whole
        self._settled = len(self._tokens)
        return self._pieces(waiting, new)

    def _pieces(self, tokens: Sequence[int], text: str) -> list[TokenPiece]:
        """Divide a text among its tokens by their bytes."""
        data = [self._texts.bytes_of(token) if self._is_shown(token) else b"" for token in tokens]
        for texts in (_characters(data), [self._in_invalid_run(token) for token in tokens]):
            if "".join(texts) == text:
                return [TokenPiece(*one) for one in zip(tokens, texts, data, strict=True)]
        # The tokenizer shows it otherwise, e.g. without the space at the beginning of a text.
        shown = [at for at, token in enumerate(tokens) if self._is_shown(token)]
        last = shown[-1] if shown else len(tokens) - 1
        texts = [text if at == last else "" for at in range(len(tokens))]
        if _is_text(b"".join(data)):
            data = [one.encode(errors="replace") for one in texts]
        return [TokenPiece(*one) for one in zip(tokens, texts, data, strict=True)]

    def _in_invalid_run(self, token: int) -> str:
        """Return the text of a token where a run of fallback bytes is not valid: each is U+FFFD."""
        if not self._is_shown(token):
            return ""
        return _REPLACEMENT if self._texts.is_fallback_byte(token) else self._texts.name_of(token)

    def _is_shown(self, token: int) -> bool:
        return self._special or not self._texts.is_skipped(token)

    def _read_bytes(self, token: int) -> bool:
        """Read the bytes of a token; return whether a character is incomplete then."""
        if self._is_shown(token):
            self._partial.decode(self._texts.bytes_of(token))
        return bool(self._partial.getstate()[0])

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._texts.decode(tokens, special=self._special)


def split_text(texts: TokenTexts, text: str, tokens: Sequence[int]) -> list[str]:
    """Return the part of a given text that each of its tokens stands for; together they are the text.

    Where decoding does not give the text back, e.g. in lower case, the tokenizer's offsets divide it.
    Tokenizers of Python alone have none: then the decoded parts are returned. A text without tokens gives no
    parts.

    Args:
        texts: of the model's tokenizer.
        text: as it was given.
        tokens: its tokens, without special ones before it.
    """
    pieces = texts.pieces(tokens)
    if "".join(pieces) == text or not pieces or not texts.tokenizer.is_fast:
        return pieces
    encoded = texts.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans: list[tuple[int, int]] = encoded["offset_mapping"]
    if len(spans) != len(pieces):
        return pieces
    ends = [0]
    for (_, end), (following, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        ends.append(max(ends[-1], min(end, following)))  # the last token of a character has all of it
    ends[-1] = len(text)
    return [text[start:end] for start, end in pairwise(ends)]


def letters_of(tokenizer: PreTrainedTokenizerBase) -> Letters:
    """Return the letters of each token as the vocabulary writes it, without spaces."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return Letters([_SPACES.sub("", name or "") for name in names])


def _common_length(one: str, other: str) -> int:
    """Count the characters that two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _characters(parts: Sequence[bytes]) -> list[str]:
    """Decode the parts of a text; a character belongs to the part with its last byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(part) for part in parts]
    rest = decoder.decode(b"", final=True)
    if rest:
        last = max(at for at, part in enumerate(parts) if part)
        texts[last] += rest
    return texts


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _types_of(state: Any) -> set[str]:
    """Return the types of a decoder and of all that it is made of."""
    found = {str(state.get("type"))}
    return found.union(*(_types_of(one) for one in state.get("decoders", ())))


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each letter in the names of byte-level tokens.

    Bytes that are visible in Latin-1 are written as themselves; the others, in order, from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(0x100 + at): byte for at, byte in enumerate(others)},
    }


_BYTES_OF_LETTERS = _bytes_of_letters()
