"""Names of models, against a hub of our own in another process's place."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from knnstore.errors import ConfigError
from knnstore.model_names import check_model

ASKING = """
import json, sys
from knnstore import model_names
from knnstore.errors import ConfigError
for name in sys.argv[1:]:
    model_names.PATIENCE = 0.3 if name.startswith("silent") else 120
    try:
        said = model_names.check_model(name)
    except ConfigError as error:
        said = str(error)
    print(json.dumps(said))
assert "torch" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """Knows one model, refuses others, and is silent about some."""

    silence = threading.Event()

    def do_HEAD(self) -> None:
        if self.path.startswith("/silent"):
            self.silence.wait(600)  # longer than whoever asks may take
        there = self.path == "/there/lm/resolve/main/config.json"
        self.send_response(200 if there else 503 if self.path.startswith("/broken") else 404)
        if there:
            for name, value in {"X-Repo-Commit": "a" * 40, "ETag": '"1"', "Content-Length": "2"}.items():
                self.send_header(name, value)
        elif self.path.startswith("/none"):
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Hub.silence.set()
        server.shutdown()


def test_the_hub_is_asked_once_and_not_waited_for(hub, tmp_path) -> None:
    kept = tmp_path / "hub" / "models--silent--kept"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("b" * 40)
    (kept / "snapshots" / ("b" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("b" * 40) / "config.json").write_text("{}")
    names = ["there/lm", "none/lm", "silent/lm", "silent/kept", "broken/lm", "a b/c"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", ASKING, *names],
        env={**environment, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    there, none, silent, cached, broken, malformed = answers
    assert (there, cached) == (False, True)
    assert (
        "the hub has no such model, or it needs a token that may read the model (HF_TOKEN): give the path"
        in none
    )
    assert "the hub cannot be reached (" in silent
    assert "503" in broken
    assert malformed.endswith("it is neither a folder nor a valid name on the hub")


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/x/y", "~/nowhere", "a/b/c", "folder"])
def test_a_path_is_no_name_of_the_hub(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    reason = "this folder has no config.json" if name == "folder" else "no such folder"
    with pytest.raises(ConfigError, match=rf"{reason}$"):
        check_model(name)
