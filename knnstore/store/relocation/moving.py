"""A move of the keys: what is noted of one that has begun, and what is reported of one that is done."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Self

from knnstore.catalog import Engine
from knnstore.datastore import SupportsBeside, registry
from knnstore.durable import publish, read_file, sync_directory
from knnstore.errors import ConfigError
from knnstore.space import medium_errors
from knnstore.store.home import Home

_NAME = "move.json"


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of `KNNStore.move`."""

    before: Engine
    """The old engine."""
    after: Engine
    """The new engine."""
    records: int
    copied: int
    """Records that this call copied; fewer than `records` if it continued an interrupted one."""
    seconds: float
    recall: float | None
    """Share of the true nearest neighbors of some stored keys that the new engine finds; 1 for exact search,
    None without records."""
    neighbors: int
    """Number of neighbors of each key in the recall."""
    codes: str | None
    """Codes of many keys in the new engine, as ``pq32``; their loss is permanent."""
    left: str | None
    """The reason why the old keys still exist; None if they were erased."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A move that has begun; kept in the home until its old keys are gone."""

    store_id: str
    source: Engine
    target: Engine
    made: bool = False
    """The target was created by this move, so whatever it holds is the store's."""

    @classmethod
    def read(cls, home: Home, store_id: str) -> Self | None:
        """Return the unfinished move; None if there is none.

        Raises:
            ConfigError: what says so is damaged, or of another store.
        """
        path = home.path / _NAME
        try:
            content = json.loads(read_file(path))
            source, target = Engine(**content["source"]), Engine(**content["target"])
            plan = cls(content["store_id"], source, target, bool(content["made"]))
            if not all(isinstance(name, str) for e in (source, target) for name in (e.adapter, e.location)):
                raise TypeError("an engine is named by what is no text")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged; remove it, and the copy that it was for: {error}"
            ) from error
        if plan.store_id != store_id:
            raise ConfigError(
                f"{path} is of another store: remove it; what is at {target.location!r} stays as it is"
            )
        return plan

    def write(self, home: Home) -> None:
        """Make this the unfinished move, durably."""
        with medium_errors(home.path):
            publish(home.path / _NAME, json.dumps(asdict(self)).encode(), "move")

    @staticmethod
    def clean(home: Home) -> None:
        """Remove what a crash left half written."""
        (home.path / f"{_NAME}.tmp").unlink(missing_ok=True)

    @staticmethod
    def forget(home: Home) -> None:
        """Leave no move unfinished, durably."""
        (home.path / _NAME).unlink(missing_ok=True)
        sync_directory(home.path)


def choose_copy_engine(home: Home, engine: Engine, *, begun: Engine | None) -> Engine:
    """Choose where a copy in the same engine goes: a free folder of the home, or what the adapter chooses.

    Args:
        home: folder of the store; relative locations are inside it.
        engine: the present engine.
        begun: target of an interrupted move, which may be this one.

    Raises:
        ConfigError: the adapter cannot choose a place on its server.
    """
    if "://" in engine.location:
        adapter = registry.load(engine.adapter)
        if not issubclass(adapter, SupportsBeside):
            raise ConfigError(
                f"the adapter {engine.adapter} cannot choose a place for a copy at {engine.location}: move "
                "the keys elsewhere with `knnstore move`, which removes the old ones"
            )
        elsewhere = adapter.beside(engine.location, **engine.params)
        return replace(engine, params={**engine.params, **elsewhere})
    if begun is not None and begun == replace(engine, location=begun.location):
        return begun
    stem = engine.location.rstrip("0123456789").removesuffix("-") or "keys"
    free = (f"{stem}-{number}" for number in count(2))
    return replace(engine, location=next(name for name in free if not (home.path / name).exists()))
