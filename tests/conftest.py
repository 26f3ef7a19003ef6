"""What every test may use: PostgreSQL, a new catalog on each database, a sudden end, a Qdrant server."""

import gc
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from sqlalchemy import URL, create_engine, text

from knnstore import failpoints

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=20)
settings.load_profile("untimed")

MEMORY = Path("/dev/shm")

ROLE = "knnstore"
PASSWORD = "s3cr%t"  # a % in it must survive URLs and configuration files
PASSWORD_ROLE = "knnstore_password"

CONFIGURATION = """
listen_addresses = ''
fsync = off
full_page_writes = off
max_connections = 60
shared_buffers = 16MB
log_min_messages = panic
"""
AUTHENTICATION = f"""
local all {PASSWORD_ROLE} scram-sha-256
local all all trust
"""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples hypothesis tries, and where temporary folders are.

    The quick run tries few examples, but not in CI. Folders are in memory where there is room: a third of the
    tests' time is syncing. Until the tests are collected, garbage is not: nearly all that is made stays.
    """
    gc.disable()
    if config.option.markexpr == "not slow" and not os.environ.get("CI"):
        settings.load_profile("quick")
    if config.option.basetemp or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < 4 << 30:
        return
    if os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:  # some tests install programs
        return
    folder = tempfile.mkdtemp(prefix="knnstore-tests-", dir=MEMORY)
    config.option.basetemp = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files whose tests are all slow out of the quick run: they import Ray, schemathesis and others."""
    if config.option.markexpr != "not slow" or not collection_path.name.startswith("test_"):
        return None
    is_slow = re.search(r"^pytestmark = .*pytest\.mark\.slow\b", collection_path.read_text(), re.MULTILINE)
    return True if is_slow else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a PostgreSQL server as slow, and begin with vLLM's tests, which wait the longest.

    The same tests on SQLite stay quick.
    """
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        is_there = "-postgresql" in item.name or "[postgresql" in item.name
        if is_there or fixtures & {"postgres", "own_postgres"}:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave the modules and the tests, a million objects, out of all further garbage collections.

    These are rare: with Python's thresholds they would take a twentieth of the tests' time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often writers were killed and where, and how many images of a power loss were read."""
    found: dict[str, list[Any]] = {"killed": [], "recoveries_killed": [], "images": []}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in found:
                found[name].append(value)
    killed = [place for places in found["killed"] for place in places]
    if killed:
        points = {place.partition(":")[0] for place in killed}
        recoveries = sum(found["recoveries_killed"])
        terminalreporter.write_line(
            f"{len(killed)} writers killed at {len(points)} failpoints, and {recoveries} in their recovery"
        )
    if found["images"]:
        terminalreporter.write_line(f"{sum(found['images'])} images of a power loss")


class PostgresServer:
    """A PostgreSQL server of its own in a temporary folder, reached through a socket in it."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._names = (f"test{number}" for number in count())
        # PostgreSQL refuses to run as root.
        self._user = None
        if os.geteuid() == 0:
            known = {entry.pw_name for entry in pwd.getpwall()}
            self._user = "postgres" if "postgres" in known else "nobody"
            shutil.chown(folder, self._user)

    def start(self) -> None:
        data = self.folder / "data"
        self._run("initdb", "-D", data, "-U", ROLE, "--no-sync", "-E", "UTF8", "--locale=C", "-A", "trust")
        with (data / "postgresql.conf").open("a") as file:
            file.write(CONFIGURATION + f"unix_socket_directories = '{self.folder}'\n")
        (data / "pg_hba.conf").write_text(AUTHENTICATION)
        self._run("pg_ctl", "-D", data, "-w", "-l", self.folder / "log", "start")
        self.execute("postgres", f"CREATE ROLE {PASSWORD_ROLE} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")

    def stop(self) -> None:
        """End the server as a crash would."""
        self._run("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "stop")

    def resume(self) -> None:
        """Start the server again, which recovers from its log."""
        self._run("pg_ctl", "-D", self.folder / "data", "-w", "-l", self.folder / "log", "start")

    def restart(self) -> None:
        """Crash the server and start it again, as a power loss would."""
        self.stop()
        self.resume()

    def new_database(self, options: str = "") -> URL:
        name = next(self._names)
        self.execute("postgres", f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def drop(self, url: URL) -> None:
        self.execute("postgres", f"DROP DATABASE {url.database} WITH (FORCE)")

    def url(self, database: str) -> URL:
        return URL.create(
            "postgresql+psycopg", username=ROLE, database=database, query={"host": str(self.folder)}
        )

    def execute(self, database: str, statement: str) -> None:
        engine = create_engine(self.url(database), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [self._binaries / program, *arguments]
        groups = [] if self._user else None
        done = subprocess.run(
            command,
            cwd=self.folder,
            user=self._user,
            extra_groups=groups,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # inherited by the server: a pipe would never end
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            log = self.folder / "log"
            said = log.read_text() if log.exists() else "no log"
            raise RuntimeError(f"{program} failed with {done.returncode}: {said}")


def postgres_binaries() -> Path | None:
    """Where initdb and pg_ctl are: Debian keeps them out of PATH."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    found = sorted(versions, key=lambda path: int(path.parent.parent.name))
    elsewhere = shutil.which("initdb")
    return found[-1].parent if found else Path(elsewhere).parent if elsewhere else None


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    binaries = postgres_binaries()
    if binaries is None:
        reason = "PostgreSQL's initdb is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Not tmp_path: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = PostgresServer(binaries, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running PostgreSQL server; one for each pytest process."""
    with running_server() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that the test may stop."""
    with running_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[URL]:
    """The URL of a new, empty database: a test that takes it runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        yield URL.create("sqlite", database=str(tmp_path / "catalog.db"))
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.new_database()
    yield url
    server.drop(url)


@pytest.fixture
def killed_at(record_property: Callable[[str, object], None]) -> Callable[[str, Callable[[], None]], bool]:
    """Runs a function in a child that is killed at a failpoint; False when it was never passed."""

    def run(failpoint: str, work: Callable[[], None]) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside pytest-xdist's threads
            child = os.fork()
        if child == 0:
            try:
                failpoints.arm(failpoint)
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            record_property("killed", [failpoint])
            return True
        assert os.WEXITSTATUS(status) == 0, "the child failed with an exception"
        return False

    return run


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How long a call to a Qdrant server may take, whatever a store was told.

    Long, so that a busy machine is no fault; short while ``is_in_vain()``, so that no test waits for nothing.
    """
    from knnstore_qdrant.collection import Attempts

    patience = SimpleNamespace(is_in_vain=lambda: False)
    seconds = property(lambda _: 0.4 if patience.is_in_vain() else 60.0, lambda _, __: None)
    monkeypatch.setattr(Attempts, "_timeout", seconds, raising=False)
    left = Attempts.seconds_left
    # Asked before each request, of which one call may make several.
    monkeypatch.setattr(Attempts, "seconds_left", lambda self: min(left(self), self._timeout))
    return patience


@pytest.fixture
def qdrant_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """A running `QdrantServer` (see tests/qdrant_server) without collections."""
    pytest.importorskip("qdrant_client")
    pytest.importorskip("qdrant_edge")
    monkeypatch.syspath_prepend(Path(__file__).with_name("qdrant_server"))
    from qdrant_server import QdrantServer

    patience = request.getfixturevalue("patience")
    with QdrantServer(tmp_path / "qdrant") as server:
        patience.is_in_vain = lambda: not server.is_running or server.faults.leave_unanswered
        yield server
