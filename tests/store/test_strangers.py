"""A home from somebody else is data: it leads to no file, no server and no secret of the user's."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knnstore.cli import app
from knnstore.errors import ConfigError
from knnstore.store import KNNStore

POSTGRES = "postgresql+psycopg://someone@db.example/knn"


@pytest.fixture
def filled(store: KNNStore, writer, home: Path) -> Path:
    """The home of a closed store with a document."""
    writer.add("law", "1")
    store.close()
    return home


def lead(home: Path, catalog: str) -> None:
    (home / "knnstore.json").write_text(json.dumps({"format": 1, "catalog": catalog}))


@pytest.mark.parametrize(
    "name", ["catalog.db", "catalog.db-wal", "knnstore.json", "writer.lock", "reserve", "weights"]
)
def test_no_link_of_a_home_is_followed_out_of_it(filled: Path, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes((filled / name).read_bytes() if (filled / name).exists() else b"")
    (filled / name).unlink(missing_ok=True)
    (filled / name).symlink_to(mine)
    before = mine.read_bytes()
    for mode in ("r", "a"):
        with pytest.raises(ConfigError, match=f"{name} leads out of its folder"):
            KNNStore.open(filled, mode)
    assert mine.read_bytes() == before


def test_a_file_in_the_place_of_the_weights_is_named_before_anything_is_fitted(filled: Path) -> None:
    (filled / "weights").touch()
    for mode in ("r", "a"):
        with pytest.raises(ConfigError, match="weights is not a folder"):
            KNNStore.open(filled, mode)


def test_no_link_among_the_keys_is_followed_out_of_them(filled: Path, tmp_path: Path) -> None:
    segments = filled / "keys" / "segments"
    shutil.move(segments, tmp_path / "mine")
    segments.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="segments leads out of its folder"):
        KNNStore.open(filled)
    segments.unlink()
    shutil.move(tmp_path / "mine", segments)
    os.mkfifo(segments / "pipe")
    with pytest.raises(ConfigError, match="pipe is neither a file nor a folder"):
        KNNStore.open(filled)


def test_keys_may_be_on_another_disk(filled: Path, tmp_path: Path) -> None:
    shutil.move(filled / "keys", tmp_path / "disk")
    (filled / "keys").symlink_to(tmp_path / "disk")
    with KNNStore.open(filled) as store:
        assert store.verify() == []


def test_a_catalog_elsewhere_is_written_only_where_the_user_names_it(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{tmp_path / 'mine.db'}"
    shutil.move(filled / "catalog.db", tmp_path / "mine.db")
    lead(filled, elsewhere)
    KNNStore.open(filled).close()
    with pytest.raises(
        ConfigError, match=r"the catalog of .* is outside of that folder, .*mine\.db: .* KNNSTORE_CATALOG"
    ):
        KNNStore.open(filled, "a")
    before = (tmp_path / "mine.db").read_bytes()
    done = CliRunner().invoke(app, ["db", "upgrade", "--home", str(filled)])
    assert (done.exit_code, "KNNSTORE_CATALOG" in done.output) == (1, True)
    assert (tmp_path / "mine.db").read_bytes() == before
    monkeypatch.setenv("KNNSTORE_CATALOG", elsewhere)
    with KNNStore.open(filled, "a") as store:
        assert [document.id for document in store.documents()] == ["1"]


@pytest.mark.parametrize(
    ("url", "environment", "problem"),
    [
        (POSTGRES, {"PGPASSWORD": "mine"}, "set PGHOST to db.example, or unset PGPASSWORD"),
        (POSTGRES, {"PGPASSWORD": "mine", "PGHOST": "my.example"}, "set PGHOST to db.example"),
        (POSTGRES + "?host=my.example,other", {"PGPASSWORD": "mine", "PGHOST": "my.example"}, "set PGHOST"),
        (POSTGRES + "?passfile=/home/me/key", {}, "the option 'passfile'"),
        (POSTGRES + "?service=mine", {}, "the option 'service'"),
    ],
)
def test_no_password_goes_to_the_server_of_a_home(
    filled: Path, monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], problem: str
) -> None:
    lead(filled, url)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem) as refused:
        KNNStore.open(filled)
    assert "mine" not in str(refused.value).split()


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, "{}", '{"store_id": "%s", "source": %s, "target": %s, "made": false}'],
    ids=["nested", "empty", "numbers"],
)
def test_a_move_that_makes_no_sense_is_one_line(filled: Path, content: str) -> None:
    engine = json.dumps({"adapter": 1, "location": 2})
    (filled / "move.json").write_text(content % ("", engine, engine) if "%s" in content else content)
    with KNNStore.open(filled) as store, pytest.raises(ConfigError, match=r"move\.json is damaged"):
        store.info()
