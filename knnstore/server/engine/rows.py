"""One text that is being written: choosing its tokens, its text so far, and where it ends."""

import math
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from knnstore.lm import Detokenizer, Likelihoods
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
    offsets: tuple[int, ...] = ()
    """Where each of the others begins in that text, in characters, if it is scored; none is not known."""


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


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token and what the mixture says of it."""

    token: int
    offset: int
    """Characters of its text before it."""
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log-probabilities, and always the token itself; may be empty."""


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
        tokenizer: the model's.
        ends: tokens that end any text.
    """

    def __init__(self, task: Task, index: int, tokenizer: Any, ends: frozenset[int]) -> None:
        self.task = task
        self.index = index
        self.tokens = [*task.prompts[index // task.copies].tokens]
        """The prompt, and what was written after it."""
        self._first = len(self.tokens)
        self._ends = ends
        self._detokenizer = Detokenizer(tokenizer, self.tokens)
        self._stops = StopStrings(task.stops)
        self._length = 0  # characters so far, those that are held back counted
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
        token = likeliest if sampling.temperature == 0 else drawn(log_probs, sampling, self._random.random)
        self.tokens.append(token)
        score = TokenScore(token, self._length)
        if top is not None:
            found = Likelihoods.of(log_probs[None], torch.tensor([token], device=log_probs.device), top)
            score = next(scored(found, [token], [self._length], top))
        if token in self._ends:
            return self._end("stop", score)
        new = self._detokenizer.take(token)
        self._length += len(new)
        text, stopped = self._stops.take(new)
        if stopped:
            return Piece(self.index, text, (score,), "stop")
        if not self.left:
            return self._end("length", score, text)
        return Piece(self.index, text, (score,))

    def _end(self, finish: Finish, score: TokenScore, text: str = "") -> Piece:
        last, stopped = self._stops.take(self._detokenizer.end())
        return Piece(self.index, text + last + self._stops.end(), (score,), "stop" if stopped else finish)


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
    found: Likelihoods, tokens: Sequence[int], offsets: Sequence[int], top: int | None
) -> Iterator[TokenScore]:
    """Say what the mixture says of some tokens.

    Args:
        found: of each of them, with at least `top` of the likeliest.
        tokens: which they are.
        offsets: where they begin.
        top: as of `Task`.
    """
    if top is None:
        yield from (TokenScore(*one) for one in zip(tokens, offsets, strict=True))
        return
    gold, best, which = found.gold.tolist(), found.best[:, :top].tolist(), found.tokens[:, :top].tolist()
    for token, offset, log_prob, values, likeliest in zip(tokens, offsets, gold, best, which, strict=True):
        listed = [(one, _finite(value)) for one, value in zip(likeliest, values, strict=True)]
        if top and token not in likeliest:
            listed.append((token, _finite(log_prob)))
        yield TokenScore(token, offset, _finite(log_prob), tuple(listed))


def prompt_scores(prompt: Prompt, parts: Sequence[Likelihoods], top: int | None) -> tuple[TokenScore, ...]:
    """Say what the mixture says of a prompt's tokens; the first has no log-probability.

    Args:
        prompt: the prompt.
        parts: of each of its tokens but the first, in parts; none where it has but one.
        top: as of `Task`.
    """
    shown = prompt.tokens[prompt.hidden :]
    offsets = prompt.offsets or (0,) * len(shown)
    first = tuple(TokenScore(token, 0) for token in shown[:1])
    if len(prompt.tokens) == 1:
        return first
    whole = Likelihoods(
        *(torch.cat(column)[prompt.hidden : len(prompt.tokens) - 1] for column in zip(*parts, strict=True))
    )
    return first + tuple(scored(whole, shown[1:], offsets[1:], top))


def _finite(log_prob: float) -> float:
    """JSON has no -inf; this is what others write."""
    return log_prob if math.isfinite(log_prob) else -9999.0


def ends_of(config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, of a generation configuration and a tokenizer."""
    named = config.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
