"""The two JSON shapes of an answer's choices: `Texts` of completions, and `Messages` of conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.server.engine import Finish, TokenScore


class Shape(Protocol):
    """Converts texts and token scores to the choices of an answer."""

    kind: str
    """Field ``object`` of a whole answer."""
    kind_of_part: str
    """Field ``object`` of an event of a stream."""
    id: str
    """Prefix of the ids of answers."""

    def get_prefix(self, index: int) -> str:
        """Return the prompt that the answer puts before a text; empty if it does not repeat prompts."""

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the JSON object for a whole text in the field ``choices``, without its finish reason.

        Args:
            index: index of the text.
            text: the text, which begins with `get_prefix(index)`.
            prompt: scores of the prompt's tokens; empty if they are not shown.
            written: scores of the generated tokens.
        """

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return the JSON object for the field ``choices`` of a stream's event, without finish reason.

        The arguments are those of `make_choice`, for the new text only. `first` marks the text's first event.
        """


def add_finish_reason(shaped: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
    """Return a copy of a choice with the field ``finish_reason``, which is None while the text goes on."""
    return {**shaped, "finish_reason": finish}


@dataclass(frozen=True)
class Texts:
    """Shape of the choices of ``/v1/completions``."""

    with_log_probs: bool
    """True if the choices have log-probabilities."""
    echoed: Sequence[str] = ()
    """The prompts, if each text begins with its prompt; else empty."""
    copies: int = 1
    """Number of texts for each prompt."""
    by_id: bool = False
    """True if tokens are shown as ``token_id:N``."""

    kind = kind_of_part = "text_completion"
    id = "cmpl-"

    def get_prefix(self, index: int) -> str:
        """Return the prompt of a text, if it is repeated; else an empty string."""
        return self.echoed[index // self.copies] if self.echoed else ""

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the choice: the text, and parallel lists of its tokens' names, scores and offsets."""
        shift = len(self.get_prefix(index))
        offsets = [*(one.offset for one in prompt), *(one.offset + shift for one in written)]
        return {
            "index": index,
            "text": text,
            "logprobs": self._make_logprobs([*prompt, *written], offsets) if self.with_log_probs else None,
        }

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return the choice of a part of a text; it has the same shape as `make_choice`."""
        return self.make_choice(index, text, prompt, written)

    def _make_logprobs(self, scores: Sequence[TokenScore], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the field ``logprobs`` of a completion: parallel lists with one item for each token."""
        return {
            "tokens": [self._token_name(one.token, one.text) for one in scores],
            "token_logprobs": [one.log_prob for one in scores],
            "top_logprobs": [self._name_top_tokens(one) for one in scores],
            "text_offset": offsets,
        }

    def _name_top_tokens(self, score: TokenScore) -> dict[str, float] | None:
        """Return the log-probabilities of the most probable tokens by name; None if none are listed.

        The token of the text has the same name as in `tokens`. If two tokens have the same name, the less
        probable one, and never the token of the text, is named by its id.
        """
        names = {score.token: self._token_name(score.token, score.text)}
        for one in score.top:
            if one.token not in names:
                name = self._token_name(one.token, one.name)
                names[one.token] = f"token_id:{one.token}" if name in names.values() else name
        return {names[one.token]: one.log_prob for one in score.top} or None

    def _token_name(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.by_id else text


@dataclass(frozen=True)
class Messages:
    """Shape of the choices of ``/v1/chat/completions``."""

    with_log_probs: bool
    """True if the choices have log-probabilities."""

    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"
    id = "chatcmpl-"

    def get_prefix(self, index: int) -> str:
        """Return an empty string: an answer does not repeat its conversation."""
        return ""

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], written: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the choice: the assistant's message and its log-probabilities. The prompt is not shown."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._make_logprobs(written)}

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        written: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return the choice of an event: a delta, which has the role only in the text's first event."""
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._make_logprobs(written)}

    def _make_logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Return the field ``logprobs`` of a message: one object for each token; None if not requested."""
        if not self.with_log_probs:
            return None
        return {
            "content": [
                {
                    **_log_prob_fields(one.text, one.data, one.log_prob),
                    "top_logprobs": [
                        _log_prob_fields(one.text, one.data, other.log_prob)
                        if other.token == one.token
                        else _log_prob_fields(other.name, other.data, other.log_prob)
                        for other in one.top
                    ],
                }
                for one in scores
            ],
            "refusal": None,
        }


def _log_prob_fields(text: str, data: bytes, log_prob: float | None) -> dict[str, Any]:
    """Return the fields of one token in the field ``logprobs``."""
    return {"token": text, "logprob": log_prob, "bytes": list(data)}
