"""Erasing: rewriting files so that no file of a store holds text or keys of removed documents.

Removing hides documents from every reader at once, but leaves bytes: a file of keys keeps removed records,
whose ids reveal the text, and a database keeps free pages and its log. Each step here may be interrupted;
calling `erase` again then does the rest.
"""

import time
from dataclasses import dataclass

from knnstore.datastore import SupportsErase, SupportsVacuum
from knnstore.progress import Progress
from knnstore.store.relocation import Relocation
from knnstore.store.soundness import list_damaged_parts
from knnstore.store.store_writer import StoreChanges


@dataclass(frozen=True, slots=True)
class Erased:
    """Report on a call of `KNNStore.erase`, which rewrites all files without removed text and keys."""

    records: int
    """Number of records that the store has after erasing."""
    seconds: float
    """Duration of the call in seconds."""
    unreached: tuple[str, ...]
    """Places that may still hold removed text or keys, with the reason, one line each.

    Backups that the user has made are not listed.
    """


def erase(changes: StoreChanges, relocation: Relocation, progress: Progress) -> Erased:
    """Rewrite all files that still hold text or keys of removed documents.

    The caller holds the writer's lock.

    Args:
        changes: the object that changes the store.
        relocation: the object that moves the store's keys. It erases leftovers of unfinished moves, and
            copies the keys if the engine cannot rewrite its files.
        progress: object that shows messages and progress to the user.

    Returns:
        The number of records, the duration, and the places that could not be rewritten.
    """
    started = time.perf_counter()
    changes.writer.check_room_to_vacuum()
    unreached = relocation.erase_leftovers(progress)
    changes.delete_unfinished_documents()  # what found no room when it was removed
    changes.delete_uploads(changes.writer.catalog.leases())  # the commit adds them from the plan's folder
    changes.remove_orphans()
    datastore, engine = changes.current.datastore, changes.current.engine
    if isinstance(datastore, SupportsVacuum):
        datastore.vacuum()
        unreached += [f"a damaged file of keys: {part.problem}" for part in list_damaged_parts(datastore)]
    elif isinstance(datastore, SupportsErase):
        unreached += relocation.rewrite_keys(changes.writer, progress)
    else:
        unreached.append(f"the keys: the adapter {engine.adapter} can neither rewrite nor erase them")
    if "://" in engine.location:
        unreached.append(f"snapshots and backups that the server at {engine.location} keeps")
    unreached += changes.writer.vacuum()
    unreached += [
        f"the folder of a plan, {lease.folder}, with documents that are not yet added"
        for lease in changes.writer.catalog.leases()
        if not lease.is_committed
    ]
    if changes.writer.catalog.identity.projection is not None:
        unreached.append("the projection of the keys, a summary of the text that it was fitted on")
    records = changes.current.datastore.count()
    return Erased(records, time.perf_counter() - started, tuple(unreached))
