"""The Compose files as Docker Compose would understand them, and Docker Compose itself."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


class ComposeLoader(yaml.SafeLoader):
    """Knows Compose's own tag: `!reset VALUE` takes the place of what it would be merged with."""


class Reset:
    def __init__(self, value: Any) -> None:
        self.value = value


def _reset(loader: ComposeLoader, node: yaml.Node) -> Reset:
    return Reset([] if isinstance(node, yaml.SequenceNode) else {})


ComposeLoader.add_constructor("!reset", _reset)


def merge(base: Any, over: Any) -> Any:
    """Merge what two files, or a service and the one that it extends, say about the same."""
    if isinstance(over, Reset):
        return over.value
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {name: merge(base.get(name), value) for name, value in over.items()}
        if "volumes" in over and isinstance(over["volumes"], list):
            merged["volumes"] = _by_target(base.get("volumes", []), over["volumes"])
        return base | merged
    if isinstance(base, list) and isinstance(over, list):
        return base + over
    return over


def _by_target(base: list[str], over: list[str]) -> list[str]:
    return list({volume.split(":")[1]: volume for volume in base + over}.values())


@pytest.fixture
def compose(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The files merged; `cluster` as the parameter adds docker-compose.cluster.yml."""
    files = ["docker-compose.yml"]
    if getattr(request, "param", "") == "cluster":
        files.append("docker-compose.cluster.yml")
    read = [yaml.load((REPOSITORY / file).read_text(), ComposeLoader) for file in files]
    base = merge({}, read[0])
    whole = base
    for over in read[1:]:
        for name, service in over["services"].items():
            if (extended := service.pop("extends", None)) is not None:
                over["services"][name] = merge(base["services"][extended["service"]], service)
        whole = merge(whole, over)
    assert isinstance(whole, dict)
    return whole


@pytest.fixture(scope="session")
def docker_compose() -> list[str]:
    """The command Docker Compose, version 2 or later; what is done with it needs no engine."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) is None:
            continue
        asked = [*command, "version", "--short"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.returncode == 0 and int(told.stdout.strip().lstrip("v").split(".")[0]) >= 2:
            return command
    pytest.skip("no docker-compose 2 on this machine (Debian 13: apt-get install docker-compose)")
