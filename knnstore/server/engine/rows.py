"""Decoding of one text: choice of its tokens, its text so far, and its end.

`Task`, `Prompt` and `Sampling` describe a request; `Piece`, `TokenScore` and `TopToken` are its results.
`Row` decodes one text; `Constraint` restricts its tokens. `make_token_score` makes the score of a token,
`build_prompt_scores` those of a prompt.
"""

import math
import random
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from knnstore.lm import Detokenizer, Likelihoods, TokenPiece, TokenTexts
from knnstore.server.engine.stop_strings import StopStrings

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a text."""

    temperature: float = 1.0
    """Divisor of the log-probabilities before the softmax; 0 always takes the most probable token."""
    top_p: float = 1.0
    """Nucleus sampling: only the most probable tokens whose probabilities add up to `top_p` are sampled."""
    seed: int | None = None
    """Seed of the random numbers; the other texts of the batch do not influence them. None is a random
    seed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens."""

    tokens: tuple[int, ...]
    """All tokens that the model reads; at least one."""
    hidden: int = 0
    """Number of leading tokens that the server has added and the answer does not show."""
    texts: tuple[str, ...] = ()
    """Text of each token after the hidden tokens, if the answer repeats the prompt; else empty."""
    unfinished: int = 0
    """Number of last tokens that end inside a character. Their text is known only with the continuation."""


class Constraint(Protocol):
    """Decides which tokens may come next in one text, so that it becomes JSON of a schema."""

    schema: Mapping[str, Any]
    """The JSON schema, for engines that enforce it themselves."""

    def fork(self) -> "Constraint":
        """Return an independent copy, for another text that has the same tokens so far."""

    def restrict(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities of shape (v,) with -inf for each token that is not allowed next.

        At least one log-probability stays finite.
        """

    def advance(self, token: int) -> bool:
        """Append the chosen token. Returns True if the text is complete, so that no token can follow."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request to continue each prompt `copies` times, or to score the prompts, or both."""

    prompts: tuple[Prompt, ...]
    knn: Hashable
    """Argument for the engine's `settings_of`, which returns the retrieval settings of the task."""
    max_tokens: int = 16
    """Largest number of tokens of each text; 0 generates nothing."""
    copies: int = 1
    """Number of texts that are generated for each prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    """Strings that end a text; none is empty."""
    top: int | None = None
    """Number of most probable tokens that each score lists; 0 lists none, None gives no log-probabilities."""
    score_prompt: bool = False
    """True if the prompts' own tokens are scored."""
    constraint: Constraint | None = None
    """Constraint of the generated tokens in its first state; each text gets a copy. None allows all
    tokens."""


class TopToken(NamedTuple):
    """One of the most probable tokens at a position."""

    token: int
    log_prob: float
    name: str
    """Text of the token inside a longer text, or `bytes:…` if the token is only a part of a character."""
    data: bytes
    """Bytes that the token adds inside a longer text."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a text and its log-probability."""

    token: int
    text: str = ""
    """Text that the token adds. Empty if it is special, ends inside a character, or follows the end."""
    offset: int = 0
    """Number of characters before the token, counted from the beginning of the prompt or continuation."""
    data: bytes = b""
    """Bytes that the token adds to the text."""
    log_prob: float | None = None
    """Log-probability of the token; None if it was not scored, as for the first token of a prompt."""
    top: tuple[TopToken, ...] = ()
    """The most probable tokens. If this token is not one of them, it is appended. Empty if none are
    requested."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Next piece of one text of a task: new text with its tokens, or the scores of its prompt."""

    index: int
    """Index of the text in its task: index of the prompt × `Task.copies` + index of the copy."""
    text: str = ""
    """New text; empty if the next text may still be cut off by a stop string."""
    tokens: tuple[TokenScore, ...] = ()
    """Generated tokens whose text is now completely in this or earlier pieces, or the tokens of the
    prompt."""
    finish: Finish | None = None
    """Reason why the text has ended; None if it goes on."""
    is_prompt: bool = False
    """True if `tokens` are the tokens of the prompt; False if they are generated tokens."""


class Row:
    """One text of a task that is being decoded.

    Args:
        task: the task.
        index: index of the text in the task, as in `Piece`.
        texts: the texts of the model's tokens.
        ends: end tokens: a text ends after one of these tokens.
    """

    def __init__(self, task: Task, index: int, texts: TokenTexts, ends: frozenset[int]) -> None:
        prompt = task.prompts[index // task.copies]
        self.task = task
        self.index = index
        self.tokens = [*prompt.tokens]
        """Tokens of the prompt, followed by the generated tokens."""
        self._prompt_length = len(self.tokens)
        self._ends = ends
        self._constraint = None if task.constraint is None else task.constraint.fork()
        self._texts = texts
        before = len(self.tokens) - prompt.unfinished
        self._detokenizer = Detokenizer(texts, self.tokens[:before])
        self._unfinished = prompt.unfinished
        self._prompt_pieces = [
            piece for token in self.tokens[before:] for piece in self._detokenizer.take(token)
        ]
        self._stop_strings = StopStrings(task.stops)
        self._untexted: deque[TokenScore] = deque()  # chosen tokens whose text depends on the next tokens
        self._held: deque[TokenScore] = deque()  # tokens whose text a stop string may still cut off
        self._text_length = 0  # characters of the tokens whose text is certain
        self._sent_length = 0  # characters of the text that were sent to the client
        seed = task.sampling.seed
        self._random = random.Random(None if seed is None else f"{seed}:{index}")  # noqa: S311

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be generated before the text has `Task.max_tokens`."""
        return self.task.max_tokens - (len(self.tokens) - self._prompt_length)

    def choose_token(self, log_probs: Tensor, likeliest: int) -> Piece:
        """Choose the next token and append it to `tokens`. Returns the text that can be sent now.

        The text ends at an end token, a stop string, a complete constraint, or after `max_tokens` tokens.

        Args:
            log_probs: log p of all tokens, float32, shape (v,).
            likeliest: id of the most probable token; used at temperature 0 without a constraint.
        """
        sampling, top = self.task.sampling, self.task.top
        # 1) Choose a token that the constraint allows.
        allowed = log_probs
        if self._constraint is not None:
            allowed = self._constraint.restrict(log_probs)
            likeliest = int(allowed.argmax())
        token = (
            likeliest if sampling.temperature == 0 else sample_token(allowed, sampling, self._random.random)
        )
        is_complete = self._constraint is not None and self._constraint.advance(token)
        # 2) Record its log-probability, without the constraint.
        score = TokenScore(token)
        if top is not None:
            likelihoods = Likelihoods.of(log_probs[None], torch.tensor([token], device=log_probs.device), top)
            score = next(build_token_scores(likelihoods, [token], top, self._texts))
        return self.append_token(score, is_complete=is_complete)

    def append_token(self, score: TokenScore, *, is_complete: bool = False) -> Piece:
        """Append a chosen token to `tokens`. Returns the text that can be sent now.

        The text ends at an end token, a stop string, or after `max_tokens` tokens.

        Args:
            score: the token and its log-probability; its text is not known yet.
            is_complete: True if no token may follow; the text then ends with this token.
        """
        token = score.token
        self.tokens.append(token)
        self._untexted.append(score)
        # End the text, or give out the text that no stop string can cut off any more.
        if token in self._ends:
            return self._end_text("stop", [*self._detokenizer.end(), TokenPiece(token, "", b"")])
        pieces = self._detokenizer.take(token)
        if is_complete:
            return self._end_text("stop", [*pieces, *self._detokenizer.end()])
        if not self.tokens_left:
            return self._end_text("length", [*pieces, *self._detokenizer.end()])
        text, stopped = self._append_pieces(pieces)
        if stopped:
            return self._end_text("stop", [], text)
        return Piece(self.index, text, self._pop_complete_scores())

    def _end_text(self, finish: Finish, pieces: Sequence[TokenPiece], text: str = "") -> Piece:
        """Return the last piece of the text, with all tokens that were held back.

        Args:
            finish: the reason of the end; a stop string in the last text changes it to "stop".
            pieces: pieces of text of the last tokens.
            text: text of this step that can be sent already.
        """
        last, stopped = self._append_pieces(pieces)
        rest = "" if stopped else self._stop_strings.release_held()
        self._sent_length += len(rest)
        scores = [_cut_score(score, self._sent_length) for score in self._held]
        return Piece(self.index, text + last + rest, tuple(scores), "stop" if stopped else finish)

    def _append_pieces(self, pieces: Sequence[TokenPiece]) -> tuple[str, bool]:
        """Append tokens whose text no longer depends on later tokens.

        Returns:
            The text that can be sent to the client, and True if a stop string was found. The text ends before
            the stop string.
        """
        text, sendable, stopped = "", "", False
        pieces, self._prompt_pieces = [*self._prompt_pieces, *pieces], []
        for piece in pieces:
            text += piece.text
            if self._unfinished:  # this token belongs to the prompt
                self._unfinished -= 1
                continue
            score = self._untexted.popleft()
            self._held.append(replace(score, text=text, offset=self._text_length, data=piece.data))
            self._text_length += len(text)
            if not stopped:
                released, stopped = self._stop_strings.append_text(text)
                sendable += released
            text = ""
        self._sent_length += len(sendable)
        return sendable, stopped

    def _pop_complete_scores(self) -> tuple[TokenScore, ...]:
        """Remove and return the held tokens whose whole text has been sent to the client."""
        done = []
        while self._held and self._held[0].offset + len(self._held[0].text) <= self._sent_length:
            done.append(self._held.popleft())
        return tuple(done)


def _cut_score(score: TokenScore, length: int) -> TokenScore:
    """Cut the text of a token's score to the part in the first `length` characters of the text."""
    kept_length = length - score.offset
    if kept_length <= 0:
        return replace(score, text="", offset=length, data=b"")
    return replace(
        score, text=score.text[:kept_length], data=score.data.removesuffix(score.text[kept_length:].encode())
    )


def sample_token(log_probs: Tensor, sampling: Sampling, draw: Any) -> int:
    """Sample a token from the probabilities at a temperature, and return its id.

    Args:
        log_probs: log p of all tokens, shape (v,).
        sampling: the temperature, which may not be 0, and top_p.
        draw: returns a random number in [0, 1); called once.
    """
    probs = (log_probs.double() / sampling.temperature).softmax(-1).cpu()
    if sampling.top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        beyond = ranked.cumsum(0) - ranked >= sampling.top_p
        probs[order[1:][beyond[1:]]] = 0  # the most probable token always stays
    total = probs.cumsum(0)
    # Rounding can put the draw beyond all tokens: then take the last token of nonzero probability.
    last = int(probs.nonzero()[-1])
    return min(int(torch.searchsorted(total, draw() * total[-1], right=True)), last)


def build_token_scores(
    likelihoods: Likelihoods, tokens: Sequence[int], top: int | None, texts: TokenTexts
) -> Iterator[TokenScore]:
    """Yield the `TokenScore` of each token, with empty text; log-probabilities of -inf become -9999.0.

    Args:
        likelihoods: the likelihoods of the tokens, with at least `top` of the most probable tokens.
        tokens: the tokens.
        top: number of most probable tokens that each score lists; None gives no log-probabilities.
        texts: the texts of the model's tokens.
    """
    if top is None:
        yield from map(TokenScore, tokens)
        return
    gold, best_log_probs, best_tokens = (
        likelihoods.gold.tolist(),
        likelihoods.best[:, :top].tolist(),
        likelihoods.tokens[:, :top].tolist(),
    )
    for token, log_prob, values, likeliest in zip(tokens, gold, best_log_probs, best_tokens, strict=True):
        yield make_token_score(token, log_prob, list(zip(likeliest, values, strict=True)), texts)


def make_token_score(
    token: int, log_prob: float, likeliest: Sequence[tuple[int, float]], texts: TokenTexts
) -> TokenScore:
    """Return a token's `TokenScore`, with empty text; log-probabilities of -inf become -9999.0.

    Args:
        token: the token.
        log_prob: its log-probability.
        likeliest: the most probable tokens and their log-probabilities, in the order of the result. The token
            itself is appended if it is not one of them; empty lists no tokens.
        texts: the texts of the model's tokens.
    """
    listed = list(likeliest)
    if listed and all(token != listed_token for listed_token, _ in listed):
        listed.append((token, log_prob))
    top_tokens = (
        TopToken(
            listed_token, _replace_infinity(value), texts.name_of(listed_token), texts.bytes_of(listed_token)
        )
        for listed_token, value in listed
    )
    return TokenScore(token, log_prob=_replace_infinity(log_prob), top=tuple(top_tokens))


def build_prompt_scores(
    prompt: Prompt, chunks: Sequence[Likelihoods], top: int | None, texts: TokenTexts
) -> tuple[TokenScore, ...]:
    """Return the scores of a prompt's shown tokens. The first of them has no log-probability.

    Args:
        prompt: the prompt.
        chunks: the likelihoods of all its tokens except the first, in chunks; empty if it has one token.
        top: number of most probable tokens that each score lists; None gives no log-probabilities.
        texts: the texts of the model's tokens.
    """
    shown = prompt.tokens[prompt.hidden :]
    scores = [TokenScore(token) for token in shown[:1]]
    if len(prompt.tokens) > 1:
        whole = Likelihoods(
            *(
                torch.cat(column)[prompt.hidden : len(prompt.tokens) - 1]
                for column in zip(*chunks, strict=True)
            )
        )
        scores += build_token_scores(whole, shown[1:], top, texts)
    return add_prompt_texts(prompt, scores)


def add_prompt_texts(prompt: Prompt, scores: Sequence[TokenScore]) -> tuple[TokenScore, ...]:
    """Return the scores of a prompt's shown tokens with the text and offset of each token.

    The scores stay unchanged if the prompt has no texts.
    """
    if not prompt.texts:
        return tuple(scores)
    offsets = [0, *accumulate(map(len, prompt.texts[:-1]))]
    return tuple(
        replace(score, text=text, offset=offset)
        for score, text, offset in zip(scores, prompt.texts, offsets, strict=True)
    )


def _replace_infinity(log_prob: float) -> float:
    """Return a log-probability as JSON can hold it: -9999.0, as other servers send, if not finite."""
    return log_prob if math.isfinite(log_prob) else -9999.0


def find_end_tokens(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the end tokens that a generation configuration and a tokenizer name; may be empty."""
    eos = config.eos_token_id
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
