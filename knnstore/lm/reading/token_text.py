"""Converting tokens to text and bytes.

`decode_tokens` decodes a text. `TokenTexts` returns the text and the bytes of each token of a tokenizer.
`Detokenizer` decodes a text token by token. `split_text` splits a given text into the parts of its tokens.
`get_token_letters` returns the letters of each token without spaces.

The tokens of a continuation cannot be decoded alone, because a tokenizer may drop the space at the beginning
of a text. So tokens of the prompt are decoded together with the continuation, and their text is removed.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from knnstore.errors import InputError
from knnstore.store import Letters

_CONTEXT = 8
"""Number of prompt tokens that are decoded together with a continuation. If the first of these tokens begins
inside a character, more tokens are used."""

_REPLACEMENT = "\ufffd"
"""Character (U+FFFD) that decoders return for bytes that are not (or not yet) a complete UTF-8 character."""

_SPACES = re.compile(r"[\sĠĊĉč▁]|^##|^<0x(?:09|0A|0D|20)>$")
"""Pattern of spaces and line ends in the vocabularies of byte-level BPE, SentencePiece and byte fallback."""

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Pattern of the name of a token that is one byte, in vocabularies with byte fallback."""


def is_panic(error: BaseException) -> bool:
    """Check whether an error is a panic (internal error) of the package tokenizers.

    A panic is a `BaseException`, not an `Exception`.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def convert_tokenizer_panics() -> Iterator[None]:
    """Convert a panic (internal error) of the package tokenizers inside the ``with`` block to InputError.

    A tokenizer panics if its files are damaged, and if a text takes one of its regular expressions too long.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InputError(
            f"the model's tokenizer fails on this text ({str(error)[:200]}): its files may be damaged"
        ) from None


def decode_tokens(tokenizer: Any, tokens: Sequence[int], *, special: bool = True) -> str:
    """Return the text of tokens.

    Spaces are not cleaned up, even if the tokenizer has ``clean_up_tokenization_spaces``: cleaning changes
    the text, and its result depends on later tokens.

    Args:
        tokenizer: the model's tokenizer.
        tokens: token ids; no tokens give an empty text.
        special: True to include the text of special tokens.
    """
    if not len(tokens):
        return ""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    )


class TokenPiece(NamedTuple):
    """The part of a text that one token adds."""

    token: int
    """The token id."""
    text: str
    """Text of the token. If a character spans several tokens, the last token has the whole character."""
    data: bytes
    """Bytes of the token; they may be a part of a character."""


class TokenTexts:
    """Returns the text and the bytes of each token of a tokenizer. Results are cached, so reuse the object.

    Args:
        tokenizer: the model's tokenizer. It is used in the calling thread only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, bool] = {}
        self._skipped: dict[int, bool] = {}

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Return the text of tokens, without cleaning up spaces.

        Args:
            tokens: token ids; no tokens give an empty text.
            special: True to include the text of special tokens.
        """
        return decode_tokens(self.tokenizer, tokens, special=special)

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds in the middle of a text.

        With byte-level BPE and byte fallback the bytes may be a part of a character. For a special token they
        are the bytes of its name. A token that the tokenizer does not have gives ``b""``.
        """
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def display_text(self, token: int) -> str:
        r"""Return the text that a token adds in the middle of a text, to show it to a user.

        A token that is part of a character gives its bytes, for example ``bytes:\xe2\x80``.

        A token that the tokenizer does not have gives ``token_id:N``, because a model's vocabulary may be
        larger than the tokenizer's.
        """
        if not self._get_vocabulary_name(token):
            return f"token_id:{token}"
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_skipped(self, token: int) -> bool:
        """Check whether a token is a special token that decoding leaves out with ``special=False``."""
        found = self._skipped.get(token)
        if found is None:
            is_added = token in self._added or token in self._special
            found = is_added and not self.decode([token], special=False)
            self._skipped[token] = found
        return found

    def is_fallback_byte(self, token: int) -> bool:
        """Check whether a token is one byte of byte fallback, for example ``<0xE2>``.

        Tokenizers decode a run of byte tokens at once. If one byte of a run is not valid UTF-8, every byte of
        the run becomes U+FFFD.
        """
        found = self._fallback_bytes.get(token)
        if found is None:
            name = self._get_vocabulary_name(token)
            found = bool(_FALLBACK_BYTE.fullmatch(name)) and name not in self.decode([token])
            self._fallback_bytes[token] = found
        return found

    @cached_property
    def is_byte_level(self) -> bool:
        """True for byte-level BPE, where a token's name has one letter for each byte, as for GPT-2."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return hasattr(self.tokenizer, "byte_decoder")
        return "ByteLevel" in _collect_decoder_types(json.loads(decoder.__getstate__()))

    def decode_pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return the text that each token adds after the previous tokens, also the text of special tokens.

        The joined pieces are the text of ``[*before, *tokens]`` without the text of `before`. If a character
        spans several tokens, the last token has the whole character. Bytes that are not valid UTF-8 give
        U+FFFD.

        Args:
            tokens: token ids; no tokens give no pieces.
            before: the tokens before `tokens`.
        """
        if not before:
            # For most texts the tokens can be decoded one by one; only the first token may lose its space.
            try:
                texts = [self.token_bytes(token).decode() for token in tokens]
            except UnicodeDecodeError:
                texts = []
            whole, joined = self.decode(tokens), "".join(texts)
            if texts and joined.endswith(whole) and len(joined) - len(whole) <= len(texts[0]):
                return [texts[0][len(joined) - len(whole) :], *texts[1:]]
        detokenizer = Detokenizer(self, before, special=True)
        pieces = [piece for token in tokens for piece in detokenizer.append_token(token)]
        return [piece.text for piece in (*pieces, *detokenizer.end())]

    # -- names and bytes of single tokens

    def _get_vocabulary_name(self, token: int) -> str:
        """Return a token as the vocabulary spells it.

        An empty string if the tokenizer does not have the token.
        """
        return self.tokenizer.convert_ids_to_tokens(token) or ""

    def _find_bytes(self, token: int) -> bytes:
        """Compute the UTF-8 bytes that a token adds in the middle of a text.

        A token that the tokenizer does not have gives ``b""``.
        """
        name = self._get_vocabulary_name(token)
        if not name:
            return b""
        if self.is_byte_level:
            letters = [_BYTES_OF_LETTERS.get(letter) for letter in name]
            is_bytes = all(byte is not None for byte in letters)
            return bytes(byte for byte in letters if byte is not None) if is_bytes else name.encode()
        if self.is_fallback_byte(token):
            return bytes([int(name[3:5], 16)])
        before, whole = self.decode(self._anchor_tokens), self.decode([*self._anchor_tokens, token])
        return whole[_get_common_prefix_length(before, whole) :].encode(errors="replace")

    @cached_property
    def _added(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary of the tokenizer."""
        return frozenset(getattr(self.tokenizer, "added_tokens_decoder", ()))

    @cached_property
    def _special(self) -> frozenset[int]:
        """Special tokens of the tokenizer."""
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _anchor_tokens(self) -> list[int]:
        """List of one token whose text is letters; empty if the tokenizer has no suitable token.

        Another token is decoded after this one, to get its text in the middle of a text.
        """
        for token in range(len(self.tokenizer) - 1, -1, -1):
            if token in self._added:
                continue
            once, twice = self.decode([token]), self.decode([token, token])
            if once.strip().isalnum() and once == once.rstrip() and twice.startswith(once) and twice != once:
                return [token]
        return []


class Detokenizer:
    """Decodes a text token by token, and returns the piece of text of each token as soon as it is certain.

    Returned pieces never change. A token that ends inside a character waits for the last byte of the
    character. With byte fallback a run of byte tokens waits for its end, because one invalid byte turns the
    whole run into U+FFFD. The joined pieces are the text of ``[*before, *tokens]`` without the text of
    `before`. A few tokenizers change earlier text when a later token follows. The next piece then begins
    after the common prefix of the old and the new text.

    Args:
        texts: the object with the model's tokenizer.
        before: tokens before the text, whose text is not returned. If they end inside a character, these
            first bytes of the character are not returned either.
        special: True to include the text of special tokens.
    """

    def __init__(self, texts: TokenTexts, before: Sequence[int] = (), *, special: bool = False) -> None:
        self._texts = texts
        self._special = special
        self._partial = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens, self._returned_text = self._choose_context(before)
        self._returned_count = len(self._tokens)
        if texts.is_byte_level:
            for token in self._tokens:
                self._read_bytes(token)

    def append_token(self, token: int) -> list[TokenPiece]:
        """Append a token to the text, and return the pieces (a token with its text) that are certain now.

        Returns an empty list while a character is incomplete; a later call then returns all waiting pieces.
        """
        self._tokens.append(token)
        if not self._adds_text(token):
            is_waiting = len(self._tokens) - self._returned_count > 1
        elif self._texts.is_byte_level:
            is_waiting = self._read_bytes(token)
        else:
            is_waiting = self._texts.is_fallback_byte(token)
        if is_waiting:
            return []
        whole = self._decode(self._tokens)
        if whole.endswith(_REPLACEMENT) and not self._texts.is_byte_level:
            return []
        return self._return_waiting_pieces(whole)

    def end(self) -> list[TokenPiece]:
        """Return the pieces of all waiting tokens; bytes of an incomplete character give U+FFFD."""
        self._partial.reset()
        return (
            self._return_waiting_pieces(self._decode(self._tokens))
            if self._returned_count < len(self._tokens)
            else []
        )

    def peek(self, tokens: Sequence[int]) -> str:
        """Decode the waiting tokens and `tokens`, as if the text ended after them, and change no state.

        Returns:
            The text that follows the pieces returned so far.
        """
        whole = self._decode([*self._tokens, *tokens])
        return whole[_get_common_prefix_length(self._returned_text, whole) :]

    def _choose_context(self, before: Sequence[int]) -> tuple[list[int], str]:
        """Choose the last tokens of `before` that are enough context to decode a continuation.

        Returns:
            At least the last 8 tokens (all, if `before` has fewer), and their text. There are more than 8 if
            the text would otherwise begin inside a character.
        """
        size = _CONTEXT
        while True:
            tokens = list(before[-size:])
            text = self._decode(tokens)
            is_certain = text and text[0] != _REPLACEMENT and not self._texts.is_fallback_byte(tokens[0])
            if is_certain or size >= len(before):
                return tokens, text
            size *= 2

    def _return_waiting_pieces(self, whole: str) -> list[TokenPiece]:
        """Return the pieces of the waiting tokens, and mark them as returned.

        Args:
            whole: the text of all tokens in `_tokens`.
        """
        waiting = self._tokens[self._returned_count :]
        new = whole[_get_common_prefix_length(self._returned_text, whole) :]
        # Drop the older context tokens, if the remaining tokens decode without a replacement character.
        text = self._decode(waiting) if new else ""
        if text and (self._texts.is_byte_level or text[0] != _REPLACEMENT):
            self._tokens, self._returned_text = waiting, text
        else:
            self._returned_text = whole
        self._returned_count = len(self._tokens)
        return self._split_into_pieces(waiting, new)

    def _split_into_pieces(self, tokens: Sequence[int], text: str) -> list[TokenPiece]:
        """Split the text of tokens into one piece (text and bytes) for each token.

        There are three ways to split. The first one whose joined pieces equal `text` is used:

        1. Decode the bytes of each token.
        2. Take U+FFFD for each fallback byte, and the token's own text for each other token.
        3. Give the whole text to the last token that adds text, or to the last token if none adds text, and
           an empty text to all other tokens.
        """
        data = [self._texts.token_bytes(token) if self._adds_text(token) else b"" for token in tokens]
        for texts in (_decode_parts(data), [self._get_invalid_run_text(token) for token in tokens]):
            if "".join(texts) == text:
                return [TokenPiece(*one) for one in zip(tokens, texts, data, strict=True)]
        # The bytes differ from the decoded text, e.g. because the tokenizer drops the first space.
        shown = [at for at, token in enumerate(tokens) if self._adds_text(token)]
        last = shown[-1] if shown else len(tokens) - 1
        texts = [text if at == last else "" for at in range(len(tokens))]
        if _is_valid_utf8(b"".join(data)):
            data = [one.encode(errors="replace") for one in texts]
        return [TokenPiece(*one) for one in zip(tokens, texts, data, strict=True)]

    def _get_invalid_run_text(self, token: int) -> str:
        """Return the text of one token of a run, if the bytes of the whole run are not valid UTF-8.

        A run is a series of tokens that stand for single bytes. The text is U+FFFD for such a token, and
        empty for a special token that is skipped. Any other token has its own text.
        """
        if not self._adds_text(token):
            return ""
        return _REPLACEMENT if self._texts.is_fallback_byte(token) else self._texts.display_text(token)

    def _adds_text(self, token: int) -> bool:
        """Check whether a token adds text. Special tokens add none if ``special`` is False."""
        return self._special or not self._texts.is_skipped(token)

    def _read_bytes(self, token: int) -> bool:
        """Append the bytes of a token; return True if the last character is incomplete now."""
        if self._adds_text(token):
            self._partial.decode(self._texts.token_bytes(token))
        return bool(self._partial.getstate()[0])

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; with special tokens only if the detokenizer has ``special=True``."""
        return self._texts.decode(tokens, special=self._special)


def split_text(texts: TokenTexts, text: str, tokens: Sequence[int]) -> list[str]:
    """Split a text into one part for each of its tokens. The joined parts are the text if possible.

    The parts are the decoded tokens if these join to the text. If they do not, for example because the
    tokenizer changes upper case to lower case, the text is split at the tokenizer's offsets. If the tokenizer
    does not return one offset for each token (slow tokenizers), the parts are the decoded tokens, and they
    differ from the text. A text without tokens gives no parts.

    Args:
        texts: the texts of the tokens, with the model's tokenizer.
        text: the text before tokenization.
        tokens: the tokens of the text, without the special tokens that the tokenizer puts before a text.
    """
    pieces = texts.decode_pieces(tokens)
    if "".join(pieces) == text or not pieces or not texts.tokenizer.is_fast:
        return pieces
    with convert_tokenizer_panics():
        encoded = texts.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans: list[tuple[int, int]] = encoded["offset_mapping"]
    if len(spans) != len(pieces):
        return pieces
    ends = [0]
    for (_, end), (following, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        ends.append(max(ends[-1], min(end, following)))  # the last token has the whole character
    ends[-1] = len(text)
    return [text[start:end] for start, end in pairwise(ends)]


def get_token_letters(tokenizer: PreTrainedTokenizerBase) -> Letters:
    """Return the spelling of each token in the tokenizer's vocabulary, by token id.

    The marks for spaces and line ends (for example Ġ, Ċ and ▁) and a leading ``##`` are removed. The spelling
    is not decoded: in a byte-level vocabulary, a letter stands for a byte.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return Letters([_SPACES.sub("", name or "") for name in names])


def _get_common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    if other.startswith(one):
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _decode_parts(parts: Sequence[bytes]) -> list[str]:
    """Decode the parts of a text; a character that spans several parts is put in the last of them.

    Bytes that are not valid UTF-8 give U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(part) for part in parts]
    rest = decoder.decode(b"", final=True)
    if rest:
        last = max(at for at, part in enumerate(parts) if part)
        texts[last] += rest
    return texts


def _is_valid_utf8(data: bytes) -> bool:
    """Check whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _collect_decoder_types(state: Any) -> set[str]:
    """Return the type of a decoder, and the types of all decoders inside it.

    Args:
        state: the decoder's state, as the package tokenizers saves it.
    """
    found = {str(state.get("type"))}
    return found.union(*(_collect_decoder_types(one) for one in state.get("decoders", ())))


def _map_letters_to_bytes() -> dict[str, int]:
    """Return the byte that each letter stands for in the vocabulary of a byte-level BPE tokenizer.

    A byte that is a visible character of Latin-1 is written as this character. The other bytes are written as
    U+0100, U+0101 and so on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(0x100 + at): byte for at, byte in enumerate(others)},
    }


_BYTES_OF_LETTERS = _map_letters_to_bytes()
