"""Prompts that ask a model to fill in the middle of a text, between a prefix and a suffix.

A model can do this if it was trained on documents whose parts stand in another order, each behind a special
token: Bavarian et al. 2022, https://arxiv.org/abs/2207.14255. The tokenizer shows which tokens these are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class _Format(NamedTuple):
    """Special tokens of a family of models; they stand before the prefix, the suffix and the middle."""

    prefix: str
    suffix: str
    middle: str | None
    """None if the suffix comes first, so that the middle follows the prefix without a token between them."""


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
"""Tokens with which models end a middle, beside the end token that the tokenizer names."""
_MARK = "☺"
"""Character that is put before a text, so that the tokenizer adds no space to the text."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Special tokens with which a model is asked to fill in the middle of a text, and their order."""

    prefix: int
    """Id of the token before the prefix."""
    suffix: int
    """Id of the token before the suffix."""
    middle: int | None
    """Id of the token after which the model generates the middle; None if the suffix comes first, and the
    middle follows the prefix."""
    ends: frozenset[int]
    """Ids of the tokens that end the middle, beside the model's end tokens."""

    @classmethod
    def find(cls, tokenizer: Any, vocabulary: int) -> "Infilling | None":
        """Return the first format whose special tokens a tokenizer has; None if there is no match.

        Args:
            tokenizer: the model's tokenizer.
            vocabulary: number of tokens that the model has.
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

        Names of special tokens in the texts become ordinary text.

        Args:
            tokenizer: the model's tokenizer.
            prefix: the text before the middle.
            suffix: the text after the middle.
            middle_start: the beginning of the middle.
            limit: largest number of tokens of the prompt. If the texts have more, the end of the suffix and
                the beginning of the prefix are left out; the suffix keeps at least a quarter of the room.
                None leaves nothing out.
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
