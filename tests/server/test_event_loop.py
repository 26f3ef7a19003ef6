"""The event loop answers while other threads work on large requests, and refuses what would take long."""

import asyncio
import json
import shutil
import threading

import pytest

from tests.server.conftest import Inside
from tests.server.test_turns import STREAM, Client, until

BIG = 4_000_000


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory) -> Inside:
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("loop") / "home")
    return inside(home, require_keys=False)


@pytest.fixture
def held(server):
    """The tokenizer is in use, by a thread that this test holds, as by a tokenization that takes long."""
    begun, free = threading.Event(), threading.Event()
    holder = threading.Thread(
        target=lambda: server.serving.call_with_tokenizer(lambda _: (begun.set(), free.wait(240)))
    )
    holder.start()
    assert begun.wait(240)
    yield free
    free.set()
    holder.join()


def test_the_loop_waits_for_no_tokenization(server, held):
    """Tokens are decoded for a stream, and health is told, while a text is tokenized."""
    asked = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "logprobs": 5, "stream": True}

    async def ask() -> None:
        stream = Client(server, "/v1/completions", asked)
        async with asyncio.timeout(240):
            await stream.run()
            assert stream.status == 200
            assert stream.events > 2
            waiting = [
                asyncio.ensure_future(Client(server, "/tokenize", {"prompt": "a" * 1000}).run())
                for _ in range(60)
            ]
            await asyncio.sleep(0)
            for path in ("/health/live", "/health"):
                assert (await server.client.get(path)).status_code == 200
            models = await server.client.get("/v1/models")  # in a thread that no tokenization has taken
            assert models.status_code == 200
            assert not any(one.done() for one in waiting)
            held.set()
            await asyncio.gather(*waiting)

    server.loop.run_until_complete(ask())


def test_bodies_are_parsed_in_other_threads(server, monkeypatch):
    """A body is held while it is parsed; meanwhile a stream goes on and health is told."""
    from knnstore.server import bodies

    begun, free, threads = threading.Event(), threading.Event(), []
    parse = bodies.json.loads

    class Held:
        JSONDecodeError = json.JSONDecodeError

        @staticmethod
        def loads(body):
            threads.append(threading.get_ident())
            if b"held" in body:
                begun.set()
                assert free.wait(240)
            return parse(body)

    monkeypatch.setattr(bodies, "json", Held)

    async def ask() -> None:
        large = Client(server, "/v1/completions", {"model": "tiny", "prompt": "held", "max_tokens": 1})
        stream = Client(server, "/v1/completions", STREAM)
        parsing = asyncio.ensure_future(large.run())
        await until(begun.is_set)
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: stream.events > 4)
        assert (await server.client.get("/health/live")).status_code == 200
        assert not parsing.done()
        free.set()
        await parsing
        assert large.status == 200
        stream.left.set()
        await streaming

    server.loop.run_until_complete(ask())
    assert threading.get_ident() not in threads


MANY_MESSAGES = [{"role": "user", "content": "a"}] * 5000
LONG_MESSAGE = [{"role": "user", "content": "a" * BIG}]
DEEP = [{"id": "a", "text": "b", "m": [[]] * 60_000}]
TOO_MUCH = {
    "a long prompt": ("/v1/completions", {"prompt": "a" * BIG}, "prompt"),
    "a long prompt of many": ("/v1/completions", {"prompt": ["a", "a" * BIG]}, "prompt"),
    "many ids": ("/v1/completions", {"prompt": [1] * 490_000}, "prompt"),
    "a long message": ("/v1/chat/completions", {"messages": LONG_MESSAGE}, "messages"),
    "many messages": ("/v1/chat/completions", {"messages": MANY_MESSAGES}, "messages"),
    "a long explanation": ("/v1/explain", {"text": "a" * BIG}, "text"),
    "a long beginning": ("/v1/explain", {"text": "a", "after": "a" * BIG}, "text"),
    "a long text of tokens": ("/tokenize", {"prompt": "a" * BIG}, "prompt"),
    "many tokens": ("/detokenize", {"tokens": [1] * 400_000}, "tokens"),
    "a long stop string": ("/v1/completions", {"prompt": "a", "stop": "a" * 2000}, None),
    "many lists": ("/v1/completions", {"prompt": [[]] * 600_000}, None),
    "many values": ("/v1/completions", {"prompt": [1] * 600_000}, None),
    "many wrong values": ("/v1/completions", {"prompt": ["a", 1] * 100_000}, None),
    "many fields": ("/v1/completions", {"prompt": "a", **dict.fromkeys(map(str, range(90_000)), 1)}, None),
    "many nested lists": ("/v1/documents", {"domain": "d", "documents": DEEP}, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_would_take_long_is_refused_before_it_is_tokenized(server, held, kind):
    """Nothing of it needs the tokenizer, which another thread has."""
    path, body, param = TOO_MUCH[kind]
    model = {} if path == "/v1/documents" else {"model": "tiny"}
    if kind == "a long prompt of many":
        held.set()  # the short one is tokenized
    answer = server.call("POST", path, json={**model, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert len(error["message"]) < 500
    if param:
        assert error["param"] == param


def test_a_text_with_many_commas_is_no_list(server):
    text = "a, [b], {c}: d, " * 100_000
    answer = server.call("POST", "/tokenize", json={"prompt": text + '"\\"' * 3})
    assert answer.json()["error"]["param"] == "prompt", "it is counted as values"


def test_a_body_that_is_compressed_or_no_text_is_refused(server):
    for content, encoding in ((b"\x1f\x8b" + b"\0" * 1000, "gzip"), (b'{"prompt": "\xff"}', "identity")):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        assert server.call("POST", "/tokenize", content=content, headers=headers).status_code == 400
