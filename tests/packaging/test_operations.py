"""The commands of docs/how-to/ and of scripts/ exist, with the options that they are given."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from knnstore.cli.reference import iterate_help_texts

REPOSITORY = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text() for page in sorted((REPOSITORY / "docs" / "how-to").glob("*.md"))}
PAGE = "\n".join(PAGES.values())
SHELL = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMOKE = (REPOSITORY / "scripts" / "compose-smoke").read_text()


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of a program, up to a pipe, a redirection or a comment."""
    text = "\n".join([*SHELL, SMOKE]).replace("\\\n", " ")
    text = re.sub(r"(^| )#.*", "", text, flags=re.MULTILINE)
    calls = re.findall(rf"(?<![\w/=.-]){program} ([^|<>;()`\n]+)", text)
    return [shlex.split(call) for call in calls]


@pytest.mark.parametrize("script", [*SHELL, SMOKE], ids=range(len(SHELL) + 1))
def test_the_shell_reads_them(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_commands_of_knnstore_exist() -> None:
    known = dict(iterate_help_texts())
    calls = [call for call in commands("knnstore") if re.match(r"[a-z]", call[0])]  # not what docker is told
    assert {"init", "add", "move", "verify", "domains"} <= {call[0] for call in calls}
    for first, *rest in calls:
        text = known[f"knnstore {first}"]
        for option in (word for word in rest if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}\b", text), f"knnstore {first} has no {option}"


def test_the_services_and_volumes_that_are_named_exist(compose: dict[str, Any]) -> None:
    named = set(re.findall(r"docker volume \w+ knnstore_(\S+?)`", PAGE))
    for loop in re.findall(r"for volume in ([\w -]+);", PAGE):
        named |= set(loop.split())
    assert named == {"home", "postgres", "qdrant"}
    assert set(re.findall(r"\bknnstore:\d[\d.]*", PAGE)) == {compose["services"]["knnstore"]["image"]}
    assert named <= set(compose["volumes"])
    for first, *rest in commands("docker compose"):
        if first in ("build", "exec", "run"):
            assert {"knnstore", "postgres", "server"} & set(rest)


def test_the_options_of_docker_compose_exist(docker_compose: list[str]) -> None:
    calls = commands("docker compose")
    assert {"build", "up", "run", "exec", "stop", "create", "kill"} <= {call[0] for call in calls}
    for command in sorted({call[0] for call in calls}):
        asked = [*docker_compose, command, "--help"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        for call in (call for call in calls if call[0] == command):
            ours = call[: call.index("postgres") if "postgres" in call else None]  # then its own options
            ours = ours[: ours.index("knnstore") if "knnstore" in ours else None]
            for option in (word for word in ours if word.startswith("-")):
                assert re.search(rf"(?<![\w-]){option}\b", text), f"docker compose {command} has no {option}"


def test_the_pages_say_what_was_not_run() -> None:
    with_docker = {name: page for name, page in PAGES.items() if "docker compose" in page}
    assert len(with_docker) >= 5
    assert "_not run_" in with_docker["qdrant-and-postgresql"]
    assert all("#what-was-tried" in page for page in with_docker.values())
    assert {name for name, page in with_docker.items() if "_Not run" in page} == {"upgrade", "scale-out"}
