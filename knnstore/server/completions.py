"""Endpoints ``/v1/completions`` and ``/v1/chat/completions``: they generate and score text.

`_Answer` submits the task of a request to the engine (the thread that runs the model) or to vLLM, and formats
the pieces of text that come back.
"""

import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from knnstore.catalog import Right
from knnstore.server.access import Access, Endpoints, Quota, get_access
from knnstore.server.engine import Piece, Prompt, Task, TokenScore
from knnstore.server.errors import ApiError, bad_request_error, convert_to_api_error
from knnstore.server.introspection import describe_second_pass, explain_generated_tokens
from knnstore.server.protocol import (
    MOST_SOURCES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    InfillRequest,
    Message,
    Retrieval,
    ToolCall,
)
from knnstore.server.serving import Serving, cancel_on_disconnect
from knnstore.server.shapes import Messages, Shape, Texts, add_finish_reason

_SCORE_BYTES = 32
"""Approximate number of bytes in an answer for each scored token, and for each most probable token that is
listed."""
_EVENT_TOKENS = 128
"""Largest number of tokens whose scores one event of a stream contains."""
_MAX_TOKENS = 16
"""Default of `max_tokens` for a completion, as in OpenAI's protocol."""
_TOKENS_PER_SOURCE_TOKEN, _EXTRA_TOKENS = 2, 20
"""Default of `max_tokens` for an encoder-decoder model: 2 tokens for each token of the longest source, plus
20 tokens. The command `translate` has the same default."""


def declare_completions(routes: Endpoints, serving: Serving) -> None:
    """Add ``/v1/completions``, ``/v1/chat/completions`` and llama.cpp's ``/infill`` to the application.

    Args:
        routes: the object with which endpoints are added to the application.
        serving: the server's state, with the model.
    """

    @routes.add("POST", "/v1/completions", Right.PREDICT)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue texts, or score the tokens of the prompts."""
        return await _Answer.create_response(request, body, serving, lambda: _plan_completion(serving, body))

    @routes.add("POST", "/infill", Right.PREDICT)
    async def infill(request: Request, body: InfillRequest) -> Response:
        """Fill in the text at a cursor, in the form of llama.cpp's server, which editors ask for."""
        serving.lm  # noqa: B018  raises 503 while the model is loading
        name = await serving.run_tokenizing(lambda: serving.scopes.name_visible(get_access(request)))
        completion = body.to_completion(name, serving.window)
        answer = await _Answer.create_response(
            request, completion, serving, lambda: _plan_infilling(serving, body, completion)
        )
        return JSONResponse(_convert_to_infill(json.loads(bytes(answer.body))))

    @routes.add("POST", "/v1/chat/completions", Right.PREDICT)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a conversation. The model needs a chat template."""
        serving.lm  # noqa: B018  raises 503 while the model is loading
        text = await serving.run_rendering(lambda: _render_conversation(serving, body))
        return await _Answer.create_response(request, body, serving, lambda: _plan_chat(serving, body, text))


@dataclass(frozen=True)
class _GenerationPlan:
    """The checked content of a request: its prompts and limits, and the JSON shape of the answer."""

    prompts: tuple[Prompt, ...]
    """The tokenized prompts."""
    max_tokens: int
    """Largest number of tokens to generate for each text; 0 generates nothing."""
    shape: Shape
    """Makes the JSON objects of the answer."""
    top: int | None
    """Number of most probable tokens that are listed for each token; 0 lists none, None gives no
    log-probabilities."""
    score_prompt: bool = False
    """True if the tokens of the prompts get log-probabilities too."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end a text, in addition to the model's end tokens."""


def _plan_completion(serving: Serving, body: CompletionRequest) -> _GenerationPlan:
    """Tokenize and check the prompts of a completion, and return the plan of its answer.

    The plan has the prompts, the limit of tokens and the JSON shape of the answer.

    Args:
        serving: the server's state, with the model.
        body: the body of the request.

    Raises:
        ApiError: 400 if a prompt is too long for the model's window, has no tokens, or has tokens that the
            model does not have.
    """
    ends = frozenset[int]()
    if serving.reads_source:
        _refuse_scored_source(body)
    if body.suffix:
        prompts: tuple[Prompt, ...] = (serving.make_infilling_prompt(str(body.prompts[0]), body.suffix),)
        ends = serving.infilling.ends if serving.infilling is not None else ends
    else:
        prompts = tuple(serving.make_prompt(prompt) for prompt in body.prompts)
    max_tokens = body.max_tokens
    if max_tokens is None:
        longest = max(len(prompt.source) for prompt in prompts)
        room = serving.window - len(prompts[0].tokens) + 1
        default = _TOKENS_PER_SOURCE_TOKEN * longest + _EXTRA_TOKENS
        max_tokens = min(room, default) if longest else _MAX_TOKENS
    for prompt in prompts:
        serving.check_window(prompt, max_tokens)
    echoed: list[str] = []
    if body.echo:
        pairs = zip(prompts, body.prompts, strict=True)
        prompts = tuple(
            serving.add_token_texts(prompt, given, is_continued=max_tokens > 0) for prompt, given in pairs
        )
        # Repeat the text itself, not its tokens: a text such as a single space may have none.
        echoed = [
            given if isinstance(given, str) else "".join(prompt.texts)
            for prompt, given in zip(prompts, body.prompts, strict=True)
        ]
    with_log_probs = body.logprobs is not None
    shape = Texts(with_log_probs, echoed, body.n or 1, bool(body.return_tokens_as_token_ids))
    return _GenerationPlan(
        prompts, max_tokens, shape, body.logprobs, bool(body.echo) and with_log_probs, ends
    )


def _refuse_scored_source(body: CompletionRequest) -> None:
    """Refuse a request to an encoder-decoder model that wants its prompt (the source) repeated or scored.

    Raises:
        ApiError: 400 if `echo` is True, which repeats the prompt, or `max_tokens` is 0, which only scores it.
    """
    if body.echo:
        raise bad_request_error(
            "echo: an encoder-decoder model does not score its prompt, which is the source", "echo"
        )
    if body.max_tokens == 0:
        raise bad_request_error(
            "max_tokens: must be at least 1, because an encoder-decoder model does not score its prompt",
            "max_tokens",
        )


def _plan_infilling(serving: Serving, body: InfillRequest, completion: CompletionRequest) -> _GenerationPlan:
    """Tokenize the text around a cursor, and return the plan of its answer.

    Text that is too far from the cursor to fit into the model's window is left out.

    Args:
        serving: the server's state, with the model.
        body: the body of the request.
        completion: the result of `body.to_completion`; only its `max_tokens` is used here.

    Raises:
        ApiError: 400 if the model has no special tokens for infilling, or if the new tokens leave less than a
            quarter of the window for the text around the cursor.
    """
    max_tokens = completion.max_tokens or 0
    limit = serving.window - max(0, max_tokens - 1)
    if limit < serving.window // 4:
        raise bad_request_error(
            f"n_predict: {max_tokens:,} tokens leave too little of the model's {serving.window:,} for the "
            "text around the cursor: ask for fewer",
            "n_predict",
        )
    prompt = serving.make_infilling_prompt(body.input_prefix, body.input_suffix, body.prompt, limit)
    serving.check_window(prompt, max_tokens)
    ends = serving.infilling.ends if serving.infilling is not None else frozenset[int]()
    return _GenerationPlan((prompt,), max_tokens, Texts(False), None, ends=ends)


def _convert_to_infill(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a completion in the form of llama.cpp's endpoint ``/infill``."""
    (choice,), usage = answer["choices"], answer["usage"]
    return {
        "content": choice["text"],
        "model": answer["model"],
        "stop": True,
        "stop_type": "limit" if choice["finish_reason"] == "length" else "eos",
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
    }


def _plan_chat(serving: Serving, body: ChatRequest, text: str) -> _GenerationPlan:
    """Tokenize and check a conversation, and return the plan of its answer.

    If the request has no limit of tokens, the answer may fill the rest of the model's window.

    Args:
        serving: the server's state, with the model.
        body: the body of the request.
        text: the conversation as the chat template has rendered it.

    Raises:
        ApiError: 400 if the conversation is empty or too long for the model's window.
    """
    tokens = serving.tokenize_conversation(text)
    if not tokens:
        raise bad_request_error("the messages are empty", "messages")
    serving.check_tokens(tokens, "messages")
    prompt = Prompt(tuple(tokens))
    room = serving.window - len(prompt.tokens) + 1
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    serving.check_window(prompt, max_tokens, "messages")
    shape = Messages(bool(body.logprobs))
    return _GenerationPlan((prompt,), max_tokens, shape, (body.top_logprobs or 0) if body.logprobs else None)


def _render_conversation(serving: Serving, body: ChatRequest) -> str:
    """Return a conversation as text, as the chat template renders it.

    The text ends where the assistant's answer begins.

    Raises:
        ApiError: 400 if the model has no chat template, the messages are too long, or the template refuses
            them.
    """
    if serving.reads_source:
        raise bad_request_error(
            "an encoder-decoder model does not support conversations: use /v1/completions", "model"
        )
    characters = sum(len(message.text) + len(message.thoughts) for message in body.messages)
    serving.check_length(characters, serving.window, "messages")
    template = serving.chat_template
    if not template.text:
        raise bad_request_error(
            "this model has no template for conversations: use /v1/completions",
            "model",
            "no_chat_template",
        )
    return template.render(_convert_messages(template.text, body.messages))


def _convert_messages(template: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a conversation as the JSON objects that a chat template takes.

    The role `developer` becomes `system` (its former name) if the template does not contain `developer`.

    Args:
        template: the source of the chat template.
        messages: the messages of the request.

    Raises:
        ApiError: 400 if a message has tool calls or the role `tool`, and the template would ignore them.
    """
    converted = []
    for number, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "developer" and "developer" not in template:
            fields["role"] = "system"
        if message.role == "tool" and "tool" not in template:
            raise bad_request_error(
                f"messages.{number}.role: this model's template does not know the role 'tool'",
                f"messages.{number}.role",
            )
        if message.tool_calls:
            if "tool_calls" not in template:
                raise bad_request_error(
                    f"messages.{number}.tool_calls: this model's template does not know tool calls",
                    f"messages.{number}.tool_calls",
                )
            fields["tool_calls"] = [_convert_tool_call(call) for call in message.tool_calls]
        if message.thoughts:  # templates use one of these two names, and ignore the other
            fields["reasoning_content"] = fields["reasoning"] = message.thoughts
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        converted.append(fields)
    return converted


def _convert_tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as the JSON object that a chat template takes, with parsed arguments.

    Arguments that are not valid JSON stay text.
    """
    arguments: Any = call.function.arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


class _Stream(StreamingResponse):
    """HTTP response that streams the events of an answer.

    When the stream ends or the client disconnects, the task of the answer is cancelled.

    Args:
        answer: the answer.
        headers: further HTTP headers.
    """

    def __init__(self, answer: "_Answer", headers: dict[str, str]) -> None:
        super().__init__(answer.stream_events(), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events to the client, then cancel the task of the answer if it has not ended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


class _Answer:
    """The answer to one request. The constructor submits the task of the request.

    The methods format the pieces of text that come back, as one JSON answer or as a stream of events.

    Args:
        serving: the server's state, with the model.
        body: the body of the request.
        plan: the checked content of the request.
        task: the task to submit.
        quota: rate limits of the client's key. The tokens of prompts and texts are counted there.

    Raises:
        ApiError: 429 if the key has used up its tokens.
        EngineBusyError: if too many requests wait.
    """

    def __init__(
        self, serving: Serving, body: GenerationRequest, plan: _GenerationPlan, task: Task, quota: Quota
    ) -> None:
        self._serving = serving
        self._body = body
        self._shape = plan.shape
        self._task = task
        self._quota = quota
        self._prompt_tokens = sum(prompt.client_tokens for prompt in plan.prompts)
        quota.check_and_spend(self._prompt_tokens)
        self._pieces = serving.submit_task(task)
        self._generated: defaultdict[int, list[int]] = defaultdict(list)
        self._head = {
            "id": f"{plan.shape.id}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    @classmethod
    async def create_response(
        cls, request: Request, body: CompletionRequest | ChatRequest, serving: Serving, plan_request: Any
    ) -> Response:
        """Check a request, submit its task, and return the HTTP response: a whole answer or a stream.

        Args:
            request: the HTTP request.
            body: the body of the request.
            serving: the server's state, with the model.
            plan_request: function without arguments that returns the request's `_GenerationPlan`; called in a
                worker thread.

        Raises:
            ApiError: if the request is wrong, not allowed or too large, or the task of a whole answer fails.
                A stream sends later errors as an event.
        """
        knn, who = body.knn or Retrieval(), get_access(request)
        if knn.sources:
            who.check(Right.READ)

        def make_plan() -> tuple[_GenerationPlan, Task]:
            """Return the plan of the answer and the task of the request."""
            plan: _GenerationPlan = plan_request()
            return plan, _build_task(serving, body, plan, who)

        serving.lm  # noqa: B018  raises 503 while the model is loading
        plan, task = await serving.run_tokenizing(make_plan)
        _check_answer_size(serving, body, task)
        answer = cls(serving, body, plan, task, who.quota)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return _Stream(answer, headers)
        try:
            return await cancel_on_disconnect(request, answer.build_whole_answer())
        finally:
            answer.close()

    def close(self) -> None:
        """Cancel the task. Does nothing to a task that has ended."""
        self._pieces.close()

    async def build_whole_answer(self) -> Response:
        """Wait until all texts are complete, and return one JSON answer with all of them.

        The JSON is built in a worker thread, because it may be large.

        Raises:
            ApiError: 400 if the log-probabilities make the answer too large; or the error of the task.
        """
        shape, texts = self._shape, defaultdict[int, list[Piece]](list)
        bytes_left = self._serving.limits.answer_bytes
        async for piece in self._pieces:
            texts[piece.index].append(self._count_tokens(piece))
            if self._task.top is not None:
                bytes_left -= _SCORE_BYTES * len(piece.tokens) * (1 + self._task.top)
            if bytes_left < 0:
                raise _answer_too_large_error(self._serving)
        sources_by_text = {index: await self._find_sources(index) for index in sorted(texts)}

        def format_answer() -> Response:
            """Build the JSON answer of all texts."""
            choices = []
            for index, text_pieces in sorted(texts.items()):
                text = shape.get_prefix(index) + "".join(piece.text for piece in text_pieces)
                prompt = [score for piece in text_pieces if piece.is_prompt for score in piece.tokens]
                generated = [score for piece in text_pieces if not piece.is_prompt for score in piece.tokens]
                shaped_choice = add_finish_reason(
                    shape.make_choice(index, text, prompt, generated), text_pieces[-1]
                )
                choices.append({**shaped_choice, **sources_by_text[index]})
            return JSONResponse(
                {**self._head, "object": shape.kind, "choices": choices, "usage": self._build_usage()}
            )

        return await run_in_threadpool(format_answer)

    async def stream_events(self) -> AsyncIterator[str]:
        """Yield the server-sent events of the answer: parts of the texts, the usage if wanted, and the end.

        A part is sent as soon as it is decoded. If the task fails, its error is sent as an event; no
        exception is raised. The last event is always ``[DONE]``.
        """
        begun_texts: set[int] = set()
        try:
            async for piece in _split_large_pieces(self._pieces):
                index, is_first = piece.index, piece.index not in begun_texts
                text = (self._shape.get_prefix(index) if is_first else "") + self._count_tokens(piece).text
                if not (text or piece.finish or (piece.tokens and self._task.top is not None)):
                    continue
                begun_texts.add(index)
                scores: tuple[tuple[TokenScore, ...], ...] = ((), piece.tokens)
                shaped = self._shape.make_chunk(
                    index, text, *(reversed(scores) if piece.is_prompt else scores), first=is_first
                )
                knn_field = await self._find_sources(index) if piece.finish else {}
                yield self._format_event([{**add_finish_reason(shaped, piece), **knn_field}])
            if self._body.wants_usage:
                yield self._format_event([], usage=self._build_usage())
        except Exception as error:  # the status was sent before, so an event must tell the error
            yield f"data: {json.dumps(convert_to_api_error(error).body)}\n\n"
        finally:
            self.close()
        yield "data: [DONE]\n\n"

    def _format_event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """Return one server-sent event as text.

        Args:
            choices: parts of texts, as JSON objects.
            usage: the numbers of tokens; None in all events but the last. Left out if the client does not
                want it.
        """
        event = {**self._head, "object": self._shape.kind_of_part, "choices": choices}
        if self._body.wants_usage:
            event["usage"] = usage
        return f"data: {json.dumps(event, ensure_ascii=False, allow_nan=False)}\n\n"

    def _count_tokens(self, piece: Piece) -> Piece:
        """Count the generated tokens of a piece (a new part of a text) for the usage and the client's quota.

        Returns the piece unchanged. Tokens of a prompt are not counted here; the constructor has counted
        them.
        """
        if not piece.is_prompt:
            self._generated[piece.index].extend(score.token for score in piece.tokens)
            self._quota.spend_unchecked(len(piece.tokens))
        return piece

    def _build_usage(self) -> dict[str, int]:
        """Return the field ``usage``: the numbers of prompt tokens, generated tokens, and all tokens."""
        written = sum(map(len, self._generated.values()))
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }

    async def _find_sources(self, index: int) -> dict[str, Any]:
        """Return the field ``knn`` of a text: for each generated token the stored records that support it.

        Returns an empty dictionary if the request asks for no sources. The model reads the text once more for
        this, so its tokens count against the client's quota again.

        Args:
            index: index of the text in the task: index of the prompt × `Task.copies` + index of the copy.

        Raises:
            ApiError: 400 if sources for more tokens are requested than one answer may have.
        """
        count = self._body.knn.sources if self._body.knn else 0
        if not count:
            return {}
        prompt = self._task.prompts[index // self._task.copies]
        _check_sources(self._body, len(self._generated[index]))
        self._quota.spend_unchecked(len(prompt.source) + len(prompt.tokens) + len(self._generated[index]))
        sources = await explain_generated_tokens(
            self._serving, self._task.knn, prompt, self._generated[index], count
        )
        return {"knn": {"sources": sources, **describe_second_pass(self._serving)}}


async def _split_large_pieces(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Yield the same pieces of texts, but split large pieces, so that no event of a stream is too large.

    A piece is a new part of a text, with its tokens. A yielded piece has at most `_EVENT_TOKENS` tokens. The
    event of a larger piece would block the event loop for long. If a piece ends a text, only the last one of
    its parts has the reason of the end (`Piece.finish`).
    """
    async for piece in pieces:
        ends = range(_EVENT_TOKENS, len(piece.tokens), _EVENT_TOKENS)
        for end in ends:
            yield replace(piece, tokens=piece.tokens[end - _EVENT_TOKENS : end], finish=None)
        yield replace(piece, tokens=piece.tokens[len(ends) * _EVENT_TOKENS :]) if ends else piece


def _check_answer_size(serving: Serving, body: CompletionRequest | ChatRequest, task: Task) -> None:
    """Check before the generation that log-probabilities and sources will not make the answer too large.

    Sources are stored records that support a generated token. The size of the generated texts is not known
    yet; it is checked later.

    Args:
        serving: the server's state, with the limits.
        body: the body of the request.
        task: the task of the request, with the tokenized prompts.

    Raises:
        ApiError: 400 if the prompts have too many log-probabilities, or if the largest number of tokens that
            may be generated would have too many sources.
    """
    text_count = len(task.prompts) * task.copies
    if task.score_prompt and not body.stream:
        scored = sum(len(prompt.tokens) for prompt in task.prompts) * task.copies
        if _SCORE_BYTES * scored * (1 + (task.top or 0)) > serving.limits.answer_bytes:
            raise _answer_too_large_error(serving)
    has_token_limit = isinstance(body, CompletionRequest) or body.max_tokens or body.max_completion_tokens
    if has_token_limit:
        _check_sources(body, task.max_tokens * text_count)


def _check_sources(body: GenerationRequest, tokens: int) -> None:
    """Check that an answer will not list too many sources (stored records that support a generated token).

    Args:
        body: the body of the request, with the number of sources for each token.
        tokens: number of generated tokens.

    Raises:
        ApiError: 400 if the number of sources for each token × `tokens` is more than `MOST_SOURCES`.
    """
    sources = body.knn.sources if body.knn else 0
    if sources * tokens > MOST_SOURCES:
        raise bad_request_error(
            f"knn.sources: {sources} for each of {tokens:,} tokens are more than {MOST_SOURCES:,}: ask for "
            "fewer",
            "knn.sources",
        )


def _answer_too_large_error(serving: Serving) -> ApiError:
    """Return, but do not raise, the error 400 for an answer whose log-probabilities take too many bytes."""
    return bad_request_error(
        f"logprobs: the answer is larger than {serving.limits.answer_bytes:,} bytes (`--max-answer`): ask "
        "for fewer of the likeliest tokens, for fewer prompts, or for a stream",
        "logprobs",
    )


def _build_task(serving: Serving, body: GenerationRequest, plan: _GenerationPlan, who: Access) -> Task:
    """Return the engine's task for a request. Before that, read into memory what its retrieval needs.

    It is read here and not in the engine's thread, because all requests share that thread.

    Args:
        serving: the server's state, with the model.
        body: the body of the request.
        plan: the checked prompts and limits of the request.
        who: the permissions of the client.

    Raises:
        ApiError: 404 if the model does not exist or the client may not see it; 400 if the field ``knn`` or
            the JSON schema is wrong.
    """
    scope = serving.scopes.parse_scope(body.model, body.knn, who)
    serving.scopes.fill_caches(scope)
    return Task(
        prompts=plan.prompts,
        knn=scope,
        max_tokens=plan.max_tokens,
        copies=body.n or 1,
        sampling=body.sampling,
        stops=(*serving.stop_strings, *body.stops),
        top=plan.top,
        score_prompt=plan.score_prompt,
        constraint=serving.json_constraints.make_constraint(body.response_format),
        ends=plan.ends,
    )
