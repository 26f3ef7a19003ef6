"""A vLLM server behind this server: `Upstream` sends it the tasks (requests) that generate and score text.

The vLLM server has the plugin of knnstore and opens the same store (see `knnstore.lm.hosts.vllm`). This
server decides which documents a request may use, and sends this decision as ``vllm_xargs``. Prompts are sent
as token ids. So chat templates, stop strings, quotas and the form of answers are the work of this server.
"""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx
from anyio import to_thread

from knnstore.errors import ConfigError
from knnstore.lm import FELL_BACK, RequestOptions, TokenTexts
from knnstore.server.engine import (
    EngineBusyError,
    EngineStoppedError,
    Observed,
    Piece,
    Prompt,
    Row,
    Task,
    Ticket,
    TokenScore,
    add_prompt_texts,
    make_token_score,
)
from knnstore.server.errors import ApiError

_logger = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0
"""Seconds after which the vLLM server is checked again, because another server may have started at its
address."""
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 600.0
"""Seconds to wait for a connection, and for the next bytes of an answer: vLLM sends nothing while a request
waits for others."""


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """Address of a vLLM server, with the API key for it."""

    url: str
    """Base URL without ``/v1``, for example ``http://127.0.0.1:8001``."""
    key: str | None = field(default=None, repr=False)
    """API key of the vLLM server; None if it has none."""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers for each request to the vLLM server; empty without a key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class UpstreamModel(NamedTuple):
    """The model that the vLLM server serves."""

    name: str
    """Name of the model in requests to vLLM."""
    max_length: int
    """Largest number of tokens of a prompt and its continuation together."""


def check_upstream(address: UpstreamAddress, store_id: str) -> UpstreamModel:
    """Check that a vLLM server uses the store, and return the model that it serves.

    A server without the plugin would ignore the options of requests and serve the model without a store. So
    this function sends a request with a wrong store id, which only the plugin refuses.

    Args:
        address: URL of the server, with its API key.
        store_id: the id of the store that the server must have opened (`KNNStore.id`).

    Raises:
        ConfigError: if the server cannot be reached, refuses the key, has no plugin, or uses another store.
    """
    url = address.url
    timeout = httpx.Timeout(_CONNECT_SECONDS)
    with httpx.Client(base_url=url, headers=address.headers, timeout=timeout, trust_env=False) as client:
        try:
            answer = client.get("/v1/models")
            model = _parse_model(url, answer)
            body = {"model": model.name, "prompt": [0], "max_tokens": 1, "vllm_xargs": {"knn_store": "?"}}
            refusal = client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"{url} cannot be used: {type(error).__name__}; is it the base URL of a running vLLM?"
            ) from error
    if refusal.status_code != 400 or "knn_store" not in refusal.text:
        raise ConfigError(
            f"vLLM at {url} runs without a store: start it with KNNSTORE_HOME and knnstore[vllm] installed"
        )
    if store_id not in refusal.text:
        raise ConfigError(f"vLLM at {url} uses another store: start it with KNNSTORE_HOME set to this store")
    return model


def _parse_model(url: str, answer: httpx.Response) -> UpstreamModel:
    """Return the first model in vLLM's answer to ``GET /v1/models``.

    Args:
        url: the URL of the vLLM server, for messages.
        answer: the answer.

    Raises:
        ConfigError: if the server refuses the key, or does not answer as vLLM does.
    """
    if answer.status_code == 401:
        raise ConfigError(f"{url} refuses the key: set KNNSTORE_UPSTREAM_KEY to the key of vLLM")
    try:
        first = answer.json()["data"][0]
        return UpstreamModel(str(first["id"]), int(first["max_model_len"]))
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} does not answer as vLLM does at /v1/models") from error


class Upstream:
    """Runs tasks (requests to generate or score) on a vLLM server, in place of an `Engine`.

    It has the methods that `Pieces` calls: `submit` and `wake`. `submit`, `wake` and `close` are called in
    one event loop. Each text of a task is one request to vLLM.

    Args:
        address: URL of the vLLM server, with its API key.
        store_id: the id of the store.
        options_of: function that returns the options of a request to vLLM, without a store id. Its argument
            is the task's `Task.knn`: the documents and settings of retrieval.
        texts: the texts of the model's tokens; no other thread uses this object.
        ends: ids of the end tokens: a text ends after one of these tokens.
        max_rows: largest number of texts that are sent to vLLM at once.
        max_waiting: largest number of tasks that wait until texts can be sent.
        observe: function that is called for each event of vLLM's streams, with the counts of this event, such
            as the number of generated tokens.

    Raises:
        ConfigError: if the vLLM server cannot be reached, refuses the key, has no plugin, or uses another
            store.
    """

    def __init__(
        self,
        address: UpstreamAddress,
        store_id: str,
        options_of: Callable[[Hashable], RequestOptions],
        texts: TokenTexts,
        ends: frozenset[int],
        *,
        max_rows: int = 256,
        max_waiting: int = 64,
        observe: Callable[[Observed], None] = lambda _: None,
    ) -> None:
        self._address = address
        self._store_id = store_id
        self._options_of = options_of
        self._texts = texts
        self._ends = ends
        self._max_rows, self._max_waiting = max_rows, max_waiting
        self._observe = observe
        self._tickets: dict[asyncio.Task[None], Ticket] = {}
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(max_rows)
        self._rows = 0
        self._caught_up = asyncio.Event()
        self._is_closed = False
        self._check_lock = threading.Lock()
        self.model = check_upstream(address, store_id)
        """The model that the vLLM server serves."""
        self._checked_at = time.monotonic()

    def check(self) -> None:
        """Check that the vLLM server still uses the store. Any thread may call this; it waits for the answer.

        Nothing is sent if the server was checked in the last `_CHECK_SECONDS` seconds.

        Raises:
            ApiError: 503 if the server cannot be reached, or no longer uses the store.
        """
        with self._check_lock:
            if not self._is_check_due():
                return
            try:
                check_upstream(self._address, self._store_id)
            except ConfigError as error:
                _logger.warning("%s", error)
                raise _unavailable_error() from error
            self._checked_at = time.monotonic()

    def _is_check_due(self) -> bool:
        """Return True if the last check was at least `_CHECK_SECONDS` ago."""
        return time.monotonic() - self._checked_at >= _CHECK_SECONDS

    def submit(self, ticket: Ticket) -> None:
        """Start a task and return at once.

        The task's pieces (new text of its texts), and its error if it fails, are passed to `ticket.tell` in
        the event loop.

        Args:
            ticket: the task with its callback.

        Raises:
            EngineBusyError: if as many texts are sent as allowed, and `max_waiting` tasks wait.
            EngineStoppedError: after `close`.
        """
        if self._is_closed:
            raise EngineStoppedError
        if self._rows >= self._max_rows and len(self._tickets) >= self._max_rows + self._max_waiting:
            raise EngineBusyError
        task = asyncio.get_running_loop().create_task(self._run_task(ticket))
        self._tickets[task] = ticket
        task.add_done_callback(self._tickets.pop)

    def wake(self) -> None:
        """End the tasks that were cancelled, and continue the texts whose clients have caught up."""
        for task, ticket in self._tickets.items():
            if ticket.cancelled:
                task.cancel()
        self._caught_up.set()
        self._caught_up.clear()

    async def close(self) -> None:
        """End all tasks with EngineStoppedError, and close the connections to vLLM.

        Later tasks are refused.
        """
        self._is_closed = True
        tasks = list(self._tickets.items())
        for task, ticket in tasks:
            task.cancel()
            ticket.tell(EngineStoppedError())
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    # -- tasks

    async def _run_task(self, ticket: Ticket) -> None:
        """Run all texts of a task at the same time.

        The first error ends the task and is sent to its client.
        """
        try:
            options = await to_thread.run_sync(self._prepare, ticket.task)
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(ticket.task.prompts):
                    group.create_task(self._run_prompt(ticket, number, prompt, options))
        except ExceptionGroup as errors:
            ticket.cancelled = True
            ticket.tell(next(_list_errors(errors)))
        except Exception as error:
            ticket.cancelled = True
            ticket.tell(error)

    def _prepare(self, task: Task) -> RequestOptions:
        """Check the vLLM server if the last check is too old, and return the options of a task's requests.

        Reads the store, so it is called in a worker thread.

        Raises:
            ApiError: 503 if vLLM cannot be used now.
        """
        self.check()
        return replace(self._options_of(task.knn), store=self._store_id)

    async def _run_prompt(self, ticket: Ticket, number: int, prompt: Prompt, options: RequestOptions) -> None:
        """Score a prompt if the task asks for it, and generate the texts of this prompt.

        Args:
            ticket: the task with the callback of its client.
            number: index of the prompt in the task.
            prompt: the prompt.
            options: the options of the requests to vLLM.
        """
        task, fell_back = ticket.task, None
        indices = range(number * task.copies, (number + 1) * task.copies)
        if task.score_prompt:
            scores, fell_back = await self._score_prompt(task, prompt, options)
            for index in indices:
                ticket.tell(Piece(index, tokens=scores, is_prompt=True))
        if not task.max_tokens:
            for index in indices:
                ticket.tell(Piece(index, finish="length", stop_reason=fell_back))
            return
        async with asyncio.TaskGroup() as group:
            for index in indices:
                group.create_task(self._generate_text(ticket, index, options, fell_back))

    async def _score_prompt(
        self, task: Task, prompt: Prompt, options: RequestOptions
    ) -> tuple[tuple[TokenScore, ...], str | None]:
        """Return the scores that vLLM gives to the shown tokens of a prompt, and vLLM's mark of a fallback.

        Hidden tokens have no scores. See `_find_fallback` for the mark.

        The first shown token has no log-probability. If the task wants no log-probabilities, or the prompt
        has fewer than two shown tokens, vLLM gets no request.

        Args:
            task: the task.
            prompt: the prompt to score.
            options: the options of the request to vLLM.
        """
        shown = prompt.tokens[prompt.hidden :]
        if len(shown) < 2 or task.top is None:
            return add_prompt_texts(prompt, [TokenScore(token) for token in shown]), None
        body = {"prompt": prompt.tokens, "max_tokens": 1, "prompt_logprobs": task.top}
        async with self._send_request(body, options) as answer:
            await answer.aread()
            choice = _read_choice(answer.json())
            log_probs = choice["prompt_logprobs"]
        scores = [TokenScore(shown[0])]
        for token, values in zip(shown[1:], log_probs[prompt.hidden + 1 :], strict=True):
            listed = {int(id): float(value["logprob"]) for id, value in values.items()}
            scores.append(self._make_score(task, token, listed[token], listed))
        return add_prompt_texts(prompt, scores), _find_fallback(choice)

    async def _generate_text(
        self, ticket: Ticket, index: int, options: RequestOptions, fell_back: str | None
    ) -> None:
        """Make vLLM generate one text, and send each new part of this text to the client.

        If the text ends here, for example at a stop string, the connection is closed and vLLM stops
        generating.

        Args:
            ticket: the task with the callback of its client.
            index: index of the text in the task: index of the prompt × `Task.copies` + index of the copy.
            options: the options of the request to vLLM.
            fell_back: the mark of a fallback when the prompt was scored; None if there was none.

        Raises:
            ApiError: 500 if vLLM fails.
        """
        task = ticket.task
        row = Row(task, index, self._texts, self._ends)
        body = {"prompt": row.tokens[:], "stream": True, **_describe_sampling(task, index)}
        body["stop_token_ids"] = sorted(self._ends | task.ends)
        async with self._send_request(body, options) as answer:
            async for choice in _read_events(answer):
                scores = list(self._read_scores(task, choice))
                self._observe(Observed(0, len(scores), max(0, len(self._tickets) - self._max_rows), 0.0))
                for score in scores:
                    piece = row.append_token(score)
                    if piece.finish:
                        ticket.tell(replace(piece, stop_reason=_find_fallback(choice) or fell_back))
                        return
                    ticket.tell(piece)
                if choice.get("finish_reason") in ("stop", "length"):  # vLLM knows a further end token
                    piece = row.end(choice["finish_reason"])
                    ticket.tell(replace(piece, stop_reason=_find_fallback(choice) or fell_back))
                    return
                while ticket.is_behind:
                    await self._caught_up.wait()
        raise _failure_error()

    def _read_scores(self, task: Task, choice: Mapping[str, Any]) -> Iterator[TokenScore]:
        """Yield the score of each token in one event of vLLM's stream.

        Args:
            task: the task; its `top` is the number of most probable tokens that each score lists.
            choice: the element of ``choices`` in the event, a JSON object with the new text and the
                log-probabilities of its tokens.
        """
        tokens, logprobs = choice.get("token_ids") or (), choice.get("logprobs")
        if task.top is None or not logprobs:
            yield from map(TokenScore, tokens)
            return
        listings = logprobs["top_logprobs"] or [None] * len(tokens)
        for token, log_prob, listed in zip(tokens, logprobs["token_logprobs"], listings, strict=True):
            values = {int(name.removeprefix("token_id:")): value for name, value in (listed or {}).items()}
            yield self._make_score(task, token, log_prob, values)

    def _make_score(self, task: Task, token: int, log_prob: float, listed: Mapping[int, float]) -> TokenScore:
        """Return the score of a token, with the `Task.top` most probable tokens in descending order.

        Args:
            task: the task.
            token: id of the token.
            log_prob: the token's log-probability.
            listed: log-probabilities by token id that vLLM sends, in any order.
        """
        top = task.top or 0
        likeliest = sorted(listed.items(), key=lambda pair: -pair[1])[:top]
        return make_token_score(token, log_prob, likeliest, self._texts)

    # -- requests

    @asynccontextmanager
    async def _send_request(
        self, body: Mapping[str, Any], options: RequestOptions
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to vLLM, and yield the response; its body can be read while the context is open.

        Waits until fewer than `max_rows` texts are sent.

        Args:
            body: fields of the request, without the model and the options.
            options: the options of the request.

        Raises:
            ApiError: 503 if vLLM cannot be reached, 500 if vLLM fails, 502 if vLLM refuses the request.
            EngineBusyError: if vLLM is busy.
        """
        whole = {
            "model": self.model.name,
            "add_special_tokens": False,
            "vllm_xargs": options.to_values(),
            **body,
        }
        async with self._slots:
            self._rows += 1
            try:
                client = self._open_client()
                async with client.stream("POST", "/v1/completions", json=whole) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        raise _convert_refusal(answer)
                    yield answer
            except httpx.HTTPError as error:
                _logger.warning("vLLM at %s: %s", self._address.url, type(error).__name__)
                self._checked_at = -math.inf  # check it before the next task: it may be another server then
                raise _unavailable_error() from error
            finally:
                self._rows -= 1

    def _open_client(self) -> httpx.AsyncClient:
        """Return the HTTP client for vLLM. The first call creates it, in the event loop."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._address.url,
                headers=self._address.headers,
                timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=self._max_rows),
                trust_env=False,
            )
        return self._client


def _describe_sampling(task: Task, index: int) -> dict[str, Any]:
    """Return the fields of a request to vLLM that say how one text is sampled.

    All settings are set, because vLLM takes missing settings from the folder of the model.

    Args:
        task: the task.
        index: index of the text in the task; it changes the seed, so that copies differ.
    """
    sampling = task.sampling
    fields: dict[str, Any] = {
        "max_tokens": task.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }
    if sampling.seed is not None:
        fields["seed"] = (sampling.seed + index) % 2**63
    if task.top is not None:
        fields |= {"logprobs": task.top, "return_tokens_as_token_ids": True}
    if task.constraint is not None:
        fields["structured_outputs"] = {"json": task.constraint.schema}
    return fields


async def _read_events(answer: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the first choice (a part of the text, as a JSON object) of each event of vLLM's stream.

    Raises:
        ApiError: 500 if an event is an error.
    """
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event or event["choices"]:
                yield _read_choice(event)


def _read_choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first choice of an answer or event of vLLM: a text or a part of it, as a JSON object.

    Raises:
        ApiError: 500 if the body contains an error of vLLM, which is logged.
    """
    if "error" in body:
        _logger.error("vLLM failed: %s", body["error"])
        raise _failure_error()
    choice: Mapping[str, Any] = body["choices"][0]
    return choice


def _find_fallback(choice: Mapping[str, Any]) -> str | None:
    """Return `FELL_BACK` if vLLM says that it went on without the store; None else.

    vLLM says so with the last token of a text. If this server ends a text earlier, as at a stop string, the
    result is None.
    """
    return FELL_BACK if choice.get("stop_reason") == FELL_BACK else None


def _convert_refusal(answer: httpx.Response) -> Exception:
    """Return the exception for the client if vLLM answers with another status than 200.

    Returns:
        `EngineBusyError` for status 429 and 503. For other statuses the answer is logged, and the exception
        is an `ApiError`: with status 502 if vLLM refused the request (below 500), else with status 500.
    """
    if answer.status_code in (429, 503):
        return EngineBusyError()
    _logger.error("vLLM answered %d: %s", answer.status_code, answer.text[:1000])
    if answer.status_code < 500:
        return ApiError(502, "the model's server refused the request; the log says more", code="upstream")
    return _failure_error()


def _failure_error() -> ApiError:
    """Return the error 500 for a vLLM server that fails a request."""
    return ApiError(500, "the model's server failed; its log says more", code="internal_error")


def _unavailable_error() -> ApiError:
    """Return, but do not raise, the error 503 for a vLLM server that cannot be reached."""
    return ApiError(
        503,
        "the model's server cannot be used now: try again later",
        code="upstream_unavailable",
        headers={"Retry-After": "2"},
    )


def _list_errors(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    """Yield the exceptions in a group, and in the groups inside it."""
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _list_errors(error)
        else:
            yield error
