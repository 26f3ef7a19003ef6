"""``/v1/completions`` and ``/v1/chat/completions``."""

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
from knnstore.server.access import Access, Endpoints, Quota, access
from knnstore.server.asking import sources_of
from knnstore.server.engine import Piece, Prompt, Task, TokenScore
from knnstore.server.errors import ApiError, error_of, refused
from knnstore.server.protocol import (
    MOST_SOURCES,
    ChatRequest,
    CompletionRequest,
    Message,
    Retrieval,
    ToolCall,
    Writing,
)
from knnstore.server.serving import Serving, unless_left
from knnstore.server.shapes import Messages, Shape, Texts, choice

_SCORE_BYTES = 32
"""Of an answer, for each token and each of the likeliest ones, about."""
_EVENT_TOKENS = 128
"""Of a prompt, whose scores are in one event."""
_MAX_TOKENS = 16  # where a completion says nothing, as OpenAI's


def declare_completions(routes: Endpoints, serving: Serving) -> None:
    """Declare the endpoints that write text."""

    @routes.add("POST", "/v1/completions", Right.PREDICT)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue texts, or score them."""
        return await _Answer.to(request, body, serving, lambda: _of_texts(serving, body))

    @routes.add("POST", "/v1/chat/completions", Right.PREDICT)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a conversation, with models that have a template for one."""
        serving.lm  # noqa: B018  is it there?
        text = await serving.render(lambda: _conversation(serving, body))
        return await _Answer.to(request, body, serving, lambda: _of_messages(serving, body, text))


@dataclass(frozen=True)
class _Plan:
    """What is to be written, but for the scope, and in which shape."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    shape: Shape
    top: int | None
    score_prompt: bool = False


def _of_texts(serving: Serving, body: CompletionRequest) -> _Plan:
    prompts = tuple(serving.prompt(one) for one in body.prompts)
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        serving.check_window(prompt, max_tokens)
    echoed: list[str] = []
    if body.echo:
        pairs = zip(prompts, body.prompts, strict=True)
        prompts = tuple(serving.echoed(one, given, is_continued=max_tokens > 0) for one, given in pairs)
        # A text as it was given: it may have no tokens, e.g. a space.
        echoed = [
            given if isinstance(given, str) else "".join(one.texts)
            for one, given in zip(prompts, body.prompts, strict=True)
        ]
    with_log_probs = body.logprobs is not None
    shape = Texts(with_log_probs, echoed, body.n or 1, bool(body.return_tokens_as_token_ids))
    return _Plan(prompts, max_tokens, shape, body.logprobs, bool(body.echo) and with_log_probs)


def _of_messages(serving: Serving, body: ChatRequest, text: str) -> _Plan:
    """Plan the answer to a conversation whose text the template has made."""
    tokens = serving.conversation_tokens(text)
    if not tokens:
        raise refused("the messages are empty", "messages")
    serving.check_tokens(tokens, "messages")
    prompt = Prompt(tuple(tokens))
    room = serving.window - len(prompt.tokens) + 1
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    serving.check_window(prompt, max_tokens, "messages")
    shape = Messages(bool(body.logprobs))
    return _Plan((prompt,), max_tokens, shape, (body.top_logprobs or 0) if body.logprobs else None)


def _conversation(serving: Serving, body: ChatRequest) -> str:
    """Return the text of a conversation, up to where the assistant is to speak."""
    characters = sum(len(one.text) + len(one.thoughts) for one in body.messages)
    serving.check_length(characters, serving.window, "messages")
    template = serving.chat_template
    if not template.text:
        raise refused(
            "this model has no template for conversations: use /v1/completions",
            "model",
            "no_chat_template",
        )
    return template.render(_messages_for(template.text, body.messages))


def _messages_for(template: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them.

    A template that does not know the role `developer` is given `system`, which it replaced. Tool calls and
    their results are refused where the template would leave them out.
    """
    found = []
    for number, message in enumerate(messages):
        given: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "developer" and "developer" not in template:
            given["role"] = "system"
        if message.role == "tool" and "tool" not in template:
            raise refused(
                f"messages.{number}.role: this model's template does not know the role 'tool'",
                f"messages.{number}.role",
            )
        if message.tool_calls:
            if "tool_calls" not in template:
                raise refused(
                    f"messages.{number}.tool_calls: this model's template does not know tool calls",
                    f"messages.{number}.tool_calls",
                )
            given["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
        if message.thoughts:  # by both of its names; a template leaves out what it does not know
            given["reasoning_content"] = given["reasoning"] = message.thoughts
        if message.name is not None:
            given["name"] = message.name
        if message.tool_call_id is not None:
            given["tool_call_id"] = message.tool_call_id
        found.append(given)
    return found


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Return a tool call with its arguments parsed, as templates expect; text that is no JSON stays text."""
    arguments: Any = call.function.arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


class _Stream(StreamingResponse):
    """The events of an answer; when the client has left, or never read one, nothing more is written."""

    def __init__(self, answer: "_Answer", headers: dict[str, str]) -> None:
        super().__init__(answer.events(), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


class _Answer:
    """The answer to one request."""

    def __init__(self, serving: Serving, body: Writing, plan: _Plan, task: Task, quota: Quota) -> None:
        self._serving = serving
        self._body = body
        self._shape = plan.shape
        self._task = task
        self._quota = quota
        self._prompt_tokens = sum(len(prompt.tokens) - prompt.hidden for prompt in plan.prompts)
        quota.spend(self._prompt_tokens)
        self._pieces = serving.write(task)
        self._written: defaultdict[int, list[int]] = defaultdict(list)
        self._head = {
            "id": f"{plan.shape.id}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }

    @classmethod
    async def to(
        cls, request: Request, body: CompletionRequest | ChatRequest, serving: Serving, plan_of: Any
    ) -> Response:
        """Begin to answer: whatever is wrong with the request is told here."""
        knn, who = body.knn or Retrieval(), access(request)
        if knn.sources:
            who.check(Right.READ)

        def planned() -> tuple[_Plan, Task]:
            plan: _Plan = plan_of()
            return plan, _task(serving, body, plan, who)

        serving.lm  # noqa: B018  is it there?
        plan, task = await serving.read(planned)
        _check_size(serving, body, task)
        answer = cls(serving, body, plan, task, who.quota)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return _Stream(answer, headers)
        try:
            return await unless_left(request, answer.whole())
        finally:
            answer.close()

    def close(self) -> None:
        """Have no more written."""
        self._pieces.close()

    async def whole(self) -> Response:
        """All texts at once; what is large is put together in another thread."""
        shape, texts = self._shape, defaultdict[int, list[Piece]](list)
        left = self._serving.limits.answer_bytes
        async for piece in self._pieces:
            texts[piece.index].append(self._noted(piece))
            if self._task.top is not None:
                left -= _SCORE_BYTES * len(piece.tokens) * (1 + self._task.top)
            if left < 0:
                raise _too_large(self._serving)
        sources = {index: await self._sources(index) for index in sorted(texts)}

        def shaped() -> Response:
            choices = []
            for index, parts in sorted(texts.items()):
                text = shape.before(index) + "".join(part.text for part in parts)
                prompt = [score for part in parts if part.is_prompt for score in part.tokens]
                written = [score for part in parts if not part.is_prompt for score in part.tokens]
                made = choice(shape.whole(index, text, prompt, written), parts[-1].finish)
                choices.append({**made, **sources[index]})
            return JSONResponse(
                {**self._head, "object": shape.kind, "choices": choices, "usage": self._usage()}
            )

        return await run_in_threadpool(shaped)

    async def events(self) -> AsyncIterator[str]:
        """A stream of events: the texts as they are written."""
        begun: set[int] = set()
        try:
            async for piece in _in_parts(self._pieces):
                index, first = piece.index, piece.index not in begun
                text = (self._shape.before(index) if first else "") + self._noted(piece).text
                if not (text or piece.finish or (piece.tokens and self._task.top is not None)):
                    continue
                begun.add(index)
                scores: tuple[tuple[TokenScore, ...], ...] = ((), piece.tokens)
                shaped = self._shape.part(
                    index, text, *(reversed(scores) if piece.is_prompt else scores), first=first
                )
                extra = await self._sources(index) if piece.finish else {}
                yield self._event([{**choice(shaped, piece.finish), **extra}])
            if self._body.wants_usage:
                yield self._event([], usage=self._usage())
        except Exception as error:  # the answer has begun: its status can say nothing any more
            yield f"data: {json.dumps(error_of(error).body)}\n\n"
        finally:
            self.close()
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        event = {**self._head, "object": self._shape.kind_of_part, "choices": choices}
        if self._body.wants_usage:
            event["usage"] = usage
        return f"data: {json.dumps(event, ensure_ascii=False, allow_nan=False)}\n\n"

    def _noted(self, piece: Piece) -> Piece:
        if not piece.is_prompt:
            self._written[piece.index].extend(score.token for score in piece.tokens)
            self._quota.take(len(piece.tokens))
        return piece

    def _usage(self) -> dict[str, int]:
        written = sum(map(len, self._written.values()))
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }

    async def _sources(self, index: int) -> dict[str, Any]:
        """Where the tokens of a text come from, if that is asked for."""
        count = self._body.knn.sources if self._body.knn else 0
        if not count:
            return {}
        prompt = self._task.prompts[index // self._task.copies]
        _check_sources(self._body, len(self._written[index]))
        self._quota.take(len(prompt.tokens) + len(self._written[index]))  # they are read once more
        found = await sources_of(self._serving, self._task.knn, prompt, self._written[index], count)
        return {"knn": {"sources": found}}


async def _in_parts(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """Cut the scores of long prompts into parts, so that each event takes a short time to write."""
    async for piece in pieces:
        ends = range(_EVENT_TOKENS, len(piece.tokens), _EVENT_TOKENS)
        for end in ends:
            yield replace(piece, tokens=piece.tokens[end - _EVENT_TOKENS : end], finish=None)
        yield replace(piece, tokens=piece.tokens[len(ends) * _EVENT_TOKENS :]) if ends else piece


def _check_size(serving: Serving, body: CompletionRequest | ChatRequest, task: Task) -> None:
    """Refuse what is known beforehand to be too large for an answer, or to take too long to be traced.

    Raises:
        ApiError: 400.
    """
    texts = len(task.prompts) * task.copies
    if task.score_prompt and not body.stream:
        scored = sum(len(prompt.tokens) for prompt in task.prompts) * task.copies
        if _SCORE_BYTES * scored * (1 + (task.top or 0)) > serving.limits.answer_bytes:
            raise _too_large(serving)
    is_named = isinstance(body, CompletionRequest) or body.max_tokens or body.max_completion_tokens
    if is_named:
        _check_sources(body, task.max_tokens * texts)


def _check_sources(body: Writing, tokens: int) -> None:
    """Refuse to name more sources than one explanation names.

    Raises:
        ApiError: 400.
    """
    sources = body.knn.sources if body.knn else 0
    if sources * tokens > MOST_SOURCES:
        raise refused(
            f"knn.sources: {sources} for each of {tokens:,} tokens are more than {MOST_SOURCES:,}: ask for "
            "fewer",
            "knn.sources",
        )


def _too_large(serving: Serving) -> ApiError:
    return refused(
        f"logprobs: the answer is larger than {serving.limits.answer_bytes:,} bytes (`--max-answer`): ask "
        "for fewer of the likeliest tokens, for fewer prompts, or for a stream",
        "logprobs",
    )


def _task(serving: Serving, body: Writing, plan: _Plan, who: Access) -> Task:
    scope = serving.scopes.scope(body.model, body.knn, who)
    serving.scopes.prepare(scope)
    return Task(
        prompts=plan.prompts,
        knn=scope,
        max_tokens=plan.max_tokens,
        copies=body.n or 1,
        sampling=body.sampling,
        stops=body.stops,
        top=plan.top,
        score_prompt=plan.score_prompt,
        constraint=serving.json_constraints.constraint_for(body.response_format),
    )
