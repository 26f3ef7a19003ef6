"""Requests to a server, one by one, and of all kinds at random times."""

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from knnstore.documents import TextDocument

PROMPT, NEW = 80, 64
"""Tokens."""
MANY = 8

Body = dict[str, Any]


class Load:
    """Requests to one server.

    Args:
        url: of the server.
        key: what it asks for; may be empty.
        model: the model's name with a domain.
    """

    def __init__(self, url: str, key: str, model: str) -> None:
        self.client = httpx.AsyncClient(
            base_url=url, timeout=120, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        self.model = model

    async def stream(self, prompt: str, **more: Any) -> tuple[float, int]:
        """Have a text written; seconds to its first token, and how many it has."""
        started, first, tokens = time.perf_counter(), 0.0, 0
        body = {"model": self.model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, **more}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                if event["choices"]:
                    first = first or time.perf_counter() - started
                else:
                    tokens = event["usage"]["completion_tokens"]
        return first, tokens

    async def score(self, tokens: list[int]) -> int:
        """Score a text as evaluation harnesses do; how many tokens were predicted."""
        body = {"model": self.model, "prompt": [tokens], "max_tokens": 1, "temperature": 0}
        answer = await self.client.post("/v1/completions", json={**body, "logprobs": 1, "echo": True})
        answer.raise_for_status()
        found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert len(found) == len(tokens) + 1, "not every token was scored"
        return len(tokens) - 1

    async def explain(self, text: str) -> None:
        """Do what the page does when it is opened and explains a text."""
        page = await self.client.get("/")
        for path in {"/page/" + name for name in re.findall(r"page/([\w.-]+)", page.text)}:
            (await self.client.get(path)).raise_for_status()
        body = {"model": self.model, "text": text, "neighbors": 6}
        (await self.client.post("/v1/explain", json=body)).raise_for_status()

    async def at_once(self, count: int, works: list[Callable[[], Coroutine[Any, Any, int]]]) -> float:
        """Do some work, so much of it at a time; what it counts, a second."""
        left, started = iter(works), time.perf_counter()

        async def worker() -> int:
            return sum([await work() for work in left])

        counted = await asyncio.gather(*(worker() for _ in range(count)))
        return sum(counted) / (time.perf_counter() - started)


class Mixture:
    """Requests of all kinds, drawn at random."""

    def __init__(self, load: Load, texts: list[TextDocument], prompts: list[str]) -> None:
        self.load = load
        self.outcomes: Counter[str] = Counter()
        self._texts = texts
        self._prompts = prompts
        self._random = random.Random(0)
        self._number = 0

    async def one(self) -> int:
        """Send one and count what becomes of it."""
        drawn, self._number = self._random, self._number + 1
        kind = drawn.choices(["stream", "whole", "score", "look", "change"], [6, 3, 2, 2, 1])[0]
        try:
            await getattr(self, f"_{kind}")(drawn.choice(self._prompts), str(self._number))
            self.outcomes[kind] += 1
        except (httpx.HTTPError, RuntimeError, AssertionError) as error:
            status = (
                error.response.status_code
                if isinstance(error, httpx.HTTPStatusError)
                else type(error).__name__
            )
            self.outcomes[f"{kind} failed: {status}"] += 1
        return 1

    @property
    def failed(self) -> int:
        """How many requests failed."""
        return sum(count for name, count in self.outcomes.items() if "failed" in name)

    async def _stream(self, prompt: str, _: str) -> None:
        knn = {"lam": self._random.random()} if self._random.random() < 0.5 else {}
        options = {
            "temperature": self._random.choice([0, 0.7, 1]),
            "max_tokens": self._random.randint(1, NEW),
        }
        await self.load.stream(prompt, knn=knn, **options)

    async def _whole(self, prompt: str, _: str) -> None:
        body = {"model": self.load.model, "prompt": prompt, "max_tokens": self._random.randint(1, NEW)}
        await self._sent("POST", "/v1/completions", json={**body, "n": 2, "logprobs": 2})

    async def _score(self, prompt: str, _: str) -> None:
        body = {"model": self.load.model, "prompt": self._random.choice(self._texts).text, "max_tokens": 0}
        await self._sent("POST", "/v1/completions", json={**body, "echo": True, "logprobs": 1})

    async def _look(self, prompt: str, _: str) -> None:
        await self._sent("GET", "/v1/models")
        await self._sent("GET", "/v1/documents", params={"limit": 20, "text": True})
        await self._sent(
            "POST", "/v1/explain", json={"model": self.load.model, "text": prompt, "neighbors": 2}
        )

    async def _change(self, prompt: str, name: str) -> None:
        document = {"id": name, "text": prompt}
        await self._sent("POST", "/v1/documents", json={"domain": "load", "documents": [document]})
        await self._sent("DELETE", "/v1/documents", params={"domain": "load", "id": name})

    async def _sent(self, method: str, path: str, **options: Any) -> None:
        (await self.load.client.request(method, path, **options)).raise_for_status()


async def mixed(mixture: Mixture, seconds: float, memory: Callable[[], int]) -> Body:
    """Half of what the server can do, for some time."""
    started = time.perf_counter()
    capacity = await mixture.load.at_once(MANY, [mixture.one for _ in range(max(24, int(seconds / 3)))])
    arriving, began = random.Random(1), time.perf_counter()
    mixture.outcomes.clear()
    running: set[asyncio.Task[int]] = set()
    sizes: list[tuple[float, int]] = []
    while (elapsed := time.perf_counter() - began) < seconds:
        await asyncio.sleep(arriving.expovariate(capacity / 2))
        task = asyncio.ensure_future(mixture.one())
        running.add(task)
        task.add_done_callback(running.discard)
        if not sizes or elapsed - sizes[-1][0] > seconds / 60:
            sizes.append((elapsed, memory()))
    await asyncio.gather(*running)
    settled = min(300, seconds / 2)
    before = [size for at, size in sizes if settled <= at <= settled + seconds / 10] or [memory()]
    last = [size for at, size in sizes if at >= seconds * 0.9] or [memory()]
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "requests_a_second_at_most": round(capacity, 2),
        "requests": sum(mixture.outcomes.values()),
        "failed": mixture.failed,
        "outcomes": dict(mixture.outcomes),
        "mebibytes": round(statistics.median(before) / 2**20, 1),
        "growth": round(statistics.median(last) / statistics.median(before) - 1, 4),
    }
