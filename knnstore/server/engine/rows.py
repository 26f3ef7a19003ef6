"""One text that is being written: choosing its tokens, its text so far, and where it ends."""

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
from knnstore.server.engine.text import StopStrings

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    """0 takes the most probable one."""
    top_p: float = 1.0
    """Only the most probable tokens that make up this much."""
    seed: int | None = None
    """Makes it repeatable, whatever else is being written."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that is to be continued."""

    tokens: tuple[int, ...]
    """At least one."""
    hidden: int = 0
    """How many of the first ones are not part of the text that was given."""
    texts: tuple[str, ...] = ()
    """The text of each of the others, if the prompt is part of the answer; else empty."""
    unfinished: int = 0
    """How many of the last ones end inside a character, whose text comes with the continuation."""


class Constraint(Protocol):
    """Decides which tokens may come next in one text."""

    def fork(self) -> "Constraint":
        """Return a constraint at the same place for another text."""

    def restrict(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities of shape (v,) with -inf for each token that is not allowed next.

        At least one stays finite.
        """

    def advance(self, token: int) -> bool:
        """Take in the chosen token; return whether the text is complete, so that nothing can follow."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be written after each of some prompts, `copies` times."""

    prompts: tuple[Prompt, ...]
    knn: Hashable
    """What the engine's `settings_of` makes settings of."""
    max_tokens: int = 16
    copies: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    top: int | None = None
    """So many of the most probable tokens are listed for each; None wants no log-probabilities."""
    score_prompt: bool = False
    """Whether the prompts' own tokens are scored."""
    constraint: Constraint | None = None
    """What each text is held to, as it is before the first token; each text forks it."""


class TopToken(NamedTuple):
    """One of the most probable tokens at a place."""

    token: int
    log_prob: float
    name: str
    """Its text in the middle of a text, or `bytes:...` for a part of a character."""
    data: bytes
    """Its bytes in the middle of a text."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a text and its log-probability."""

    token: int
    text: str = ""
    """What it adds to the text. Nothing if it is special, ends inside a character or follows the end."""
    offset: int = 0
    """Characters of the prompt or the continuation before it."""
    data: bytes = b""
    """Its own bytes, as far as they are part of the text."""
    log_prob: float | None = None
    top: tuple[TopToken, ...] = ()
    """The most probable tokens, and always the token itself; may be empty."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one text."""

    index: int
    """Which text: prompt × copies + copy."""
    text: str = ""
    tokens: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    is_prompt: bool = False
    """Whether these are the tokens of its prompt."""


class Row:
    """A text of a task that is being written.

    Args:
        task: what is asked for.
        index: which of its texts.
        texts: of the model's tokenizer.
        ends: tokens that end any text.
    """

    def __init__(self, task: Task, index: int, texts: TokenTexts, ends: frozenset[int]) -> None:
        prompt = task.prompts[index // task.copies]
        self.task = task
        self.index = index
        self.tokens = [*prompt.tokens]
        """The prompt, and what was written after it."""
        self._first = len(self.tokens)
        self._ends = ends
        self._constraint = None if task.constraint is None else task.constraint.fork()
        self._texts = texts
        before = len(self.tokens) - prompt.unfinished
        self._detokenizer = Detokenizer(texts, self.tokens[:before])
        self._unfinished = prompt.unfinished
        self._early = [piece for token in self.tokens[before:] for piece in self._detokenizer.take(token)]
        self._stops = StopStrings(task.stops)
        self._chosen: deque[TokenScore] = deque()  # their text is not certain
        self._held: deque[TokenScore] = deque()  # their text is not given out, a stop string may cut it off
        self._length = 0  # characters that are certain
        self._given = 0  # characters that were given out
        seed = task.sampling.seed
        self._random = random.Random(None if seed is None else f"{seed}:{index}")  # noqa: S311

    @property
    def left(self) -> int:
        """How many tokens are still to come at most."""
        return self.task.max_tokens - (len(self.tokens) - self._first)

    def take(self, log_probs: Tensor, likeliest: int) -> Piece:
        """Choose the next token.

        Args:
            log_probs: log p of all, float32, shape (v,).
            likeliest: the most probable one.
        """
        sampling, top = self.task.sampling, self.task.top
        allowed = log_probs
        if self._constraint is not None:
            allowed = self._constraint.restrict(log_probs)
            likeliest = int(allowed.argmax())
        token = likeliest if sampling.temperature == 0 else drawn(allowed, sampling, self._random.random)
        is_complete = self._constraint is not None and self._constraint.advance(token)
        self.tokens.append(token)
        score = TokenScore(token)
        if top is not None:
            found = Likelihoods.of(log_probs[None], torch.tensor([token], device=log_probs.device), top)
            score = next(scored(found, [token], top, self._texts))
        self._chosen.append(score)
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
        """End the text; its last tokens have what of their texts is before a stop string."""
        last, stopped = self._give(pieces)
        rest = "" if stopped else self._stops.end()
        self._given += len(rest)
        scores = [_cut(score, self._given) for score in self._held]
        return Piece(self.index, text + last + rest, tuple(scores), "stop" if stopped else finish)

    def _give(self, pieces: Sequence[TokenPiece]) -> tuple[str, bool]:
        """Take in tokens whose text is certain.

        Returns:
            What of the text can be given out, and whether a stop string came.
        """
        text, given, stopped = "", "", False
        pieces, self._early = [*self._early, *pieces], []
        for piece in pieces:
            text += piece.text
            if self._unfinished:  # a token of the prompt
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
        """Return the tokens all of whose text was given out; they are no longer held."""
        done = []
        while self._held and self._held[0].offset + len(self._held[0].text) <= self._given:
            done.append(self._held.popleft())
        return tuple(done)


def _cut(score: TokenScore, length: int) -> TokenScore:
    """Return a token as it is in a text of this length."""
    left = length - score.offset
    if left <= 0:
        return replace(score, text="", offset=length, data=b"")
    return replace(score, text=score.text[:left], data=score.data.removesuffix(score.text[left:].encode()))


def drawn(log_probs: Tensor, sampling: Sampling, draw: Any) -> int:
    """Draw a token.

    Args:
        log_probs: of all tokens, shape (v,).
        sampling: how; its temperature is not 0.
        draw: gives a number in [0, 1); asked once.
    """
    probs = (log_probs.double() / sampling.temperature).softmax(-1).cpu()
    if sampling.top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        beyond = ranked.cumsum(0) - ranked >= sampling.top_p
        probs[order[1:][beyond[1:]]] = 0  # one always stays
    total = probs.cumsum(0)
    # The last one that can be drawn, where rounding leaves a draw beyond all.
    last = int(probs.nonzero()[-1])
    return min(int(torch.searchsorted(total, draw() * total[-1], right=True)), last)


def scored(
    found: Likelihoods, tokens: Sequence[int], top: int | None, texts: TokenTexts
) -> Iterator[TokenScore]:
    """Say what the mixture says of some tokens; their texts are left empty.

    Args:
        found: of each of them, with at least `top` of the likeliest.
        tokens: which they are.
        top: as of `Task`.
        texts: of the model's tokenizer.
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
    """Say what the mixture says of a prompt's tokens; the first has no log-probability.

    Args:
        prompt: the prompt.
        parts: of each of its tokens but the first, in parts; none where it has but one.
        top: as of `Task`.
        texts: of the model's tokenizer.
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
    """JSON has no -inf; this is what others write."""
    return log_prob if math.isfinite(log_prob) else -9999.0


def ends_of(config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, of a generation configuration and a tokenizer."""
    named = config.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
