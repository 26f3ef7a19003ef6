"""Data of a move of the keys to another engine: `MovePlan` while it is unfinished, `Moved` as its result."""

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

_FILE_NAME = "move.json"


@dataclass(frozen=True, slots=True)
class Moved:
    """Report on a call of `KNNStore.move`, which moves the store's keys to another vector engine."""

    before: Engine
    """The old engine."""
    after: Engine
    """The new engine."""
    records: int
    """Number of records in the new engine."""
    copied: int
    """Number of records that this call copied; smaller than `records` if it continued an interrupted move."""
    seconds: float
    """Duration of the call in seconds."""
    recall: float | None
    """Share of the true nearest neighbors of some stored keys that the new engine finds, 0 to 1; 1 for an
    engine with exact search, None if there are no records."""
    neighbors: int
    """Number of neighbors of each sampled key from which the recall was computed."""
    codes: str | None
    """Name of the codes (short numbers that stand for a key), such as ``pq32``, to which the new engine
    compresses the keys of domains with many records. The lost precision cannot be restored. None if no key is
    compressed."""
    left: str | None
    """The reason why the old keys still exist; None if they were erased."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """State of a move of the keys, saved in the store's folder until the old keys are erased."""

    store_id: str
    """Id of the store."""
    source: Engine
    """The engine that had the keys when the move began."""
    target: Engine
    """The engine to which the keys are copied."""
    made: bool = False
    """True if this move has created the target datastore, so that all records in it belong to this store."""

    @classmethod
    def read(cls, home: Home, store_id: str) -> Self | None:
        """Read the state of a store's unfinished move; None if no move is unfinished.

        Args:
            home: folder of the store.
            store_id: id of the store.

        Raises:
            ConfigError: if the file of the move is damaged, or belongs to another store.
        """
        path = home.path / _FILE_NAME
        try:
            content = json.loads(read_file(path))
            source, target = Engine(**content["source"]), Engine(**content["target"])
            plan = cls(content["store_id"], source, target, bool(content["made"]))
            if not all(isinstance(name, str) for e in (source, target) for name in (e.adapter, e.location)):
                raise TypeError("the name of an adapter or a location is not a string")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged; remove it and the unfinished copy of the keys: {error}"
            ) from error
        if plan.store_id != store_id:
            raise ConfigError(
                f"{path} belongs to another store: remove it, but not the keys at {target.location!r}"
            )
        return plan

    def write(self, home: Home) -> None:
        """Save this state of the unfinished move in the store's folder, durably."""
        with medium_errors(home.path):
            publish(home.path / _FILE_NAME, json.dumps(asdict(self)).encode(), "move")

    @staticmethod
    def remove_temporary_file(home: Home) -> None:
        """Delete the temporary file that a crash during `write` may have left in the store's folder."""
        (home.path / f"{_FILE_NAME}.tmp").unlink(missing_ok=True)

    @staticmethod
    def delete(home: Home) -> None:
        """Delete the saved state of a move from the store's folder, durably, because the move has ended."""
        (home.path / _FILE_NAME).unlink(missing_ok=True)
        sync_directory(home.path)


def choose_copy_engine(home: Home, engine: Engine, *, begun: Engine | None) -> Engine:
    """Choose a location at which the same vector engine can make a copy of the store's keys.

    If the location of the keys is a URL, the location stays, and the adapter chooses parameters that name
    another place on the same server. Otherwise the result has a new location: a folder that does not exist
    yet. But if an interrupted move has begun a copy with the same engine, the result is the target of that
    move.

    Args:
        home: folder of the store; relative locations are inside it.
        engine: the engine that has the keys: adapter, location and parameters.
        begun: target of an interrupted move; None if no move was interrupted.

    Returns:
        The engine for the copy, which differs from `engine` in location or parameters.

    Raises:
        ConfigError: if the adapter cannot choose a place on its server.
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
