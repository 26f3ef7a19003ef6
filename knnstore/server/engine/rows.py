"""Decoding of one text: choice of its tokens, its text so far, and its end.

`Task`, `Prompt` and `Sampling` describe a request; `Piece`, `TokenScore` and `TopToken` are its results.
`Row` decodes one text, which is one continuation of a prompt. `StopStrings` finds where a text must end, and
`Constraint` restricts its tokens. `make_token_score` makes the score of a token, `build_prompt_scores` makes
the scores of a prompt.
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
from transformers import LogitsProcessorList

from knnstore.errors import ConfigError
from knnstore.lm import Detokenizer, Likelihoods, TokenPiece, TokenTexts

Finish = Literal["stop", "length"]
"""Reason why a text ended: "stop" for an end token, a stop string or a complete constraint; "length" for
`max_tokens`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of the texts of a task."""

    temperature: float = 1.0
    """Divisor of the log-probabilities before the softmax; 0 always takes the most probable token."""
    top_p: float = 1.0
    """Nucleus sampling: only the most probable tokens whose probabilities add up to `top_p` are sampled."""
    seed: int | None = None
    """Seed of the random numbers. With the same seed a text gets the same random numbers, whatever other
    texts are decoded at the same time. None means a random seed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the texts of the tokens if the answer repeats the prompt."""

    tokens: tuple[int, ...]
    """Ids of all tokens that the model reads; at least one."""
    hidden: int = 0
    """Number of leading tokens that the server has added, for example the token that begins a document. The
    answer does not show these tokens."""
    texts: tuple[str, ...] = ()
    """Text of each token after the hidden tokens, if the answer repeats the prompt; otherwise empty."""
    unfinished: int = 0
    """Number of tokens at the end of the prompt that hold only the beginning of a character. Their text is
    known only when the first generated tokens complete the character."""
    source: tuple[int, ...] = ()
    """Ids of the tokens that the encoder of an encoder-decoder model reads. `tokens` are then the tokens with
    which its decoder begins every text, and all of them are hidden. Empty for a causal model."""

    @property
    def client_tokens(self) -> int:
        """Number of tokens that the client sent: of the source, or of the prompt without hidden tokens."""
        return len(self.source) or len(self.tokens) - self.hidden


class Constraint(Protocol):
    """Decides which tokens may come next in one text, so that the text becomes JSON of a schema.

    It keeps a state: `advance` must be called with each token that is appended to the text.
    """

    schema: Mapping[str, Any]
    """The JSON schema, for other engines (such as vLLM) that enforce the schema themselves."""

    def fork(self) -> "Constraint":
        """Return an independent copy in the current state, for another text with the same tokens."""

    def mask_log_probs(self, log_probs: Tensor) -> Tensor:
        """Return a copy of the next token's log-probabilities, with -inf for each token that is not allowed.

        Input and result have the shape (v,). At least one log-probability of the result is finite.
        """

    def advance(self, token: int) -> bool:
        """Append the chosen token to the constraint's state.

        Returns True if the text is complete and must end.
        """


@dataclass(frozen=True, slots=True)
class Task:
    """One request: continue each prompt `copies` times, or score the prompts' own tokens, or do both."""

    prompts: tuple[Prompt, ...]
    """The prompts; at least one."""
    knn: Hashable
    """Scope of retrieval: the documents to retrieve from, and the settings that the request overrides. The
    server uses a `Scope` here. The engine only passes this value to its function `settings_of`, which returns
    the settings. Texts with equal values share one search."""
    max_tokens: int = 16
    """Largest number of tokens to generate for each text; 0 generates nothing."""
    copies: int = 1
    """Number of texts that are generated for each prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling settings of the tokens; the default samples at temperature 1."""
    stops: tuple[str, ...] = ()
    """Stop strings: a text ends before the first of these strings. None of them is empty."""
    top: int | None = None
    """Number of most probable tokens that the score of each token lists; 0 gives log-probabilities without a
    list, None gives no log-probabilities."""
    score_prompt: bool = False
    """True if the tokens of the prompts get log-probabilities too."""
    constraint: Constraint | None = None
    """Constraint of the generated tokens, in its initial state; each text gets a copy. None allows all
    tokens."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end a text, in addition to the model's end tokens."""


class TopToken(NamedTuple):
    """One of the most probable tokens at a position of a text."""

    token: int
    """Id of the token."""
    log_prob: float
    """Natural logarithm of the token's probability; -9999.0 stands for -inf."""
    name: str
    """Text of the token inside a longer text, or `bytes:…` if the token is only a part of a character."""
    data: bytes
    """Bytes that the token adds inside a longer text."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a text, with its text and its log-probability."""

    token: int
    """Id of the token."""
    text: str = ""
    """Text that the token adds. Empty if the token is special, ends inside a character, or lies after the end
    of the text."""
    offset: int = 0
    """Number of characters before the token's text, counted from the beginning of the prompt (for a prompt's
    token) or of the continuation (for a generated token)."""
    data: bytes = b""
    """Bytes that the token adds to the text."""
    log_prob: float | None = None
    """Natural logarithm of the token's probability; -9999.0 stands for -inf. None if the token was not
    scored, like the first token of a prompt."""
    top: tuple[TopToken, ...] = ()
    """The most probable tokens at this position. If this token is not one of them, it is appended. Empty if
    none were requested."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A result for the client: the next part of one text of a task, or the scores of the text's prompt."""

    index: int
    """Index of the text in its task: index of the prompt × `Task.copies` + index of the copy."""
    text: str = ""
    """New text that follows the text of the earlier pieces. Empty if nothing can be sent yet, because a stop
    string may still cut off the newest text."""
    tokens: tuple[TokenScore, ...] = ()
    """Tokens of this piece: the generated tokens whose text is complete with this piece. If `is_prompt` is
    True, the tokens of the prompt, without hidden tokens."""
    finish: Finish | None = None
    """Reason why the text has ended, "stop" or "length"; None if more pieces of the text follow."""
    is_prompt: bool = False
    """True if `tokens` are the tokens of the prompt; False if they are generated tokens."""
    stop_reason: str | None = None
    """With `finish`: `FELL_BACK` if a vLLM server went on without the store, because the retrieval failed."""


class StopStrings:
    """Finds stop strings in a growing text. Holds back the end of the text while it may begin a stop string.

    Args:
        stops: the stop strings, each of at least one character. An empty sequence holds nothing back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def append_text(self, piece: str) -> tuple[str, bool]:
        """Append a piece of text, and search it for stop strings together with the text that is held back.

        Args:
            piece: the new text; may be empty.

        Returns:
            The text that can be sent to the client, and True if a stop string was found. If one was found,
            the sendable text ends before the first stop string, and the rest is dropped. Otherwise the end of
            the text is held back if it may begin a stop string.
        """
        text = self._held + piece
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        safe = len(text) - max((_overlap_length(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def release_held(self) -> str:
        """Return the text that was held back, and hold nothing any more. Call it when the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with; 0 if none."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class Row:
    """One text that is being decoded: a prompt and its continuation so far.

    Args:
        task: the task that the text belongs to.
        index: index of the text in the task: index of the prompt × `Task.copies` + index of the copy.
        texts: the texts of the model's tokens.
        ends: ids of the end tokens: the text ends after one of these tokens.
        rules: logits processors of transformers that change the log-probabilities before a token is chosen;
            None for no rules.
    """

    def __init__(
        self,
        task: Task,
        index: int,
        texts: TokenTexts,
        ends: frozenset[int],
        rules: LogitsProcessorList | None = None,
    ) -> None:
        prompt = task.prompts[index // task.copies]
        self.task = task
        self.index = index
        self.tokens = [*prompt.tokens]
        """Ids of the prompt's tokens, followed by the ids of the generated tokens."""
        self._prompt_length = len(self.tokens)
        self._ends = ends | task.ends
        self._constraint = None if task.constraint is None else task.constraint.fork()
        self._rules = rules
        self._texts = texts
        before = len(self.tokens) - prompt.unfinished
        self._detokenizer = Detokenizer(texts, self.tokens[:before])
        self._unfinished = prompt.unfinished
        self._prompt_pieces = [
            piece for token in self.tokens[before:] for piece in self._detokenizer.append_token(token)
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
        """Number of tokens that may still be generated until the text has `Task.max_tokens` new tokens."""
        return self.task.max_tokens - (len(self.tokens) - self._prompt_length)

    def choose_token(self, log_probs: Tensor, likeliest: int) -> Piece:
        """Choose the next token, append it to the text, and return the text that can be sent to the client.

        The token is sampled, or at temperature 0 the most probable token is taken. The text ends at an end
        token, a stop string, a complete constraint, or after `max_tokens` tokens; `Piece.finish` is set then.

        Args:
            log_probs: log-probabilities of all v tokens, float32, shape (v,).
            likeliest: id of the most probable token. It is taken at temperature 0 if the text has no rules
                and no constraint.

        Returns:
            The new text and its tokens. The text may be empty: text is held back while it may be the
            beginning of a stop string, or while it ends inside a character.
        """
        sampling, top = self.task.sampling, self.task.top
        # 1) Choose a token that the rules and the constraint allow.
        allowed = log_probs
        if self._rules:
            input_ids: Any = torch.tensor([self.tokens], device=log_probs.device)
            allowed = self._rules(input_ids, allowed[None])[0]
        if self._constraint is not None:
            allowed = self._constraint.mask_log_probs(allowed)
        if allowed is not log_probs:
            likeliest = int(allowed.argmax())
        token = (
            likeliest if sampling.temperature == 0 else sample_token(allowed, sampling, self._random.random)
        )
        is_complete = self._constraint is not None and self._constraint.advance(token)
        # 2) Record its log-probability, without rules and constraint.
        score = TokenScore(token)
        if top is not None:
            likelihoods = Likelihoods.from_log_probs(
                log_probs[None], torch.tensor([token], device=log_probs.device), top
            )
            score = next(build_token_scores(likelihoods, [token], top, self._texts))
        return self.append_token(score, is_complete=is_complete)

    def append_token(self, score: TokenScore, *, is_complete: bool = False) -> Piece:
        """Append a token that was chosen elsewhere, and return the text that can be sent to the client.

        The text ends at an end token, a stop string, or after `max_tokens` tokens; `Piece.finish` is set
        then.

        Args:
            score: the token and its log-probability. Its fields `text`, `offset` and `data` are filled in
                later.
            is_complete: True if no token may follow, so that the text ends with this token.

        Returns:
            The new text and its tokens. The text may be empty: text is held back while it may be the
            beginning of a stop string, or while it ends inside a character.
        """
        token = score.token
        self.tokens.append(token)
        self._untexted.append(score)
        # End the text, or give out the text that no stop string can cut off any more.
        if token in self._ends:
            return self._end_text("stop", [*self._detokenizer.end(), TokenPiece(token, "", b"")])
        pieces = self._detokenizer.append_token(token)
        if is_complete:
            return self._end_text("stop", [*pieces, *self._detokenizer.end()])
        if not self.tokens_left:
            return self._end_text("length", [*pieces, *self._detokenizer.end()])
        text, stopped = self._append_pieces(pieces)
        if stopped:
            return self._end_text("stop", [], text)
        return Piece(self.index, text, self._pop_complete_scores())

    def end(self, finish: Finish) -> Piece:
        """End the text after its last token for a reason outside this object, and return the last piece."""
        return self._end_text(finish, self._detokenizer.end())

    def _end_text(self, finish: Finish, pieces: Sequence[TokenPiece], text: str = "") -> Piece:
        """Return the last piece of the text for the client, with all text and tokens that were held back.

        Args:
            finish: the reason of the end. It becomes "stop" if the last text contains a stop string.
            pieces: the last tokens with their texts.
            text: text of this step that can be sent already; the piece begins with it.
        """
        last, stopped = self._append_pieces(pieces)
        rest = "" if stopped else self._stop_strings.release_held()
        self._sent_length += len(rest)
        scores = [_cut_score(score, self._sent_length) for score in self._held]
        return Piece(self.index, text + last + rest, tuple(scores), "stop" if stopped else finish)

    def _append_pieces(self, pieces: Sequence[TokenPiece]) -> tuple[str, bool]:
        """Append the text of tokens to the answer, and hold their scores until the text is sent.

        If the prompt ended inside a character (`Prompt.unfinished`), the text of the prompt's last tokens is
        put before the text of the first generated token.

        Args:
            pieces: the tokens with their texts. The texts are final: no later token changes them.

        Returns:
            The text that can be sent to the client, and True if a stop string was found. The sendable text
            then ends before the stop string.
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
        """Remove and return the scores of the tokens whose whole text has been sent to the client."""
        done = []
        while self._held and self._held[0].offset + len(self._held[0].text) <= self._sent_length:
            done.append(self._held.popleft())
        return tuple(done)


def _cut_score(score: TokenScore, length: int) -> TokenScore:
    """Return a copy of a token's score, without the characters after the end of the whole text.

    Args:
        score: the score of the token.
        length: number of characters of the whole text. A token that begins after it gets an empty text.
    """
    kept_length = length - score.offset
    if kept_length <= 0:
        return replace(score, text="", offset=length, data=b"")
    return replace(
        score, text=score.text[:kept_length], data=score.data.removesuffix(score.text[kept_length:].encode())
    )


def sample_token(log_probs: Tensor, sampling: Sampling, draw: Any) -> int:
    """Sample a token from the probabilities at a temperature, and return the token's id.

    Args:
        log_probs: log-probabilities of all v tokens, shape (v,).
        sampling: the temperature, which may not be 0, and `top_p`. The seed is not used here.
        draw: function without arguments that returns a random number in [0, 1); called once.
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
    """Yield the `TokenScore` of each token, with empty text. A log-probability of -inf becomes -9999.0.

    Args:
        likelihoods: log-probabilities of the n tokens, and at least the `top` most probable tokens at each
            position.
        tokens: the n token ids.
        top: number of most probable tokens that each score lists; None gives scores without
            log-probabilities.
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
    """Return the `TokenScore` of a token, with empty text. A log-probability of -inf becomes -9999.0.

    Args:
        token: id of the token.
        log_prob: the token's log-probability.
        likeliest: ids and log-probabilities of the most probable tokens, in the order in which the score
            lists them. The token itself is appended if it is missing. An empty sequence gives a score without
            a list.
        texts: the texts of the model's tokens.
    """
    listed = list(likeliest)
    if listed and all(token != listed_token for listed_token, _ in listed):
        listed.append((token, log_prob))
    top_tokens = (
        TopToken(
            listed_token,
            _replace_infinity(value),
            texts.display_text(listed_token),
            texts.token_bytes(listed_token),
        )
        for listed_token, value in listed
    )
    return TokenScore(token, log_prob=_replace_infinity(log_prob), top=tuple(top_tokens))


def build_prompt_scores(
    prompt: Prompt, chunks: Sequence[Likelihoods], top: int | None, texts: TokenTexts
) -> tuple[TokenScore, ...]:
    """Return the scores of the tokens of a prompt that the answer shows, without the prompt's hidden tokens.

    The first shown token has no log-probability. If the prompt has texts, the scores have text and offset.

    Args:
        prompt: the prompt.
        chunks: likelihoods of all tokens of the prompt except the first, in consecutive chunks; empty if the
            prompt has one token.
        top: number of most probable tokens that each score lists; None gives scores without
            log-probabilities.
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
    """Return copies of the scores of a prompt's shown tokens, with the texts and offsets of the tokens.

    If `prompt.texts` is empty, the scores are returned unchanged, as a tuple.

    Args:
        prompt: the prompt; the texts of its shown tokens are in `prompt.texts`.
        scores: one score for each shown token.
    """
    if not prompt.texts:
        return tuple(scores)
    offsets = [0, *accumulate(map(len, prompt.texts[:-1]))]
    return tuple(
        replace(score, text=text, offset=offset)
        for score, text, offset in zip(scores, prompt.texts, offsets, strict=True)
    )


def _replace_infinity(log_prob: float) -> float:
    """Return a log-probability in a form that JSON can hold: -9999.0 if it is not finite.

    Other servers of OpenAI's protocol send the same number.
    """
    return log_prob if math.isfinite(log_prob) else -9999.0


def find_end_tokens(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that end a text.

    The generation configuration and the tokenizer name these tokens. The result is empty if they name none.

    Args:
        config: the generation configuration of the model; its `eos_token_id` is one id, a list of ids, or
            None.
        tokenizer: the model's tokenizer; its `eos_token_id` is an id or None.
    """
    eos = config.eos_token_id
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)


def find_stop_strings(config: Any) -> tuple[str, ...]:
    """Return the stop strings of a model's generation configuration; empty if it has none.

    Args:
        config: the generation configuration of the model; its `stop_strings` is a string, a list of strings,
            or None.

    Raises:
        ConfigError: a stop string is empty or not a string; or `max_time` is set, which the server does not
            support.
    """
    if config.max_time is not None:
        raise ConfigError(
            f"this model cannot be served: its generation configuration has max_time {config.max_time}, and "
            "the server ends no text after a time: remove max_time from generation_config.json"
        )
    stops = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings or ())
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigError(
            f"this model cannot be served: stop_strings of its generation configuration are {stops!r}, but "
            "each must be a string that is not empty: correct generation_config.json"
        )
    return tuple(stops)
