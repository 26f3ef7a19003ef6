"""A server as a process: its beginning, its end, its log, and how much it takes."""

import json
import re
import signal
import socket
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from knnstore.catalog import NewDocument
from knnstore.distributed import PlanFolder, commit_plan, encode_shards, make_plan
from knnstore.server import running
from knnstore.store import KNNStore
from tests.forked import run_forked

LONG = {"model": "tiny+news", "prompt": "The", "max_tokens": 90, "temperature": 1.6}


def test_it_is_there_before_its_model_and_ends_what_runs(serve):
    """One process from its start to its end, with a client and a log of a line for each request."""
    server = serve()
    assert server.call("GET", "/health/live").status_code == 200
    early = server.call("GET", "/v1/models")
    assert early.status_code in (200, 503)
    server.ready()
    assert server.call("GET", "/health").json() == {"status": "ready"}
    listed = server.call("GET", "/v1/models")
    server.call("GET", "/v1/documents", params={"id": "hush-hush"})
    texts, finished = [], []
    begun, ending = threading.Event(), threading.Event()

    def read() -> None:
        stream = server.client().completions.create(**LONG, n=16, seed=1, stream=True)
        for event in stream:
            begun.set()
            assert ending.wait(240)  # what comes later is read after the signal
            texts.append(event.choices[0].text)
            finished.append(event.choices[0].finish_reason)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(240)
    server.process.send_signal(signal.SIGTERM)
    ending.set()
    reader.join(240)
    assert server.wait() == 0
    assert sum(1 for text in texts if text) > 16
    assert sum(1 for finish in finished if finish) == 16, "texts that had begun were not ended"
    rows = [row for row in server.log() if row.get("status") == 200 and row["endpoint"].startswith("/v1/")]
    assert [row["endpoint"] for row in rows[-3:]] == ["/v1/models", "/v1/documents", "/v1/completions"]
    assert rows[-3]["id"] == listed.headers["x-request-id"]
    assert "hush-hush" not in "\n".join(server.lines)
    assert not any("traceback" in row for row in server.log())
    with pytest.raises(httpx.ConnectError):
        server.call("GET", "/health")


def test_who_reads_that_it_listens_can_connect(home, monkeypatch, caplog):
    """At once, before the event loop runs: the connection waits for it."""
    connected: list[str] = []

    def run(self, sockets) -> None:
        (port,) = re.findall(r"listening at http://127\.0\.0\.1:(\d+)", caplog.text)
        socket.create_connection(("127.0.0.1", int(port)), timeout=240).close()
        connected.append(port)

    monkeypatch.setattr("uvicorn.Server.run", run)
    with caplog.at_level("INFO", "knnstore"):
        running.serve(running.Config(home=home, name="tiny", port=0), lambda: pytest.fail("it is not loaded"))
    assert connected


@pytest.mark.slow
def test_what_takes_too_long_to_end_is_ended(serve):
    server = serve("--drain", "1", "--max-batch", "1").ready()
    failed: list[BaseException] = []
    begun = threading.Event()

    def read() -> None:
        try:
            for _ in server.client().completions.create(**LONG, n=16, stream=True):
                begun.set()
            for _ in range(200):
                server.client().completions.create(**LONG, n=16)
        except (openai.APIError, httpx.HTTPError) as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(240)
    assert server.end(signal.SIGINT) == 0  # all that was asked for would take many minutes
    reader.join(240)
    assert failed


@pytest.mark.slow
def test_too_many_are_told_to_come_back(serve):
    server = serve("--max-batch", "1", "--max-queue", "2", "--max-body", "2000").ready()
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    body, kind = json.dumps({**LONG, "n": 4}), {"Content-Type": "application/json"}
    with ExitStack() as opened:
        askers = [opened.enter_context(closing(HTTPConnection(host, port, timeout=240))) for _ in range(12)]
        server.process.send_signal(signal.SIGSTOP)  # so that all have asked before it sees the first
        for asker in askers:
            asker.request("POST", "/v1/completions", body, kind)
        server.process.send_signal(signal.SIGCONT)
        answers = [asker.getresponse() for asker in askers]
        assert all(answer.read() for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    refused = [answer for answer in answers if answer.status == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert server.call("POST", "/v1/completions", json={**LONG, "n": 4}).status_code == 200
    assert server.call("POST", "/tokenize", json={"prompt": "a" * 3000}).status_code == 413


@pytest.mark.slow
def test_a_store_that_is_written_to_is_refused_in_one_line(process):
    status, said = run_forked("--home", str(process.home), "serve", "--port", "0")
    assert (status, said.count("\n")) == (1, 1)
    assert "is being written by process" in said


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_in_one_line(process):
    port = process.url.rpartition(":")[2]
    status, said = run_forked("--home", str(process.home), "serve", "--read-only", "--port", port)
    assert status == 1
    assert f"cannot listen at 127.0.0.1 port {port}" in said.splitlines()[-1]


@pytest.mark.slow
def test_sighup_ends_nothing(serve):
    server = serve().ready()
    texts, begun = [], threading.Event()

    def read() -> None:
        for event in server.client().completions.create(**LONG, n=16, seed=1, stream=True):
            begun.set()
            texts.append(event.choices[0].finish_reason)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(240)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("reloaded: ")
    reader.join(240)
    assert sum(1 for finish in texts if finish) == 16
    assert server.call("GET", "/health").json() == {"status": "ready"}
    assert server.end() == 0


def test_it_is_warm_before_it_is_ready(inside, prepared):
    server = inside(prepared, require_keys=False)
    made: list[object] = []
    make = server.serving.scopes._resolve_settings
    server.serving.scopes._resolve_settings = lambda scope: (made.append(scope), make(scope))[1]
    for model in ("tiny+news", "tiny+letters", "tiny+letters+news"):
        body = {"model": model, "prompt": "The council", "max_tokens": 1}
        assert server.call("POST", "/v1/completions", json=body).status_code == 200
    assert not made, "the settings of a first request were not there"
    server.serving.reload_caches()
    assert {scope.domains for scope in made} == {("letters",), ("news",), ("letters", "news")}


def test_a_server_begins_where_the_latest_document_has_no_token(inside, home):
    """As text of characters that the tokenizer leaves out."""
    with KNNStore.open(home, "a") as store:
        empty = NewDocument("no token", "news", "0" * 64, np.zeros(0, np.uint32))
        with store.ingest([empty]):
            pass
    server = inside(home, require_keys=False)
    assert server.call("GET", "/health").json() == {"status": "ready"}


@pytest.mark.slow
def test_a_plan_is_committed_beside_a_server_that_only_reads(serve, home, tmp_path):
    server, folder = serve("--read-only").ready(), PlanFolder(tmp_path / "plan")
    asked = {"model": "tiny+planned", "prompt": "The council", "max_tokens": 4}
    documents = [{"id": f"p-{at}", "text": f"The harbour wall was repaired {at} times."} for at in range(9)]
    with KNNStore.open(home, "a") as store:
        tokenizer = AutoTokenizer.from_pretrained(store.identity.model)
        plan = make_plan(store, tokenizer, documents, folder, domain="planned", shard_tokens=50)
    assert plan is not None
    assert len(plan.shards) > 1
    encode_shards(folder)
    assert server.call("POST", "/v1/completions", json=asked).status_code == 404
    before = {one["id"] for one in server.call("GET", "/v1/documents").json()["data"]}
    with KNNStore.open(home, "a") as store:
        commit_plan(store, folder)
    assert server.call("POST", "/v1/completions", json=asked).status_code == 200
    after = {one["id"] for one in server.call("GET", "/v1/documents").json()["data"]}
    assert after - before == {document["id"] for document in documents}
    with KNNStore.open(home) as store:
        assert store.verify() == []
