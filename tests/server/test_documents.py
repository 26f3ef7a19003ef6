"""Documents put in and taken out of a store while texts are written from it."""

import asyncio
import threading

import openai
import pytest

from tests.server.test_turns import Client, until

SENTENCE = "The council voted to repair the harbour wall before the winter storms."


def add(server, documents, domain="new", key="", **more):
    return server.call("POST", "/v1/documents", key, json={"domain": domain, "documents": documents, **more})


def test_a_document_is_added_found_replaced_and_removed(listen, home):
    server = listen(home, require_keys=False)
    client = server.client()
    document = {"id": "é / +%?#", "text": "Seven grey geese sang to the moon.", "title": "Geese"}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny+new", prompt="Seven")
    done = add(server, [document], tags=["t"]).json()
    assert (done["added"], done["unchanged"]) == (1, 0)
    assert add(server, [document], tags=["t"]).json()["unchanged"] == 1
    found = client.completions.create(
        model="tiny+new",
        prompt="Seven grey",
        max_tokens=8,
        temperature=0,
        extra_body={"knn": {"lam": 1, "k": 1}},
    )
    assert document["text"].startswith("Seven grey" + found.choices[0].text)
    shown = server.call("GET", "/v1/documents", params={"id": document["id"], "text": True}).json()["data"]
    assert [(one["id"], one["domain"], one["text"], one["metadata"], one["tags"]) for one in shown] == [
        (document["id"], "new", document["text"], {"title": "Geese"}, ["t"])
    ]
    assert add(server, [{**document, "text": "Other."}]).json()["replaced"] == 1
    gone = server.call("DELETE", "/v1/documents", params={"domain": "new", "id": document["id"]})
    assert gone.json() == {
        "object": "document.deleted",
        "deleted": True,
        "id": document["id"],
        "domain": "new",
    }
    again = server.call("DELETE", "/v1/documents", params={"domain": "new", "id": document["id"]})
    assert again.status_code == 404
    assert server.call("GET", "/v1/documents", params={"domain": "new"}).json()["data"] == []
    domains = [one["name"] for one in server.call("GET", "/v1/domains").json()["data"]]
    assert domains == ["letters", "news"]


def test_pages_of_documents(server):
    whole = server.call("GET", "/v1/documents").json()
    assert not whole["has_more"]
    pages = [
        server.call("GET", "/v1/documents", params={"limit": 2, "offset": at}).json() for at in (0, 2, 4)
    ]
    assert [page["has_more"] for page in pages] == [True, True, False]
    assert [one for page in pages for one in page["data"]] == whole["data"]
    named = [
        one["id"] for one in server.call("GET", "/v1/documents", params={"domain": "news"}).json()["data"]
    ]
    assert named == ["n-17", "n-18", "n/19 ü"]


def test_what_cannot_be_stored_is_refused_and_nothing_is(server):
    good = {"id": "g", "text": "Good."}
    for bad in (
        {"id": "b", "text": " "},
        {"id": "b"},
        {"id": 1.5, "text": "a"},
        {"id": "g", "text": "Twice."},
    ):
        answer = add(server, [good, bad])
        assert answer.status_code == 400, answer.text
        assert "document 2" in answer.json()["error"]["message"]
    assert add(server, [good], domain="\0").status_code == 400
    assert [one["name"] for one in server.call("GET", "/v1/domains").json()["data"]] == ["letters", "news"]
    assert server.call("DELETE", "/v1/domains", params={"domain": "nothing"}).status_code == 404


def test_no_token_after_a_removal_is_retrieved_from_what_is_gone(inside, home, monkeypatch):
    """With λ = 1 and k = 1 a text is the copy of a stored one, up to where this is removed.

    The engine stands still after its fourth step, but for what the removal has to do in it.
    """
    server = inside(home, require_keys=False)
    engine = server.serving.engine
    repeated = " ".join(f"{SENTENCE[:-1]} {number}." for number in range(4))
    body = {"domain": "new", "documents": [{"id": "long", "text": repeated}]}
    assert server.call("POST", "/v1/documents", json=body).status_code == 200
    ids = server.call("POST", "/tokenize", json={"prompt": "The council"}).json()["tokens"]
    asked = {
        "model": "tiny+new+letters", "prompt": "The council", "max_tokens": 90 - len(ids), "temperature": 0,
        "knn": {"lam": 1, "k": 1, "domains": ["new"]},
    }  # fmt: skip
    whole = server.call("POST", "/v1/completions", json=asked).json()["choices"][0]["text"]
    assert repeated.startswith("The council" + whole)
    stored = set(server.call("POST", "/tokenize", json={"prompt": repeated}).json()["tokens"])

    steps, removed = [], threading.Event()

    def observe(turn) -> None:
        steps.append(turn)
        while len(steps) >= 4 and engine._inbox.empty() and not removed.is_set():
            removed.wait(0.001)

    monkeypatch.setattr(engine, "_observe", observe)
    options = {"stream": True, "logprobs": 0, "n": 16, "return_tokens_as_token_ids": True}

    async def ask() -> tuple[list[int], int]:
        stream = Client(server, "/v1/completions", {**asked, **options})
        streaming = asyncio.ensure_future(stream.run())
        await until(lambda: len(steps) >= 4)
        gone = await server.client.delete("/v1/documents", params={"domain": "new", "id": "long"})
        assert gone.status_code == 200
        await asyncio.sleep(0)
        before = stream.tokens()
        removed.set()
        await streaming
        return stream.tokens()[len(before) :], len(before)

    try:
        after, before = server.loop.run_until_complete(ask())
    finally:
        removed.set()
    assert before < 16 * 20
    assert len(after) > 16 * 20, "the text had ended before the document was removed"
    assert set(after) - stored, "the model alone says other things"
    again = server.call("POST", "/v1/completions", json={**asked, "model": "tiny", "knn": None})
    assert again.json()["choices"][0]["text"] != whole


@pytest.mark.slow
def test_adding_and_removing_beside_many_texts(serve):
    server = serve().ready()
    errors: list[BaseException] = []

    def write(seed: int) -> None:
        try:
            for model in ("tiny+news", "tiny+letters+news", "tiny"):
                server.client().completions.create(
                    model=model, prompt=["The", "In"], max_tokens=40, seed=seed, n=2
                )
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(6)]
    for writer in writers:
        writer.start()
    for number in range(10):
        assert (
            add(server, [{"id": str(number), "text": f"{SENTENCE} {number}"}], domain="news").status_code
            == 200
        )
        if number % 3 == 0:
            gone = server.call("DELETE", "/v1/documents", params={"domain": "news", "id": str(number)})
            assert gone.status_code == 200
    assert server.call("DELETE", "/v1/domains", params={"domain": "letters"}).json()["documents"] == 2
    for writer in writers:
        writer.join(240)
    assert all(isinstance(error, openai.NotFoundError) for error in errors)  # of what began after the removal
    assert server.end() == 0
    import knnstore

    with knnstore.open(server.home) as store:
        assert store.verify() == []
        assert [domain.documents for domain in store.domains()] == [9]


@pytest.mark.slow
def test_a_server_that_only_reads_sees_what_others_write(serve, listen, home):
    reading = serve("--read-only").ready()
    assert add(reading, [{"id": "a", "text": "b"}]).status_code == 403
    writing = listen(home, require_keys=False)
    assert add(writing, [{"id": "a", "text": SENTENCE}]).status_code == 200
    assert "tiny+new" in [model.id for model in reading.client().models.list()]
    found = reading.client().completions.create(model="tiny+new", prompt="The", max_tokens=3, temperature=0)
    assert found.usage.completion_tokens == 3
