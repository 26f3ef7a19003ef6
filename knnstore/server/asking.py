"""Models, tokens and why they are likely: ``/v1/models``, ``/tokenize`` and the like, ``/v1/explain``."""

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from knnstore.catalog import Right
from knnstore.lm import Explanation, FixedLambda, KNNSettings, TokenExplanation, explain_tokens
from knnstore.server.access import Access, Endpoints, access
from knnstore.server.engine import Prompt
from knnstore.server.errors import refused
from knnstore.server.protocol import MOST_EXPLAINED, DetokenizeRequest, ExplainRequest, TokenizeRequest
from knnstore.server.scopes import named
from knnstore.server.serving import Serving, unless_left


def declare_asking(routes: Endpoints, serving: Serving) -> None:
    """Declare the endpoints that write no text."""

    def models_of(who: Access) -> list[dict[str, Any]]:
        store = serving.lm.store
        seen = who.seen(domain.name for domain in store.domains())
        names = [named(serving.name), *(named(serving.name, (domain,)) for domain in seen)]
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
        """List the model alone, and with each domain."""
        return {"object": "list", "data": models_of(access(request))}

    @routes.add("GET", "/v1/models/{name:path}", Right.PREDICT)
    def model(request: Request, name: str) -> dict[str, Any]:
        """Show a model, which may have several domains."""
        serving.lm  # noqa: B018
        serving.scopes.scope(name, None, access(request))
        return {**models_of(access(request))[0], "id": name}

    @routes.add("POST", "/tokenize", Right.PREDICT)
    def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text."""
        serving.lm  # noqa: B018
        tokens = serving.tokens(body.prompt, special=body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": serving.window}

    @routes.add("POST", "/detokenize", Right.PREDICT)
    def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of some tokens."""
        if max(body.tokens, default=0) >= serving.lm.store.identity.vocab_size:
            raise refused("a token is not in the vocabulary", "tokens")
        return {"prompt": serving.text(body.tokens) if body.tokens else ""}

    @routes.add("GET", "/tokenizer_info", Right.PREDICT)
    def tokenizer_info() -> dict[str, Any]:
        """What evaluation harnesses need to know of the tokenizer."""
        tokenizer = serving.lm.tokenizer
        assert tokenizer is not None
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "chat_template": tokenizer.chat_template,
            "model_max_length": serving.window,
        }

    @routes.add("POST", "/v1/explain", Right.READ)
    async def explain(request: Request, body: ExplainRequest) -> Response:
        """Say how probable each token of a text is, and where that comes from."""
        lm = serving.lm
        scope = await run_in_threadpool(serving.scopes.scope, body.model, body.knn, access(request))
        start = len(await run_in_threadpool(serving.tokens, body.after))
        tokens = await run_in_threadpool(serving.tokens, body.after + body.text)
        if len(tokens) > MOST_EXPLAINED:
            raise refused(
                f"the text has {len(tokens):,} tokens, at most {MOST_EXPLAINED:,} are explained at once",
                "text",
            )

        access(request).quota.spend(len(tokens))

        def work() -> tuple[KNNSettings, Explanation]:
            settings, given = serving.scopes.settings(scope), np.array(tokens, np.uint32)
            return settings, explain_tokens(lm, given, settings, neighbors=body.neighbors, start=start)

        settings, found = await unless_left(request, serving.call(work))
        answer = {
            "object": "list",
            "model": body.model,
            "data": [_shown(one) for one in found],
            "documents": [asdict(one) for one in found.documents],
            "knn": _in_force(settings),
        }
        return JSONResponse(answer)  # at once: it holds numbers and texts alone, and many


async def sources_of(
    serving: Serving, scope: Hashable, prompt: Prompt, written: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """Say where each token of a text comes from that was written after a prompt."""
    before = prompt.tokens[1:] if prompt.tokens[0] == serving.prefix else prompt.tokens
    tokens = np.array([*before, *written], np.uint32)

    def work() -> Explanation:
        settings = serving.scopes.settings(scope).for_writing
        return explain_tokens(serving.lm, tokens, settings, neighbors=count, start=len(before))

    found = await serving.call(work)
    return [_shown(one) for one in found]


def _in_force(settings: KNNSettings) -> dict[str, Any]:
    """The settings of an answer that a request may change; no λ where a mixer chooses one for each token."""
    mixer, gate = settings.mixer, settings.gate
    return {
        "k": settings.k,
        "probes": settings.probes,
        "temperature": settings.temperature,
        "lam": mixer.lam if gate is None and isinstance(mixer, FixedLambda) else None,
        "mixer": mixer.name if gate is None else "gate",
    }


def _shown(token: TokenExplanation) -> dict[str, Any]:
    return {"lambda" if name == "lam" else name: value for name, value in asdict(token).items()}
