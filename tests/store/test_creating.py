"""Making a store, interrupted anywhere: the same call goes through, and what is somebody's is left alone."""

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from knnstore import failpoints
from knnstore.errors import (
    ConfigError,
    DatastoreExistsError,
    KnnstoreError,
    StoreExistsError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from knnstore.store import KNNStore


class Places:
    """Where a store and its parts are to be made: each time at new places."""

    def __init__(self, folder: Path, layout: str, request: pytest.FixtureRequest) -> None:
        self._folder = folder
        self._layout = layout
        self._request = request
        self._made = 0

    def new(self) -> tuple[Path, dict[str, str]]:
        """A home, and the options with which to make it."""
        self._made += 1
        folder = self._folder / str(self._made)
        folder.mkdir()
        options = {}
        if self._layout != "inside":
            options["location"] = str(folder / "keys")
        if self._layout == "sqlite":
            options["catalog"] = f"sqlite:///{folder / 'catalog.db'}"
        if self._layout == "postgresql":
            url = self._request.getfixturevalue("postgres").new_database()
            options["catalog"] = url.render_as_string(hide_password=False)
        return folder / "home", options


@pytest.fixture(params=["inside", "location", "sqlite", "postgresql"])
def places(request, tmp_path) -> Places:
    return Places(tmp_path, request.param, request)


def left_beside(home: Path) -> set[str]:
    return {path.name for path in home.parent.iterdir()} - {"home", "keys", "catalog.db"}


def passages(places: Places, identity, monkeypatch) -> list[str]:
    """Every step that making a store passes, as ``name:passage``."""
    home, options = places.new()
    monkeypatch.setattr(failpoints, "_recorded", None)
    names = failpoints.record()
    KNNStore.create(home, identity, **options).close()
    counted: Counter[str] = Counter()
    listed = []
    for name in names:
        if name.startswith("segments.file."):  # of which nothing is seen before the file is renamed
            continue
        counted[name] += 1
        listed.append(f"{name}:{counted[name]}")
    monkeypatch.undo()
    return listed


@pytest.mark.slow
@pytest.mark.parametrize("places", ["inside", "postgresql"], indirect=True)
def test_killed_anywhere_the_same_call_goes_through(
    places, identity, writer_of, killed_at, monkeypatch
) -> None:
    outcomes: Counter[str] = Counter()
    for place in passages(places, identity, monkeypatch):
        home, options = places.new()
        assert killed_at(place, lambda: KNNStore.create(home, identity, **options).close())  # noqa: B023
        outcomes["after" if home.exists() else "before"] += 1
        if home.exists():  # it was there, and whole, when it was killed
            with pytest.raises(StoreExistsError):
                KNNStore.create(home, identity, **options)
        else:
            with pytest.raises(StoreNotFoundError):
                KNNStore.open(home)
            KNNStore.create(home, identity, **options).close()
        with KNNStore.open(home, "a") as store:
            writer_of(store).add("law", "1")
            assert store.verify() == []
        assert left_beside(home) == set(), place
    assert outcomes["before"] >= 6
    assert outcomes["after"] >= 1


def test_a_failure_midway_leaves_nothing_in_the_way(places, identity, monkeypatch) -> None:
    home, options = places.new()
    failpoints.arm("catalog.create.inside=eio")
    try:
        with pytest.raises(OSError, match=r"catalog\.create\.inside"):
            KNNStore.create(home, identity, **options)
    finally:
        failpoints.arm(None)
    assert not home.exists()
    KNNStore.create(home, identity, **options).close()
    assert left_beside(home) == set()


def test_an_unreachable_catalog_is_noticed_before_anything_is_made(identity, tmp_path) -> None:
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            KNNStore.create(
                tmp_path / "home",
                identity,
                location=str(tmp_path / "keys"),
                catalog="postgresql://127.0.0.1:1/x",
            )
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("places", ["location", "sqlite", "postgresql"], indirect=True)
def test_what_somebody_made_is_refused_and_kept(places, identity, writer_of, killed_at) -> None:
    """Also when it is empty, and when a creation at the same place was interrupted before."""
    home, options = places.new()
    other = home.with_name("other")
    assert killed_at("segments.creation.renamed", lambda: KNNStore.create(other, identity, **options).close())
    with KNNStore.create(home, identity, **options) as store:
        for _ in range(2):
            with pytest.raises((StoreExistsError, DatastoreExistsError)):
                KNNStore.create(other, identity, **options)
        writer = writer_of(store)
        writer.add("law", "1")
    catalog = options.pop("catalog", None)
    with pytest.raises(DatastoreExistsError, match="choose another --location"):
        KNNStore.create(other, identity, **options)
    if catalog is not None:
        with pytest.raises(StoreExistsError, match="already holds"):
            KNNStore.create(other, identity, catalog=catalog)
    with KNNStore.open(home) as store:
        assert store.verify() == []
        assert (store.search(writer.keys["law", "1"], 1).distances < 1e-4).all()


def race(home: Path, identity, delays: list[float], killed: str | None) -> Counter[str]:
    """Make one home in several processes, of which the first may be killed: what became of each."""
    ends: Counter[str] = Counter()
    children = []
    for number, delay in enumerate(delays):
        child = os.fork()
        if child == 0:
            end = 3
            try:
                failpoints.arm(killed if number == 0 else None)
                time.sleep(delay)
                KNNStore.create(home, identity).close()
                end = 0
            except KnnstoreError as error:
                end = 1 if "\n" not in str(error) and str(home.name) in str(error) else 2
            finally:
                os._exit(end)
        children.append(child)
    for child in children:
        status = os.waitpid(child, 0)[1]
        ended = ("made", "refused", "said in several lines", "failed")
        ends["killed" if os.WIFSIGNALED(status) else ended[os.WEXITSTATUS(status)]] += 1
    return ends


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside pytest-xdist's threads
def test_of_several_that_make_one_home_one_does(identity, tmp_path, monkeypatch) -> None:
    rng = random.Random(0)
    monkeypatch.setattr(failpoints, "_recorded", None)
    passed = failpoints.record()
    started = time.perf_counter()
    KNNStore.create(tmp_path / "first", identity).close()
    seconds = time.perf_counter() - started
    monkeypatch.undo()
    names = sorted(set(passed))
    seen: Counter[str] = Counter()
    for number in range(30):
        home = tmp_path / str(number) / "home"
        home.parent.mkdir()
        delays = [rng.uniform(0, seconds) * (number % 3) / 2 for _ in range(3)]
        killed = rng.choice(names) if number % 2 else None
        ends = race(home, identity, delays, killed)
        assert ends["made"] + ends["refused"] + ends["killed"] == 3, ends
        assert ends["made"] + ends["killed"] >= 1
        assert ends["made"] <= 1
        if not home.exists():
            assert ends["killed"] == 1
            KNNStore.create(home, identity).close()
        with KNNStore.open(home, "a") as store:
            assert store.verify() == []
        assert left_beside(home) == set()
        seen += ends
    assert seen["refused"] >= 30
    assert seen["killed"] >= 5


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_somebody_has_where_the_home_is_to_be_made_stays(home, identity, tmp_path, kind) -> None:
    place = home.with_name(".home.unfinished")
    theirs = place if kind == "folder" else tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    if kind == "link":
        (theirs / "creation.lock").touch()  # of a creation elsewhere
        place.symlink_to(theirs)
    elif kind == "file":
        (theirs / "notes.txt").rename(place)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"\.home\.unfinished.* move it away"):
        KNNStore.create(home, identity)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not home.exists()


def test_a_place_in_the_home_is_named_from_there(home, identity) -> None:
    with pytest.raises(ConfigError, match="--location keys"):
        KNNStore.create(home, identity, location=str(home / "keys"))
    assert not home.exists()
