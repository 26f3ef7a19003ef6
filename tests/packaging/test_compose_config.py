"""The Compose files as others see them: the specification's schema, Docker Compose, and the shells inside."""

import http.server
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
SINGLE = [REPOSITORY / "docker-compose.yml"]
CLUSTER = [*SINGLE, REPOSITORY / "docker-compose.cluster.yml"]

Compose = dict[str, Any]
Config = Callable[..., "subprocess.CompletedProcess[str]"]

# Mistakes, each in docker-compose.yml; of some of them the schema knows nothing.
WRONG = {
    "unknown key": ("read_only: true", "readonly: true"),
    "wrong type": ("init: true", "init: [1]"),
    "unknown service": ("      qdrant: {condition", "      redis: {condition"),
    "undefined volume": ("volumes:\n  home:\n", "volumes:\n"),
    "undefined secret": ("  qdrant_api_key: {file: ./secrets/qdrant_api_key}\n", ""),
    "no duration": ("interval: 5s", "interval: often"),
    "no amount": ("shm_size: 256m", "shm_size: much"),
    "no port": (":-5432}:5432", ":-5432}:http"),
}
WRONG_FOR_THE_SCHEMA = {"unknown key", "wrong type"}


@pytest.fixture(scope="module")
def validate() -> Callable[[Compose], Compose]:
    """Checks against the schema of the Compose specification; variables are not filled in."""
    schema = json.loads((Path(__file__).parent / "assets" / "compose-spec.json").read_text())
    compiled: Callable[[Compose], Compose] = fastjsonschema.compile(schema)
    return compiled


@pytest.fixture(scope="module")
def config(docker_compose: list[str]) -> Config:
    """Runs ``docker-compose config``; the variables of this machine stay out.

    It shows what is active without naming anything, which is what ``down`` takes away.
    """

    def run(files: list[Path], **variables: str) -> "subprocess.CompletedProcess[str]":
        given = [argument for file in files for argument in ("--file", file)]
        return subprocess.run(
            [*docker_compose, *given, "config", "--format", "json"],
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "COMPOSE_PROFILES": "vllm", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with one of the mistakes."""
    right, mistake = WRONG[request.param]
    text = SINGLE[0].read_text()
    assert right in text
    file = tmp_path / "docker-compose.yml"
    file.write_text(text.replace(right, mistake, 1))
    return file


@pytest.mark.parametrize("compose", ["single", "cluster"], indirect=True)
def test_the_schema_accepts(compose: Compose, validate: Callable[[Compose], Compose]) -> None:
    validate(compose)


@pytest.mark.parametrize("wrong", sorted(WRONG_FOR_THE_SCHEMA), indirect=True)
def test_the_schema_refuses(wrong: Path, validate: Callable[[Compose], Compose]) -> None:
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validate(yaml.safe_load(wrong.read_text()))


@pytest.mark.parametrize(
    ("compose", "files"),
    [("single", SINGLE), ("cluster", CLUSTER)],
    indirect=["compose"],
    ids=["single", "cluster"],
)
def test_docker_compose_reads_what_our_rules_are_applied_to(
    compose: Compose, files: list[Path], config: Config
) -> None:
    done = config(files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    real = json.loads(done.stdout)
    assert set(real["services"]) == set(compose["services"])
    assert set(real["volumes"]) == set(compose["volumes"])
    for name, service in compose["services"].items():
        seen = real["services"][name]
        volumes = [
            f"{volume['source']}:{volume['target']}{':ro' * volume.get('read_only', False)}"
            for volume in seen.get("volumes", [])
        ]
        assert sorted(volumes) == sorted(service.get("volumes", [])), name
        assert [port["host_ip"] for port in seen.get("ports", [])] == ["127.0.0.1"] * len(
            service.get("ports", [])
        )
        assert set(seen.get("depends_on", ())) == set(service.get("depends_on", ())), name
        assert set(seen.get("environment", ())) == set(service.get("environment", ())), name
        assert seen.get("image") == re.sub(r"\$\{.*\}$", "", service["image"]), name
        for key in ("user", "read_only", "cap_drop", "security_opt", "restart"):
            assert seen.get(key) == service.get(key), (name, key)


def test_docker_compose_takes_the_digests_of_variables(config: Config) -> None:
    names = {"QDRANT_DIGEST": "a", "POSTGRES_DIGEST": "b", "PYTHON_DIGEST": "c"}
    digests = {name: f"@sha256:{digit * 64}" for name, digit in names.items()}
    done = config(CLUSTER, **digests)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    for name in ("qdrant", "qdrant-2", "qdrant-3"):
        assert services[name]["image"].endswith("-unprivileged@sha256:" + "a" * 64)
    assert services["postgres"]["image"] == "postgres:18-trixie@sha256:" + "b" * 64
    assert services["knnstore"]["build"]["args"] == {"PYTHON_DIGEST": "@sha256:" + "c" * 64, "TORCH": "cpu"}


@pytest.mark.parametrize("wrong", list(WRONG), indirect=True)
def test_docker_compose_refuses(wrong: Path, config: Config) -> None:
    assert config([wrong]).returncode != 0


# -- the shell commands in the file, run as they stand


def shell(service: Compose, key: str, **changes: str) -> list[str]:
    """A command of a service, with `$$` read as Compose reads it and texts replaced."""
    command = [part.replace("$$", "$") for part in service[key]]
    for old, new in changes.items():
        command = [part.replace({"port": "6333", "secrets": "/run/secrets"}[old], new) for part in command]
    return command


@pytest.fixture
def answering() -> Iterator[Callable[[int, int], int]]:
    """Starts an HTTP server with one answer to /readyz and one to /collections; gives its port."""
    servers: list[http.server.HTTPServer] = []

    def start(ready: int, collections: int) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response({"/readyz": ready, "/collections": collections}.get(self.path, 404))
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return int(servers[-1].server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_qdrants_healthcheck_tells_ready_from_loading_from_open_from_down(
    compose: Compose, answering: Callable[[int, int], int]
) -> None:
    def healthy(port: int) -> bool:
        kind, *command = shell(compose["services"]["qdrant"]["healthcheck"], "test", port=str(port))
        assert kind == "CMD"
        return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode == 0

    assert healthy(answering(200, 401))
    assert healthy(answering(200, 403))
    assert not healthy(answering(503, 401))
    assert not healthy(answering(200, 200))  # it would serve everybody
    closed = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    closed.server_close()
    assert not healthy(closed.server_address[1])


# Shows what a program in its place is told: the configuration, whom it is readable by, and the environment.
PROGRAM = """#!/bin/sh
[ "$#" = 2 ] && [ "$1" = --config-path ] && cat "$2" && stat -c %a "$2" && env
"""


@pytest.mark.parametrize("key", ["k3y", 'it\'s "$(x)" \\n%s', "", None])
def test_qdrant_starts_with_its_key_or_not_at_all(compose: Compose, key: str | None, tmp_path: Path) -> None:
    image = tmp_path / "entrypoint.sh"
    image.write_text(PROGRAM)
    image.chmod(0o755)
    if key is not None:
        (tmp_path / "qdrant_api_key").write_text(key)
    command = shell(compose["services"]["qdrant"], "command", secrets=str(tmp_path))
    command = [part.replace("/tmp/qdrant-key", f"{tmp_path}/qdrant-key") for part in command]
    variables = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, umask=0o022, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is bool(key), done.stderr
    if key:
        configuration, mode, seen = re.split(r"^(\d+)$", done.stdout, maxsplit=1, flags=re.MULTILINE)
        assert yaml.safe_load(configuration) == {"service": {"api_key": key}}
        assert mode == "600"
        assert key not in seen
    else:
        assert done.stdout == ""
        assert not (tmp_path / "qdrant-key.yaml").exists()
