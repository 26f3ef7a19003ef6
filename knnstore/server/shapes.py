"""The two shapes of what was written: texts with their tokens, and messages of a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.server.engine import Finish, TokenScore


class Shape(Protocol):
    """How choices of an answer look."""

    kind: str
    """Of a whole answer, its ``object``."""
    kind_of_part: str
    """Of a part of a stream."""
    id: str
    """What ids of answers begin with."""

    def before(self, index: int) -> str:
        """What a text begins with: its prompt, if that is wanted."""

    def whole(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """A choice, but for why it ended: its text, the prompt's tokens and those written."""

    def part(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """The same of a part of a text; `first` is its first."""


def choice(shaped: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
    """A choice with why it ended; None in the middle."""
    return {**shaped, "finish_reason": finish}


@dataclass(frozen=True)
class Texts:
    """Of ``/v1/completions``."""

    with_log_probs: bool
    echoed: Sequence[str] = ()
    """The prompts, where each text begins with its own."""
    copies: int = 1
    by_id: bool = False
    """Whether tokens are written as their ids."""

    kind = kind_of_part = "text_completion"
    id = "cmpl-"

    def before(self, index: int) -> str:
        """The prompt, if it is wanted."""
        return self.echoed[index // self.copies] if self.echoed else ""

    def whole(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """A text, and a list for each thing that is known of its tokens."""
        shift = len(self.before(index))
        offsets = [*(one.offset for one in prompt), *(one.offset + shift for one in written)]
        return {
            "index": index,
            "text": text,
            "logprobs": self._log_probs([*prompt, *written], offsets) if self.with_log_probs else None,
        }

    def part(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """A part of a text, in the same shape."""
        return self.whole(index, text, prompt, written)

    def _log_probs(self, scores: Sequence[TokenScore], offsets: Sequence[int]) -> dict[str, Any]:
        return {
            "tokens": [self._name(one.token, one.text) for one in scores],
            "token_logprobs": [one.log_prob for one in scores],
            "top_logprobs": [self._top(one) for one in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float] | None:
        """Return log-probabilities by name; the token of the text has the name that `tokens` has.

        A token whose name is taken, by that one or a more probable one, is named by its id.
        """
        names = {score.token: self._name(score.token, score.text)}
        for one in score.top:
            if one.token not in names:
                name = self._name(one.token, one.name)
                names[one.token] = f"token_id:{one.token}" if name in names.values() else name
        return {names[one.token]: one.log_prob for one in score.top} or None

    def _name(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.by_id else text


@dataclass(frozen=True)
class Messages:
    """Of ``/v1/chat/completions``."""

    with_log_probs: bool

    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"
    id = "chatcmpl-"

    def before(self, index: int) -> str:
        """Nothing."""
        return ""

    def whole(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """A message of the assistant."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._log_probs(written)}

    def part(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """What a message goes on with."""
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._log_probs(written)}

    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self.with_log_probs:
            return None
        return {
            "content": [
                {
                    **_shown(one.text, one.data, one.log_prob),
                    "top_logprobs": [
                        _shown(one.text, one.data, other.log_prob)
                        if other.token == one.token
                        else _shown(other.name, other.data, other.log_prob)
                        for other in one.top
                    ],
                }
                for one in scores
            ],
            "refusal": None,
        }


def _shown(text: str, data: bytes, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(data)}
