"""Secrets from files: what is accepted, what is refused, and that no message repeats a secret."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from knnstore.datastore import read_secret
from knnstore.errors import ConfigError, KnnstoreError
from knnstore.store import KNNStore

NAME = "KNNSTORE_TEST_SECRET"


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"sesame", "sesame"),
        (b"sesame\n", "sesame"),
        (b"sesame\r\n", "sesame"),
        (b"sesame\n\n", "sesame\n"),
        (b"sesame\r", "sesame\r"),
        (b" p $(x) 'w ", " p $(x) 'w "),
        ("schlüssel\n".encode(), "schlüssel"),
        (b"x" * 65_536, "x" * 65_536),
    ],
)
def test_a_file_holds_the_secret_and_perhaps_a_line_break(
    content: bytes, secret: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(content)
    assert read_secret(NAME, {f"{NAME}_FILE": str(tmp_path / "secret")}) == secret
    assert read_secret(NAME, {f"{NAME}_FILE": str(tmp_path / "secret"), NAME: ""}) == secret


def test_a_variable_is_a_secret_by_itself() -> None:
    assert read_secret(NAME, {NAME: "sesame\n"}) == "sesame\n"
    assert read_secret(NAME, {NAME: "", f"{NAME}_FILE": ""}) is None
    assert read_secret(NAME, {}) is None


def test_both_variables_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame")
    given = {NAME: "sesame", f"{NAME}_FILE": str(tmp_path / "secret")}
    with pytest.raises(ConfigError) as refused:
        read_secret(NAME, given)
    assert str(refused.value) == f"{NAME} and {NAME}_FILE are both set: unset one of them"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "cannot be read: No such file or directory"),
        ("folder", "cannot be read: it is not a regular file"),
        ("pipe", "cannot be read: it is not a regular file"),
        ("device", "cannot be read: it is not a regular file"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("empty", "is empty"),
        ("line break", "is empty"),
        ("binary", "is not text in UTF-8"),
        ("nul", "contains a NUL byte"),
        ("large", "is larger than 64 KiB"),
    ],
)
def test_a_file_that_is_no_secret_is_one_line(kind: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)  # nobody writes: reading it would never end
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "missing":
            pass
        case _:
            contents = {"empty": b"", "line break": b"\n", "binary": b"sesame\xff", "nul": b"sesame\0sesame"}
            path.write_bytes(contents.get(kind, b"sesame" * 11_000))
    with pytest.raises(ConfigError) as refused:
        read_secret(NAME, {f"{NAME}_FILE": str(path)})
    assert str(refused.value).startswith(f"{NAME}_FILE names {path}, which {problem}")
    assert "sesame" not in str(refused.value).replace(str(path), "")
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_file_of_somebody_else_is_one_line(tmp_path: Path) -> None:
    """As a user who may not read it, in a process of its own: the tests may run as root."""
    path = tmp_path / "secret"
    path.write_text("sesame")
    path.chmod(0)
    script = (
        "import os, sys\n"
        "from knnstore.datastore import read_secret\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: read_secret('X')\n"
        "except Exception as error: print(error)\n"
    )
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.owner() == path.owner() and str(folder).startswith(("/tmp/", "/dev/shm/")):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "X_FILE": str(path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"X_FILE names {path}, which cannot be read: Permission denied\n"


# -- the two databases


def test_the_catalogs_password_comes_from_a_file(
    postgres: Any, home: Path, identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database().set(username="knnstore_password")
    bare = url.render_as_string()
    secret = tmp_path / "password"
    monkeypatch.setenv("PGPASSWORD_FILE", str(secret))
    with pytest.raises(ConfigError, match=f"PGPASSWORD_FILE names {secret}, which cannot be read"):
        KNNStore.create(home, identity, catalog=bare)
    secret.write_text("s3cr%t\n")
    KNNStore.create(home, identity, catalog=bare).close()
    assert "s3cr" not in "".join(path.read_text() for path in home.glob("*.json"))

    with pytest.raises(ConfigError, match=r"PGPASSWORD_FILE may be for another server: set PGHOST"):
        KNNStore.open(home)
    monkeypatch.setenv("PGHOST", str(url.query["host"]))
    with KNNStore.open(home, "a") as store:
        assert "s3cr" not in repr(store.home.catalog_url)
        assert store.documents() == []

    secret.write_text("s3cr\n")
    with pytest.raises(KnnstoreError, match="password authentication failed") as refused:
        KNNStore.open(home)
    assert "s3cr" not in str(refused.value)
    monkeypatch.setenv("PGPASSWORD", "s3cr%t")
    with pytest.raises(ConfigError, match="PGPASSWORD and PGPASSWORD_FILE are both set"):
        KNNStore.open(home)


def test_the_catalogs_url_comes_from_a_file(
    postgres: Any, home: Path, identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database().set(username="knnstore_password", password="s3cr%t")
    given = url.render_as_string(hide_password=False)
    KNNStore.create(home, identity, catalog=given).close()
    secret = tmp_path / "catalog"
    secret.write_text(given + "\n")
    monkeypatch.setenv("KNNSTORE_CATALOG_FILE", str(secret))
    KNNStore.open(home, "a").close()
    monkeypatch.setenv("PGPASSWORD_FILE", str(tmp_path / "none"))  # the URL has a password already
    KNNStore.open(home, "a").close()
    secret.write_text(given.replace("s3cr", "wr0ng").replace(str(url.database), "another"))
    with pytest.raises(ConfigError, match="names another") as refused:
        KNNStore.open(home)
    assert "wr0ng" not in str(refused.value)
    monkeypatch.setenv("KNNSTORE_CATALOG", given)
    with pytest.raises(ConfigError, match="KNNSTORE_CATALOG and KNNSTORE_CATALOG_FILE are both set"):
        KNNStore.open(home)


def test_qdrants_key_comes_from_a_file(
    qdrant_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from knnstore_qdrant import QdrantDatastore

    secret = tmp_path / "key"
    monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY_FILE", str(secret))
    with type(qdrant_server)(tmp_path / "locked", api_key="sesame") as server:
        place: dict[str, Any] = {"location": server.url, "dim": 8, "grpc_port": server.grpc_port}
        monkeypatch.setenv("KNNSTORE_QDRANT_URL", server.url)
        with pytest.raises(ConfigError, match=f"KNNSTORE_QDRANT_API_KEY_FILE names {secret}, which cannot"):
            QdrantDatastore.open(**place)
        for wrong in ("sesam\n", "s\u00e9same", "ses\x01ame"):
            secret.write_text(wrong)
            with pytest.raises(KnnstoreError, match="KNNSTORE_QDRANT_API_KEY") as refused:
                QdrantDatastore.open(**place)
            assert wrong.strip() not in str(refused.value)
        secret.write_text("sesame\n")
        QdrantDatastore.open(**place).close()
        secret.write_text("another sesame\n")
        monkeypatch.setenv("KNNSTORE_QDRANT_URL", f"http://other:6333 {server.url}")
        QdrantDatastore.open(**place).close()
        monkeypatch.setenv("KNNSTORE_QDRANT_API_KEY", "sesame")
        with pytest.raises(ConfigError, match="KNNSTORE_QDRANT_API_KEY and KNNSTORE_QDRANT_API_KEY_FILE are"):
            QdrantDatastore.open(**place)
