"""One text that is being decoded: sampling of its tokens, its text so far, and its end.

`Task`, `Prompt` and `Sampling` describe a request; `Piece`, `TokenScore` and `TopToken` are its results.
`Row` decodes one text; `Constraint` restricts its tokens. `prompt_scores` builds the scores of a prompt.
"""

import math
import random
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
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
    """Settings that choose the tokens of a text."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Nucleus sampling: only the most probable tokens whose probabilities add up to `top_p` are sampled."""
    seed: int | None = None
    """The same seed gives the same random numbers, whatever other texts are decoded meanwhile."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens."""

    tokens: tuple[int, ...]
    """All tokens that the model reads; at least one."""
    hidden: int = 0
    """Number of leading tokens that the server has added and the answer does not show."""
    texts: tuple[str, ...] = ()
    """Text of each shown token, if the answer repeats the prompt; else empty."""
    unfinished: int = 0
    """Number of trailing tokens that end inside a character. The continuation gives their text."""


class Constraint(Protocol):
    """Decides which tokens are allowed next in one text."""

    def fork(self) -> "Constraint":
        """Return an independent copy, for another text that has the same tokens so far."""

    def restrict(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities of shape (v,) with -inf for each token that is not allowed next.

        At least one stays finite.
        """

    def advance(self, token: int) -> bool:
        """Append the chosen token. Returns True if the text is complete, so that no token can follow."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request to continue each prompt `copies` times, or to score the prompts, or both."""

    prompts: tuple[Prompt, ...]
    knn: Hashable
    """Key from which the engine's `settings_of` makes the retrieval settings."""
    max_tokens: int = 16
    """Largest number of tokens of each text; 0 generates nothing."""
    copies: int = 1
    """Number of texts for each prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    """Strings that end a text; none is empty."""
    top: int | None = None
    """Number of most probable tokens listed for each token; None gives no log-probabilities."""
    score_prompt: bool = False
    """True if the prompts' own tokens are scored."""
    constraint: Constraint | None = None
    """Constraint of each text before its first token. Each text forks it."""


class TopToken(NamedTuple):
    """One of the most probable tokens at a position."""

    token: int
    log_prob: float
    name: str
    """The token's text inside a longer text, or `bytes:...` for a part of a character."""
    data: bytes
    """The token's bytes inside a longer text."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a text and its log-probability."""

    token: int
    text: str = ""
    """Text that the token adds. Empty if it is special, ends inside a character, or follows the end."""
    offset: int = 0
    """Number of characters before it, in the prompt or in the continuation."""
    data: bytes = b""
    """The token's bytes that are part of the text."""
    log_prob: float | None = None
    """Log-probability of the token; None if it was not scored, as for the first token of a prompt."""
    top: tuple[TopToken, ...] = ()
    """The most probable tokens, and the token itself behind them if it is none of them. Empty if none are
    wanted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens of one text of a task."""

    index: int
    """Index of the text: prompt × copies + copy."""
    text: str = ""
    tokens: tuple[TokenScore, ...] = ()
    """Tokens whose text has been given out completely."""
    finish: Finish | None = None
    """Reason why the text has ended; None if it goes on."""
    is_prompt: bool = False
    """True if `tokens` are those of the text's prompt."""


class Row:
    """One text of a task that is being decoded.

    Args:
        task: the task.
        index: index of the text in the task, as in `Piece`.
        texts: the texts of the model's tokens.
        ends: tokens that end any text.
    """

    def __init__(self, task: Task, index: int, texts: TokenTexts, ends: frozenset[int]) -> None:
        prompt = task.prompts[index // task.copies]
        self.task = task
        self.index = index
        self.tokens = [*prompt.tokens]
        """Tokens of the prompt, followed by the generated tokens."""
        self._first = len(self.tokens)
        self._ends = ends
        self._constraint = None if task.constraint is None else task.constraint.fork()
        self._texts = texts
        before = len(self.tokens) - prompt.unfinished
        self._detokenizer = Detokenizer(texts, self.tokens[:before])
        self._unfinished = prompt.unfinished
        self._early = [piece for token in self.tokens[before:] for piece in self._detokenizer.take(token)]
        self._stops = StopStrings(task.stops)
        self._chosen: deque[TokenScore] = deque()  # tokens whose text depends on the tokens that follow
        self._held: deque[TokenScore] = deque()  # tokens whose text a stop string may still cut off
        self._length = 0  # characters of the tokens whose text is certain
        self._given = 0  # characters given out
        seed = task.sampling.seed
        self._random = random.Random(None if seed is None else f"{seed}:{index}")  # noqa: S311

    @property
    def left(self) -> int:
        """Largest number of tokens that the text may still get."""
        return self.task.max_tokens - (len(self.tokens) - self._first)

    def take(self, log_probs: Tensor, likeliest: int) -> Piece:
        """Choose and append the next token. Returns the text and tokens that can be given out now.

        The text ends at an end token, a stop string, a complete constraint, or after `max_tokens` tokens.

        Args:
            log_probs: log p of all tokens, float32, shape (v,).
            likeliest: the most probable token.
        """
        sampling, top = self.task.sampling, self.task.top
        # 1) Choose a token that the constraint allows.
        allowed = log_probs
        if self._constraint is not None:
            allowed = self._constraint.restrict(log_probs)
            likeliest = int(allowed.argmax())
        token = likeliest if sampling.temperature == 0 else drawn(allowed, sampling, self._random.random)
        is_complete = self._constraint is not None and self._constraint.advance(token)
        self.tokens.append(token)
        # 2) Record its log-probability, without the constraint.
        score = TokenScore(token)
        if top is not None:
            found = Likelihoods.of(log_probs[None], torch.tensor([token], device=log_probs.device), top)
            score = next(scored(found, [token], top, self._texts))
        self._chosen.append(score)
        # 3) End the text, or give out the text that no stop string can cut off any more.
        if token in self._ends:
            return self._end("stop", [*self._detokenizer.end(), TokenPiece(token, "", b"")])
        pieces = self._detokenizer.take(token)
        if is_complete:
            return self._end("stop", [*pieces, *self._detokenizer.end()])
        if not self.left:
            return self._end("length", [*pieces, *self._detokenizer.end()])
        text, stopped = self._give(pieces)
        if stopped:
            return self._end("stop", [], text)
        return Piece(self.index, text, self._let_go())

    def _end(self, finish: Finish, pieces: Sequence[TokenPiece], text: str = "") -> Piece:
        """Return the last piece of the text. The text is cut before a stop string, and so are its tokens."""
        last, stopped = self._give(pieces)
        rest = "" if stopped else self._stops.end()
        self._given += len(rest)
        scores = [_cut(score, self._given) for score in self._held]
        return Piece(self.index, text + last + rest, tuple(scores), "stop" if stopped else finish)

    def _give(self, pieces: Sequence[TokenPiece]) -> tuple[str, bool]:
        """Append tokens whose text is certain.

        Returns:
            The text that can be given out, and True if a stop string was found.
        """
        text, given, stopped = "", "", False
        pieces, self._early = [*self._early, *pieces], []
        for piece in pieces:
            text += piece.text
            if self._unfinished:  # this token belongs to the prompt
                self._unfinished -= 1
                continue
            score = self._chosen.popleft()
            self._held.append(replace(score, text=text, offset=self._length, data=piece.data))
            self._length += len(text)
            if not stopped:
                out, stopped = self._stops.take(text)
                given += out
            text = ""
        self._given += len(given)
        return given, stopped

    def _let_go(self) -> tuple[TokenScore, ...]:
        """Remove and return the held tokens whose text has been given out completely."""
        done = []
        while self._held and self._held[0].offset + len(self._held[0].text) <= self._given:
            done.append(self._held.popleft())
        return tuple(done)


def _cut(score: TokenScore, length: int) -> TokenScore:
    """Return a token cut to the part that lies in the first `length` characters of the text."""
    left = length - score.offset
    if left <= 0:
        return replace(score, text="", offset=length, data=b"")
    return replace(score, text=score.text[:left], data=score.data.removesuffix(score.text[left:].encode()))


def drawn(log_probs: Tensor, sampling: Sampling, draw: Any) -> int:
    """Sample a token.

    Args:
        log_probs: log p of all tokens, shape (v,).
        sampling: temperature, which is not 0, and top_p.
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


def scored(
    found: Likelihoods, tokens: Sequence[int], top: int | None, texts: TokenTexts
) -> Iterator[TokenScore]:
    """Yield the score of each token, with empty text.

    Args:
        found: the likelihoods of the tokens, with at least `top` of the most probable tokens.
        tokens: the tokens.
        top: as in `Task`; None gives no log-probabilities.
        texts: the texts of the model's tokens.
    """
    if top is None:
        yield from map(TokenScore, tokens)
        return
    gold, best, which = found.gold.tolist(), found.best[:, :top].tolist(), found.tokens[:, :top].tolist()
    for token, log_prob, values, likeliest in zip(tokens, gold, best, which, strict=True):
        listed = list(zip(likeliest, values, strict=True))
        if top and token not in likeliest:
            listed.append((token, log_prob))
        named = (
            TopToken(one, _finite(value), texts.name_of(one), texts.bytes_of(one)) for one, value in listed
        )
        yield TokenScore(token, log_prob=_finite(log_prob), top=tuple(named))


def prompt_scores(
    prompt: Prompt, parts: Sequence[Likelihoods], top: int | None, texts: TokenTexts
) -> tuple[TokenScore, ...]:
    """Return the scores of a prompt's shown tokens. The first of them has no log-probability.

    Args:
        prompt: the prompt.
        parts: the likelihoods of all its tokens but the first, in chunks; empty if it has one token.
        top: as in `Task`.
        texts: the texts of the model's tokens.
    """
    shown = prompt.tokens[prompt.hidden :]
    scores = [TokenScore(token) for token in shown[:1]]
    if len(prompt.tokens) > 1:
        whole = Likelihoods(
            *(
                torch.cat(column)[prompt.hidden : len(prompt.tokens) - 1]
                for column in zip(*parts, strict=True)
            )
        )
        scores += scored(whole, shown[1:], top, texts)
    if not prompt.texts:
        return tuple(scores)
    offsets = [0, *accumulate(map(len, prompt.texts[:-1]))]
    return tuple(
        replace(score, text=text, offset=offset)
        for score, text, offset in zip(scores, prompt.texts, offsets, strict=True)
    )


def _finite(log_prob: float) -> float:
    """Return a log-probability that JSON can hold: -9999.0 in place of -inf, as other servers send."""
    return log_prob if math.isfinite(log_prob) else -9999.0


def ends_of(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text, by a generation configuration and a tokenizer; may be empty."""
    named = config.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
