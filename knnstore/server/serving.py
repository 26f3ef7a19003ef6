"""The state that all endpoints share: `Serving` holds the model, its engine and tokenizer, and the `Limits`.

The engine is the thread that runs the model. `Pieces` gives the results of a task as an asynchronous
iterator. `cancel_on_disconnect` cancels work when the client disconnects.
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
    KNNLM,
    Detokenizer,
    Purpose,
    TokenTexts,
    check_tokens,
    convert_tokenizer_panics,
    explain_tokens,
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
    find_stop_strings,
)
from knnstore.server.errors import ApiError, bad_request_error
from knnstore.server.infilling import Infilling
from knnstore.server.protocol import MOST_EXPLAINED
from knnstore.server.scopes import Scope, Scopes
from knnstore.server.structured import JsonConstraints
from knnstore.server.upstream import Upstream, UpstreamAddress
from knnstore.store import KNNStore, Selection

_logger = logging.getLogger(__name__)

_MAX_WARM_UP_KEYS, _KEYS_PER_CALL = 1024, 128
"""For the warm-up, cells (groups of near records) are searched with `_MAX_WARM_UP_KEYS` stored keys as
queries. One call of the engine searches with `_KEYS_PER_CALL` of these keys."""
_TOKENIZING_THREADS = 4
"""Number of threads that tokenize and check requests."""
_WARM_UP_TOKENS = 32
"""Number of tokens at the beginning of a document that are explained and continued while warming up."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server: how much requests may ask for, and how long clients may take."""

    rows: int = 16
    """Largest number of texts that are decoded at once by the engine of this process."""
    upstream_rows: int = 256
    """Largest number of texts that are sent to a vLLM server at once."""
    waiting: int = 64
    """Largest number of requests that wait. Further requests are refused with the error 429."""
    body_bytes: int = 4 << 20
    """Largest size of a request's body in bytes."""
    head_seconds: float = 20.0
    """Seconds in which the head (the first line and the headers) of a request must arrive. They count from
    the beginning of the connection; for a later request on the same connection, from its first byte."""
    body_seconds: float = 60.0
    """Seconds in which the body of a request must arrive, after its head."""
    answer_seconds: float = 30.0
    """Seconds in which a client must read a part of its answer. Otherwise its connection is closed."""
    k: int = 16_384
    """Largest number of neighbors (retrieved records) for each token that a request may ask for."""
    probes: int = 128
    """Largest number of searched cells (groups of near records) for each token that a request may ask for."""
    answer_bytes: int = 32 << 20
    """Largest size of an answer in bytes."""


@dataclass
class Serving:
    """The server's state: the served model, its engine (the thread that runs it), and its tokenizer.

    It answers requests only after `start` has ended.

    Args:
        name: the name of the model alone, without domains.
        limits: the limits of the server.
        observe: function that is called in the engine's thread with the counts of each turn of the engine (a
            turn is a decoding step, or other work between two steps).
        upstream_address: a vLLM server with the same store, which generates and scores all texts; None lets
            the engine of this process do that. With and without vLLM, the engine of this process explains
            texts and encodes new documents.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    observe: Callable[[Observed], None] = lambda _: None
    upstream_address: UpstreamAddress | None = None

    def __post_init__(self) -> None:
        self._lm: KNNLM | None = None
        self.upstream: Upstream | None = None
        """The vLLM server that runs the tasks. None if the engine of this process runs them, or before
        `start` has ended."""
        self._tokenizing = threading.Lock()
        self._reading = CapacityLimiter(_TOKENIZING_THREADS)
        self._rendering = CapacityLimiter(1)

    def start(self, lm: KNNLM) -> None:
        """Start serving a model: start the engine, warm up, and become ready. Takes seconds.

        Args:
            lm: the model, with its store.

        Raises:
            ConfigError: if the model cannot be served, or the vLLM server cannot be used.
        """
        # 1) Copy the tokenizer: the engine and the requests may not share one.
        tokenizer: Any = lm.tokenizer
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._token_texts = TokenTexts(self._tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.infilling = Infilling.find_tokens(self._tokenizer, lm.store.identity.vocab_size)
        """Special tokens of prompts with a suffix; None if the tokenizer has none: suffixes are refused."""
        self.window = lm.reader.max_length
        self.prefix = lm.reader.prefix
        self.reads_source = lm.reader.reads_pairs
        """True for an encoder-decoder model: a prompt is a source, and a document is a pair."""
        self.document_end = lm.reader.document_tokenizer.end
        """The token that ends the tokens of every document; empty for a causal model."""
        self.stop_strings = find_stop_strings(lm.generation_config)
        """Stop strings of the model's generation configuration. They end every text, as in `generate`."""
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

    def reload_caches(self) -> None:
        """Forget the cached settings, and do in advance the slow work that the next requests would wait for.

        Requests are answered meanwhile. Changes of documents, domains, keys and settings need no reload: they
        are seen at once.
        """
        lm = self.lm
        self.engine.call(self.scopes.clear_cache).result()
        for scope in self.scopes.list_warm_up_scopes():
            self._warm_up(lm, scope)

    def _warm_up(self, lm: KNNLM, scope: Scope) -> None:
        """Do the work in advance that the first request of a scope would have to wait for.

        The work is to count n-grams, to read cells (groups of near records) from disk, and to run the model
        once. An error of the store or a busy engine is only logged as a warning, because requests may still
        succeed.

        Args:
            lm: the model, with its store.
            scope: the documents that a request retrieves from, and the settings that it overrides.
        """
        selection = Selection(domains=scope.domains)

        def read_cells(keys: Keys) -> None:
            """Search with some stored keys, so that the cells (groups of near records) are read from disk."""
            settings = self.scopes.resolve_settings(scope)
            if settings.probes:
                lm.store.visit(keys, settings.probes, selection)

        def run_model() -> None:
            """Explain and continue the beginning of the longest document that the scope retrieves from."""
            settings, lengths = self.scopes.resolve_settings(scope), lm.store.lengths(selection)
            text = np.zeros(1, np.uint32)
            if any(lengths.values()):  # a document can have characters but no tokens
                text = lm.store.tokens_by_number(max(lengths, key=lengths.__getitem__))[:_WARM_UP_TOKENS]
            # Any tokens serve as the source of an encoder-decoder model.
            source = text if lm.key_encoder.reads_source else None
            explain_tokens(lm, text, settings, neighbors=1, source=source)
            with torch.inference_mode():
                generating = lm.resolve_settings(settings, Purpose.GENERATION)
                ids = torch.from_numpy(text[None].astype(np.int64))
                lm(ids, knn=generating, **({} if source is None else {"decoder_input_ids": ids}))

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
        """True if the model is loaded and the engine's thread runs."""
        return self._lm is not None and self.engine.is_alive

    def status(self) -> Literal["ready", "loading", "store_unavailable", "upstream_unavailable"]:
        """Return "ready" if requests are answered, otherwise the reason why not.

        Checks whether the store can be reached, and may send a request to the vLLM server.
        """
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
    def lm(self) -> KNNLM:
        """The model. Outside of the engine's thread, only its store may be used, and only for reading.

        Raises:
            ApiError: 503 if the server is not ready.
        """
        if not self.is_ready or self._lm is None:
            raise ApiError(503, "the model is not ready yet", code="not_ready", headers={"Retry-After": "2"})
        return self._lm

    def stop(self) -> None:
        """Stop the engine, the writer and the process of the chat template, and close the store.

        Does nothing if no model was loaded.
        """
        if self._lm is not None:
            self.engine.stop()
            self.writer.shut_down()
            self.chat_template.close()
            self._lm.store.close()

    async def run_tokenizing(self, work: Callable[[], Found]) -> Found:
        """Run a function that tokenizes and checks a request in a worker thread, and return its result.

        At most `_TOKENIZING_THREADS` functions run at once. So requests that wait for the tokenizer take no
        threads from other endpoints.

        Args:
            work: the function, without arguments. Its exceptions are raised here.
        """
        return await to_thread.run_sync(work, limiter=self._reading)

    async def run_rendering(self, work: Callable[[], Found]) -> Found:
        """Run a function that renders a chat template in a worker thread, and return its result.

        Only one of these functions runs at a time. A slow template does not delay requests without a
        template.

        Args:
            work: the function, without arguments. Its exceptions are raised here.
        """
        return await to_thread.run_sync(work, limiter=self._rendering)

    # -- tokens and texts

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a text that ``/tokenize`` and ``/detokenize`` accept.

        It is the model's window or `MOST_EXPLAINED`, whichever is larger.
        """
        return max(self.window, MOST_EXPLAINED)

    def call_with_tokenizer(self, use: Callable[[Any], Found]) -> Found:
        """Call a function with the tokenizer, and return the function's result. Other threads wait meanwhile.

        Args:
            use: the function; its argument is the tokenizer.

        Raises:
            InputError: if the tokenizer itself fails on a text (a panic in its Rust code).
        """
        with self._tokenizing, convert_tokenizer_panics():
            return use(self._tokenizer)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            special: True adds the special tokens that the tokenizer puts around a text.
        """
        return self.call_with_tokenizer(
            lambda tokenizer: list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        )

    def tokenize_document(self, text: str) -> list[int]:
        """Return the token ids of a text, tokenized like the text of a stored document.

        For an encoder-decoder model the text is tokenized as a target. No special tokens are added, not even
        the token that ends a document.
        """
        arguments = {"text_target" if self.reads_source else "text": text}
        return self.call_with_tokenizer(
            lambda tokenizer: list(
                tokenizer(**arguments, add_special_tokens=False, verbose=False)["input_ids"]
            )
        )

    def tokenize_conversation(self, text: str) -> list[int]:
        """Return the token ids of a conversation that the chat template has rendered as text.

        Control tokens that a client wrote in a message become ordinary text.

        Args:
            text: the result of the chat template's `render`.

        Raises:
            ApiError: 400 if the tokenizer cannot encode a control token from a message as ordinary text. A
                client could then forge control tokens.
            InputError: the tokenizer itself fails on the text.
        """
        return self.call_with_tokenizer(lambda tokenizer: self.chat_template.encode(tokenizer, text))

    def add_token_texts(
        self, prompt: Prompt, text_or_ids: str | Sequence[int], *, is_continued: bool
    ) -> Prompt:
        """Return a copy of a prompt with the text of each token that the answer shows.

        The texts are needed for an answer that repeats the prompt.

        Args:
            prompt: the tokenized prompt.
            text_or_ids: the prompt as in the request: text, or token ids. If it is text, the texts of the
                tokens add up to this text.
            is_continued: True if tokens are generated after the prompt. Token ids may end inside a character;
                then the tokens of this character get their text together with the first generated tokens.
        """
        shown = prompt.tokens[prompt.hidden :]

        def split_into_texts(_: Any) -> tuple[list[str], int]:
            """Return the text of each shown token, and the number of last tokens without complete text."""
            if isinstance(text_or_ids, str):
                return split_text(self._token_texts, text_or_ids, shown), 0
            last = shown[-1]
            is_incomplete = "\ufffd" in self._token_texts.decode([last])
            if not (is_continued and (is_incomplete or self._token_texts.is_fallback_byte(last))):
                return self._token_texts.decode_pieces(shown), 0
            detokenizer = Detokenizer(self._token_texts, special=True)
            texts = [piece.text for token in shown for piece in detokenizer.append_token(token)]
            unfinished = len(shown) - len(texts)
            return [*texts, *[""] * unfinished], unfinished

        texts, unfinished = self.call_with_tokenizer(split_into_texts)
        return replace(prompt, texts=tuple(texts), unfinished=unfinished)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with the texts of special tokens included."""
        return self.call_with_tokenizer(lambda _: self._token_texts.decode(tokens))

    def make_prompt(self, text_or_ids: str | Sequence[int], param: str = "prompt") -> Prompt:
        """Return a checked `Prompt` for a prompt of a request.

        Text is tokenized. If the model has a token that begins a document, this token is put first and marked
        as hidden. Token ids are used unchanged. For an encoder-decoder model the prompt is the source, and
        text gets the special tokens of a source.

        Args:
            text_or_ids: the prompt as text or as token ids.
            param: name of the request's field, for the error message.

        Raises:
            ApiError: 400 if the prompt has no token, is too long, or has tokens that the model does not have.
        """
        if self.reads_source:
            source = self.make_source(text_or_ids, param)
            return Prompt(self.prefix, len(self.prefix), source=tuple(source))
        if isinstance(text_or_ids, str):
            self.check_length(len(text_or_ids), self.window, param)
            prompt = Prompt((*self.prefix, *self.tokenize(text_or_ids)), len(self.prefix))
            if not prompt.tokens:
                raise bad_request_error(
                    "the prompt is empty, and the model has no token to begin with", param
                )
            self.check_tokens(prompt.tokens[len(self.prefix) :], param)
            return prompt
        self._check_count(len(text_or_ids), param)
        self.check_tokens(text_or_ids, param)
        return Prompt(tuple(text_or_ids))

    def make_source(self, text_or_ids: str | Sequence[int], param: str) -> list[int]:
        """Return the checked token ids of a source for an encoder-decoder model.

        Args:
            text_or_ids: the source as text, or as the token ids that the encoder reads.
            param: name of the request's field, for the error message.

        Raises:
            ApiError: 400 if the source is empty, is too long, or has tokens that the model does not have.
        """
        if isinstance(text_or_ids, str):
            if not text_or_ids.strip():
                raise bad_request_error(f"{param}: the source is empty", param)
            self.check_length(len(text_or_ids), self.window, param)
            text_or_ids = self.tokenize(text_or_ids, special=True)
        self._check_count(len(text_or_ids), param)
        self.check_tokens(text_or_ids, param)
        return list(text_or_ids)

    def _check_count(self, count: int, param: str) -> None:
        """Check that the model can read a prompt of `count` tokens, else raise ApiError 400."""
        if count > self.window:
            raise bad_request_error(
                f"{param}: {count:,} tokens are too many: this model reads at most {self.window:,}",
                param,
                "context_length_exceeded",
            )

    def make_infilling_prompt(
        self, prefix: str, suffix: str, middle_start: str = "", limit: int | None = None
    ) -> Prompt:
        """Return a checked prompt after which the model generates the text between a prefix and a suffix.

        Args:
            prefix: the text before; the field ``prompt`` of a request.
            suffix: the text after; the field ``suffix`` of a request.
            middle_start: the beginning of the text between them.
            limit: largest number of tokens of the prompt: longer texts are cut at their far ends. None
                refuses texts that are too long.

        Raises:
            ApiError: 400 if the model cannot fill in, or a text is too long or has tokens that the model does
                not have.
        """
        if self.reads_source:
            raise bad_request_error(
                "an encoder-decoder model cannot fill in the middle: leave the suffix out", "suffix"
            )
        if self.infilling is None:
            raise bad_request_error(
                f"the model {self.name!r} cannot fill in the middle: its tokenizer has no tokens for a "
                "prefix, a suffix and a middle",
                "suffix" if limit is None else "model",
            )
        room = limit
        if limit is None:
            for text, param in ((prefix, "prompt"), (suffix, "suffix")):
                self.check_length(len(text), self.window, param)
        else:
            most = self.window * self._longest_token  # what lies farther away has no room
            prefix, suffix, room = prefix[-most:], suffix[:most], limit - len(self.prefix)
            self.check_length(len(middle_start), limit, "prompt")
        infilling = self.infilling
        tokens = self.call_with_tokenizer(
            lambda tokenizer: infilling.make_prompt(tokenizer, prefix, suffix, middle_start, room)
        )
        self.check_tokens(tokens, "prompt")
        return Prompt((*self.prefix, *tokens), len(self.prefix))

    def check_length(self, characters: int, tokens: int, param: str) -> None:
        """Refuse a text that surely has more than `tokens` tokens, judged by its length in characters.

        The text is not tokenized. A text that passes can still have more tokens.

        Args:
            characters: number of characters of the text.
            tokens: largest number of tokens that the text may have.
            param: name of the request's field, for the error message.

        Raises:
            ApiError: 400 if the text has more than `tokens` × L characters, where L is the length of the
                longest token of the vocabulary.
        """
        most = tokens * self._longest_token
        if characters > most:
            raise bad_request_error(
                f"{param}: the text has {characters:,} characters, more than {tokens:,} tokens can have",
                param,
                "context_length_exceeded",
            )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Check that the model has all given tokens.

        Args:
            tokens: token ids.
            param: name of the request's field, for the error message.

        Raises:
            ApiError: 400 if a token is missing. The message names the first missing token.
        """
        vocabulary = self.lm.key_encoder.vocabulary
        try:
            check_tokens(tokens, vocabulary)
        except InputError:
            try:
                # Check again with the tokenizer, so that the message has the token's text.
                self.call_with_tokenizer(lambda tokenizer: check_tokens(tokens, vocabulary, tokenizer))
            except InputError as error:
                raise bad_request_error(str(error), param) from error

    def check_window(self, prompt: Prompt, max_tokens: int, param: str = "prompt") -> None:
        """Check that a prompt and its continuation fit into the model's window.

        The last generated token does not count, because the model does not read it.

        Args:
            prompt: the prompt.
            max_tokens: largest number of tokens to generate.
            param: name of the request's field, for the error message.

        Raises:
            ApiError: 400 if the prompt and the continuation are too long together.
        """
        if len(prompt.tokens) + max(0, max_tokens - 1) > self.window:
            most = self.window - len(prompt.tokens) + 1
            raise bad_request_error(
                f"this model generates at most {most} tokens, not {max_tokens}: ask for fewer"
                if prompt.source
                else f"this model reads at most {self.window} tokens, but the prompt has "
                f"{len(prompt.tokens)} and {max_tokens} more are requested: shorten it or ask for fewer",
                param,
                "context_length_exceeded",
            )

    # -- the engine

    def submit_task(self, task: Task) -> "Pieces":
        """Submit a task (a request to generate or score) to the engine or to vLLM, and return its results.

        The results are an asynchronous iterator. An error of the task itself is raised later, by the
        iterator.

        Raises:
            EngineBusyError: if too many tasks wait.
            EngineStoppedError: if the engine is stopping or has stopped.
        """
        return Pieces(self.upstream or self.engine, task)

    async def call(self, work: Callable[[], Found]) -> Found:
        """Run a short function in the engine's thread, between two decoding steps, and return its result.

        The function has no arguments. Its exceptions and the errors of `Engine.call` are raised here.
        """
        return await asyncio.wrap_future(self.engine.call(work))

    async def call_in_turns(self, work: Callable[[], Turns[Found]]) -> Found:
        """Run long work in the engine's thread, in parts between decoding steps, and return its result.

        If the caller is cancelled, the work ends before its next part.

        Args:
            work: function without arguments that returns a generator. The generator yields at the end of each
                part; its return value is the result.
        """
        return await asyncio.wrap_future(self.engine.call_in_turns(work))


class Pieces:
    """The results of a task as an asynchronous iterator of `Piece` objects. The constructor submits the task.

    A piece is new text of one text of the task, or the scores of its prompt. The iterator ends when all texts
    of the task have ended. If the task fails, the iterator raises the task's error.

    A slow client delays no other task. If the client has more than `MOST_BEHIND` pieces left to take, the
    engine starts no further text of the task. If it has more than `MOST_UNREAD` left, the task fails with
    ApiError 400.

    Args:
        engine: the engine or the vLLM server that runs the task.
        task: the task: prompts to continue or to score.

    Raises:
        EngineBusyError: if too many tasks wait.
        EngineStoppedError: if the engine is stopping or has stopped.
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
        """Wait for the next piece (new text or scores) and return it.

        Raises the task's error if the task failed.
        """
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
        """Cancel the task and end the iterator.

        The engine drops the task's texts before its next decoding step.
        """
        self._left = 0
        self._ticket.cancelled = True
        self._engine.wake()

    def _tell(self, piece: Piece | Exception) -> None:
        """Pass a piece (new text or scores), or the error of the task, to the event loop.

        The engine calls this method in its thread. If the client has left more than `MOST_UNREAD` pieces in
        the queue, the task is cancelled, and ApiError 400 is passed instead of the piece.
        """
        ticket = self._ticket
        ticket.told += 1
        if ticket.told - ticket.taken > MOST_UNREAD:
            ticket.cancelled = True
            piece = ApiError(
                400, "the client reads the answer more slowly than it is generated", code="too_slow"
            )
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._box.put_nowait, piece)


def _sample_keys(store: KNNStore, selection: Selection) -> Keys:
    """Return at most `_MAX_WARM_UP_KEYS` stored keys of the selected documents, float32, shape (n, d).

    The keys are evenly spaced in the first batch of records. The shape is (0, 0) if the selection has no
    records, or if the store has no cells (groups of near records).

    Args:
        store: the store.
        selection: documents whose keys are sampled.
    """
    first_batch = next(store.records(selection), None) if store.has_cells else None
    if first_batch is None:
        return np.empty((0, 0), np.float32)
    return first_batch.keys[:: -(-len(first_batch.keys) // _MAX_WARM_UP_KEYS)].astype(np.float32)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Await a coroutine and return its result. Cancels the coroutine if the client disconnects.

    Args:
        request: the request of the client.
        work: the coroutine. Its exceptions are raised here.

    Raises:
        ApiError: 499 if the client has disconnected. Nobody receives this answer: it is only counted and
            logged.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ApiError(499, "the client has disconnected")
        return work_task.result()
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.wait({work_task})


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client of a request disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
