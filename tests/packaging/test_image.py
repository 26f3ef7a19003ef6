"""The Dockerfile, what it is given, and the scripts around it."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def copied() -> list[str]:
    """What the Dockerfile takes from the repository."""
    arguments = [rest.split() for word, rest in instructions() if word == "COPY"]
    return [source for words in arguments if not words[0].startswith("--") for source in words[:-1]]


def test_the_bases_are_pinned_and_the_same() -> None:
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 3
    assert bases[0] == bases[2]
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+\$\{PYTHON_DIGEST\}", bases[0])
    assert re.fullmatch(r"vllm/vllm-openai:v0\.32\.\d+\$\{VLLM_DIGEST\}", bases[1])
    before = [rest for word, rest in instructions()[: [word for word, _ in instructions()].index("FROM")]]
    assert before == [
        "PYTHON_DIGEST=",
        "VLLM_DIGEST=",
    ]  # an ARG is known in FROM only where it stands before the first


def test_every_package_is_installed_by_its_hash() -> None:
    """Or is our own, made here; nothing but the four lists comes from an index."""
    lines = [rest for word, rest in instructions() if word == "RUN"]
    calls = re.findall(r"(?:/bin/|-m )pip (install|wheel) ([^&]*)", " && ".join(lines))
    assert len(calls) == 7
    from_an_index = [rest.split() for _, rest in calls if "--no-index" not in rest]
    for arguments in from_an_index:
        assert arguments[:3] == ["--no-deps", "--require-hashes", "-r"]
        assert len(arguments) == 4
    assert [Path(arguments[3]).name for arguments in from_an_index] == [
        f"{name}.txt" for name in ("torch-$TORCH", "image", "build", "vllm")
    ]
    assert any(line.endswith("pip check") for line in lines)  # so the lists are complete


def test_the_program_runs_as_the_user_and_in_the_folders_that_compose_expects(
    compose: dict[str, Any],
) -> None:
    last = dict(instructions())
    service = compose["services"]["knnstore"]
    assert last["USER"] == service["user"]
    assert last["ENTRYPOINT"] == '["docker-entrypoint"]'  # as a list: signals reach the program
    settings = dict(re.findall(r"(\w+)=(\S+)", last["ENV"]))
    volumes = [volume.split(":")[1] for volume in service["volumes"]]
    # `init` puts a new home beside its place first: the volume is the folder above.
    assert sorted(volumes) == [str(Path(settings["KNNSTORE_HOME"]).parent), settings["HF_HOME"]]
    assert service["environment"]["KNNSTORE_UPGRADE"] == "true"


def test_nothing_secret_or_unneeded_gets_in() -> None:
    for word, rest in instructions():
        assert word != "ADD"
        if word in ("ARG", "ENV"):
            assert not re.search("PASSWORD|KEY|SECRET|TOKEN", rest), rest
    first, *rest = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert first == "*"
    let_in = {line.removeprefix("!") for line in rest if line.startswith("!")}
    assert let_in == set(copied())


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build(tmp_path: Path) -> None:
    context = tmp_path / "context"
    for name in copied():
        source, target = REPOSITORY / name, context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, context]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("knnstore-*.whl"))


def test_the_entrypoint_leaves_secrets_in_their_files(tmp_path: Path) -> None:
    """What a process has in its environment can be seen, and goes to all that it starts."""
    program = tmp_path / "knnstore"
    program.write_text('#!/bin/sh\nenv\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    given = {}
    for name in ("PGPASSWORD", "KNNSTORE_QDRANT_API_KEY"):
        (tmp_path / name).write_text("sesame\n")
        given[f"{name}_FILE"] = str(tmp_path / name)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    command = [REPOSITORY / "scripts" / "docker-entrypoint", "add", "two words"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n<add><two words>")
    assert {f"{name}={path}" for name, path in given.items()} < set(done.stdout.splitlines())
    assert "sesame" not in done.stdout


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("upgrade", ["true", "", "fails"])
def test_the_entrypoint_brings_the_catalog_up_to_date_first(made: bool, upgrade: str, tmp_path: Path) -> None:
    """Where it is asked to and there is one; the command has its input and its output for itself."""
    program = tmp_path / "knnstore"
    program.write_text(
        f"""#!/bin/sh
        echo "$@" >>"{tmp_path}/calls"
        case $1 in
          db) cat; echo upgraded; echo said >&2; [ {upgrade or "true"} = true ];;
          *) cat ;;
        esac
        """
    )
    program.chmod(0o755)
    home = tmp_path / "store"
    if made:
        home.mkdir()
    done = subprocess.run(
        [REPOSITORY / "scripts" / "docker-entrypoint", "add", "-"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "KNNSTORE_HOME": str(home),
            "KNNSTORE_UPGRADE": upgrade and "true",
        },
        input="documents",
        capture_output=True,
        text=True,
        check=False,
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    if made and upgrade == "fails":
        assert (done.returncode, done.stdout, calls) == (1, "", ["db upgrade"])
        assert "said" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "documents", "")
        assert calls == (["db upgrade", "add -"] if made and upgrade else ["add -"])


def test_secrets_are_made_once_and_kept_from_others(tmp_path: Path, compose: dict[str, Any]) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(REPOSITORY / "scripts" / "make-secrets", tmp_path / "scripts")
    subprocess.run([script], check=True, umask=0)
    files = [tmp_path / secret["file"] for secret in compose["secrets"].values()]
    before = [file.read_text() for file in files]
    assert len(set(before)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in before)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o444}
    subprocess.run([script], check=True)
    assert [file.read_text() for file in files] == before


def test_the_secrets_stay_out_of_git() -> None:
    assert "/secrets/" in (REPOSITORY / ".gitignore").read_text().splitlines()
