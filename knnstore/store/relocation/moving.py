"""A move of the keys: `MovePlan` is saved while a move is unfinished, `Moved` is the result of a move."""

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
    """The result of `KNNStore.move`."""

    before: Engine
    """The old engine."""
    after: Engine
    """The new engine."""
    records: int
    copied: int
    """Number of records that this call copied; fewer than `records` if it continued an interrupted move."""
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
class MovePlan:
    """State of a move that has begun. It is saved in the store's folder until the old keys are erased."""

    store_id: str
    source: Engine
    target: Engine
    made: bool = False
    """True if this move has created the target, so that all records in it belong to this store."""

    @classmethod
    def read(cls, home: Home, store_id: str) -> Self | None:
        """Return the unfinished move; None if there is none.

        Raises:
            ConfigError: if the file of the move is damaged, or belongs to another store.
        """
        path = home.path / _FILE_NAME
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
        """Save this as the unfinished move, durably."""
        with medium_errors(home.path):
            publish(home.path / _FILE_NAME, json.dumps(asdict(self)).encode(), "move")

    @staticmethod
    def remove_temporary_file(home: Home) -> None:
        """Delete the temporary file that a crash may have left."""
        (home.path / f"{_FILE_NAME}.tmp").unlink(missing_ok=True)

    @staticmethod
    def delete(home: Home) -> None:
        """Delete the saved state, durably: no move is unfinished any more."""
        (home.path / _FILE_NAME).unlink(missing_ok=True)
        sync_directory(home.path)


def choose_copy_engine(home: Home, engine: Engine, *, begun: Engine | None) -> Engine:
    """Return the same engine at another location, for a copy of the keys.

    This is a free folder in the home, the target of the interrupted move if it fits, or, for a URL, the place
    that the adapter chooses.

    Args:
        home: folder of the store; relative locations are inside it.
        engine: the present engine.
        begun: target of an interrupted move, which may be this one.

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
