"""The wheel, the sdist and the editable install, each used as a user would."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

USE = """
import json, sys
import knnstore
loaded = sorted({name.partition(".")[0] for name in sys.modules})

from importlib.metadata import entry_points
from pathlib import Path
import knnstore.catalog as catalog
from knnstore.catalog.schema import find_migrations_folder

url = catalog.parse_url("sqlite:///" + sys.argv[1])
identity = catalog.Identity("m", "a", "b", "final_hidden", 8, "l2", 100, 64, 32)
catalog.Catalog.create(url, identity, catalog.Engine("faiss", "keys")).close()
again = catalog.Catalog.open(url)
print(json.dumps({
    "loaded": loaded,
    "package": str(Path(knnstore.__file__).parent),
    "migrations": str(find_migrations_folder()),
    "dim": again.identity.dim,
    "adapters": {
        point.name: sys.modules[point.load().__module__.partition(".")[0]].__file__
        for point in entry_points(group="knnstore.datastores")
    },
}))
again.close()
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def build(source: Path, into: Path, *what: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", into, source)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(REPOSITORY, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(REPOSITORY, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Installs into a new environment that sees the dependencies of this one, but not our package."""

    def make(*what: str | Path) -> Path:
        venv.create(tmp_path / "venv", with_pip=False)
        python = tmp_path / "venv" / "bin" / "python"
        (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        # A folder named in a .pth file is searched, but the .pth files in it are not read: this
        # is how an editable install of ours stays out.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *what)
        return python

    return make


def use(python: Path, folder: Path) -> dict[str, object]:
    """What a program sees that uses the installed package, from a folder without our sources."""
    answer: dict[str, object] = json.loads(run(python, "-I", "-c", USE, folder / "catalog.db", cwd=folder))
    assert answer["dim"] == 8
    assert not {"torch", "transformers", "faiss", "sqlalchemy"} & set(answer["loaded"])  # type: ignore[call-overload]
    assert "Usage" in run(python.parent / "knnstore", "--help", cwd=folder)
    return answer


def test_the_wheel_works_where_nothing_else_of_ours_is(
    wheel: Path, install: Callable[..., Path], tmp_path: Path
) -> None:
    seen = use(install(wheel), tmp_path)
    inside = str(tmp_path / "venv")
    assert str(seen["package"]).startswith(inside)
    assert seen["migrations"] == f"{seen['package']}/migrations"
    adapters = seen["adapters"]
    assert isinstance(adapters, dict)
    assert {"memory", "faiss"} <= set(adapters)
    assert all(file.startswith(inside) for file in adapters.values())


def test_the_editable_install_works(install: Callable[..., Path], tmp_path: Path) -> None:
    seen = use(install("--editable", REPOSITORY), tmp_path)
    assert seen["package"] == str(REPOSITORY / "knnstore")
    assert seen["migrations"] == str(REPOSITORY / "migrations")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "knnstore").rglob("*.py")}
    modules |= {str(path.relative_to(REPOSITORY / "adapters")) for path in REPOSITORY.glob("adapters/*/*.py")}
    assert modules <= names
    assert {"knnstore/py.typed", "knnstore_faiss/py.typed"} <= names
    page = (REPOSITORY / "knnstore/server/page/static").iterdir()
    assert {str(path.relative_to(REPOSITORY)) for path in page} <= names
    assert {"knnstore/migrations/env.py", "knnstore/migrations/versions/0001_first_schema.py"} <= names
    roots = {name.partition("/")[0] for name in names}
    assert all(root.startswith("knnstore") for root in roots), roots
    assert not {name for name in names if "__pycache__" in name}


def test_the_sdist_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build(source, tmp_path / "again", "--wheel")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    for file in ("Makefile", "constraints.txt", "LICENSE", "README.md", "tests/conftest.py"):
        assert (source / file).is_file()


@pytest.mark.parametrize("folder", ["adapters", "migrations", "tests"])
def test_folders_that_are_no_packages(folder: str) -> None:
    """`adapters` is also the name of another distribution's package, which must stay importable."""
    assert (REPOSITORY / folder).is_dir()
    assert not (REPOSITORY / folder / "__init__.py").exists()
