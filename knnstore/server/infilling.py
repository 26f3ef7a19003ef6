"""Prompts that ask a model to fill in the middle of a text, between a prefix and a suffix.

A model can do this if it was trained on documents whose parts were reordered: first prefix and suffix, then
the middle, with a special token before each part. See Bavarian et al. 2022, https://arxiv.org/abs/2207.14255.
`Infilling.find_tokens` recognizes the special tokens in the tokenizer's vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class _Format(NamedTuple):
    """Names of the special tokens before the prefix, the suffix and the middle, for one family of models."""

    prefix: str
    suffix: str
    middle: str | None
    """None if the prompt has the order suffix, prefix, middle. No token separates prefix and middle then."""


_FORMATS = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Format("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ENDS = (
    "▁<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<file_sep>",
    "<repo_name>",
    "<fim_pad>",
)
"""Tokens that can end a generated middle, in addition to the end token that the tokenizer names."""
_MARK = "☺"
"""Character that is put before a text, so that the tokenizer adds no space to the text."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Ids of the special tokens with which a prompt asks a model to fill in the middle of a text."""

    prefix: int
    """Id of the token before the prefix."""
    suffix: int
    """Id of the token before the suffix."""
    middle: int | None
    """Id of the token after which the model generates the middle. None if the prompt has the order suffix,
    prefix, middle; no token separates prefix and middle then."""
    ends: frozenset[int]
    """Ids of the tokens that end the middle, in addition to the model's end tokens."""

    @classmethod
    def find_tokens(cls, tokenizer: Any, vocabulary: int) -> "Infilling | None":
        """Find the special tokens for infilling in a tokenizer; return None if it has none.

        The known formats, such as that of Qwen2.5-Coder, are tried in order. The tokenizer must have all
        tokens of a format.

        Args:
            tokenizer: the model's tokenizer.
            vocabulary: number of tokens that the model has. Tokens with higher ids do not count.
        """
        ids = {name: id for name, id in tokenizer.get_vocab().items() if id < vocabulary}
        for format in _FORMATS:
            names = [name for name in format if name is not None]
            if ids.keys() >= {*names}:
                tokens = [ids[name] for name in names]
                prefix, suffix, *middle = tokens
                ends = {*tokens, *(ids[name] for name in _ENDS if name in ids)}
                return cls(prefix, suffix, middle[0] if middle else None, frozenset(ends))
        return None

    def make_prompt(
        self, tokenizer: Any, prefix: str, suffix: str, middle_start: str = "", limit: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt after which the model generates the middle.

        If a text contains the name of a special token, the name is encoded as ordinary text.

        Args:
            tokenizer: the model's tokenizer.
            prefix: the text before the middle.
            suffix: the text after the middle.
            middle_start: the beginning of the middle; the model continues it. It is never cut.
            limit: largest number of tokens of the prompt. A longer prompt loses the end of its suffix and
                the beginning of its prefix. A long suffix keeps at least a quarter of the tokens that prefix
                and suffix may have together. None means no limit.
        """
        before, after = _tokenize(tokenizer, prefix), _tokenize_rest(tokenizer, suffix)
        middle = _tokenize_rest(tokenizer, middle_start) if middle_start else []
        if limit is not None:
            room = max(0, limit - len(middle) - 3)
            after = after[: max(room // 4, room - len(before))]
            before = before[max(0, len(before) + len(after) - room) :]
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before, *middle]
        return [self.prefix, *before, self.suffix, *after, self.middle, *middle]


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens."""
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return list(encoded["input_ids"])


def _tokenize_rest(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that follows other text.

    Some tokenizers put a space before each text. Here this space is left out.
    """
    tokens = _tokenize(tokenizer, text)
    adds_space = tokenizer.convert_ids_to_tokens(_tokenize(tokenizer, "a")[:1])[0].startswith("▁")
    if adds_space:
        mark, marked = _tokenize(tokenizer, _MARK), _tokenize(tokenizer, _MARK + text)
        if marked[: len(mark)] == mark:
            return marked[len(mark) :]
    return tokens
