"""A move of the keys: what is noted of one that has begun, and what is reported of one that is done."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from knnstore.catalog import Engine
from knnstore.durable import publish, sync_directory
from knnstore.errors import ConfigError
from knnstore.space import medium_errors
from knnstore.store.home import Home

_NAME = "move.json"


@dataclass(frozen=True, slots=True)
class Moved:
    """What `KNNStore.move` did."""

    before: Engine
    """Where the keys were."""
    after: Engine
    """Where they are."""
    records: int
    copied: int
    """Records copied by this call; fewer than `records` when it went on from an interrupted one."""
    seconds: float
    recall: float | None
    """Share of the true nearest neighbors of some stored keys that the new engine finds, 1 where
    its search is exact; None without records."""
    neighbors: int
    """How many neighbors of each key that was."""
    left: str | None
    """Why the old keys are still where they were; None when they are gone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A move that has begun; kept in the home until its old keys are gone."""

    source: Engine
    target: Engine
    made: bool = False
    """The target was created by this move, so whatever it holds is the store's."""

    @classmethod
    def read(cls, home: Home) -> Self | None:
        """The move that is unfinished, if any."""
        path = home.path / _NAME
        try:
            content = json.loads(path.read_bytes())
            return cls(Engine(**content["source"]), Engine(**content["target"]), content["made"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is damaged; remove it, and the copy that it was for: {error}"
            ) from error

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
