"""State that all endpoints share: `Serving` holds the model, its engine and tokenizer, and the `Limits`.

`Pieces` is the result of a task as an asynchronous iterator. `cancel_on_disconnect` cancels work when the
client leaves.
"""

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
    named_panics,
    split_text,
)
from knnstore.server.chat_templates import ChatTemplate
from knnstore.server.document_changes import StoreWriter
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
from knnstore.server.upstream import Upstream, UpstreamAddress
from knnstore.store import KNNStore, Selection

_logger = logging.getLogger(__name__)

_MAX_WARM_UP_KEYS, _KEYS_PER_CALL = 1024, 128
"""Number of stored keys whose cells are read while warming up, and number of them in one call."""
_TOKENIZING_THREADS = 4
"""Number of threads that tokenize and check requests."""
_WARM_UP_TOKENS = 32
"""Number of a document's first tokens that are explained and continued while warming up."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server."""

    rows: int = 16
    """Largest number of texts that are decoded at once by the engine of this process."""
    upstream_rows: int = 256
    """Largest number of texts that are sent to a vLLM server at once."""
    waiting: int = 64
    """Largest number of requests that wait."""
    body_bytes: int = 4 << 20
    """Largest size of a request's body in bytes."""
    head_seconds: float = 20.0
    """Seconds in which the head of a request must arrive. They count from the beginning of the connection;
    for a later request on the same connection, from its first byte."""
    body_seconds: float = 60.0
    """Seconds in which the body must arrive, after the head."""
    answer_seconds: float = 30.0
    """Seconds in which a client must read a part of its answer."""
    k: int = 16_384
    """Largest number of neighbors of a token that a request may ask for."""
    probes: int = 128
    """Largest number of cells of a token that a request may ask for."""
    answer_bytes: int = 32 << 20
    """Largest size of an answer in bytes."""


@dataclass
class Serving:
    """A served model; it is not ready before `start` has ended.

    Args:
        name: the name of the model alone.
        limits: the limits of the server.
        observe: called in the engine's thread with the counts of each of its turns.
        upstream_address: a vLLM server with the same store, which generates and scores all texts; None lets
            the engine of this process do it. In both cases this engine explains texts and reads documents.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    observe: Callable[[Observed], None] = lambda _: None
    upstream_address: UpstreamAddress | None = None

    def __post_init__(self) -> None:
        self._lm: KNNLMForCausalLM | None = None
        self.upstream: Upstream | None = None
        """The vLLM server that runs the tasks; None if the engine does, or before `start` has ended."""
        self._tokenizing = threading.Lock()
        self._reading = CapacityLimiter(_TOKENIZING_THREADS)
        self._rendering = CapacityLimiter(1)

    def start(self, lm: KNNLMForCausalLM) -> None:
        """Start serving a model: start the engine, warm up, and become ready. Takes seconds."""
        # 1) Copy the tokenizer: the engine and the requests may not share one.
        tokenizer: Any = lm.tokenizer
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._token_texts = TokenTexts(self._tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.window = lm.reader.max_length
        self.prefix = lm.reader.prefix
        # 2) Start the engine and the writer.
        self.scopes = Scopes(lm.store, self.name, self.limits.k, self.limits.probes)
        self.engine = Engine(
            lm,
            self.scopes.resolve_settings,
            max_rows=self.limits.rows,
            max_waiting=self.limits.waiting,
            observe=self.observe,
        )
        self.json_constraints = JsonConstraints(
            self.call_with_tokenizer, lm.store.identity.vocab_size, self.engine.ends
        )
        if self.upstream_address is not None:
            self.upstream = Upstream(
                self.upstream_address,
                lm.store.id,
                self.scopes.build_options,
                TokenTexts(copy.deepcopy(tokenizer)),
                self.engine.ends,
                max_rows=self.limits.upstream_rows,
                max_waiting=self.limits.waiting,
                observe=self.observe,
            )
            # vLLM counts a last token that the model does not read.
            self.window = min(self.window, self.upstream.model.max_length - 1)
        lm.store.count_ngrams_in_background()
        self.engine.start()
        self.writer = StoreWriter(lm, self.engine)
        # 3) Warm up, then become ready.
        for scope in self.scopes.list_warm_up_scopes():
            self._warm_up(lm, scope)
        self.chat_template = ChatTemplate(tokenizer, self.window * self._longest_token)
        self._lm = lm

    def reload(self) -> None:
        """Clear the cached settings, and warm up again while texts are decoded.

        Changes of documents, domains, keys and settings are seen without a reload.
        """
        lm = self.lm
        self.engine.call(self.scopes.clear_cache).result()
        for scope in self.scopes.list_warm_up_scopes():
            self._warm_up(lm, scope)

    def _warm_up(self, lm: KNNLMForCausalLM, scope: Scope) -> None:
        """Do the work that a scope's first request would wait for: count n-grams, read cells, run the model.

        Errors of the store and a busy engine are logged as a warning, because requests may still succeed.
        """
        selection = Selection(domains=scope.domains)

        def read_cells(keys: Keys) -> None:
            settings = self.scopes.resolve_settings(scope)
            if settings.probes:
                lm.store.visit(keys, settings.probes, selection)

        def run_model() -> None:
            """Explain and continue the beginning of the longest document of the scope."""
            settings, lengths = self.scopes.resolve_settings(scope), lm.store.lengths(selection)
            text = np.zeros(1, np.uint32)
            if any(lengths.values()):  # a document can have characters but no tokens
                text = lm.store.text(max(lengths, key=lengths.__getitem__))[:_WARM_UP_TOKENS]
            explain_tokens(lm, text, settings, neighbors=1)
            with torch.inference_mode():
                generating = lm.resolve_settings(settings, Purpose.GENERATION)
                lm(torch.from_numpy(text[None].astype(np.int64)), knn=generating)

        try:
            self.scopes.fill_caches(scope)
            keys = self.engine.call(lambda: _sample_keys(lm.store, selection)).result()
            # Several short calls, so that other work of the engine can run between them.
            for start in range(0, len(keys), _KEYS_PER_CALL):
                self.engine.call(partial(read_cells, keys[start : start + _KEYS_PER_CALL])).result()
            self.engine.call(run_model).result()
        except (KnnstoreError, EngineBusyError) as error:
            _logger.warning("could not warm up: %s", error)

    @property
    def is_ready(self) -> bool:
        """True if the model is loaded and the engine runs."""
        return self._lm is not None and self.engine.is_alive

    def status(self) -> Literal["ready", "loading", "store_unavailable", "upstream_unavailable"]:
        """Return "ready" if requests are answered, otherwise the reason. Reads the store's revision."""
        if not self.is_ready or self._lm is None:
            return "loading"
        try:
            self._lm.store.revision()
        except StoreUnavailableError:
            return "store_unavailable"
        try:
            if self.upstream is not None:
                self.upstream.check()
        except ApiError:
            return "upstream_unavailable"
        return "ready"

    @property
    def lm(self) -> KNNLMForCausalLM:
        """The model. Outside of the engine's thread, only its store may be used, and only for reading.

        Raises ApiError 503 if the server is not ready.
        """
        if not self.is_ready or self._lm is None:
            raise ApiError(503, "the model is not there yet", code="not_ready", headers={"Retry-After": "2"})
        return self._lm

    def stop(self) -> None:
        """Stop the engine, the writer and the template's process, and close the store.

        Does nothing if no model was loaded.
        """
        if self._lm is not None:
            self.engine.stop()
            self.writer.shut_down()
            self.chat_template.close()
            self._lm.store.close()

    async def run_tokenizing(self, work: Callable[[], Found]) -> Found:
        """Run `work`, which tokenizes and checks a request, in a worker thread, and return its result.

        At most `_TOKENIZING_THREADS` threads do this, so that requests that wait for the tokenizer take no
        threads from other endpoints.
        """
        return await to_thread.run_sync(work, limiter=self._reading)

    async def run_rendering(self, work: Callable[[], Found]) -> Found:
        """Run `work`, which renders a chat template, in a thread of its own, and return its result.

        Only one runs at a time. A slow template delays no requests without a template.
        """
        return await to_thread.run_sync(work, limiter=self._rendering)

    # -- tokens and texts

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a text to tokenize. It can exceed the model's window."""
        return max(self.window, MOST_EXPLAINED)

    def call_with_tokenizer(self, use: Callable[[Any], Found]) -> Found:
        """Call `use` with the tokenizer and return the result of `use`. Other threads wait for the tokenizer.

        Raises:
            InputError: if the tokenizer itself fails on a text (a panic in its Rust code).
        """
        with self._tokenizing, named_panics():
            return use(self._tokenizer)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. `special` includes the special tokens that the tokenizer adds."""
        return self.call_with_tokenizer(
            lambda one: list(one(text, add_special_tokens=special, verbose=False)["input_ids"])
        )

    def tokenize_conversation(self, text: str) -> list[int]:
        """Return the token ids of a conversation that the chat template has rendered.

        Raises ApiError 400 if a client could forge control tokens; see `ChatTemplate.encode`.
        """
        return self.call_with_tokenizer(lambda one: self.chat_template.encode(one, text))

    def add_token_texts(self, prompt: Prompt, given: str | Sequence[int], *, is_continued: bool) -> Prompt:
        """Return a copy of a prompt with the text of each shown token, for an answer that repeats the prompt.

        Args:
            prompt: the prompt.
            given: the prompt as in the request. If it is text, the texts of its tokens add up to it.
            is_continued: True if an incomplete character at the end of token ids gets its text with the
                continuation.
        """
        shown = prompt.tokens[prompt.hidden :]

        def split_into_texts(_: Any) -> tuple[list[str], int]:
            """Return the text of each shown token, and the number of unfinished tokens at the end."""
            if isinstance(given, str):
                return split_text(self._token_texts, given, shown), 0
            last = shown[-1]
            is_incomplete = "\ufffd" in self._token_texts.decode([last])
            if not (is_continued and (is_incomplete or self._token_texts.is_fallback_byte(last))):
                return self._token_texts.pieces(shown), 0
            detokenizer = Detokenizer(self._token_texts, special=True)
            texts = [piece.text for token in shown for piece in detokenizer.take(token)]
            unfinished = len(shown) - len(texts)
            return [*texts, *[""] * unfinished], unfinished

        texts, unfinished = self.call_with_tokenizer(split_into_texts)
        return replace(prompt, texts=tuple(texts), unfinished=unfinished)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self.call_with_tokenizer(lambda _: self._token_texts.decode(tokens))

    def make_prompt(self, text_or_ids: str | Sequence[int], param: str = "prompt") -> Prompt:
        """Convert text or token ids to a `Prompt`, and check it.

        Text is tokenized. If the model has a token that begins a document, that token is put first, hidden.
        Token ids are used unchanged.

        Args:
            text_or_ids: the text or the token ids.
            param: the field of the request that an error names.

        Raises:
            ApiError: 400 if the prompt has no token, is too long, or has tokens that the model does not have.
        """
        if isinstance(text_or_ids, str):
            self.check_length(len(text_or_ids), self.window, param)
            prefix_tokens = [] if self.prefix is None else [self.prefix]
            prompt = Prompt((*prefix_tokens, *self.tokenize(text_or_ids)), len(prefix_tokens))
            if not prompt.tokens:
                raise refused("the prompt is empty, and the model has no token to begin with", param)
            self.check_tokens(prompt.tokens[len(prefix_tokens) :], param)
            return prompt
        if len(text_or_ids) > self.window:
            raise refused(
                f"{param}: {len(text_or_ids):,} tokens are more than this model reads, {self.window:,}",
                param,
                "context_length_exceeded",
            )
        self.check_tokens(text_or_ids, param)
        return Prompt(tuple(text_or_ids))

    def check_length(self, characters: int, tokens: int, param: str) -> None:
        """Raise ApiError 400 if a text has more characters than `tokens` tokens can have.

        This check is fast, so that no long text has to be tokenized.
        """
        most = tokens * self._longest_token
        if characters > most:
            raise refused(
                f"{param}: the text has {characters:,} characters, more than {tokens:,} tokens can have",
                param,
                "context_length_exceeded",
            )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise ApiError 400 if the model lacks a token. The message names the first missing token."""
        vocabulary = self.lm.encoder.vocabulary
        try:
            check_tokens(tokens, vocabulary)
        except InputError:
            try:
                # Check again with the tokenizer, so that the message has the token's text.
                self.call_with_tokenizer(lambda tokenizer: check_tokens(tokens, vocabulary, tokenizer))
            except InputError as error:
                raise refused(str(error), param) from error

    def check_window(self, prompt: Prompt, max_tokens: int, param: str = "prompt") -> None:
        """Raise ApiError 400 if a prompt and `max_tokens` generated tokens exceed the model's window.

        The last generated token does not count, because the model does not read it.
        """
        if len(prompt.tokens) + max(0, max_tokens - 1) > self.window:
            raise refused(
                f"this model reads at most {self.window} tokens, but the prompt has {len(prompt.tokens)} and "
                f"{max_tokens} are to follow: shorten it or ask for fewer",
                param,
                "context_length_exceeded",
            )

    # -- the engine

    def submit_task(self, task: Task) -> "Pieces":
        """Submit a task to the engine or to vLLM, and return its pieces as an asynchronous iterator.

        An error of the task itself is raised later, by the iterator.

        Raises:
            EngineBusyError: if too many tasks and jobs wait.
            EngineStoppedError: if the engine is stopping or has stopped.
        """
        return Pieces(self.upstream or self.engine, task)

    async def call(self, work: Callable[[], Found]) -> Found:
        """Run a short function in the engine's thread, and return its result; see `Engine.call`."""
        return await asyncio.wrap_future(self.engine.call(work))

    async def call_in_turns(self, work: Callable[[], Turns[Found]]) -> Found:
        """Run long work in turns in the engine's thread, and return its result; see `Engine.call_in_turns`.

        If the caller is cancelled, the work gets no further turn.
        """
        return await asyncio.wrap_future(self.engine.call_in_turns(work))


class Pieces:
    """The pieces of a task, as an asynchronous iterator. Creating the object submits the task.

    A slow client delays no other task. If more than `MOST_BEHIND` pieces are not taken, the engine starts no
    further text of the task. If more than `MOST_UNREAD` are not taken, the task fails with ApiError 400.

    Args:
        engine: the engine or the vLLM server that runs the task.
        task: the task.
    """

    def __init__(self, engine: Engine | Upstream, task: Task) -> None:
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
        """Cancel the task, and end the iterator. The engine drops the task before its next turn."""
        self._left = 0
        self._ticket.cancelled = True
        self._engine.wake()

    def _tell(self, piece: Piece | Exception) -> None:
        """Pass a piece to the event loop. The engine's thread calls this."""
        ticket = self._ticket
        ticket.told += 1
        if ticket.told - ticket.taken > MOST_UNREAD:
            ticket.cancelled = True
            piece = ApiError(400, "the answer is read more slowly than it is written", code="too_slow")
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._box.put_nowait, piece)


def _sample_keys(store: KNNStore, selection: Selection) -> Keys:
    """Return at most `_MAX_WARM_UP_KEYS` stored keys, float32, shape (n, d).

    They are evenly spaced in the first batch of records. Without cells or records the shape is (0, 0).
    """
    first_batch = next(store.records(selection), None) if store.has_cells else None
    if first_batch is None:
        return np.empty((0, 0), np.float32)
    return first_batch.keys[:: -(-len(first_batch.keys) // _MAX_WARM_UP_KEYS)].astype(np.float32)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Await `work` and return its result. Cancels `work` if the client disconnects.

    Raises:
        ApiError: 499 if the client has disconnected. Nobody receives this answer: it is only counted and
            logged.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ApiError(499, "the client has gone")
        return work_task.result()
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.wait({work_task})


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
