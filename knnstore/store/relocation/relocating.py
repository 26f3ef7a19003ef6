"""Putting a store's keys elsewhere: all of them in another engine, or fewer of them in the same one."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from knnstore.catalog import CatalogWriter, Engine, PrunedDocument, Snapshot
from knnstore.checks import check_json
from knnstore.datastore import Datastore, IdRanges
from knnstore.errors import ConfigError, KnnstoreError, ReadOnlyError
from knnstore.failpoints import failpoint
from knnstore.progress import Progress
from knnstore.store.reader import StoreReader
from knnstore.store.relocation import moving
from knnstore.store.relocation.copying import Transferred, transfer
from knnstore.store.relocation.moving import Moved
from knnstore.store.relocation.pruning import Chooser, Pruned, plan_pruning
from knnstore.store.selection import Selection
from knnstore.store.view import View

Inspector = Callable[[StoreReader], None]
"""Looks at a store as it will be."""


class RelocatableStore(StoreReader):
    """The part of `KNNStore` that moves and prunes; it has the writer and its lock."""

    _writer: CatalogWriter | None
    _writing: threading.RLock

    def move(
        self,
        adapter: str,
        location: str,
        *,
        params: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Moved:
        """Move the keys to another engine: copy, compare, switch in one transaction, erase the old ones.

        Until the switch the store is as it was. When this was interrupted, the same call goes on where
        it stopped; a call with another target erases the half-made copy first.

        Args:
            adapter: the new adapter's name.
            location: a new place: a URL or a folder, a relative one inside the home.
            params: the new adapter's own parameters; JSON values.
            progress: hears of each batch.

        Raises:
            DatastoreExistsError: something else is at the location.
            DatastoreError: the copy differs from its source, or an engine failed.
        """
        started, progress = time.perf_counter(), progress or Progress()
        check_json(params or {}, "the parameters")
        target = Engine(adapter, location, json.loads(json.dumps(dict(params or {}))))
        with self._locked() as writer:
            self.view()  # follows a move whose answer was lost
            before = self._engine
            done = self._relocate(writer, target, progress)
            left = moving.settle(self.home, target)
            return Moved(before, target, seconds=time.perf_counter() - started, left=left, **done._asdict())

    def prune(
        self,
        keep: float,
        choose: Chooser,
        *,
        domains: Sequence[str] = (),
        location: str | None = None,
        params: Mapping[str, Any] | None = None,
        inspect: Inspector | None = None,
        progress: Progress | None = None,
    ) -> Pruned:
        """Let only some records of each domain stay: those are copied to a new place of the same engine.

        Works as `move` does: until the switch, which also says in the catalogue what was pruned, the store
        is as it was, and the same call goes on where it was interrupted. Called again when it is done, it
        changes nothing.

        Args:
            keep: share of each domain's tokens that shall have a record, above 0 and at most 1. A domain
                that has no more records stays as it is.
            choose: says which records stay, see `random_chooser` and `merge_chooser`.
            domains: the domains to prune; none is all.
            location: a new place; by default a new folder beside the old one, in the home.
            params: adapter's parameters that differ from those in use.
            inspect: looks at the store as it will be, before the switch; what it raises ends the pruning.
            progress: hears of each batch.

        Raises:
            ConfigError: `keep` is out of range, or the engine is a server and neither location nor params
                say where the copy is to be.
            DomainNotFoundError: there is no such domain.
            DatastoreExistsError: something else is at the location.
        """
        started, progress = time.perf_counter(), progress or Progress()
        check_json(params or {}, "the parameters")
        with self._locked() as writer:
            view, before = self.view(), self._engine
            view.scope(Selection(domains=tuple(domains)) if domains else Selection())
            names = sorted(set(domains) or view.snapshot.domains)
            plan = plan_pruning(self._catalog, view.datastore, view.snapshot, keep, choose, names, progress)
            if not plan.gone:
                seconds = time.perf_counter() - started
                return Pruned(plan.domains, before, before, view.datastore.count(), seconds)
            target = self._place_beside(location, json.loads(json.dumps(dict(params or {}))))

            def look(copy: Datastore) -> None:
                if inspect is not None:
                    inspect(_Preview(self, copy, plan.snapshot))

            done = self._relocate(
                writer, target, progress, without=plan.gone, pruned=plan.documents, look=look
            )
            left = moving.settle(self.home, target)
            seconds = time.perf_counter() - started
            return Pruned(plan.domains, before, target, done.records, seconds, left)

    def abandon_move(self) -> Engine | None:
        """Give up a move or a pruning that was interrupted, and erase what it had copied.

        Returns:
            Where it was going; None when there is no such move.
        """
        with self._locked():
            return moving.abandon(self.home, self.identity, self._catalog.engine())

    def _relocate(
        self,
        writer: CatalogWriter,
        target: Engine,
        progress: Progress,
        *,
        without: IdRanges | None = None,
        pruned: Mapping[int, PrunedDocument] | None = None,
        look: Callable[[Datastore], None] = lambda copy: None,
    ) -> Transferred:
        """Copy the records, compare them, and switch to the copy; the old keys stay."""
        copy = moving.begin(self.home, self.identity, self._engine, target, progress)
        try:
            done = transfer(self._datastore, copy, progress, without=without or IdRanges())
            look(copy)
            with self._viewing:  # other threads see both changes or none
                writer.move(target, pruned or {})
                failpoint("move.switched")
                old, self._datastore, self._engine, self._view = self._datastore, copy, target, None
        except BaseException:
            with suppress(KnnstoreError):  # what is durable already serves the next try
                copy.close()
            raise
        old.close()
        return done

    def _place_beside(self, location: str | None, params: dict[str, Any]) -> Engine:
        """Where the copy of the same engine goes."""
        target = replace(self._engine, params={**self._engine.params, **params})
        if location is not None:
            return replace(target, location=location)
        if "://" in target.location:
            if not params:
                raise ConfigError(
                    f"the keys are at {target.location}: say where the copy goes, with --location, or by a "
                    "parameter such as --param collection=NAME"
                )
            return target
        begun = moving.unfinished(self.home, self._engine)
        if begun is not None and begun == replace(target, location=begun.location):
            return begun
        stem = target.location.rstrip("0123456789").removesuffix("-") or "keys"
        free = (f"{stem}-{number}" for number in count(2))
        return replace(target, location=next(name for name in free if not self._is_there(name)))

    def _is_there(self, location: str) -> bool:
        return (self.home.path / location).exists()

    @contextmanager
    def _locked(self) -> Iterator[CatalogWriter]:
        if self._writer is None:
            raise ReadOnlyError(f"{self.home.path} was opened for reading; open it with mode 'a' to write")
        with self._writing:
            yield self._writer


class _Preview(StoreReader):
    """A store as it will be once a copy is switched to; shares everything with the one that it is of.

    Args:
        store: the store as it is.
        copy: where its records will be.
        snapshot: what its catalogue will say.
    """

    def __init__(self, store: StoreReader, copy: Datastore, snapshot: Snapshot) -> None:
        self.__dict__.update(store.__dict__)
        self._prepared = View(snapshot, copy, self._catalog)

    def view(self) -> View:
        """What will be live."""
        return self._prepared

    def close(self) -> None:
        """Leave everything to the store."""
