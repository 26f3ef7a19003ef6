"""requirements/: the packages of the image with their hashes, as `make lock` writes them."""

import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "requirements"
SCRIPT = REPOSITORY / "scripts" / "lock-requirements"
IMAGE_EXTRAS = ("faiss", "qdrant", "postgres", "server")

# The image's platform; markers about anything else are an error.
PLATFORM = {
    "python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux", "os_name": "posix",
    "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}  # fmt: skip


def read_pins(file: Path) -> dict[str, str]:
    """The version of each package of a file."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s\\]+)", file.read_text(), re.MULTILINE))


def read_constraints() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def needed(roots: Iterable[Requirement]) -> set[str]:
    """The packages that requirements need on the image's platform, by what is installed here."""
    found: set[tuple[str, str]] = set()
    left = list(roots)
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for text in requires(name) or ():
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate(PLATFORM | {"extra": extra}):
                    left.append(inner)
    return {name for name, _ in found}


@pytest.mark.parametrize("name", ["image", "build", "torch-cpu", "torch-cuda"])
def test_every_package_has_a_version_and_hashes(name: str) -> None:
    """And the file says nothing else, but where torch comes from that is made for processors only."""
    text = (FOLDER / f"{name}.txt").read_text()
    first, _, rest = text.partition("\n")
    assert first.startswith("# Written by `make lock`.")
    if name == "torch-cpu":
        index, _, rest = rest.partition("\n")
        assert index == "--index-url https://download.pytorch.org/whl/cpu"
    package = r"[a-z0-9-]+==[0-9a-z.+]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(f"({package})+", rest)


def test_the_versions_are_those_of_the_tests() -> None:
    constraints = read_constraints()
    image, build = read_pins(FOLDER / "image.txt"), read_pins(FOLDER / "build.txt")
    assert image.pop("setuptools")  # torch wants it; of no other use here
    for name, version in (image | build).items():
        assert constraints[name] == version, f"{name}: run `make lock`"
    assert read_pins(FOLDER / "torch-cpu.txt") == {"torch": constraints["torch"] + "+cpu"}
    cuda = read_pins(FOLDER / "torch-cuda.txt")
    assert cuda["torch"] == constraints["torch"]
    assert not cuda.keys() & image.keys()


def test_the_image_has_all_that_it_needs_and_nothing_else() -> None:
    root = Requirement(f"knnstore[{','.join(IMAGE_EXTRAS)}]")
    # Without what torch needs beside its own for a GPU, where torch of that kind is installed.
    expected = {name for name in needed([root]) if not re.match(r"nvidia-|cuda-|triton$", name)}
    assert set(read_pins(FOLDER / "image.txt")) == expected - {"knnstore", "torch"}


def test_the_wheel_is_made_with_what_it_needs_and_nothing_else() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    roots = [Requirement(text) for text in project["build-system"]["requires"]]
    assert set(read_pins(FOLDER / "build.txt")) == needed(roots)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_pip_installs_the_image_by_its_hashes(tmp_path: Path) -> None:
    """All but torch, as the Dockerfile does, and the wheel with what builds it."""
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    for name in ("image", "build"):
        command = [*pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", FOLDER / f"{name}.txt"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    command = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", REPOSITORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert {line.partition(", ")[2] for line in done.stdout.splitlines()} == {"which is not installed."}
    assert {re.findall(r"requires (\S+),", line)[0] for line in done.stdout.splitlines()} == {"torch"}


@pytest.mark.slow
def test_pip_refuses_a_package_with_another_hash(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    text = re.search(r"^idna==.*?(?=^\S)", (FOLDER / "image.txt").read_text(), re.MULTILINE | re.DOTALL)
    assert text
    (tmp_path / "list.txt").write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", text[0]))
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--require-hashes", "-r", tmp_path / "list.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.slow
def test_the_script_writes_what_is_there(tmp_path: Path) -> None:
    """A later upload of another file of the same version only adds hashes."""
    pytest.importorskip("uv")
    command = [sys.executable, SCRIPT, "image", "build", "torch-cuda", "--into", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("image", "build", "torch-cuda"):
        assert read_pins(tmp_path / f"{name}.txt") == read_pins(FOLDER / f"{name}.txt"), name
        new, old = (
            set(re.findall(r"sha256:\w+", (folder / f"{name}.txt").read_text()))
            for folder in (tmp_path, FOLDER)
        )
        assert old <= new, name
    assert distribution("uv").version == read_constraints()["uv"]
