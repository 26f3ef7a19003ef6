"""scripts/pin-images, with a stand-in for the registry: the digests that it writes, and that it refuses."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
DIGEST = "sha256:" + "0123456789abcdef" * 4

# Answers for each image with a digest of its own, as JSON; or as the test asks.
DOCKER = """#!/bin/sh
[ "$1 $2 $3 $5 $6" = "buildx imagetools inspect --format {{json .Manifest.Digest}}" ] || exit 64
echo "$4" >>"${0%/*}/asked"
[ ! -e "${0%/*}/answer" ] || { cat "${0%/*}/answer"; exit; }
[ ! -e "${0%/*}/down" ] || { echo 'no route to host' >&2; exit 1; }
printf '"sha256:%s"\\n' "$(printf '%s' "$4" | sha256sum | cut -c1-64)"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, the files that it reads, and a `docker` in tools/."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "pin-images", tmp_path / "scripts")
    for name in ("docker-compose.yml", "Dockerfile"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "docker").write_text(DOCKER)
    (tmp_path / "tools" / "docker").chmod(0o755)
    return tmp_path


def pin(checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [checkout / "scripts" / "pin-images", *arguments],
        env={"PATH": f"{checkout / 'tools'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def images() -> set[str]:
    """Every image that is pulled, by name and tag: of the services, but what is built here, and its base."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"].values()
    pulled = {service["image"].partition("$")[0] for service in services if "build" not in service}
    bases = re.findall(r"^FROM ([^$\s]+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    return pulled | set(bases)


def test_each_image_gets_the_digest_that_the_registry_gives(checkout: Path) -> None:
    (checkout / ".env").write_text("QDRANT_MEMORY=4g\nPOSTGRES_DIGEST=@sha256:old\n")
    (checkout / ".env").chmod(0o640)
    done = pin(checkout)
    assert done.returncode == 0, done.stderr
    asked = (checkout / "tools" / "asked").read_text().split()
    assert sorted(asked) == sorted(images())
    lines = (checkout / ".env").read_text().splitlines()
    assert lines[0] == "QDRANT_MEMORY=4g"
    written = dict(line.split("=", 1) for line in lines[1:])
    assert set(written) == {"POSTGRES_DIGEST", "PYTHON_DIGEST", "QDRANT_DIGEST", "VLLM_DIGEST"}
    assert all(re.fullmatch("@sha256:[0-9a-f]{64}", digest) for digest in written.values())
    for variable, name in {
        "POSTGRES": "postgres:",
        "PYTHON": "python:",
        "QDRANT": "qdrant/",
        "VLLM": "vllm/",
    }.items():
        (image,) = (image for image in images() if image.startswith(name))
        assert f"{image}{written[f'{variable}_DIGEST']}" in done.stdout.splitlines()
    assert len(set(written.values())) == 4
    assert (checkout / ".env").stat().st_mode & 0o777 == 0o640
    assert pin(checkout, "--check").stdout == done.stdout


@pytest.mark.parametrize(
    "answer", ["", "Name: x\nDigest: sha256:1", '"sha256:12"', f'"{DIGEST}0"', f'"{DIGEST}"\nmore']
)
def test_an_answer_that_is_no_digest_is_not_written(answer: str, checkout: Path) -> None:
    (checkout / ".env").write_text("POSTGRES_DIGEST=@sha256:old\n")
    (checkout / "tools" / "answer").write_text(answer)
    done = pin(checkout)
    assert done.returncode != 0
    assert "the registry gave no digest but" in done.stderr
    assert (checkout / ".env").read_text() == "POSTGRES_DIGEST=@sha256:old\n"
    assert not list(checkout.glob(".env.*"))


def test_a_registry_that_does_not_answer_changes_nothing(checkout: Path) -> None:
    (checkout / "tools" / "down").touch()
    done = pin(checkout)
    assert done.returncode != 0
    assert "no route to host" in done.stderr
    assert (checkout / ".env").read_text() == ""


@pytest.mark.parametrize(
    ("digest", "problem"),
    [
        ("", "postgres:18-trixie has no digest: run scripts/pin-images"),
        (DIGEST, "POSTGRES_DIGEST in .env is no digest"),
        (f"@{DIGEST[:-1]}", "POSTGRES_DIGEST in .env is no digest"),
        (f"@{DIGEST}0", "POSTGRES_DIGEST in .env is no digest"),
        (f"@{DIGEST[:-1]}G", "POSTGRES_DIGEST in .env is no digest"),
        (f"@{DIGEST.replace('256', '512')}", "POSTGRES_DIGEST in .env is no digest"),
    ],
)
def test_the_check_names_the_image_without_a_digest(digest: str, problem: str, checkout: Path) -> None:
    assert pin(checkout).returncode == 0
    text = (checkout / ".env").read_text()
    (checkout / ".env").write_text(re.sub("POSTGRES_DIGEST=.*", f"POSTGRES_DIGEST={digest}", text))
    done = pin(checkout, "--check")
    assert done.returncode != 0
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
