"""Erasing: no file of a store holds anything of what was removed.

Removing takes documents away from every reader at once, and leaves bytes: a segment keeps its dead rows,
whose ids are the text, and a database its free pages and its log. Each step here may be interrupted, and
the same call does the rest.
"""

import time
from dataclasses import dataclass

from knnstore.datastore import SupportsErase, SupportsVacuum
from knnstore.progress import Progress
from knnstore.store.relocation import Relocation
from knnstore.store.soundness import damaged_parts
from knnstore.store.store_writer import Writing


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of `KNNStore.erase`."""

    records: int
    """Number of records after erasing."""
    seconds: float
    unreached: tuple[str, ...]
    """Places that may still hold removed text or keys, with the reason, one line each; never backups."""


def erase(writing: Writing, relocation: Relocation, progress: Progress) -> Erased:
    """Rewrite whatever holds removed text or keys; see `KNNStore.erase`."""
    started = time.perf_counter()
    writing.writer.check_room_to_vacuum()
    unreached = relocation.clear(progress)
    writing.purge()  # what found no room when it was removed
    writing.remove_orphans()
    datastore, engine = writing.current.datastore, writing.current.engine
    if isinstance(datastore, SupportsVacuum):
        datastore.vacuum()
        unreached += [f"a damaged file of keys: {part.problem}" for part in damaged_parts(datastore)]
    elif isinstance(datastore, SupportsErase):
        unreached += relocation.rewrite(writing.writer, progress)
    else:
        unreached.append(f"the keys: the adapter {engine.adapter} can neither rewrite nor erase them")
    if "://" in engine.location:
        unreached.append(f"snapshots and backups that the server at {engine.location} keeps")
    unreached += writing.writer.vacuum()
    if writing.writer.catalog.identity.projection is not None:
        unreached.append("the projection of the keys, a summary of the text that it was fitted on")
    records = writing.current.datastore.count()
    return Erased(records, time.perf_counter() - started, tuple(unreached))
