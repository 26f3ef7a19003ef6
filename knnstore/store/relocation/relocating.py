"""Putting a store's keys elsewhere: all of them in another engine, or fewer of them in the same one.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from knnstore.catalog import Catalog, CatalogWriter, Engine
from knnstore.checks import check_json
from knnstore.datastore import Datastore, IdRanges, SupportsBeside, registry
from knnstore.errors import ConfigError, DatastoreExistsError, KnnstoreError
from knnstore.failpoints import failpoint
from knnstore.progress import Progress
from knnstore.store.current import Current
from knnstore.store.home import Home, Place, holds_something
from knnstore.store.reader import Reader
from knnstore.store.relocation.copying import Transferred, transfer
from knnstore.store.relocation.moving import Moved, Plan
from knnstore.store.relocation.pruning import Chooser, Pruned, Pruning, plan_pruning
from knnstore.store.selection import EVERYTHING, Selection
from knnstore.store.view import View

_logger = logging.getLogger(__name__)

Inspector = Callable[[Reader], None]
"""Looks at a store as it will be."""


class Relocation:
    """Moves and prunes one store; `preview` makes a reader of what will be live."""

    def __init__(
        self, home: Home, catalog: Catalog, current: Current, preview: Callable[[View], Reader]
    ) -> None:
        self._home = home
        self._catalog = catalog
        self._current = current
        self._preview = preview

    def unfinished(self) -> Engine | None:
        """Where a move goes that was interrupted before it switched."""
        plan = Plan.read(self._home)
        return None if plan is None or plan.target == self._catalog.engine() else plan.target

    def settle(self) -> str | None:
        """Erase the old keys of a move that has switched; returns why they are still there, if they are."""
        try:
            plan = Plan.read(self._home)
            switched = plan is not None and plan.target == self._current.engine
            return self._end(plan) if plan is not None and switched else None
        except (KnnstoreError, OSError) as error:
            return f"{error}; the next writer tries again"

    def settle_quietly(self) -> None:
        """Do `settle` when a store is opened, which must not fail for it."""
        Plan.clean(self._home)
        left = self.settle()
        if left:
            _logger.warning("keys that were moved are still at the old place: %s", left)

    def abandon(self) -> Engine | None:
        """Erase the half-made copy of an unfinished move; see `KNNStore.abandon_move`."""
        self._current.view()  # follows a move whose answer was lost
        plan = Plan.read(self._home)
        if plan is None or plan.target == self._current.engine:
            return None
        left = self._end(plan)
        if left:
            _logger.warning("the unfinished copy stays: %s", left)
        return plan.target

    def clear(self, progress: Progress) -> list[str]:
        """Erase the copy or the old keys of an unfinished move; returns what stays of them, a line each."""
        plan = Plan.read(self._home)
        if plan is None:
            return []
        progress.say(f"giving up what is left of a move: {self._leftover(plan)}")
        return _lines(self._leftover(plan), self._end(plan))

    def rewrite(self, writer: CatalogWriter, progress: Progress) -> list[str]:
        """Copy the records to a new place of the same engine; returns what stays of the old, a line each."""
        before = self._place(self._current.engine)
        self._relocate(writer, self._place_beside(None, {}), progress)
        return _lines(before, self.settle())

    def move(self, writer: CatalogWriter, target: Engine, progress: Progress) -> Moved:
        """Move the keys to another engine; see `KNNStore.move`."""
        started = time.perf_counter()
        target = replace(target, params=_as_json(target.params))
        self._current.view()  # follows a move whose answer was lost
        before = self._current.engine
        done = self._relocate(writer, target, progress)
        left = self.settle()
        return Moved(before, target, seconds=time.perf_counter() - started, left=left, **done._asdict())

    def prune(
        self,
        writer: CatalogWriter,
        keep: float,
        choose: Chooser,
        domains: Sequence[str],
        location: str | None,
        params: Mapping[str, Any] | None,
        inspect: Inspector | None,
        progress: Progress,
    ) -> Pruned:
        """Let only some records of each domain stay; see `KNNStore.prune`."""
        started, differing = time.perf_counter(), _as_json(params or {})
        view, before = self._current.view(), self._current.engine
        view.scope(Selection(domains=tuple(domains)) if domains else EVERYTHING)
        names = sorted(set(domains) or view.snapshot.domains)
        plan = plan_pruning(self._catalog, view, keep, choose, names, progress)
        if not plan.gone:
            seconds = time.perf_counter() - started
            return Pruned(plan.domains, before, before, view.datastore.count(), seconds)
        target = self._place_beside(location, differing)
        done = self._relocate(writer, target, progress, plan, inspect)
        left = self.settle()
        return Pruned(plan.domains, before, target, done.records, time.perf_counter() - started, left)

    def _relocate(
        self,
        writer: CatalogWriter,
        target: Engine,
        progress: Progress,
        pruning: Pruning | None = None,
        inspect: Inspector | None = None,
    ) -> Transferred:
        """Copy the records, compare them, and switch to the copy; the old keys stay."""

        def commit() -> None:
            writer.move(target, pruning.documents if pruning else {})
            failpoint("move.switched")

        copy = self._begin(target, progress)
        try:
            without = pruning.gone if pruning else IdRanges()
            done = transfer(self._current.datastore, copy, progress, without=without)
            if pruning and inspect:
                inspect(self._preview(View(pruning.snapshot, copy, self._catalog)))
            old = self._current.switch(target, copy, commit)
        except BaseException:
            with suppress(KnnstoreError):  # what is durable already serves the next try
                copy.close()
            raise
        old.close()
        return done

    def _begin(self, target: Engine, progress: Progress) -> Datastore:
        """Open the target for writing: a new one, or the one of the same move, interrupted."""
        source, place = self._current.engine, self._place(target)
        plan = Plan.read(self._home)
        if plan is not None and plan.target != target:
            self._give_up(plan, progress)
            plan = None
        if plan is None:
            self._check_free(place)
            Plan(source, target).write(self._home)
            failpoint("move.planned")
            try:
                opened = place.open("x")
            except (ConfigError, DatastoreExistsError):
                Plan.forget(self._home)
                raise
        else:
            opened = place.open("a")
            if not plan.made and opened.count():
                opened.close()
                Plan.forget(self._home)
                raise place.taken()
        failpoint("move.made")
        Plan(source, target, made=True).write(self._home)
        return opened

    def _check_free(self, place: Place) -> None:
        """Refuse a place that holds anything: whatever is there after the move is taken for the store's."""
        folder, old, problem = place.folder, self._place(self._current.engine).folder, None
        if folder is not None and old is not None and folder.is_relative_to(old):
            problem = "is where the keys are now"
        elif folder is not None and holds_something(folder):
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
        """The old keys of a move that has switched, the copy of one that has not."""
        return self._place(plan.source if plan.target == self._current.engine else plan.target)

    def _place(self, engine: Engine) -> Place:
        return Place(self._home, self._catalog.identity, engine)

    def _place_beside(self, location: str | None, params: Mapping[str, Any]) -> Engine:
        """Where the copy of the same engine goes."""
        engine = self._current.engine
        target = replace(engine, params={**engine.params, **params})
        if location is not None:
            return replace(target, location=location)
        if "://" in target.location:
            adapter = registry.load(engine.adapter)
            if not params and issubclass(adapter, SupportsBeside):
                elsewhere = adapter.beside(engine.location, **engine.params)
                return replace(target, params={**engine.params, **elsewhere})
            if not params:
                raise ConfigError(
                    f"the keys are at {target.location}: say where the copy goes, with --location, or by a "
                    "parameter such as --param collection=NAME"
                )
            return target
        begun = self.unfinished()
        if begun is not None and begun == replace(target, location=begun.location):
            return begun
        stem = target.location.rstrip("0123456789").removesuffix("-") or "keys"
        free = (f"{stem}-{number}" for number in count(2))
        return replace(target, location=next(name for name in free if not (self._home.path / name).exists()))


def _lines(place: Place, left: str | None) -> list[str]:
    return [f"{place}: {left}"] if left else []


def _as_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter's parameters as they come back from JSON."""
    check_json(params, "the parameters")
    return dict(json.loads(json.dumps(dict(params))))
