"""The two JSON shapes of an answer: `Texts` for completions, and `Messages` for conversations.

An answer has a list ``choices`` with one object for each text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.server.engine import Piece, TokenScore


class Shape(Protocol):
    """Converts texts and token scores to the JSON objects of an answer's field ``choices``."""

    kind: str
    """Value of the field ``object`` of a whole answer."""
    kind_of_part: str
    """Value of the field ``object`` of an event of a stream."""
    id: str
    """First characters of the ids of answers."""

    def get_prefix(self, index: int) -> str:
        """Return the prompt that precedes a text in the answer; empty if the answer does not repeat prompts.

        Args:
            index: index of the text in the answer.
        """

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], generated: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the JSON object of a whole text for the field ``choices``, without the reason of its end.

        Args:
            index: index of the text in the answer.
            text: the text, which begins with `get_prefix(index)`.
            prompt: scores of the prompt's tokens; empty if they are not shown.
            generated: scores of the generated tokens.
        """

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        generated: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return the JSON object of new text for the field ``choices`` of an event, without finish reason.

        Args:
            index: index of the text in the answer.
            text: the new text.
            prompt: scores of the prompt's tokens in this event; empty if there are none.
            generated: scores of the generated tokens in this event.
            first: True for the first event of the text.
        """


def add_finish_reason(shaped: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Return a copy of a text's JSON object with ``finish_reason``, and ``stop_reason`` if there is one.

    Args:
        shaped: the JSON object.
        piece: the last piece of the text so far, which has the reasons if the text has ended.
    """
    reason = {"stop_reason": piece.stop_reason} if piece.stop_reason else {}
    return {**shaped, "finish_reason": piece.finish, **reason}


@dataclass(frozen=True)
class Texts:
    """Shape of the answers of ``/v1/completions``."""

    with_log_probs: bool
    """True if the answer has log-probabilities."""
    echoed: Sequence[str] = ()
    """The prompts, if the answer repeats each prompt before its texts; otherwise empty."""
    copies: int = 1
    """Number of texts for each prompt."""
    by_id: bool = False
    """True if tokens are named ``token_id:N`` in the log-probabilities, because two tokens can have one
    text."""

    kind = kind_of_part = "text_completion"
    id = "cmpl-"

    def get_prefix(self, index: int) -> str:
        """Return the prompt of a text, if the answer repeats prompts; otherwise an empty string."""
        return self.echoed[index // self.copies] if self.echoed else ""

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], generated: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the text, its index, and its log-probabilities (None if the answer has none).

        The text begins with `get_prefix(index)`.
        """
        shift = len(self.get_prefix(index))
        offsets = [*(score.offset for score in prompt), *(score.offset + shift for score in generated)]
        return {
            "index": index,
            "text": text,
            "logprobs": self._make_logprobs([*prompt, *generated], offsets) if self.with_log_probs else None,
        }

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        generated: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return new text with the fields of a whole text (`make_choice`); `first` changes nothing."""
        return self.make_choice(index, text, prompt, generated)

    def _make_logprobs(self, scores: Sequence[TokenScore], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the field ``logprobs`` of a completion: lists with one item for each token.

        Args:
            scores: the scores of the tokens.
            offsets: number of characters before each token.
        """
        return {
            "tokens": [self._token_name(score.token, score.text) for score in scores],
            "token_logprobs": [score.log_prob for score in scores],
            "top_logprobs": [self._name_top_tokens(score) for score in scores],
            "text_offset": offsets,
        }

    def _name_top_tokens(self, score: TokenScore) -> dict[str, float] | None:
        """Return the log-probabilities of the most probable tokens by name; None if the score lists none.

        If two tokens have the same name, the less probable token is named by its id (``token_id:N``). The
        generated token itself always keeps its name, the same as in the list `tokens`.
        """
        names = {score.token: self._token_name(score.token, score.text)}
        for top_token in score.top:
            if top_token.token not in names:
                name = self._token_name(top_token.token, top_token.name)
                names[top_token.token] = f"token_id:{top_token.token}" if name in names.values() else name
        return {names[top_token.token]: top_token.log_prob for top_token in score.top} or None

    def _token_name(self, token: int, text: str) -> str:
        """Return the name of a token in the log-probabilities: its text, or ``token_id:N`` with `by_id`."""
        return f"token_id:{token}" if self.by_id else text


@dataclass(frozen=True)
class Messages:
    """Shape of the answers of ``/v1/chat/completions``."""

    with_log_probs: bool
    """True if the answer has log-probabilities."""

    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"
    id = "chatcmpl-"

    def get_prefix(self, index: int) -> str:
        """Return an empty string: an answer does not repeat its conversation."""
        return ""

    def make_choice(
        self, index: int, text: str, prompt: Sequence[TokenScore], generated: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the assistant's message with its index. `prompt` is not used."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._make_logprobs(generated)}

    def make_chunk(
        self,
        index: int,
        text: str,
        prompt: Sequence[TokenScore],
        generated: Sequence[TokenScore],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Return the new text of a message with its index. Only the first event names the role."""
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._make_logprobs(generated)}

    def _make_logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Return the field ``logprobs`` of a message, one object for each token; None if not requested."""
        if not self.with_log_probs:
            return None
        return {
            "content": [
                {
                    **_log_prob_fields(score.text, score.data, score.log_prob),
                    "top_logprobs": [
                        _log_prob_fields(score.text, score.data, top_token.log_prob)
                        if top_token.token == score.token
                        else _log_prob_fields(top_token.name, top_token.data, top_token.log_prob)
                        for top_token in score.top
                    ],
                }
                for score in scores
            ],
            "refusal": None,
        }


def _log_prob_fields(text: str, data: bytes, log_prob: float | None) -> dict[str, Any]:
    """Return the JSON object of one token for the field ``logprobs``.

    Args:
        text: the text of the token.
        data: the bytes of the token.
        log_prob: its log-probability; None if the token was not scored.
    """
    return {"token": text, "logprob": log_prob, "bytes": list(data)}
