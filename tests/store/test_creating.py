"""Making a store, interrupted anywhere: the same call goes through, and what is somebody's is left alone."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from knnstore import failpoints
from knnstore.errors import (
    ConfigError,
    DatastoreExistsError,
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


@pytest.mark.parametrize("places", ["location", "sqlite", "postgresql"], indirect=True)
def test_what_somebody_made_is_refused_and_kept(places, identity, writer_of, killed_at) -> None:
    """Also when it is empty, and when a creation at the same place was interrupted before."""
    home, options = places.new()
    other = home.with_name("other")
    assert killed_at("segments.creation.written", lambda: KNNStore.create(other, identity, **options).close())
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
        assert (store.search(writer.keys["law", "1"], 1).distances == np.float32(0)).all()


def test_a_place_in_the_home_is_named_from_there(home, identity) -> None:
    with pytest.raises(ConfigError, match="--location keys"):
        KNNStore.create(home, identity, location=str(home / "keys"))
    assert not home.exists()
