"""Moving the keys to another engine, in steps that may each be interrupted.

::

    1 plan       HOME/move.json says from which engine to which
    2 make       the target is created, empty, and from then on is the store's own
    3 transfer   the records are copied, durably every few seconds, and compared
    4 switch     transaction: the catalogue names the target; readers follow      <- moved
    5 erase      the old keys, then HOME/move.json

A crash before 4 leaves the store as it was: the same move goes on where it stopped, and any other
erases the half-made target first. After 4 the next writer does step 5.
"""

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from knnstore.catalog import Engine, Identity
from knnstore.datastore import Datastore, SupportsErase, registry
from knnstore.durable import publish, sync_directory
from knnstore.errors import (
    ConfigError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    KnnstoreError,
)
from knnstore.failpoints import failpoint
from knnstore.progress import Progress
from knnstore.store.home import Home
from knnstore.store.reader import open_datastore

_NAME = "move.json"

_logger = logging.getLogger(__name__)


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
    """Share of the true nearest neighbours of some stored keys that the new engine finds, 1 where
    its search is exact; None without records."""
    neighbors: int
    """How many neighbours of each key that was."""
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
        """The move that is unfinished, if any.

        Raises:
            ConfigError: its file is damaged.
        """
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
        content = json.dumps({**asdict(self), "source": _plain(self.source), "target": _plain(self.target)})
        publish(home.path / _NAME, content.encode(), "move")


def begin(home: Home, identity: Identity, source: Engine, target: Engine, progress: Progress) -> Datastore:
    """Open the target of a move for writing: a new one, or the one of the same move, interrupted.

    Args:
        home: of the store.
        identity: of the store.
        source: where the keys are.
        target: where they shall be; params are JSON values.
        progress: hears what else happens.

    Raises:
        DatastoreExistsError: something else is at the location.
    """
    plan = Plan.read(home)
    if plan is not None and plan.target != target:
        _give_up(home, identity, source, plan, progress)
        plan = None
    if plan is None:
        _check_free(home, identity, source, target)
        Plan(source, target).write(home)
        failpoint("move.planned")
        try:
            opened = open_datastore(home, identity, target, "x")
        except (ConfigError, DatastoreExistsError):
            _forget(home)
            raise
    else:
        opened = open_datastore(home, identity, target, "a")
        if not plan.made and opened.count():
            opened.close()
            _forget(home)
            raise _occupied(target)
    failpoint("move.made")
    Plan(source, target, made=True).write(home)
    return opened


def unfinished(home: Home, engine: Engine) -> Engine | None:
    """Where a move goes that was interrupted before it switched; `engine` is what the catalogue names."""
    plan = Plan.read(home)
    return None if plan is None or plan.target == engine else plan.target


def settle(home: Home, engine: Engine) -> str | None:
    """Erase the old keys of a move that has switched, if there is one.

    Args:
        home: of the store.
        engine: the one that the catalogue names.

    Returns:
        Why the old keys are still there, if they are; None otherwise.
    """
    try:
        return _settle(home, engine)
    except (KnnstoreError, OSError) as error:
        return f"{error}; the next writer tries again"


def settle_quietly(home: Home, engine: Engine) -> None:
    """Do `settle` when a store is opened, which must not fail for it."""
    (home.path / f"{_NAME}.tmp").unlink(missing_ok=True)
    left = settle(home, engine)
    if left:
        _logger.warning("keys that were moved are still at the old place: %s", left)


def abandon(home: Home, identity: Identity, engine: Engine) -> Engine | None:
    """Erase the half-made target of an unfinished move.

    Args:
        home: of the store.
        identity: of the store.
        engine: the one that the catalogue names.

    Returns:
        The target; None when no move is unfinished.

    Raises:
        KnnstoreError: it cannot be erased.
    """
    plan = Plan.read(home)
    if plan is None or plan.target == engine:
        return None
    left = _abandon(home, identity, plan)
    if left:
        _logger.warning("the unfinished copy stays: %s", left)
    return plan.target


def _give_up(home: Home, identity: Identity, source: Engine, plan: Plan, progress: Progress) -> None:
    """Clear the way for another move: what was left of this one is erased, or named."""
    switched = plan.target == source  # only its old keys could not be erased
    place = _place(plan.source if switched else plan.target)
    try:
        if switched:
            problem = _settle(home, source)
        else:
            progress.say(f"giving up the unfinished move to {place}")
            problem = _abandon(home, identity, plan)
    except (KnnstoreError, OSError) as error:
        problem = str(error)
    if problem:
        progress.say(f"remove what is left at {place} yourself: {problem}")
    _forget(home)


def _settle(home: Home, engine: Engine) -> str | None:
    plan = Plan.read(home)
    if plan is None or plan.target != engine:
        return None
    left = _erase(home, plan.source)
    _forget(home)
    return left


def _abandon(home: Home, identity: Identity, plan: Plan) -> str | None:
    """Erase the target of a move that has not switched; returns why it is left to the user, if it is."""
    left = _erase(home, plan.target) if plan.made or _is_empty(home, identity, plan.target) else None
    _forget(home)
    return left


def _check_free(home: Home, identity: Identity, source: Engine, target: Engine) -> None:
    """Refuse a place that holds anything, for whatever is there after the move is taken for the store's."""
    place, old = home.resolve(target.location), home.resolve(source.location)
    if "://" not in place:
        folder = Path(place).resolve()
        if "://" not in old and folder.is_relative_to(Path(old).resolve()):
            raise DatastoreExistsError(f"{place} is where the keys are now; choose another --location")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DatastoreExistsError(f"{place} holds something already; choose another --location")
    with suppress(DatastoreNotFoundError):
        open_datastore(home, identity, target, "r").close()
        raise _occupied(target)


def _occupied(target: Engine) -> DatastoreExistsError:
    return DatastoreExistsError(f"a datastore is already at {_place(target)}; choose another --location")


def _is_empty(home: Home, identity: Identity, engine: Engine) -> bool:
    try:
        with open_datastore(home, identity, engine, "r") as found:
            return found.count() == 0
    except DatastoreNotFoundError:
        return True
    except DatastoreMismatchError:
        return False


def _erase(home: Home, engine: Engine) -> str | None:
    """Remove a datastore; returns why that is left to the user, if it is."""
    adapter = registry.load(engine.adapter)
    if not issubclass(adapter, SupportsErase):
        return f"the adapter {engine.adapter} removes nothing; {_place(engine)} is yours to delete"
    adapter.erase(home.resolve(engine.location), **engine.params)
    failpoint("move.erased")
    return None


def _forget(home: Home) -> None:
    (home.path / _NAME).unlink(missing_ok=True)
    sync_directory(home.path)


def _place(engine: Engine) -> str:
    return f"{engine.adapter} at {engine.location}"


def _plain(engine: Engine) -> dict[str, object]:
    return {"adapter": engine.adapter, "location": engine.location, "params": dict(engine.params)}
