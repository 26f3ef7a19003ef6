"""Long work is done in turns: texts go on between them, and there is no turn for a client that has left."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

import knnstore
from knnstore.catalog import Catalog
from knnstore.lm import NGramSettings, resolve, save_settings
from knnstore.server.engine import Observed, admission
from knnstore.server.serving import Limits
from knnstore.store import counting
from tests.server.conftest import Inside

LONG = "The council said the harbour wall was in the storm, and the boats were lost. " * 8
STREAM = {
    "model": "tiny+news", "prompt": "The", "max_tokens": 90, "temperature": 1, "seed": 3, "stream": True,
    "n": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory) -> Inside:
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("turns") / "home")
    return inside(home, require_keys=False)


@pytest.fixture
def observed(server):
    """What the engine did, turn by turn; its thread waits while the test holds `going`."""
    seen: list[Observed] = []
    observe = server.serving.engine._observe
    server.serving.engine._observe = lambda turn: (seen.append(turn), observe(turn))
    yield seen
    server.serving.engine._observe = observe


class Client:
    """A request to an application without a socket: its events are read one by one, and it can leave."""

    def __init__(self, server: Inside, path: str, body: object, key: str = "") -> None:
        self._server, self._body = server, json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"inside")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": b"", "headers": headers, "scheme": "http", "server": ("inside", 80),
            "client": ("x", 1), "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.left = asyncio.Event()
        self.sent: list[dict] = []

    async def run(self) -> None:
        given = iter([{"type": "http.request", "body": self._body, "more_body": False}])

        async def receive():
            if (message := next(given, None)) is not None:
                return message
            await self.left.wait()
            return {"type": "http.disconnect"}

        await self._server.app(self._scope, receive, self.send)

    async def send(self, message) -> None:
        """Take what is sent."""
        self.sent.append(message)

    @property
    def events(self) -> int:
        return sum(message.get("body", b"").count(b"data: ") for message in self.sent)

    def tokens(self) -> list[int]:
        """Return the tokens of a stream that was asked for with `return_tokens_as_token_ids`."""
        body = b"".join(message.get("body", b"") for message in self.sent)
        return [int(id) for id in re.findall(rb'"token_id:(\d+)"', body)]

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.sent if "status" in one), None)


async def until(is_there: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not is_there():
            await asyncio.sleep(0.001)


HEAVY = {
    "explanation": ("/v1/explain", {"model": "tiny+news", "text": LONG, "neighbors": 64}),
    "echo": (
        "/v1/completions",
        {"model": "tiny+news", "prompt": [LONG[:70]] * 40, "max_tokens": 0, "echo": True, "logprobs": 20},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEAVY)
def test_streams_go_on_between_the_turns_of_long_work(server, observed, kind):
    path, body = HEAVY[kind]

    async def ask() -> int:
        stream, heavy = Client(server, "/v1/completions", STREAM), Client(server, path, body)
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        before = len(observed)
        await heavy.run()
        assert heavy.status == 200, heavy.sent
        turns = observed[before:]
        stream.left.set()
        await streaming
        return sum(bool(turn.rows) for turn in turns)

    steps = server.loop.run_until_complete(ask())
    assert steps >= 5, "the texts stood still"


@pytest.mark.slow
def test_each_turn_of_an_explanation_has_a_step_behind_it(server, observed):
    async def ask() -> None:
        stream = Client(server, "/v1/completions", STREAM)
        heavy = [Client(server, *HEAVY["explanation"]) for _ in range(3)]
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        await asyncio.gather(*(one.run() for one in heavy))
        assert [one.status for one in heavy] == [200] * 3
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())
    beside = [turn for turn in observed if turn.rows and turn.turns]
    assert len(beside) >= 5
    assert {turn.turns for turn in beside} == {1}, (
        "three explanations at once stop the texts no longer than one"
    )


def test_an_explanation_ends_when_its_client_has_left(server, observed):
    async def ask() -> None:
        heavy = Client(server, *HEAVY["explanation"])
        running = asyncio.ensure_future(heavy.run())
        await until(lambda: any(turn.turns for turn in observed))
        heavy.left.set()
        await running
        assert heavy.status == 499
        done = len(observed)
        await asyncio.wrap_future(server.serving.engine.call(lambda: None))
        await asyncio.wrap_future(server.serving.engine.call(lambda: None))
        # At most the turn that ran while the client left; the two calls have a turn each.
        assert sum(turn.turns for turn in observed[done:]) <= 3
        await until(lambda: server.serving.engine._waiting_count == 0)

    server.loop.run_until_complete(ask())


def test_an_explanation_in_turns_says_what_the_model_says(server):
    text = LONG[:300]
    answer = server.call("POST", "/v1/explain", json={"model": "tiny+news", "text": text, "neighbors": 3})
    serving = server.serving
    scope = serving.scopes.list_warm_up_scopes()[1]
    expected = serving.engine.call(
        lambda: serving.lm.explain(text, serving.scopes.resolve_settings(scope), neighbors=3)
    ).result()
    found = answer.json()
    assert scope.domains == ("news",)
    assert [one["text"] for one in found["data"]] == [one.text for one in expected]
    assert [one["p"] for one in found["data"]] == pytest.approx([one.p for one in expected], rel=1e-3)
    assert {one["document"] for one in found["documents"]} == {one.document for one in expected.documents}


def test_what_is_too_much_is_refused_by_name(server):
    def refused(path: str, **body: object) -> str:
        answer = server.call("POST", path, json={"model": "tiny+news", **body})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["param"]

    assert refused("/v1/explain", text="The boat", knn={"k": 16_385}) == "knn.k"
    assert refused("/v1/explain", text="The boat", knn={"probes": 129}) == "knn.probes"
    assert refused("/v1/completions", prompt="The boat", knn={"k": 16_385}) == "knn.k"
    assert refused("/v1/explain", text="boat " * 700, neighbors=64) == "neighbors"
    assert refused("/v1/explain", text="a" * 2_000_000) == "text"
    limits = server.serving.limits
    try:
        server.serving.limits = Limits(answer_bytes=5000)
        assert refused("/v1/explain", text=LONG, neighbors=8) == "neighbors"
    finally:
        server.serving.limits = limits


def test_texts_that_search_for_much_hold_up_no_others(server, observed):
    many = {"model": "tiny+news", "prompt": "The", "max_tokens": 12, "n": 8, "knn": {"k": 16_384}}

    async def ask() -> None:
        stream = Client(server, "/v1/completions", {**STREAM, "n": 3})
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        heavy = Client(server, "/v1/completions", many)
        await heavy.run()
        assert heavy.status == 200, heavy.sent
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())
    rows = [turn.rows for turn in observed if turn.rows]
    first = rows.index(4)  # of the eight, as many as search for 65,536 neighbors together
    steps = rows[first - 1 : first + 16]
    assert steps == [3, 4] * 8 + [3], "each step of many is between two of the others"


def test_prompts_scored_with_several_settings_share_one_turn(server, observed, monkeypatch):
    scored: list[int] = []
    score_targets = admission.score_targets

    def record(lm, parts, came, *rest):
        scored.append(sum(map(len, came)))
        return score_targets(lm, parts, came, *rest)

    monkeypatch.setattr(admission, "score_targets", record)
    monkeypatch.setattr(admission, "_SHORT_SECONDS", 0.0)  # however fast it is, no turn becomes longer
    observe = server.serving.engine._observe
    server.serving.engine._observe = lambda turn: (scored.append(0), observe(turn))

    async def ask() -> None:
        stream = Client(server, "/v1/completions", STREAM)
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        heavy = [
            Client(
                server, "/v1/completions",
                {
                    "model": "tiny+news", "prompt": LONG[:90], "max_tokens": 0, "echo": True, "logprobs": 1,
                    "knn": {"k": 16_383 - number},
                },
            )
            for number in range(5)
        ]  # fmt: skip
        await asyncio.gather(*(one.run() for one in heavy))
        assert [one.status for one in heavy] == [200] * 5
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())
    turns = [sum(map(int, turn.split())) for turn in " ".join(map(str, scored)).split(" 0")]
    assert sum(turns) >= 5 * 20
    assert max(turns) <= 4, "65,536 neighbors are searched for in a turn, whosever they are"


@pytest.fixture
def counted(inside, prepared, tmp_path):
    """An application over a store whose settings have n-grams."""
    home = shutil.copytree(prepared, tmp_path / "home")
    with knnstore.KNNStore.open(home, "a") as store:
        settings = replace(resolve(store), ngrams=NGramSettings(order=4, lam=0.5))
        save_settings(store, settings)
    return inside(home, require_keys=False)


def test_conditions_are_resolved_and_n_grams_counted_beside_the_engine(counted, monkeypatch):
    threads: dict[str, set[str]] = {"condition": set(), "n-grams": set()}

    def recorded(what, work):
        def record(*given):
            threads[what].add(threading.current_thread().name)
            return work(*given)

        return record

    monkeypatch.setattr(Catalog, "rows_where", recorded("condition", Catalog.rows_where))
    monkeypatch.setattr(counting, "NGramCounts", recorded("n-grams", counting.NGramCounts))

    async def ask() -> None:
        stream = Client(counted, "/v1/completions", STREAM)
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        knn = {"where": "not draft = true"}
        for path, asked in (
            ("/v1/completions", {"prompt": "The", "max_tokens": 2, "knn": knn}),
            ("/v1/explain", {"text": "The boat", "knn": {"where": "not draft = false"}}),
        ):
            one = Client(counted, path, {"model": "tiny+news", **asked})
            await one.run()
            assert one.status == 200, one.sent
        new = {"id": "new", "text": "Zebra zebra zebra zebra."}
        one = Client(counted, "/v1/documents", {"domain": "news", "documents": [new]})
        await one.run()
        assert one.status == 200, one.sent
        assert not streaming.done()
        stream.left.set()
        await streaming

    counted.loop.run_until_complete(ask())
    assert all(threads.values())
    assert "knnstore-engine" not in set().union(*threads.values())
    text = {"model": "tiny+news", "text": "Zebra zebra zebra zebra.", "neighbors": 8}
    named = counted.call("POST", "/v1/explain", json=text).json()["documents"]
    assert "new" in {one["document"] for one in named}, "what an answered request has added counts"


def test_texts_that_search_for_much_begin_a_few_at_a_time(server, observed):
    before: list[int] = []

    async def ask() -> None:
        stream = Client(server, "/v1/completions", {**STREAM, "n": 3})
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        heavy = [
            Client(
                server, "/v1/completions",
                {"model": "tiny+news", "prompt": "The", "max_tokens": 1, "knn": {"k": 16_384 - number}},
            )
            for number in range(12)
        ]  # fmt: skip
        before.append(len(observed))
        await asyncio.gather(*(one.run() for one in heavy))
        assert [one.status for one in heavy] == [200] * 12
        # A turn is observed after its pieces were told.
        await asyncio.wrap_future(server.serving.engine.call(lambda: None))
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())
    begun = [turn.tokens - turn.rows for turn in observed[before[0] :]]
    beside = [count for count in begun if count > 0]
    assert sum(beside) >= 12
    assert max(beside) <= 4, "65,536 neighbors are searched for between two steps"
