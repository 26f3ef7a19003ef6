"""Documents are added and removed through a server whose disk is full."""

import shutil
from pathlib import Path

import pytest

import knnstore.space
from tests.server.conftest import LETTERS

TEXT = " ".join(LETTERS.values()) * 40


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 100 << 10, 400 << 10, 800 << 10])
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_full_disk_is_said_and_what_was_answered_stays(
    is_foreseen, room, disk, prepared, inside, monkeypatch
) -> None:
    size = 30 << 20
    small = disk(size)
    app = inside(Path(shutil.copytree(prepared, small.path / "home")))
    key = app.key("predict", "read", "write")

    def add(id: str) -> int:
        body = {"domain": "new", "documents": [{"id": id, "text": TEXT + id}]}
        answer = app.call("POST", "/v1/documents", key, json=body)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "disk_full"
        return answer.status_code

    def stored() -> set[str]:
        answer = app.call("GET", "/v1/documents", key, params={"domain": "new"})
        return {one["id"] for one in answer.json()["data"]}

    small.fill()
    if is_foreseen:
        room += knnstore.space.MARGIN
    else:  # as when something else fills the disk after the look at it
        monkeypatch.setattr(knnstore.space, "MARGIN", -(1 << 60))
    small.resize(size + room)
    acknowledged = set()
    while (status := add(f"d{len(acknowledged)}")) == 200:
        acknowledged.add(f"d{len(acknowledged)}")
    assert status == 507
    small.fill()
    assert stored() == acknowledged
    body = {"model": "tiny+news", "prompt": "The council", "max_tokens": 2}
    assert app.call("POST", "/v1/completions", key, json=body).status_code == 200
    for domain, id in ("letters", "first"), ("news", "n-17"), ("news", "n-18"):
        answer = app.call("DELETE", "/v1/documents", key, params={"domain": domain, "id": id})
        assert answer.status_code == 200, answer.text
        small.fill()
    small.relieve()
    assert [add(id) for id in ("e0", "e1")] == [200, 200]
    assert stored() == acknowledged | {"e0", "e1"}
    assert app.serving.lm.store.verify() == []
