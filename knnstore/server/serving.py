"""What all endpoints share: the model once it is there, its engine, and what is allowed."""

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from anyio import CapacityLimiter, to_thread
from fastapi import Request

from knnstore.datastore import Keys
from knnstore.errors import InputError, KnnstoreError, StoreUnavailableError
from knnstore.lm import (
    Detokenizer,
    KNNLMForCausalLM,
    Purpose,
    TokenTexts,
    check_tokens,
    explain_tokens,
    split_text,
)
from knnstore.server.chat_templates import ChatTemplate
from knnstore.server.engine import (
    MOST_UNREAD,
    Engine,
    EngineBusyError,
    Observed,
    Piece,
    Prompt,
    Task,
    Ticket,
    Turns,
)
from knnstore.server.errors import ApiError, refused
from knnstore.server.protocol import MOST_EXPLAINED
from knnstore.server.scopes import Scope, Scopes
from knnstore.server.structured import JsonConstraints
from knnstore.server.writing import StoreWriter
from knnstore.store import KNNStore, Selection

_logger = logging.getLogger(__name__)

_WARMING, _AT_ONCE = 1024, 128
"""Stored keys whose cells are read before a server is ready, and how many of them at a time."""
_READING = 4
"""Threads that read requests."""
_BEGINNING = 32
"""Tokens of a document that is explained and continued then."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes."""

    rows: int = 16
    """Texts that are written at once."""
    waiting: int = 64
    """Requests that wait."""
    body_bytes: int = 4 << 20
    """Of a request."""
    head_seconds: float = 20.0
    """In which the head of a request must come, from its connection's beginning or its first byte."""
    body_seconds: float = 60.0
    """In which its body must come, from there."""
    answer_seconds: float = 30.0
    """In which a client must read something of its answer."""
    k: int = 16_384
    """Neighbors of each token that a request may ask for."""
    probes: int = 128
    """Cells of each token that a request may ask for."""
    answer_bytes: int = 32 << 20
    """Of an answer at most."""


@dataclass
class Serving:
    """A model being served, or about to be.

    Args:
        name: of the model alone.
        limits: what is taken.
        observe: told of each step of the engine.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    observe: Callable[[Observed], None] = lambda _: None

    def __post_init__(self) -> None:
        self._lm: KNNLMForCausalLM | None = None
        self._tokenizing = threading.Lock()
        self._reading = CapacityLimiter(_READING)
        self._rendering = CapacityLimiter(1)

    def begin(self, lm: KNNLMForCausalLM) -> None:
        """Take in the model, warm up, and be ready."""
        tokenizer: Any = lm.tokenizer
        self._tokenizer: Any = copy.deepcopy(tokenizer)  # one for each thread: they may not be shared
        self._token_texts = TokenTexts(self._tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.window = lm.reader.max_length
        self.prefix = lm.reader.prefix
        self.scopes = Scopes(lm.store, self.name, self.limits.k, self.limits.probes)
        self.engine = Engine(
            lm,
            self.scopes.settings,
            max_rows=self.limits.rows,
            max_waiting=self.limits.waiting,
            observe=self.observe,
        )
        self.json_constraints = JsonConstraints(
            self.tokenizer, lm.store.identity.vocab_size, self.engine.ends
        )
        lm.store.count_ngrams_in_background()
        self.engine.start()
        self.writer = StoreWriter(lm, self.engine)
        for scope in self.scopes.first():
            self._warm_up(lm, scope)
        self.chat_template = ChatTemplate(tokenizer, self.window * self._longest_token)
        self._lm = lm

    def reload(self) -> None:
        """Forget what is remembered of the store's settings, and warm up again while texts are written.

        Documents, domains, keys and settings that change are seen without.
        """
        lm = self.lm
        self.engine.call(self.scopes.forget).result()
        for scope in self.scopes.first():
            self._warm_up(lm, scope)

    def _warm_up(self, lm: KNNLMForCausalLM, scope: Scope) -> None:
        """Do once what a first request would wait for: n-grams are counted, cells are read where keys are."""
        selection = Selection(domains=scope.domains)

        def visited(keys: Keys) -> None:
            settings = self.scopes.settings(scope)
            if settings.probes:
                lm.store.visit(keys, settings.probes, selection)

        def explained() -> None:
            settings, lengths = self.scopes.settings(scope), lm.store.lengths(selection)
            text = np.zeros(1, np.uint32)
            if any(lengths.values()):  # some characters are no token
                text = lm.store.text(max(lengths, key=lengths.__getitem__))[:_BEGINNING]
            explain_tokens(lm, text, settings, neighbors=1)
            with torch.inference_mode():
                generating = lm.resolve_settings(settings, Purpose.GENERATION)
                lm(torch.from_numpy(text[None].astype(np.int64)), knn=generating)

        try:
            self.scopes.prepare(scope)
            keys = self.engine.call(lambda: _some_keys(lm.store, selection)).result()
            for at in range(0, len(keys), _AT_ONCE):  # others are not to wait long
                self.engine.call(partial(visited, keys[at : at + _AT_ONCE])).result()
            self.engine.call(explained).result()
        except (KnnstoreError, EngineBusyError) as error:  # which requests may meet, or not
            _logger.warning("could not warm up: %s", error)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._lm is not None and self.engine.is_alive

    def status(self) -> Literal["ready", "loading", "store_unavailable"]:
        """Whether requests are answered, and if not, why."""
        if not self.is_ready or self._lm is None:
            return "loading"
        try:
            self._lm.store.revision()
        except StoreUnavailableError:
            return "store_unavailable"
        return "ready"

    @property
    def lm(self) -> KNNLMForCausalLM:
        """The model; only its store may be used outside of the engine, and only to read."""
        if not self.is_ready or self._lm is None:
            raise ApiError(503, "the model is not there yet", code="not_ready", headers={"Retry-After": "2"})
        return self._lm

    def end(self) -> None:
        """Stop the engine and close the store."""
        if self._lm is not None:
            self.engine.stop()
            self.writer.end()
            self.chat_template.close()
            self._lm.store.close()

    async def read(self, work: Callable[[], Found]) -> Found:
        """Read a request in one of a few threads: tokenize it, look up what it names.

        Requests that wait for a tokenizer take no thread from others.
        """
        return await to_thread.run_sync(work, limiter=self._reading)

    async def render(self, work: Callable[[], Found]) -> Found:
        """Render a chat template in a thread of its own, so that a slow one delays no other request."""
        return await to_thread.run_sync(work, limiter=self._rendering)

    # -- tokens and texts

    @property
    def most_tokens(self) -> int:
        """Tokens of a text that is tokenized at most, which may be longer than the model's window."""
        return max(self.window, MOST_EXPLAINED)

    def tokenizer(self, use: Callable[[Any], Found]) -> Found:
        """Use the tokenizer, as the only one meanwhile."""
        with self._tokenizing:
            return use(self._tokenizer)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, with the special ones that the tokenizer adds if wanted."""
        return self.tokenizer(
            lambda one: list(one(text, add_special_tokens=special, verbose=False)["input_ids"])
        )

    def conversation_tokens(self, text: str) -> list[int]:
        """The tokens of a conversation whose text the model's template has made."""
        return self.tokenizer(lambda one: self.chat_template.encode(one, text))

    def echoed(self, prompt: Prompt, given: str | Sequence[int], *, is_continued: bool) -> Prompt:
        """Return a prompt with the text of each of its tokens, for an answer that begins with it.

        Args:
            prompt: the prompt.
            given: what it was made of. The texts of the tokens of a text add up to it.
            is_continued: whether an incomplete character at its end is left to the continuation.
        """
        shown = prompt.tokens[prompt.hidden :]

        def texts(_: Any) -> tuple[list[str], int]:
            if isinstance(given, str):
                return split_text(self._token_texts, given, shown), 0
            last = shown[-1]
            is_part = "\ufffd" in self._token_texts.decode([last]) or self._token_texts.is_fallback_byte(last)
            if not (is_continued and is_part):
                return self._token_texts.pieces(shown), 0
            detokenizer = Detokenizer(self._token_texts, special=True)
            found = [piece.text for token in shown for piece in detokenizer.take(token)]
            unfinished = len(shown) - len(found)
            return [*found, *[""] * unfinished], unfinished

        found, unfinished = self.tokenizer(texts)
        return replace(prompt, texts=tuple(found), unfinished=unfinished)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return self.tokenizer(lambda _: self._token_texts.decode(tokens))

    def prompt(self, given: str | Sequence[int], param: str = "prompt") -> Prompt:
        """A text as the model reads it, after the token that begins a document; tokens as they are."""
        if isinstance(given, str):
            self.check_length(len(given), self.window, param)
            before = [] if self.prefix is None else [self.prefix]
            found = Prompt((*before, *self.tokens(given)), len(before))
            if not found.tokens:
                raise refused("the prompt is empty, and the model has no token to begin with", param)
            self.check_tokens(found.tokens[len(before) :], param)
            return found
        if len(given) > self.window:
            raise refused(
                f"{param}: {len(given):,} tokens are more than this model reads, {self.window:,}",
                param,
                "context_length_exceeded",
            )
        self.check_tokens(given, param)
        return Prompt(tuple(given))

    def check_length(self, characters: int, tokens: int, param: str) -> None:
        """Refuse a text of more characters than so many tokens can have, before it is tokenized."""
        most = tokens * self._longest_token
        if characters > most:
            raise refused(
                f"{param}: the text has {characters:,} characters, more than {tokens:,} tokens can have",
                param,
                "context_length_exceeded",
            )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuse tokens that the model does not have, with a 400 that names the first of them."""
        vocabulary = self.lm.encoder.vocabulary
        try:
            check_tokens(tokens, vocabulary)
        except InputError:
            try:
                self.tokenizer(lambda one: check_tokens(tokens, vocabulary, one))  # with the token's text
            except InputError as error:
                raise refused(str(error), param) from error

    def check_window(self, prompt: Prompt, max_tokens: int, param: str = "prompt") -> None:
        """Refuse what is longer than the model reads; the last token that is written is not read."""
        if len(prompt.tokens) + max(0, max_tokens - 1) > self.window:
            raise refused(
                f"this model reads at most {self.window} tokens, but the prompt has {len(prompt.tokens)} and "
                f"{max_tokens} are to follow: shorten it or ask for fewer",
                param,
                "context_length_exceeded",
            )

    # -- the engine

    def write(self, task: Task) -> "Pieces":
        """Have a task written; its pieces come as they are written, and closing them ends it.

        Raises:
            EngineBusyError, EngineStoppedError: at once; or whatever fails, later.
        """
        return Pieces(self.engine, task)

    async def call(self, work: Callable[[], Found]) -> Found:
        """Do some work with the model, in the engine's thread."""
        return await asyncio.wrap_future(self.engine.call(work))

    async def call_in_turns(self, work: Callable[[], Turns[Found]]) -> Found:
        """Do some work with the model in turns; when the caller is cancelled it has no further turn."""
        return await asyncio.wrap_future(self.engine.call_in_turns(work))


class Pieces:
    """The pieces of a task as an asynchronous iterator, which waits for whoever reads them.

    Where many pieces are not taken, no further text of the task begins; where far too many are not, the task
    fails. Nobody else waits.

    Args:
        engine: writes the task.
        task: what is to be written.
    """

    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._box = asyncio.Queue[Piece | Exception]()
        self._left = len(task.prompts) * task.copies
        self._ticket = Ticket(task, self._tell)
        engine.submit(self._ticket)

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> Piece:
        if not self._left:
            raise StopAsyncIteration
        piece = await self._box.get()
        was_behind = self._ticket.is_behind
        self._ticket.taken += 1
        if was_behind and not self._ticket.is_behind:
            self._engine.wake()
        if isinstance(piece, Exception):
            raise piece
        self._left -= piece.finish is not None
        return piece

    def close(self) -> None:
        """End the task: the engine drops it before its next turn."""
        self._left = 0
        self._ticket.cancelled = True
        self._engine.wake()

    def _tell(self, piece: Piece | Exception) -> None:
        """Hand a piece on to the event loop; called in the engine's thread."""
        ticket = self._ticket
        ticket.told += 1
        if ticket.told - ticket.taken > MOST_UNREAD:
            ticket.cancelled = True
            piece = ApiError(400, "the answer is read more slowly than it is written", code="too_slow")
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._box.put_nowait, piece)


def _some_keys(store: KNNStore, selection: Selection) -> Keys:
    """Keys of some of the first records, where an engine has cells to be read."""
    first = next(store.records(selection), None) if store.has_cells else None
    if first is None:
        return np.empty((0, 0), np.float32)
    return first.keys[:: -(-len(first.keys) // _WARMING)].astype(np.float32)


async def unless_left(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Await some work; it is cancelled when the client has gone.

    Raises:
        ApiError: 499, which nobody reads.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has gone")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
