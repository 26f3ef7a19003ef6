"""Endpoints that generate no text: ``/v1/models``, ``/tokenize``, ``/detokenize``, ``/v1/explain``.

An explanation shows which stored records (neighbors) and which components made a token likely.
`explain_generated_tokens` explains the tokens of an answer, for the endpoints of `completions`.
`describe_second_pass` marks explanations of texts that vLLM has generated.
"""

import json
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from knnstore.catalog import Right
from knnstore.lm import (
    DocumentEffect,
    FixedLambda,
    KNNSettings,
    Purpose,
    TokenExplanation,
    explain_in_turns,
)
from knnstore.server.access import Access, Endpoints, get_access
from knnstore.server.engine import Prompt, Turns
from knnstore.server.errors import bad_request_error
from knnstore.server.protocol import (
    MOST_EXPLAINED,
    MOST_SOURCES,
    DetokenizeRequest,
    ExplainRequest,
    TokenizeRequest,
)
from knnstore.server.scopes import Scope, format_model_name
from knnstore.server.serving import Serving, cancel_on_disconnect

_DOCUMENTS_AT_ONCE = 256
"""Number of documents of an explanation that are converted to JSON at once, between two decoding steps."""


def declare_introspection(routes: Endpoints, serving: Serving) -> None:
    """Declare the endpoints for models, tokenization and explanations, which generate no text.

    Args:
        routes: the object with which endpoints are added to the application.
        serving: the server's state, with the model.
    """

    def build_model_list(who: Access) -> list[dict[str, Any]]:
        """Return JSON objects for the model alone and for the model with each domain that the client may see.

        Args:
            who: the permissions of the client.
        """
        store = serving.lm.store
        seen = who.filter_visible(domain.name for domain in store.domains())
        names = [
            format_model_name(serving.name),
            *(format_model_name(serving.name, (domain,)) for domain in seen),
        ]
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "knnstore",
                "max_model_len": serving.window,
            }
            for name in names
        ]

    @routes.add("GET", "/v1/models", Right.PREDICT)
    def models(request: Request) -> dict[str, Any]:
        """List the model alone, and the model with each domain."""
        return {"object": "list", "data": build_model_list(get_access(request))}

    @routes.add("GET", "/v1/models/{name:path}", Right.PREDICT)
    def model(request: Request, name: str) -> dict[str, Any]:
        """Describe one model. Its name may contain several domains."""
        serving.lm  # noqa: B018
        serving.scopes.parse_scope(name, None, get_access(request))
        return {**build_model_list(get_access(request))[0], "id": name}

    @routes.add("POST", "/tokenize", Right.PREDICT)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the tokens of a text."""
        serving.lm  # noqa: B018

        def build_answer() -> Response:
            """Tokenize the text and return the answer. Runs in a worker thread."""
            serving.check_length(len(body.prompt), serving.most_tokens, "prompt")
            tokens = serving.tokenize(body.prompt, special=body.add_special_tokens)
            return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": serving.window})

        return await serving.run_tokenizing(build_answer)

    @routes.add("POST", "/detokenize", Right.PREDICT)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids; an empty text without token ids."""
        serving.lm  # noqa: B018
        if len(body.tokens) > serving.most_tokens:
            most = serving.most_tokens
            raise bad_request_error(
                f"tokens: got {len(body.tokens):,}, but at most {most:,} are read at once", "tokens"
            )

        def build_answer() -> Response:
            """Check the tokens and return the answer with their text. Runs in a worker thread."""
            serving.check_tokens(body.tokens, "tokens")
            return JSONResponse({"prompt": serving.detokenize(body.tokens) if body.tokens else ""})

        return await serving.run_tokenizing(build_answer)

    @routes.add("GET", "/tokenizer_info", Right.PREDICT)
    def tokenizer_info() -> dict[str, Any]:
        """Return the properties of the tokenizer that evaluation harnesses need."""
        tokenizer, max_bytes = serving.lm.tokenizer, serving.limits.answer_bytes
        assert tokenizer is not None
        fields = {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "chat_template": tokenizer.chat_template,
            "model_max_length": serving.window,
        }
        if len(_encode_json(fields)) > max_bytes:
            raise bad_request_error(
                f"the model's chat template is larger than {max_bytes:,} bytes (`--max-answer`)"
            )
        return fields

    @routes.add("POST", "/v1/explain", Right.READ)
    async def explain(request: Request, body: ExplainRequest) -> Response:
        """Explain the probability of each token of a text.

        The answer lists for each token its components (the store's parts of the prediction) and its neighbors
        (the retrieved records).
        """
        serving.lm  # noqa: B018

        def make_plan() -> tuple[Scope, int, list[int], list[int]]:
            """Return the scope of the request, the number of tokens before `text`, and all tokens.

            Also returns the tokens of the source; empty for a causal model.
            """
            scope = serving.scopes.parse_scope(body.model, body.knn, get_access(request))
            source = _tokenize_source(serving, body.source)
            plan = scope, *_tokenize_explained_text(serving, body), source
            serving.scopes.fill_caches(scope)
            return plan

        scope, start, tokens, source = await serving.run_tokenizing(make_plan)
        get_access(request).quota.check_and_spend(len(source) + len(tokens))

        def explain_in_engine() -> Turns[bytes]:
            """Explain the text in the engine's thread, in parts between decoding steps.

            Returns the JSON answer.
            """
            settings, explanation_json = (
                serving.scopes.resolve_settings(scope),
                _ExplanationJson(serving.limits.answer_bytes),
            )
            turns = explain_in_turns(
                serving.lm,
                np.array(tokens, np.uint32),
                settings,
                neighbors=body.neighbors,
                start=start,
                source=_to_array(source),
            )
            documents = yield from _run_explanation(turns, explanation_json.add_tokens)
            for start_document in range(0, len(documents), _DOCUMENTS_AT_ONCE):
                yield
                explanation_json.add_documents(
                    documents[start_document : start_document + _DOCUMENTS_AT_ONCE]
                )
            return explanation_json.build_answer(
                {
                    "object": "list",
                    "model": body.model,
                    "knn": _describe_settings(settings),
                    **describe_second_pass(serving),
                }
            )

        answer = await cancel_on_disconnect(request, serving.call_in_turns(explain_in_engine))
        return Response(answer, media_type="application/json")


async def explain_generated_tokens(
    serving: Serving, scope: Hashable, prompt: Prompt, generated: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """Explain each generated token of a text: name the stored records (neighbors) that made the token likely.

    The engine's thread does the work, in parts between decoding steps.

    Args:
        serving: the server's state, with the model.
        scope: the `Scope` of the text: the documents and the settings of its retrieval.
        prompt: the prompt of the text.
        generated: ids of the generated tokens.
        count: number of neighbors that each explanation lists.

    Returns:
        One JSON object for each generated token, in order.
    """
    has_prefix = prompt.tokens[: len(serving.prefix)] == serving.prefix
    prompt_tokens = prompt.tokens[len(serving.prefix) :] if has_prefix else prompt.tokens
    tokens = np.array([*prompt_tokens, *generated], np.uint32)

    def explain_in_engine() -> Turns[list[dict[str, Any]]]:
        """Explain the tokens in the engine's thread, in parts between decoding steps.

        Returns JSON objects.
        """
        shown = list[dict[str, Any]]()
        settings = serving.lm.resolve_settings(serving.scopes.resolve_settings(scope), Purpose.GENERATION)
        turns = explain_in_turns(
            serving.lm,
            tokens,
            settings,
            neighbors=count,
            start=len(prompt_tokens),
            source=_to_array(prompt.source),
        )
        yield from _run_explanation(turns, lambda part: shown.extend(map(_token_fields, part)))
        return shown

    return await serving.call_in_turns(explain_in_engine)


def describe_second_pass(serving: Serving) -> dict[str, Any]:
    """Return the JSON field ``second_pass: true`` if vLLM generates the texts; otherwise an empty dictionary.

    The field marks explanations of texts from vLLM. This process explains them: its engine reads the text
    again, in a pass of its own. Rounding makes its probabilities differ slightly from vLLM's.
    """
    return {} if serving.upstream is None else {"second_pass": True}


def _tokenize_source(serving: Serving, source: str | None) -> list[int]:
    """Return the tokens of the source of an explained text; empty for a causal model.

    Raises:
        ApiError: 400 if an encoder-decoder model has no source or cannot read it, or a causal model has one.
    """
    if serving.reads_source != (source is not None):
        problem = (
            "is missing: an encoder-decoder model needs it"
            if source is None
            else "works only with encoder-decoder models"
        )
        raise bad_request_error(f"source: the source of the text {problem}", "source")
    return [] if source is None else serving.make_source(source, "source")


def _to_array(source: Sequence[int]) -> NDArray[np.uint32] | None:
    """Return the token ids of a source as an array; None if there are none (a causal model has no source)."""
    return np.array(source, np.uint32) if source else None


def _tokenize_explained_text(serving: Serving, body: ExplainRequest) -> tuple[int, list[int]]:
    """Tokenize the text to explain together with the text before it, and check the size of the explanation.

    Args:
        serving: the server's state, with the tokenizer.
        body: the body of the request. It has the text, the text before it, and the number of neighbors
            (retrieved records) that the explanation lists for each token.

    Returns:
        The number of tokens before the explained text, and the ids of all tokens.

    Raises:
        ApiError: 400 if the text has too many tokens, if tokens × neighbors are too many, or if the model
            does not have a token.
    """
    serving.check_length(len(body.after) + len(body.text), MOST_EXPLAINED, "text")
    start = len(serving.tokenize_document(body.after))
    tokens = [*serving.tokenize_document(body.after + body.text), *serving.document_end]
    if len(tokens) > MOST_EXPLAINED:
        raise bad_request_error(
            f"the text has {len(tokens):,} tokens, but at most {MOST_EXPLAINED:,} are explained at once",
            "text",
        )
    if (len(tokens) - start) * body.neighbors > MOST_SOURCES:
        raise bad_request_error(
            f"neighbors: {body.neighbors} for each of {len(tokens) - start:,} tokens are more than "
            f"{MOST_SOURCES:,}: ask for fewer, or explain a part of the text with the rest as `after`",
            "neighbors",
        )
    serving.check_tokens(tokens, "text")
    return start, tokens


def _run_explanation(
    turns: Generator[list[TokenExplanation], None, tuple[DocumentEffect, ...]],
    take: Callable[[list[TokenExplanation]], object],
) -> Turns[tuple[DocumentEffect, ...]]:
    """Run an explanation in turns, and pass the explained tokens of each turn to a function.

    A turn is a short piece of work. This generator yields after each turn, so that the engine can generate
    text before the next turn.

    Args:
        turns: the generator of the explanation. It yields the explained tokens of each turn, and returns the
            effect of each document on the probability of the text.
        take: function that is called after each turn with the turn's explained tokens.

    Returns:
        The effect of each document, when the explanation is complete.
    """
    while True:
        try:
            explained = next(turns)
        except StopIteration as end:
            documents: tuple[DocumentEffect, ...] = end.value
            return documents
        take(explained)
        yield


class _ExplanationJson:
    """Builds the JSON answer of ``/v1/explain`` in small parts, so that other requests do not wait long.

    Args:
        max_bytes: largest size of the answer in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._bytes_left = max_bytes
        self._tokens: list[tuple[int, bytes]] = []
        self._documents: list[bytes] = []

    def add_tokens(self, explanations: Sequence[TokenExplanation]) -> None:
        """Add explained tokens to the answer, in any order; `build_answer` sorts them by position.

        Raises:
            ApiError: 400 if the answer becomes too large.
        """
        self._tokens += [
            (token.position, self._encode_and_count(_token_fields(token))) for token in explanations
        ]

    def add_documents(self, effects: Sequence[DocumentEffect]) -> None:
        """Add the effects of documents (how much each changed the probability of the text) to the answer.

        Raises:
            ApiError: 400 if the answer becomes too large.
        """
        self._documents += [self._encode_and_count(asdict(effect)) for effect in effects]

    def build_answer(self, first_fields: dict[str, Any]) -> bytes:
        """Return the whole answer as JSON in UTF-8: ``{FIRST_FIELDS, "data": [...], "documents": [...]}``.

        Args:
            first_fields: the first fields of the answer, at least one. The field ``data`` has the tokens that
                were added, by position; ``documents`` has the effects of documents.
        """
        tokens = b",".join(text for _, text in sorted(self._tokens))
        documents = b",".join(self._documents)
        beginning = _encode_json(first_fields)[:-1]
        return b"".join([beginning, b',"data":[', tokens, b'],"documents":[', documents, b"]}"])

    def _encode_and_count(self, fields: dict[str, Any]) -> bytes:
        """Return an object as JSON, and subtract its bytes from the bytes that are left for the answer.

        Raises:
            ApiError: 400 if the answer becomes larger than allowed.
        """
        text = _encode_json(fields)
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise bad_request_error(
                f"the answer is larger than {self._max_bytes:,} bytes (`--max-answer`): ask for fewer "
                "neighbors, or explain a part of the text with the rest as `after`",
                "neighbors",
            )
        return text


def _encode_json(value: object) -> bytes:
    """Return a value as compact JSON, encoded as UTF-8. NaN and infinity raise ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _describe_settings(settings: KNNSettings) -> dict[str, Any]:
    """Return the retrieval settings in force that a request can change, for the field ``knn`` of an answer.

    A mixer is the rule that chooses λ (the weight of retrieval) for each token. `lam` is None if λ is not a
    fixed number. If a gate (a small network) chooses the weights, `mixer` is "gate"; otherwise it is
    the name of the mixer.
    """
    mixer, gate = settings.mixer, settings.gate
    return {
        "k": settings.k,
        "probes": settings.probes,
        "temperature": settings.temperature,
        "lam": mixer.lam if gate is None and isinstance(mixer, FixedLambda) else None,
        "mixer": mixer.name if gate is None else "gate",
    }


def _token_fields(token: TokenExplanation) -> dict[str, Any]:
    """Return a token's explanation as a JSON object.

    The field `lam` is called ``lambda``, as in the protocol.
    """
    return {"lambda" if name == "lam" else name: value for name, value in asdict(token).items()}
