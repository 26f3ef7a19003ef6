"""Committing a plan: adding the documents of all its shards to the store in one transaction."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from knnstore.distributed.plan_folder import Plan, PlanFolder, PlannedDocument, Shard
from knnstore.errors import DiskFullError, PlanError
from knnstore.failpoints import failpoint
from knnstore.lm import save_default_settings
from knnstore.progress import Progress
from knnstore.store import Ingest, KNNStore, Lease, NewDocument, StoredVersion

_BLOCK_RECORDS = 1 << 14  # records that are added at once
_MAX_LISTED = 5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """Result of `commit_plan`."""

    documents: int
    """Number of documents that were added; 0 if the plan was committed before."""
    tokens: int
    """Number of tokens that were added."""
    skipped: tuple[str, ...]
    """Ids of the planned documents that were not added. A document is skipped if the store has added,
    replaced, renamed or removed a document with its id since the plan was made."""
    was_committed: bool
    """True if the plan was committed before this call; then the call adds nothing."""


def commit_plan(store: KNNStore, folder: PlanFolder, *, progress: Progress | None = None) -> Committed:
    """Check the keys of all shards, and add the documents to the store in one transaction.

    Readers see all of the documents or none. Afterwards the store is indexed, and the documents and keys are
    removed from the folder. A second call adds nothing. If the call is interrupted, repeat it: the folder
    keeps its documents and keys until the commit is done.

    Args:
        store: the store of the plan, opened for writing.
        folder: folder of the plan.
        progress: progress display, which receives numbers of tokens.

    Raises:
        PlanError: a shard is not encoded or is damaged (the message names the shards), the folder has no
            plan or the plan of another store, or the plan was dropped.
        ReadOnlyError: the store was opened for reading.
    """
    shown, plan = progress or Progress(), folder.plan
    lease = _find_lease(store, plan, folder)
    if lease.is_committed:  # the first commit may have been interrupted before its last step
        _finish_commit(store, folder)
        return Committed(0, 0, (), was_committed=True)
    # 1) Check the keys of all shards before anything is written.
    problems = []
    shown.start("checking", total=plan.tokens)
    for shard in plan.shards:
        folder.read_documents(shard)
        try:
            folder.open_keys(shard)
        except PlanError as error:
            problems.append(str(error))
        shown.advance(shard.tokens)
    if problems:
        more = f" and {len(problems) - _MAX_LISTED:,} more" if len(problems) > _MAX_LISTED else ""
        listed = ", ".join(problems[:_MAX_LISTED])
        raise PlanError(f"{listed}{more}: run `knnstore encode {folder.path}`, then commit again")
    # 2) Add shard by shard; readers see no document before the `with` block ends.
    added, tokens, skipped = 0, 0, list[str]()
    withdrawn_ids = store.withdrawn_ids(lease, plan.domain)
    shown.start("adding", total=plan.tokens)
    with store.ingest_leased(lease) as ingest:
        for shard in plan.shards:
            documents = folder.read_documents(shard)
            versions = store.stored_versions(plan.domain, [planned.document.id for planned in documents])
            starts = {id: version.start for id, version in versions.items()}
            # A document is left out if its stored version has changed since the plan was made.
            is_current = [
                planned.replaces == starts.get(planned.document.id)
                and planned.document.id not in withdrawn_ids
                for planned in documents
            ]
            skipped += [
                planned.document.id for planned, keep in zip(documents, is_current, strict=True) if not keep
            ]
            chosen = np.flatnonzero(is_current)
            with ingest.add_part(
                [_keep_tags(documents[at].document, versions) for at in chosen],
                folder.compute_starts(shard, documents)[chosen].tolist(),
            ) as part:
                _add_keys(part, folder, shard, documents, is_current)
            added += len(chosen)
            tokens += sum(len(documents[at].document.tokens) for at in chosen)
            shown.advance(shard.tokens)
            failpoint("commit.shard")
        failpoint("commit.before")
    failpoint("commit.after")
    # 3) Index the store, and empty the folder.
    _finish_commit(store, folder)
    shown.finish()
    return Committed(added, tokens, tuple(skipped), was_committed=False)


def _finish_commit(store: KNNStore, folder: PlanFolder) -> None:
    """Index the store, save its default settings, and remove documents and keys from the folder.

    If the disk is too full for the indexes, a warning is logged, and the rest is done.
    """
    try:
        store.optimize()
    except DiskFullError as error:
        _logger.warning("the documents are added, but not indexed: run `knnstore optimize` later: %s", error)
    save_default_settings(store)
    folder.remove_data()


def _keep_tags(document: NewDocument, versions: Mapping[str, StoredVersion]) -> NewDocument:
    """Return a planned document with its own tags and those of the stored version that it replaces."""
    version = versions.get(document.id)
    return document if version is None else replace(document, tags=document.tags | version.tags)


def drop_plan(store: KNNStore, folder: PlanFolder) -> None:
    """Give up a plan: delete its uploaded records, its lease (reserved positions), and its files.

    No document of the store changes. If the plan was committed, its documents stay in the store. The function
    also works if files of the plan are damaged or missing.

    Args:
        store: the store of the plan, opened for writing.
        folder: folder of the plan.

    Raises:
        PlanError: the folder has a plan of another store.
    """
    place = str(folder.path.absolute())
    if folder.exists:
        try:
            plan = folder.plan
        except PlanError:  # damaged: the lease is found by the folder
            plan = None
        if plan is not None:
            if plan.store != store.id:
                raise PlanError(f"{folder.path} has a plan of another store")
            store.release(plan.id)
    for lease in store.leases():
        if lease.folder == place:
            store.release(lease.id)
    failpoint("plan.released")
    folder.remove()


def _find_lease(store: KNNStore, plan: Plan, folder: PlanFolder) -> Lease:
    """Return the lease of a plan: the positions that the store has reserved for its documents.

    Raises:
        PlanError: the plan was made for another store, or for a store of another model or other keys; the
            plan's positions are not the positions of its lease; or the plan was dropped.
    """
    if plan.store != store.id or plan.identity != store.identity:
        raise PlanError(f"{folder.path} has a plan of another store: choose the store with --home")
    for lease in store.leases():
        if lease.id == plan.id:
            if (lease.start, lease.stop) != (plan.start, plan.start + plan.tokens):
                raise PlanError(
                    f"the plan in {folder.path} does not match the positions reserved for it: drop it and "
                    "make it again"
                )
            return lease
    raise PlanError(f"the plan in {folder.path} was dropped: make it again")


def _add_keys(
    part: Ingest,
    folder: PlanFolder,
    shard: Shard,
    documents: Sequence[PlannedDocument],
    is_current: Sequence[bool],
) -> None:
    """Add the records of a shard's chosen documents to the datastore, `_BLOCK_RECORDS` at a time.

    If workers have uploaded all of these records, only the checksums of their keys are computed.

    Args:
        part: object that adds the records; its documents are the chosen documents of the shard.
        folder: folder of the plan.
        shard: the shard.
        documents: all documents of the shard.
        is_current: for each document, True if it is chosen.
    """
    keys, digest = folder.open_keys(shard), folder.read_digest(shard)
    owner, positions, tokens = folder.list_records(documents)
    chosen = np.asarray(is_current, bool)
    number_among_chosen = np.cumsum(chosen) - 1
    rows = np.flatnonzero(chosen[owner])
    is_stored = False
    if folder.is_uploaded(shard):
        is_stored = part.count_uploaded(folder.name_upload(shard, digest)) == len(rows)
    for begin in range(0, len(rows), _BLOCK_RECORDS):
        at = rows[begin : begin + _BLOCK_RECORDS]
        part.add(
            number_among_chosen[owner[at]],
            positions[at],
            tokens[at],
            keys[at].astype(np.float32, copy=False),
            is_stored=is_stored,
        )
