"""Moving a store's keys to another engine, or copying them to a new place of the same engine.

Each of these steps may be interrupted.

::

    1 plan       HOME/move.json says from which engine to which
    2 create     the empty target is created; from then on it belongs to the store
    3 transfer   the records are copied, durably every few seconds, and compared
    4 switch     transaction: the catalog names the target; readers follow      <- moved
    5 erase      the old keys, then HOME/move.json

A crash before step 4 leaves the store unchanged: the same move continues where it stopped, and any other move
first erases the unfinished target. After step 4 the next writer does step 5.
"""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, Self

from knnstore.catalog import Catalog, CatalogWriter, Engine
from knnstore.checks import check_json
from knnstore.datastore import Datastore, SupportsCopyParams, registry
from knnstore.durable import read_file, sync_directory, write_atomically
from knnstore.errors import (
    ConfigError,
    CorruptDatastoreError,
    DatastoreError,
    DatastoreExistsError,
    KnnstoreError,
)
from knnstore.failpoints import failpoint
from knnstore.progress import Progress
from knnstore.space import convert_disk_errors
from knnstore.store.current import Current
from knnstore.store.home import Home, KeyOwner, Place, exists_and_is_not_empty
from knnstore.store.relocation.copying import GIVE_UP, Transferred, copy_all_records
from knnstore.store.soundness import (
    check_undamaged,
    format_document_names,
    make_checksum_checker,
    make_checksum_computer,
    name_damaged_documents,
)

_logger = logging.getLogger(__name__)
_FILE_NAME = "move.json"
_UNCHANGED = "the store stays as it is"


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
    engine with exact search, None if there are no records or an earlier call has copied them and switched."""
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
        with convert_disk_errors(home.path):
            write_atomically(home.path / _FILE_NAME, json.dumps(asdict(self)).encode(), "move")

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
        adapter = registry.load_adapter(engine.adapter)
        if not issubclass(adapter, SupportsCopyParams):
            raise ConfigError(
                f"the adapter {engine.adapter} cannot choose a place for a copy at {engine.location}: move "
                "the keys elsewhere with `knnstore move`, which removes the old ones"
            )
        elsewhere = adapter.choose_copy_params(engine.location, **engine.params)
        return replace(engine, params={**engine.params, **elsewhere})
    if begun is not None and begun == replace(engine, location=begun.location):
        return begun
    stem = engine.location.rstrip("0123456789").removesuffix("-") or "keys"
    free = (f"{stem}-{number}" for number in count(2))
    return replace(engine, location=next(name for name in free if not (home.path / name).exists()))


class Relocation:
    """Moves the keys of one store to another vector engine, and erases what unfinished moves have left.

    A move copies the records, switches the catalog to the copy in one transaction, and erases the old keys. A
    move is unfinished if it was interrupted before its old keys were erased.

    Args:
        home: folder of the store.
        catalog: catalog of the store.
        current: the open datastore of the store.
    """

    def __init__(self, home: Home, catalog: Catalog, current: Current) -> None:
        self._home = home
        self._catalog = catalog
        self._current = current

    def get_unfinished_target(self) -> Engine | None:
        """Return the target engine of a move that was interrupted while the old engine was still in use.

        Returns None if there is no such move.
        """
        plan = self._read_plan()
        return None if plan is None or plan.target == self._catalog.engine() else plan.target

    def erase_old_keys(self) -> str | None:
        """Erase the old keys that a move has left after its switch to the new engine. Raises no error.

        Does nothing if no move has left old keys.

        Returns:
            The reason why the old keys still exist; None if they were erased, or there is no such move.
        """
        try:
            plan = self._read_plan()
            has_switched = plan is not None and plan.target == self._current.engine
            return self._erase_leftover(plan) if plan is not None and has_switched else None
        except (KnnstoreError, OSError) as error:
            return f"{error}; the next command that writes tries again"

    def finish_or_warn(self) -> None:
        """Erase the old keys that a move has left after its switch; log a warning if they cannot be erased.

        The writer calls this method when it opens a store. Does nothing if no move has left old keys.
        """
        MovePlan.remove_temporary_file(self._home)
        reason = self.erase_old_keys()
        if reason:
            _logger.warning("the old keys of a move were not deleted: %s", reason)

    def abandon_move(self) -> Engine | None:
        """Give up an unfinished move of the keys, if the store does not use the new engine yet.

        The copy of the keys in the new engine is erased, and the saved state of the move is deleted. If the
        copy cannot be erased, a warning is logged.

        Returns:
            The target engine of the move; None if there is no such move.
        """
        self._current.view()  # follows a move whose answer was lost
        plan = self._read_plan()
        if plan is None or plan.target == self._current.engine:
            return None
        reason = self._erase_leftover(plan)
        if reason:
            _logger.warning("the unfinished copy was not deleted: %s", reason)
        return plan.target

    def erase_leftovers(self, progress: Progress) -> list[str]:
        """Erase the keys that an unfinished move has left: the copy, or the old keys after its switch.

        Args:
            progress: object that shows a message to the user.

        Returns:
            A list with one line if the keys could not be erased: their place and the reason; else empty.
        """
        self._current.view()  # follows a move whose answer was lost
        plan = self._read_plan()
        if plan is None:
            return []
        progress.say(f"deleting what a move has left behind: {self._get_leftover(plan)}")
        return _format_leftover(self._get_leftover(plan), self._erase_leftover(plan))

    def rewrite_keys(self, writer: CatalogWriter, progress: Progress) -> list[str]:
        """Copy all records to a new location of the same engine, switch to the copy, and erase the old keys.

        Args:
            writer: writer of the catalog.
            progress: object that shows messages and progress to the user.

        Returns:
            A list with one line if the old keys could not be erased: their place and the reason; else empty.
        """
        old_place = self._current.place(self._current.engine)
        target = choose_copy_engine(self._home, self._current.engine, begun=self.get_unfinished_target())
        self._copy_and_switch(writer, target, progress)
        return _format_leftover(old_place, self.erase_old_keys())

    def move_keys(self, writer: CatalogWriter, target: Engine, progress: Progress) -> Moved:
        """Move the keys to another engine: copy all records, switch to the copy, and erase the old keys.

        An interrupted move to the same target is continued. If it has switched, but its caller was told that
        the database failed, only the old keys are erased. The copy of another unfinished move is erased.

        Args:
            writer: writer of the catalog.
            target: the new engine: adapter, location and parameters.
            progress: object that shows messages and progress to the user.

        Raises:
            ConfigError: if the store has no keys, or `target` keeps no keys.
            DatastoreExistsError: if the location already holds something else.
            DatastoreError: if the copy differs from its source, or records are lost.
        """
        started = time.perf_counter()
        for engine in (self._current.engine, target):
            _check_has_keys(engine)
        target = replace(target, params=_normalize_params(target.params))
        self._current.view()  # follows a move whose answer was lost
        before, plan = self._current.engine, self._read_plan()
        if plan is not None and plan.target == target == before:  # the copy was compared before the switch
            before, copy = plan.source, self._current.datastore
            transferred = Transferred(copy.count(), 0, None, 0, copy.capabilities.codes)
        else:
            transferred = self._copy_and_switch(writer, target, progress)
        reason_left = self.erase_old_keys()
        return Moved(
            before, target, seconds=time.perf_counter() - started, left=reason_left, **transferred._asdict()
        )

    def _copy_and_switch(self, writer: CatalogWriter, target: Engine, progress: Progress) -> Transferred:
        """Copy all records to another engine, compare the copy, and switch the store to the copy.

        The old keys are not erased. After an error, the store still uses the old keys, and the copy stays so
        that the next call can continue.

        Args:
            writer: writer of the catalog.
            target: the engine for the copy: adapter, location and parameters.
            progress: object that shows messages and progress to the user.

        Raises:
            DatastoreError: if the copy differs from its source, or the source has lost records.
            CorruptDatastoreError: if keys of the source are damaged. The message names their documents.
        """

        def commit() -> None:
            """Make the catalog name the target as the engine of the keys."""
            writer.switch_engine(target, target_checksums.get_checksums())
            failpoint("move.switched")

        # 1) Copy the records, and compare the copy.
        source = self._current.datastore
        check_undamaged(self._catalog, source, _UNCHANGED)
        snapshot, stored = self._current.view().snapshot, self._catalog.key_checksums()
        copy = self._open_target(target, source.count(), progress)
        try:
            source_checksums, target_checksums = (
                make_checksum_checker(snapshot, stored),
                make_checksum_computer(snapshot, copy.capabilities),
            )
            with name_damaged_documents(self._catalog, source, _UNCHANGED):
                transferred = copy_all_records(
                    source,
                    copy,
                    progress,
                    on_source_batch=source_checksums.add_records,
                    on_target_batch=target_checksums.add_records,
                )
            # 2) Check that the source has not lost or altered anything.
            altered = source_checksums.find_differing(stored)
            if altered:
                raise CorruptDatastoreError(
                    f"keys of {format_document_names(self._catalog, altered)} were altered: remove the "
                    f"documents that `knnstore verify` names, and add them again; {GIVE_UP}"
                )
            lost_records = int(snapshot.records.sum()) - transferred.records
            if lost_records > 0:
                raise DatastoreError(
                    f"{lost_records:,} records are lost: `knnstore verify` names their documents; {GIVE_UP}"
                )
            # 3) Switch the catalog and the open datastore to the copy.
            old = self._current.switch_engine(target, copy, commit)
        except BaseException:
            with suppress(KnnstoreError):  # what is durable already serves the next try
                copy.close()
            raise
        old.close()
        return transferred

    def _open_target(self, target: Engine, records: int, progress: Progress) -> Datastore:
        """Open the datastore to which a move copies the records, for writing.

        The datastore is created, unless an interrupted move to the same target has created it. This store
        claims it, and saves the state of the move in its folder. The copy of another unfinished move is
        erased first.

        Args:
            target: the engine for the copy: adapter, location and parameters.
            records: number of records that will be copied.
            progress: object that shows messages to the user.

        Raises:
            DatastoreExistsError: if the location already holds something else.
            DiskFullError: if the disk has too little space for the copy.
        """
        source, place, is_known = self._current.engine, self._current.place(target), True
        operation = f"a copy of {records:,} records"
        plan = self._read_plan()
        if plan is not None and plan.target != target:
            self._abandon_other_move(plan, progress)
            plan = None
        if plan is None:
            self._check_place_is_free(place)
            place.check_space(records, operation)
            MovePlan(self._catalog.store_id, source, target).write(self._home)
            failpoint("move.planned")
            try:
                datastore = place.open("x")
            except (ConfigError, DatastoreExistsError):
                MovePlan.delete(self._home)
                raise
        else:
            key_owner = place.find_owner()
            if key_owner in (KeyOwner.OTHER_STORE, KeyOwner.OTHER_COPY):
                raise place.make_taken_error()
            is_known = key_owner is KeyOwner.THIS_STORE or (plan.made and not place.saves_claims)
            datastore = place.open("a")
        with ExitStack() as failed:
            failed.callback(datastore.close)
            if plan is not None:
                if not is_known and datastore.count():
                    MovePlan.delete(self._home)
                    raise place.make_taken_error()
                place.check_space(records - datastore.count(), operation)
            place.claim()
            failpoint("move.made")
            MovePlan(self._catalog.store_id, source, target, made=True).write(self._home)
            failed.pop_all()
        return datastore

    def _check_place_is_free(self, place: Place) -> None:
        """Raise DatastoreExistsError if a copy of the keys cannot be made at a place.

        The place must have no files, and must not be inside the folder of the present keys.
        """
        folder, old, problem = place.folder, self._current.place(self._current.engine).folder, None
        if folder is not None and old is not None and folder.is_relative_to(old):
            problem = "is where the keys are now"
        elif folder is not None and exists_and_is_not_empty(folder):
            problem = "is not empty"
        if problem is not None:
            raise DatastoreExistsError(f"{place.location} {problem}; choose another --location")
        place.check_free()

    def _abandon_other_move(self, plan: MovePlan, progress: Progress) -> None:
        """Erase the keys that an unfinished move has left, before a move to another target begins.

        If the keys cannot be erased, the user gets a message, and no error is raised.

        Args:
            plan: state of the unfinished move.
            progress: object that shows messages to the user.
        """
        if plan.target != self._current.engine:
            progress.say(f"giving up the unfinished move to {self._get_leftover(plan)}")
        try:
            problem = self._erase_leftover(plan)
        except (KnnstoreError, OSError) as error:
            problem = f"{error}; delete {self._get_leftover(plan)} yourself"
            MovePlan.delete(self._home)
        if problem:
            progress.say(f"the keys that the earlier move left were not deleted: {problem}")

    def _erase_leftover(self, plan: MovePlan) -> str | None:
        """Erase the copy of a move, or the old keys if the store already uses the copy.

        A copy is not erased if it has records and the move did not create it. The saved state of the move is
        deleted in any case.

        Args:
            plan: saved state of the move.

        Returns:
            The reason why the keys were not erased; None if they were erased.
        """
        leftover = self._get_leftover(plan)
        reason_left: str | None = f"the move did not create {leftover}, which has records"
        if plan.made or plan.target == self._current.engine or leftover.is_empty():
            reason_left = leftover.erase()
        MovePlan.delete(self._home)
        return reason_left

    def _get_leftover(self, plan: MovePlan) -> Place:
        """Return the place of the keys that must be erased after an unfinished move.

        If the store already uses the copy, this is the place of the old keys. Otherwise it is the place of
        the copy.

        Args:
            plan: saved state of the move.
        """
        return self._current.place(plan.source if plan.target == self._current.engine else plan.target)

    def _read_plan(self) -> MovePlan | None:
        """Read the state of the unfinished move from the store's folder; None if no move is unfinished."""
        return MovePlan.read(self._home, self._catalog.store_id)


def _check_has_keys(engine: Engine) -> None:
    """Raise ConfigError if the engine is that of a store without keys, which cannot be moved."""
    if engine.is_keyless:
        raise ConfigError(
            "a store without keys cannot get keys, nor the reverse: make another store and add the "
            "documents to it"
        )


def _format_leftover(place: Place, reason_left: str | None) -> list[str]:
    """Return a list with one line about keys that could not be erased; an empty list if they were erased.

    Args:
        place: place of the keys.
        reason_left: reason why the keys could not be erased; None if they were erased.
    """
    return [f"{place}: {reason_left}"] if reason_left else []


def _normalize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an adapter's parameters to JSON and back, so that they equal parameters read from a file.

    Raises InputError if a value cannot be stored as JSON.
    """
    check_json(params, "the parameters")
    return dict(json.loads(json.dumps(dict(params))))
