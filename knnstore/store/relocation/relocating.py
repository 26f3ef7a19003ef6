"""Putting a store's keys elsewhere: in another engine, or written anew in the same one.

In steps that may each be interrupted.

::

    1 plan       HOME/move.json says from which engine to which
    2 make       the target is created, empty, and from then on is the store's own
    3 transfer   the records are copied, durably every few seconds, and compared
    4 switch     transaction: the catalog names the target; readers follow      <- moved
    5 erase      the old keys, then HOME/move.json

A crash before 4 leaves the store as it was: the same move goes on where it stopped, and any other
erases the half-made target first. After 4 the next writer does step 5.
"""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from knnstore.catalog import Catalog, CatalogWriter, Engine
from knnstore.checks import check_json
from knnstore.datastore import Datastore
from knnstore.errors import (
    ConfigError,
    CorruptDatastoreError,
    DatastoreError,
    DatastoreExistsError,
    KnnstoreError,
)
from knnstore.failpoints import failpoint
from knnstore.progress import Progress
from knnstore.store.current import Current
from knnstore.store.home import Home, KeyOwner, Place, exists_and_is_not_empty
from knnstore.store.relocation.copying import GIVE_UP, Transferred, transfer
from knnstore.store.relocation.moving import Moved, Plan, choose_copy_engine
from knnstore.store.soundness import (
    check_undamaged,
    format_document_names,
    make_checksum_checker,
    make_checksum_computer,
    name_damaged_documents,
)

_logger = logging.getLogger(__name__)

_UNDONE = "the store stays as it is"


class Relocation:
    """Moves the keys of one store."""

    def __init__(self, home: Home, catalog: Catalog, current: Current) -> None:
        self._home = home
        self._catalog = catalog
        self._current = current

    def unfinished(self) -> Engine | None:
        """Return the target of a move that was interrupted before its switch; None without one."""
        plan = self._plan()
        return None if plan is None or plan.target == self._catalog.engine() else plan.target

    def settle(self) -> str | None:
        """Erase the old keys of a move that has switched; returns why they are still there, if they are."""
        try:
            plan = self._plan()
            switched = plan is not None and plan.target == self._current.engine
            return self._end(plan) if plan is not None and switched else None
        except (KnnstoreError, OSError) as error:
            return f"{error}; the next writer tries again"

    def settle_quietly(self) -> None:
        """Do `settle` when a store is opened, which must not fail for it."""
        Plan.clean(self._home)
        left = self.settle()
        if left:
            _logger.warning("what is left of a move stays: %s", left)

    def abandon(self) -> Engine | None:
        """Erase the half-made copy of an unfinished move; see `KNNStore.abandon_move`."""
        self._current.view()  # follows a move whose answer was lost
        plan = self._plan()
        if plan is None or plan.target == self._current.engine:
            return None
        left = self._end(plan)
        if left:
            _logger.warning("the unfinished copy stays: %s", left)
        return plan.target

    def clear(self, progress: Progress) -> list[str]:
        """Erase the copy or the old keys of an unfinished move; returns what stays of them, a line each."""
        self._current.view()  # follows a move whose answer was lost
        plan = self._plan()
        if plan is None:
            return []
        progress.say(f"giving up what is left of a move: {self._leftover(plan)}")
        return _lines(self._leftover(plan), self._end(plan))

    def rewrite(self, writer: CatalogWriter, progress: Progress) -> list[str]:
        """Copy the records to a new place of the same engine; returns what stays of the old, a line each."""
        before = self._current.place(self._current.engine)
        target = choose_copy_engine(self._home, self._current.engine, begun=self.unfinished())
        self._relocate(writer, target, progress)
        return _lines(before, self.settle())

    def move(self, writer: CatalogWriter, target: Engine, progress: Progress) -> Moved:
        """Move the keys to another engine; see `KNNStore.move`."""
        started = time.perf_counter()
        for engine in (self._current.engine, target):
            _check_keys(engine)
        target = replace(target, params=_as_json(target.params))
        self._current.view()  # follows a move whose answer was lost
        before = self._current.engine
        done = self._relocate(writer, target, progress)
        left = self.settle()
        return Moved(before, target, seconds=time.perf_counter() - started, left=left, **done._asdict())

    def _relocate(self, writer: CatalogWriter, target: Engine, progress: Progress) -> Transferred:
        """Copy the records, compare them, and switch to the copy; the old keys stay."""

        def commit() -> None:
            writer.move(target, held.get_checksums())
            failpoint("move.switched")

        source = self._current.datastore
        check_undamaged(self._catalog, source, _UNDONE)
        snapshot, stored = self._current.view().snapshot, self._catalog.checksums()
        copy = self._begin(target, source.count(), progress)
        try:
            read, held = (
                make_checksum_checker(snapshot, stored),
                make_checksum_computer(snapshot, copy.capabilities),
            )
            with name_damaged_documents(self._catalog, source, _UNDONE):
                done = transfer(source, copy, progress, reads=read.add, holds=held.add)
            altered = read.find_differing(stored)
            if altered:
                raise CorruptDatastoreError(
                    f"keys of {format_document_names(self._catalog, altered)} were altered: remove and add "
                    f"again what `knnstore verify` names; {GIVE_UP}"
                )
            lacking = int(snapshot.records.sum()) - done.records
            if lacking > 0:
                raise DatastoreError(
                    f"{lacking:,} records are lost: `knnstore verify` names their documents; {GIVE_UP}"
                )
            old = self._current.switch(target, copy, commit)
        except BaseException:
            with suppress(KnnstoreError):  # what is durable already serves the next try
                copy.close()
            raise
        old.close()
        return done

    def _begin(self, target: Engine, records: int, progress: Progress) -> Datastore:
        """Open the target for writing: a new one, or the one of the same move, interrupted."""
        source, place, known = self._current.engine, self._current.place(target), True
        what = f"a copy of {records:,} records"
        plan = self._plan()
        if plan is not None and plan.target != target:
            self._give_up(plan, progress)
            plan = None
        if plan is None:
            self._check_free(place)
            place.check_space(records, what)
            Plan(self._catalog.store_id, source, target).write(self._home)
            failpoint("move.planned")
            try:
                opened = place.open("x")
            except (ConfigError, DatastoreExistsError):
                Plan.forget(self._home)
                raise
        else:
            key_owner = place.find_owner()
            if key_owner in (KeyOwner.OTHER_STORE, KeyOwner.OTHER_COPY):
                raise place.taken()
            known = key_owner is KeyOwner.THIS_STORE or (plan.made and not place.remembers)
            opened = place.open("a")
        with ExitStack() as failed:
            failed.callback(opened.close)
            if plan is not None:
                if not known and opened.count():
                    Plan.forget(self._home)
                    raise place.taken()
                place.check_space(records - opened.count(), what)
            place.claim()
            failpoint("move.made")
            Plan(self._catalog.store_id, source, target, made=True).write(self._home)
            failed.pop_all()
        return opened

    def _check_free(self, place: Place) -> None:
        """Refuse a place that holds anything: whatever is there after the move is taken for the store's."""
        folder, old, problem = place.folder, self._current.place(self._current.engine).folder, None
        if folder is not None and old is not None and folder.is_relative_to(old):
            problem = "is where the keys are now"
        elif folder is not None and exists_and_is_not_empty(folder):
            problem = "holds something already"
        if problem is not None:
            raise DatastoreExistsError(f"{place.location} {problem}; choose another --location")
        place.check_free()

    def _give_up(self, plan: Plan, progress: Progress) -> None:
        """Clear the way for another move: what was left of this one is erased, or named."""
        if plan.target != self._current.engine:
            progress.say(f"giving up the unfinished move to {self._leftover(plan)}")
        try:
            problem = self._end(plan)
        except (KnnstoreError, OSError) as error:
            problem = str(error)
            Plan.forget(self._home)
        if problem:
            progress.say(f"remove what is left at {self._leftover(plan)} yourself: {problem}")

    def _end(self, plan: Plan) -> str | None:
        """Erase what is left of a move; returns why that is left to the user, if it is."""
        leftover = self._leftover(plan)
        ours = plan.made or plan.target == self._current.engine or leftover.is_empty()
        left = leftover.erase() if ours else None
        Plan.forget(self._home)
        return left

    def _leftover(self, plan: Plan) -> Place:
        """Return the keys to erase: the old keys if the move has switched, else the copy."""
        return self._current.place(plan.source if plan.target == self._current.engine else plan.target)

    def _plan(self) -> Plan | None:
        """Return the unfinished move; None if there is none."""
        return Plan.read(self._home, self._catalog.store_id)


def _check_keys(engine: Engine) -> None:
    """Refuse to move keys where none are kept."""
    if engine.is_keyless:
        raise ConfigError(
            "a store keeps keys or none from its beginning on: make another one and add the documents to it"
        )


def _lines(place: Place, left: str | None) -> list[str]:
    return [f"{place}: {left}"] if left else []


def _as_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's parameters after a round trip through JSON."""
    check_json(params, "the parameters")
    return dict(json.loads(json.dumps(dict(params))))
