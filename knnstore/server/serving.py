"""What all endpoints share: the model once it is there, its engine, and what is allowed."""

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request

from knnstore.errors import StoreUnavailableError
from knnstore.lm import KNNLMForCausalLM, decoded
from knnstore.server.engine import Engine, Observed, Piece, Prompt, Task, Ticket
from knnstore.server.errors import ApiError, refused
from knnstore.server.scopes import Scopes

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

    def begin(self, lm: KNNLMForCausalLM) -> None:
        """Take in the model, and be ready."""
        self._tokenizer: Any = copy.deepcopy(lm.tokenizer)  # one for each thread: they may not be shared
        self.window = lm.reader.max_length
        self.prefix = lm.reader.prefix
        self.scopes = Scopes(lm.store, self.name)
        self.engine = Engine(
            lm,
            self.scopes.settings,
            max_rows=self.limits.rows,
            max_waiting=self.limits.waiting,
            observe=self.observe,
        )
        self.engine.start()
        self._lm = lm

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
            self._lm.store.close()

    # -- tokens and texts

    def tokenizer(self, use: Callable[[Any], Found]) -> Found:
        """Use the tokenizer, as the only one meanwhile."""
        with self._tokenizing:
            return use(self._tokenizer)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, with the special ones that the tokenizer adds if wanted."""
        return self.tokenizer(
            lambda one: list(one(text, add_special_tokens=special, verbose=False)["input_ids"])
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return self.tokenizer(lambda one: decoded(one, tokens))

    def prompt(self, given: str | Sequence[int], param: str = "prompt") -> Prompt:
        """A text as the model reads it, after the token that begins a document; tokens as they are."""
        if isinstance(given, str):
            before = [] if self.prefix is None else [self.prefix]
            found = Prompt((*before, *self.tokens(given)), len(before))
            if not found.tokens:
                raise refused("the prompt is empty, and the model has no token to begin with", param)
            return found
        vocabulary = self.lm.store.identity.vocab_size
        if max(given) >= vocabulary:
            raise refused(f"token {max(given)} is not in the vocabulary of {vocabulary}", param)
        return Prompt(tuple(given))

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

    def write(self, task: Task) -> AsyncIterator[Piece]:
        """Have a task written; its pieces come as they are written, and leaving them ends it.

        Raises:
            EngineBusyError, EngineStoppedError: at once; or whatever fails, later.
        """
        loop, box = asyncio.get_running_loop(), asyncio.Queue[Piece | Exception]()

        def tell(piece: Piece | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(box.put_nowait, piece)

        ticket = Ticket(task, tell)
        self.engine.submit(ticket)

        async def pieces() -> AsyncIterator[Piece]:
            left = len(task.prompts) * task.copies
            try:
                while left:
                    piece = await box.get()
                    if isinstance(piece, Exception):
                        raise piece
                    left -= piece.finish is not None
                    yield piece
            finally:
                ticket.cancelled = True

        return pieces()

    async def call(self, work: Callable[[], Found]) -> Found:
        """Do some work with the model, in the engine's thread."""
        return await asyncio.wrap_future(self.engine.call(work))


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
