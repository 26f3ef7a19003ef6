"""The Compose files obey our own rules, and the rules find what they are for."""

import re
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

Compose = dict[str, Any]


def problems(compose: Compose) -> Iterator[str]:
    """What our rules find wrong in a merged Compose file."""
    services: dict[str, dict[str, Any]] = compose["services"]
    for name, service in services.items():
        for rule in (references, cleaning, health, confinement, image, published, storage, confidence):
            yield from (f"{name}: {problem}" for problem in rule(service, compose))
    for kind in ("volumes", "secrets"):
        used = {entry.split(":")[0] for service in services.values() for entry in service.get(kind, [])}
        yield from (f"{kind}: {unused} is used nowhere" for unused in set(compose[kind]) - used)


def references(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    for kind in ("volumes", "secrets", "networks"):
        for entry in service.get(kind, []):
            if entry.split(":")[0] not in compose.get(kind, {}):
                yield f"{kind}: {entry} is defined nowhere"
    for other, how in service.get("depends_on", {}).items():
        target = compose["services"].get(other)
        if target is None:
            yield f"depends on {other}, which is no service"
        elif how["condition"] == "service_healthy" and "healthcheck" not in target:
            yield f"waits for {other}, which has no healthcheck"
        elif how["condition"] == "service_completed_successfully" and "restart" in target:
            yield f"waits for the end of {other}, which is started again"


def cleaning(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    # With COMPOSE_PROFILES in .env `down` takes away what this profile has; its volumes are those of others.
    if service.get("profiles", ["vllm"]) != ["vllm"]:
        yield "`down` leaves its containers and volumes: it is behind a profile"
    runs_on = "restart" in service
    if not runs_on and service.get("deploy", {}).get("replicas") != 0:
        yield "`up` starts it, and its end is taken for a failure"


def health(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    check = service.get("healthcheck", {})
    if "restart" in service and not {"test", "interval", "timeout", "retries", "start_period"} <= set(check):
        yield "runs on and has no complete healthcheck"
    if {"curl", "wget"} & set(re.findall(r"\w+", str(check))):
        yield "its healthcheck needs a program that the image has not"


def confinement(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    if service.get("read_only") is not True or "/tmp" not in [
        one.partition(":")[0] for one in service.get("tmpfs", [])
    ]:
        yield "its root is writable, or it has no /tmp"
    if service.get("cap_drop") != ["ALL"] or "cap_add" in service or service.get("privileged"):
        yield "has capabilities"
    if service.get("security_opt") != ["no-new-privileges:true"]:
        yield "may gain privileges"
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", str(service.get("user"))):
        yield "runs as root, or as a user of the image's choice"
    if {"network_mode", "pid", "ipc", "devices", "userns_mode"} & set(service):
        yield "shares what is the host's"
    limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
    if set(limits) != {"cpus", "memory", "pids"}:
        yield "has no limits"
    if "ulimits" in service:
        yield "is refused by an engine whose own limits are lower"


def image(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    name, tag = name_and_tag(service)
    if not ("build" in service or re.search(r"\$\{[A-Z]+_DIGEST:-\}$", service.get("image", ""))):
        yield "its image cannot be pinned by a digest"
    if not re.match(r"v?\d", tag):
        yield "its image has no version"
    if name == "qdrant/qdrant":
        (client,) = re.findall(
            r"^qdrant-client==(\d+\.\d+)\.", (REPOSITORY / "constraints.txt").read_text(), re.M
        )
        if not tag.startswith(f"v{client}.") or not tag.endswith("-unprivileged"):
            yield f"is not an unprivileged image of the client's minor version, {client}"
    if name == "knnstore":
        version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
        if tag != version:
            yield f"is not this version, {version}"


def name_and_tag(service: dict[str, Any]) -> tuple[str, str]:
    """The name and the tag of its image, without the variable for the digest."""
    name, _, tag = service.get("image", "").partition("${")[0].partition(":")
    return name, tag


def published(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    for port in service.get("ports", []):
        if not port.startswith("127.0.0.1:"):
            yield f"port {port} is open to other machines"


def storage(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    name, tag = name_and_tag(service)
    targets = [volume.split(":")[1] for volume in service.get("volumes", [])]
    if name == "postgres" and (major := re.match(r"\d+", tag)):
        wanted = "/var/lib/postgresql" + ("" if int(major[0]) >= 18 else "/data")
        if targets != [wanted]:
            yield f"PostgreSQL {major[0]} keeps its data in {wanted}; elsewhere it is lost with the container"
    if name == "qdrant/qdrant":
        if targets != ["/qdrant/storage", "/qdrant/snapshots"]:
            yield "Qdrant's data is not in a volume"
        marker = service.get("environment", {}).get("QDRANT_INIT_FILE_PATH", "")
        if not marker.startswith("/qdrant/storage/"):
            yield "Qdrant would write its marker to the read-only root"


def confidence(service: dict[str, Any], compose: Compose) -> Iterator[str]:
    for variable in service.get("environment", {}):
        if re.search("PASSWORD|KEY|SECRET|TOKEN", variable) and not variable.endswith("_FILE"):
            yield f"{variable} is in the file itself"
    for part in service.get("command", []):
        if re.search(r"export [A-Z_]*(PASSWORD|KEY|SECRET|TOKEN)", part):
            yield "its command puts a secret into the environment"
    for secret in service.get("secrets", []):
        if f"/run/secrets/{secret}" not in str(service.get("environment", {})) + str(service.get("command")):
            yield f"the secret {secret} is read by nothing"
    for secret in service.get("secrets", []):
        if set(compose["secrets"].get(secret, {"file": ""})) != {"file"}:
            yield f"the secret {secret} is not in a file"


def altered(compose: Compose, path: str, value: Any) -> Compose:
    """A copy with one entry changed; None takes it away."""
    result = deepcopy(compose)
    *parents, last = path.split("/")
    place = result
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return result


# What is changed in docker-compose.yml, to what, and the words of the problem that must be found.
MISTAKES = {
    "unknown service": ("services/knnstore/depends_on/redis", {"condition": "service_started"}, "no service"),
    "undefined volume": ("services/qdrant/volumes", ["data:/qdrant/storage"], "defined nowhere"),
    "undefined secret": ("services/postgres/secrets", ["password"], "defined nowhere"),
    "undefined network": ("services/postgres/networks", ["back"], "defined nowhere"),
    "unused volume": ("volumes/old", {}, "used nowhere"),
    "no healthcheck": ("services/postgres/healthcheck", None, "no complete healthcheck"),
    "waits in vain": ("services/qdrant/healthcheck", None, "has no healthcheck"),
    "curl": ("services/qdrant/healthcheck/test", ["CMD", "curl", "-f", "localhost:6333"], "has not"),
    "endless one-shot": (
        "services/knnstore/depends_on/postgres",
        {"condition": "service_completed_successfully"},
        "started again",
    ),
    "a profile": ("services/knnstore/profiles", ["cli"], "behind a profile"),
    "one that ends": ("services/knnstore/deploy/replicas", None, "taken for a failure"),
    "many files": ("services/qdrant/ulimits", {"nofile": 65536}, "own limits are lower"),
    "volume of 17": ("services/postgres/volumes", ["postgres:/var/lib/postgresql/data"], "is lost"),
    "volume of 18": ("services/postgres/image", "postgres:17-trixie${POSTGRES_DIGEST:-}", "is lost"),
    "no digest": ("services/postgres/image", "postgres:18-trixie", "cannot be pinned"),
    "no version": ("services/postgres/image", "postgres:latest${POSTGRES_DIGEST:-}", "no version"),
    "other Qdrant": ("services/qdrant/image", "qdrant/qdrant:v1.19.0-unprivileged", "minor version"),
    "root's Qdrant": ("services/qdrant/image", "qdrant/qdrant:v1.20.0", "unprivileged"),
    "old package": ("services/knnstore/image", "knnstore:0.0.9", "not this version"),
    "open port": ("services/qdrant/ports", ["6333:6333"], "other machines"),
    "writable root": ("services/knnstore/read_only", False, "writable"),
    "marker on the root": ("services/qdrant/environment/QDRANT_INIT_FILE_PATH", "/x", "read-only root"),
    "root": ("services/postgres/user", "0:0", "root"),
    "image's user": ("services/qdrant/user", None, "user of the image's choice"),
    "capability": ("services/postgres/cap_add", ["CHOWN"], "capabilities"),
    "no limits": ("services/knnstore/deploy", {}, "limits"),
    "password in the file": ("services/postgres/environment/POSTGRES_PASSWORD", "x", "in the file itself"),
    "exported secret": (
        "services/qdrant/command",
        [
            "bash",
            "-c",
            'export QDRANT__SERVICE__API_KEY="$$(cat /run/secrets/qdrant_api_key)"; exec ./entrypoint.sh',
        ],
        "into the environment",
    ),
    "idle secret": ("services/knnstore/environment", {}, "is read by nothing"),
    "secret in the environment": ("secrets/qdrant_api_key", {"environment": "KEY"}, "not in a file"),
}


@pytest.mark.parametrize("compose", ["single", "cluster"], indirect=True)
def test_the_files_obey_our_rules(compose: Compose) -> None:
    assert list(problems(compose)) == []


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_our_rules_find(mistake: str, compose: Compose) -> None:
    path, value, words = MISTAKES[mistake]
    found = list(problems(altered(compose, path, value)))
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("compose", ["cluster"], indirect=True)
def test_the_cluster_is_three_nodes_that_know_each_other(compose: Compose) -> None:
    services = compose["services"]
    nodes = {name: service for name, service in services.items() if name.startswith("qdrant")}
    assert len(nodes) == 3
    assert len({volume for node in nodes.values() for volume in node["volumes"]}) == 6
    assert [name for name, node in nodes.items() if node["ports"]] == ["qdrant"]
    for name, node in nodes.items():
        environment = node["environment"]
        assert environment["QDRANT__CLUSTER__ENABLED"] == "true"
        assert environment["QDRANT_URI"] == f"http://{name}:6335"
        assert environment.get("QDRANT_BOOTSTRAP") == (None if name == "qdrant" else "http://qdrant:6335")
        assert name in services["knnstore"]["depends_on"]
        assert name in services["server"]["depends_on"]
