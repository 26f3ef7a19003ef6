"""Limits of keys: requests at once and tokens a minute, each key for itself."""

import asyncio
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from knnstore.cli import app as cli
from knnstore.server.access import Quota
from knnstore.server.errors import ApiError

COMPLETION = {"model": "tiny+news", "prompt": "The council", "max_tokens": 20, "temperature": 0}


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 60), st.integers(0, 60)), max_size=20),
)
def test_tokens_fill_in_a_minute(limit, asked):
    now, level, last = [0.0], float(limit), 0.0
    quota = Quota(tokens=limit, now=lambda: now[0])
    for seconds, first, later in asked:
        now[0] += seconds
        level = min(limit, level + limit * (now[0] - last) / 60)
        last = now[0]
        if level <= 0:
            with pytest.raises(ApiError) as refused:
                quota.check_and_spend(first)
            wait = int(refused.value.headers["Retry-After"])
            assert refused.value.status == 429
            assert wait >= 1
            now[0] += wait  # until then there is something again, or it is a second at least
            assert level + limit * wait / 60 >= -1e-6
        else:
            quota.check_and_spend(first)
            quota.spend_unchecked(later)
            level -= first + later


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory):
    return inside(shutil.copytree(prepared, tmp_path_factory.mktemp("limits") / "home"))


def limited(server, **limits) -> str:
    from knnstore.catalog import Right

    return server.keys.add([Right.PREDICT, Right.READ], **limits)[1]


def at_once(server, key: str, count: int) -> list[int]:
    headers = {"Authorization": f"Bearer {key}"}

    async def ask() -> list[int]:
        posts = [
            server.client.post("/v1/completions", json=COMPLETION, headers=headers) for _ in range(count)
        ]
        return sorted(answer.status_code for answer in await asyncio.gather(*posts))

    return server.loop.run_until_complete(ask())


@pytest.mark.slow
def test_so_many_requests_at_once(server):
    key, other = limited(server, requests=2), limited(server)
    assert at_once(server, key, 5) == [200, 200, 429, 429, 429]
    assert at_once(server, key, 2) == [200, 200], "ended requests are still counted"
    assert at_once(server, other, 5) == [200] * 5
    refused = server.call("POST", "/v1/completions", key, json={**COMPLETION, "model": "x"})
    assert refused.status_code == 404
    assert at_once(server, key, 2) == [200, 200], "failed requests are still counted"


def test_so_many_tokens_a_minute(server):
    key, other = limited(server, tokens=30), limited(server)
    used = server.call("POST", "/v1/completions", key, json=COMPLETION).json()["usage"]["total_tokens"]
    assert 20 < used < 30
    assert server.call("POST", "/v1/completions", key, json={**COMPLETION, "n": 3}).status_code == 200
    for path, body in (
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, "stream": True}),
        ("/v1/explain", {"model": "tiny+news", "text": "The council"}),
    ):
        refused = server.call("POST", path, key, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 60 < int(refused.headers["retry-after"]) <= 200  # three texts of twenty are missing
    assert server.call("GET", "/v1/models", key).status_code == 200
    assert server.call("POST", "/v1/completions", other, json=COMPLETION).status_code == 200


def test_limits_are_given_on_the_command_line(home, make_key):
    make_key(home, "--right", "predict", "--requests", "4", "--tokens", "60000")
    make_key(home, "--right", "predict")
    rows = json.loads(CliRunner().invoke(cli, ["--home", str(home), "key", "list", "--json"]).stdout)
    assert [(row["requests"], row["tokens"]) for row in rows] == [(4, 60_000), ("any", "any")]
