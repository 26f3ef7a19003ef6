"""Requests of any kind: none is a fault of the server, and what is answered adds up."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TOKENS = st.integers(0, 298)
TEXTS = st.text(max_size=30)
PROMPTS = (
    TEXTS
    | st.lists(TOKENS, max_size=20)
    | st.lists(TEXTS, max_size=3)
    | st.lists(st.lists(TOKENS, max_size=9), max_size=3)
)
NUMBERS = st.floats() | st.integers(-3, 10**20)
KNN = st.fixed_dictionaries(
    {},
    optional={
        "domains": st.lists(st.sampled_from(["news", "letters", "x", ""]), max_size=2),
        "tags": st.lists(st.sampled_from(["sea", "old", "none"]), max_size=2),
        "k": st.integers(-1, 4000),
        "probes": st.integers(-1, 4),
        "temperature": st.floats(1e-13, 1e6) | NUMBERS,
        "lam": st.floats(0, 1) | NUMBERS,
        "sources": st.integers(0, 3),
    },
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["tiny", "tiny+news", "tiny+letters+news", "tiny+x"]),
        "prompt": PROMPTS,
        "max_tokens": st.integers(0, 6),
    },
    optional={
        "temperature": st.floats(0, 2) | NUMBERS,
        "top_p": st.floats(1e-9, 1) | NUMBERS,
        "n": st.integers(1, 3),
        "seed": st.integers(),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 5),
        "stream": st.booleans(),
        "knn": KNN,
    },
)


@pytest.mark.slow
def test_no_completion_is_a_fault_of_the_server(process):
    statuses: set[int] = set()

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(BODIES)
    def ask(body):
        try:
            answer = client.post("/v1/completions", json=body)
        except ValueError:  # a number that JSON does not have
            return
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"].count("\n") == 0
        elif body.get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        else:
            found, copies = answer.json(), body.get("n", 1)
            many = isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int)
            assert [one["index"] for one in found["choices"]] == list(
                range(copies * (len(body["prompt"]) if many else 1))
            )
            if "logprobs" in body and not body.get("echo"):
                assert (
                    sum(len(one["logprobs"]["tokens"]) for one in found["choices"])
                    == found["usage"]["completion_tokens"]
                )

    with httpx.Client(base_url=process.url, timeout=60) as client:
        ask()
    assert statuses == {200, 400, 404}
    assert process.call("GET", "/health").status_code == 200
    assert not [row for row in process.log() if "traceback" in row]
