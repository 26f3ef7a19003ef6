"""Completions as OpenAI's client reads them from a real process."""

import json
import math
import shutil
import socket
import threading

import numpy as np
import openai
import pytest
import torch

import knnstore
from knnstore import KNNSettings, Selection
from knnstore.lm import settings_for
from knnstore.server.connections import create_connection_class
from knnstore.server.engine import Observed, Ticket
from tests.server.conftest import listening, wait_until

HARBOUR = "The harbour was"


@pytest.fixture(scope="module")
def lm(prepared):
    opened = knnstore.load(prepared)
    with opened.store:
        yield opened


def settings_of(lm, *domains):
    return settings_for(lm.store, Selection(domains=domains)) if domains else KNNSettings(lam=0.0)


def log_probs(lm, tokens, settings):
    """log p of what comes after each token of a text, float64, shape (t, v)."""
    with torch.inference_mode():
        return (
            lm(torch.tensor([tokens]), knn=settings, use_cache=False)
            .logits[0]
            .double()
            .log_softmax(-1)
            .numpy()
        )


def test_models_are_the_scopes(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "tiny+letters", "tiny+news"]
    assert client.models.retrieve("tiny+news+letters").id == "tiny+news+letters"
    for name in ("tiny+nothing", "tinyx", "tiny+", "+letters", "letters"):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model=name, prompt="a")


@pytest.mark.parametrize("domains", [(), ("news",), ("letters", "news")])
def test_greedy_text_is_that_of_generate_in_the_scope(server, lm, domains):
    expected = lm.generate_text(HARBOUR, max_new_tokens=20, do_sample=False, knn=settings_of(lm, *domains))
    found = server.client().completions.create(
        model="+".join(["tiny", *reversed(domains)]), prompt=HARBOUR, max_tokens=20, temperature=0
    )
    assert found.choices[0].text == expected
    assert found.choices[0].finish_reason == "length"
    assert found.object == "text_completion"
    tokens = len(lm.reader.tokenize(HARBOUR))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (tokens, 20)


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_every_token_of_the_prompt(server, lm, as_ids):
    text = "Déjà vu in the harbour 🙂 wall"
    ids = lm.reader.tokenize(text).tolist()
    given = ids if as_ids else text
    found = server.client().completions.create(
        model="tiny+letters",
        prompt=[given] if as_ids else given,
        max_tokens=1,
        temperature=0,
        logprobs=3,
        echo=True,
        extra_body={"return_tokens_as_token_ids": True},  # some are written alike
    )
    choice, before = found.choices[0], [] if as_ids else [*lm.reader.prefix]
    expected = log_probs(lm, before + ids, settings_of(lm, "letters"))[len(before) :]
    listed = choice.logprobs
    assert len(listed.tokens) == len(ids) + 1 == len(listed.text_offset)
    assert listed.token_logprobs[0] is None
    assert listed.top_logprobs[0] is None
    last = int(expected[-1].argmax())
    gold = [expected[at, token] for at, token in enumerate([*ids[1:], last])]
    np.testing.assert_allclose(listed.token_logprobs[1:], gold, atol=1e-5)
    for row, top, number in zip(expected, listed.top_logprobs[1:], listed.token_logprobs[1:], strict=True):
        assert max(top.values()) == pytest.approx(row.max(), abs=1e-5)
        assert number in top.values()
    assert choice.text.startswith(text)
    assert [choice.text[at:][:1] for at in listed.text_offset[:-1]] == [
        text[len(lm.reader.decode(ids[:at]).rstrip("\ufffd")) :][:1] for at in range(len(ids))
    ]


def test_scoring_alone_and_ids_in_place_of_texts(server, lm):
    ids = [lm.reader.tokenize(text).tolist() for text in ("The council said", "winter storms in the morning")]
    found = server.client().completions.create(
        model="tiny",
        prompt=ids,
        max_tokens=0,
        logprobs=1,
        echo=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice, tokens in zip(found.choices, ids, strict=True):
        assert choice.text == lm.reader.decode(tokens)
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens]
        rows = log_probs(lm, tokens, settings_of(lm))
        gold = [rows[at, token] for at, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], gold, atol=1e-5)
    assert found.usage.completion_tokens == 0


def test_a_seed_makes_the_same_text_whatever_runs_beside_it(server):
    client = server.client()
    asked = {
        "model": "tiny+news",
        "prompt": ["Boats", "Grain"],
        "max_tokens": 25,
        "seed": 7,
        "n": 3,
        "temperature": 0.9,
        "top_p": 0.9,
    }
    alone = [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(alone)) == 6
    others = [
        threading.Thread(
            target=client.completions.create,
            kwargs={"model": "tiny+letters", "prompt": "In the", "max_tokens": 10 + 7 * at, "seed": at},
        )
        for at in range(9)
    ]
    for other in others:
        other.start()
    beside = [choice.text for choice in client.completions.create(**asked).choices]
    for other in others:
        other.join()
    assert beside == alone
    assert [choice.text for choice in client.completions.create(**{**asked, "seed": 8}).choices] != alone


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_answer_in_pieces(server, echo):
    client = server.client()
    asked = {
        "model": "tiny+letters",
        "prompt": ["Déjà", "The"],
        "max_tokens": 20,
        "seed": 3,
        "n": 2,
        "logprobs": 2,
        "echo": echo,
    }
    whole = client.completions.create(**asked)
    texts, offsets, ends, usage = {}, {}, {}, None
    for event in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert event.object == "text_completion"
        usage = event.usage or usage
        for choice in event.choices:
            assert choice.index not in ends
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert offsets == {choice.index: choice.logprobs.text_offset for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


@pytest.mark.slow
def test_a_text_ends_at_a_string_that_spans_tokens(server):
    client = server.client()
    asked = {"model": "tiny+letters", "prompt": "The harbour", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    for at in range(1, len(whole) - 4, 15):
        stop = whole[at : at + 4]
        expected = whole[: whole.index(stop)]
        found = client.completions.create(**asked, stop=["never", stop]).choices[0]
        assert (found.text, found.finish_reason) == (expected, "stop")
        pieces = [
            event.choices[0].text for event in client.completions.create(**asked, stop=stop, stream=True)
        ]
        assert "".join(pieces) == expected


def test_the_field_knn_narrows_and_tunes(server, lm):
    client = server.client()
    ids = lm.reader.tokenize("The council said the harbour wall").tolist()

    def scores(model, **knn):
        found = client.completions.create(
            model=model,
            prompt=ids,
            max_tokens=0,
            logprobs=0,
            echo=True,
            extra_body={"knn": knn} if knn else {},
        )
        return found.choices[0].logprobs.token_logprobs[1:]

    def expected(settings):
        rows = log_probs(lm, ids, settings)
        return [rows[at, token] for at, token in enumerate(ids[1:])]

    one = KNNSettings(k=7, temperature=30.0, lam=0.3, selection=Selection(domains=("news",)))
    given = {"domains": ["news"], "k": 7, "temperature": 30.0, "lam": 0.3}
    np.testing.assert_allclose(scores("tiny+letters+news", **given), expected(one), atol=1e-5)
    tagged = KNNSettings(
        k=7, temperature=30.0, lam=0.3, selection=Selection(domains=("letters",), tags=("old",))
    )
    found = scores("tiny+letters", tags=["old"], k=7, temperature=30.0, **{"lambda": 0.3})
    np.testing.assert_allclose(found, expected(tagged), atol=1e-5)
    np.testing.assert_allclose(scores("tiny+letters", lam=0), scores("tiny"), atol=1e-5)
    for model, knn in (
        ("tiny+news", {"domains": ["letters"]}),
        ("tiny", {"domains": ["news"]}),
        ("tiny+news", {"k": 2, "probes": 1}),
    ):
        with pytest.raises(openai.BadRequestError):
            scores(model, **knn)


def test_every_token_names_its_sources(server, lm):
    found = server.client().completions.create(
        model="tiny+news",
        prompt="The council",
        max_tokens=6,
        temperature=0,
        extra_body={"knn": {"sources": 2}},
    )
    choice = found.choices[0]
    sources = choice.knn["sources"]
    assert "".join(one["text"] for one in sources) == choice.text
    expected = lm.explain(choice.text, settings_of(lm, "news"), neighbors=2, after="The council")
    for one, other in zip(sources, expected, strict=True):
        assert one["p"] == pytest.approx(other.p, abs=1e-5)
        assert [near["document"] for near in one["neighbors"]] == [near.document for near in other.neighbors]
        assert {near["domain"] for near in one["neighbors"]} == {"news"}


def test_explain_and_the_tokenizer(server, lm):
    asked = {"model": "tiny+news", "after": "The", "text": " council voted", "neighbors": 1}
    found = server.call("POST", "/v1/explain", json=asked).json()["data"]
    expected = lm.explain(" council voted", settings_of(lm, "news"), neighbors=1, after="The")
    assert [one["p"] for one in found] == pytest.approx([one.p for one in expected], abs=1e-5)
    assert [one["lambda"] for one in found] == [one.lam for one in expected]
    tokens = server.call("POST", "/tokenize", json={"prompt": "Déjà vu", "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert tokens == lm.reader.tokenize("Déjà vu").tolist()
    assert server.call("POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": "Déjà vu"}
    assert server.call("GET", "/tokenizer_info").json()["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a " * 200}, "prompt"),
        ({"max_tokens": 97}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": math.pi * 1e-9, "top_p": 0}, "top_p"),
        ({"logprobs": 100}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"top_k": 3}, "top_k"),
        ({"knn": {"kk": 3}}, "knn.kk"),
        ({"knn": {"domains": []}}, "knn.domains"),
        ({"prompt": ["a"] * 64, "n": 3}, None),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(server, wrong, param):
    body = {"model": "tiny+news", "prompt": "a", "max_tokens": 1, **wrong}
    found = server.call("POST", "/v1/completions", json=body)
    if wrong == {"prompt": ""}:  # there is a token to begin with
        assert found.status_code == 200
        return
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (400, "invalid_request_error")
    assert "\n" not in error["message"]
    if param:
        assert error["param"].startswith(param)


def test_other_errors_have_the_same_shape(server):
    answers = {
        404: server.call("GET", "/v1/nothing"),
        405: server.call("PUT", "/v1/models"),
        400: server.call("POST", "/v1/completions", content=b"{", kind="application/json"),
        413: server.call("POST", "/v1/completions", content=b" " * ((4 << 20) + 1)),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    chunks = (b" " * 65_536 for _ in range(70))  # of no length that is told beforehand
    large = server.call("POST", "/v1/completions", content=chunks, kind="application/json")
    assert large.status_code == 413
    with pytest.raises(openai.BadRequestError, match="no template"):
        server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


@pytest.fixture(scope="module")
def within(inside, prepared, tmp_path_factory):
    """A server in this process, whose engine a test can stop between two steps."""
    return inside(shutil.copytree(prepared, tmp_path_factory.mktemp("within") / "home"), require_keys=False)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_ends_its_texts(within, monkeypatch, streamed):
    """The engine stands still after a step, until the server has seen that the client is gone."""
    engine = within.serving.engine
    standing, free = threading.Event(), threading.Event()
    written: list[int] = []
    tickets: list[Ticket] = []

    def observe(turn: Observed) -> None:
        written.append(turn.tokens)
        if turn.rows and not standing.is_set():
            tickets.extend(engine._tickets.values())
            standing.set()
            assert free.wait(120)

    monkeypatch.setattr(engine, "_observe", observe)
    body = {"model": "tiny+news", "prompt": "The", "max_tokens": 90, "n": 16, "temperature": 1.6}
    sent = json.dumps({**body, "stream": streamed}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    try:
        with listening(within.app, create_connection_class(20)) as server:
            with socket.create_connection(server.address) as client:
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
                if streamed:
                    client.settimeout(120)
                    assert client.recv(1)
                assert standing.wait(120)
            before = sum(written)
            wait_until(lambda: all(ticket.cancelled for ticket in tickets))
            free.set()
            engine.call(lambda: None).result(120)
            engine.call(lambda: None).result(120)
            assert not engine.rows
    finally:
        free.set()
    assert 16 <= before < 16 * 90
    assert sum(written) == before, "texts that nobody waits for are written on"
