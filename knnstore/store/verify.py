"""Checking all stored data: the catalog, the datastore, and that both agree on every token."""

import base64
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from knnstore.catalog import Catalog, Lease, PlacedDocument, Snapshot
from knnstore.datastore import (
    Datastore,
    IdRanges,
    Ids,
    SupportsVerify,
    id_ranges_from_positions,
    positions_from_ids,
    tokens_from_ids,
)
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store.fitted import find_file_problem, find_files_in_use
from knnstore.store.home import Home
from knnstore.store.provenance import Tokens
from knnstore.store.soundness import make_checksum_checker, retry_past_damage
from knnstore.store.view import View

_logger = logging.getLogger(__name__)

_NO_TOKENS: Tokens = np.zeros(0, np.uint32)

PLAN_FILES = "plan"
"""Name of the folder, inside the folder of a plan, with the plan's description and documents."""


def find_problems(home: Home, catalog: Catalog, view: View) -> list[str]:
    """Read and check all stored data of a store. Changes nothing.

    A file that every user of the machine can read is logged as a warning, and is not a problem.

    Args:
        home: folder of the store.
        catalog: catalog of the store.
        view: the documents and the datastore at the latest revision.

    Returns:
        One line of text for each problem; empty if the store is sound.
    """
    problems, datastore = catalog.find_problems(), view.datastore
    exposed = home.find_exposed_file()
    if exposed is not None:  # no problem of the store's, and it may be meant
        _logger.warning(
            "every user of this machine can read %s: `chmod -R o= %s` ends that", exposed, home.path
        )
    unsettled = catalog.unsettled_documents()
    if unsettled:
        problems.append(
            f"{len(unsettled)} documents are half added or half removed: another process is writing, or was "
            "interrupted; in that case `knnstore repair`, or the next command that writes, cleans up"
        )
    if isinstance(datastore, SupportsVerify):
        problems += datastore.verify()
    try:
        problems += retry_past_damage(datastore, lambda: _compare_records(catalog, datastore, unsettled))
    except KnnstoreError as error:
        problems.append(str(error))
    fingerprint_problem = _find_fingerprint_problem(catalog.identity.model_fingerprint)
    problems += [fingerprint_problem] if fingerprint_problem else []
    try:
        names = sorted(find_files_in_use(catalog, view.snapshot))
        damaged = [find_file_problem(home.weights, name) for name in names]
    except KnnstoreError as error:  # saved settings cannot be read
        return [*problems, str(error)]
    return problems + [problem for problem in damaged if problem]


def _find_fingerprint_problem(fingerprint: str) -> str | None:
    """Check the form of a model's fingerprint, the text by which a store recognizes its model.

    A fingerprint begins with a SHA-256 hash. Further parts may follow: first the hashed data, then JSON
    values. A colon stands before each further part, and each is encoded in base64. See also
    `knnstore.lm.keys.model_fingerprint`.

    Args:
        fingerprint: the fingerprint in the catalog.

    Returns:
        One line of text if the fingerprint is damaged, else None.
    """
    digest, *parts = fingerprint.split(":")
    try:
        sample, *config = (base64.b64decode(part, validate=True) for part in parts or [""])
        is_sound = not parts or (hashlib.sha256(sample).hexdigest() == digest and len(sample) % 4 == 0)
        for part in config:
            json.loads(part)
    except (ValueError, RecursionError):
        is_sound = False
    if is_sound:
        return None
    return "the catalog is damaged: the model's fingerprint is invalid; restore the catalog from a backup"


def select_open_positions(leases: Iterable[Lease]) -> IdRanges:
    """Return the ids of all possible records at the positions of leases that are not committed.

    A lease reserves positions for the documents of a plan. Workers may have uploaded records with these ids.

    Args:
        leases: the leases of a store.
    """
    bounds = [(lease.start, lease.stop) for lease in leases if not lease.is_committed]
    starts, stops = np.array(bounds, np.int64).reshape(-1, 2).T
    return id_ranges_from_positions(starts, stops)


def find_orphans(catalog: Catalog, datastore: Datastore) -> Ids:
    """Return the ids of the records of a datastore that belong to no document and no plan, int64, ascending.

    A document counts if it is live (completely stored and not removed), and a plan if it is not committed.
    All records are read.

    Args:
        catalog: catalog of the store, which lists the live documents and the leases of plans.
        datastore: datastore with the records.
    """
    snapshot, planned = catalog.snapshot(), select_open_positions(catalog.leases())
    orphans = [_select_orphans(ids, snapshot) for ids, _, _ in datastore.iterate()]
    return np.concatenate([np.zeros(0, np.int64), *(ids[~planned.contains(ids)] for ids in orphans)])


def _compare_records(catalog: Catalog, datastore: Datastore, unsettled: list[PlacedDocument]) -> list[str]:
    """Check that the datastore has exactly the records that the catalog lists, with unchanged keys.

    Token and domain of each record are compared with its document. The number of records and the checksum of
    the keys are compared for each document.

    Args:
        catalog: the open catalog.
        datastore: the datastore, all of whose records are read.
        unsettled: documents that are half added or removed. Their records are allowed, and so are records
            that were uploaded for a plan that is not committed.

    Returns:
        One line of text for each problem; an empty list without problems.
    """
    snapshot = catalog.snapshot()
    first = 0 if catalog.identity.has_prefix else 1  # without one nothing predicts a first token
    records = np.zeros(len(snapshot.rows), np.int64)
    wrong = np.zeros(len(snapshot.rows), bool)
    foreign = [np.zeros(0, np.int64)]
    stored = catalog.key_checksums()
    checked = make_checksum_checker(snapshot, stored)
    texts: dict[int, Tokens] = {}
    # 1) Read all records, and compare each record with its document.
    for batch_ids, batch_keys, batch_groups in datastore.iterate():
        checked.add_records(batch_ids, batch_keys)
        batch_documents = snapshot.documents_at(positions_from_ids(batch_ids))
        has_document = batch_documents >= 0
        foreign.append(batch_ids[~has_document])
        ids, groups, at = batch_ids[has_document], batch_groups[has_document], batch_documents[has_document]
        positions = positions_from_ids(ids)
        documents, which, counts = np.unique(at, return_inverse=True, return_counts=True)
        records[documents] += counts
        # A document may have records in two batches: its tokens are kept from the last batch.
        texts = {document: texts[document] for document in documents.tolist() if document in texts}
        texts |= _read_texts(catalog, snapshot, [at for at in documents.tolist() if at not in texts])
        read = [texts.get(document, _NO_TOKENS) for document in documents.tolist()]
        lengths = np.array([len(tokens) for tokens in read], np.int64)
        origins = np.cumsum(lengths) - lengths
        offsets = positions - snapshot.starts[at]
        is_correct = (first <= offsets) & (offsets < lengths[which])
        is_correct &= groups == snapshot.groups[at]
        tokens = np.concatenate([_NO_TOKENS, *read])
        is_correct[is_correct] = tokens[(origins[which] + offsets)[is_correct]] == tokens_from_ids(
            ids[is_correct]
        )
        wrong[at[~is_correct]] = True
    # 2) Report the documents with wrong, missing or altered records.
    wrong |= records != snapshot.records
    damaged = catalog.find_damaged_documents(snapshot.rows.tolist())
    incomplete = set(snapshot.rows[wrong].tolist()) - damaged
    altered = set(checked.find_differing(stored)) - incomplete - damaged
    problems = []
    for rows, problem_text in (
        (damaged, "is damaged in the catalog"),
        (incomplete, "has lost or wrong records"),
        (altered, "has altered keys"),
    ):
        problems += [
            f"{name} {problem_text}: remove it and add it again" for name in _name_documents(catalog, rows)
        ]
    # 3) Report records without a document: of plans that are gone, and of unknown origin.
    orphans = np.concatenate(foreign)
    for lease in catalog.leases():
        of_lease = select_open_positions([lease]).contains(orphans)
        orphans, uploaded = orphans[~of_lease], int(of_lease.sum())
        if not lease.is_committed and not Path(lease.folder, PLAN_FILES).is_dir():
            problems.append(
                f"the folder {lease.folder} of a plan is not on this machine "
                f"({lease.stop - lease.start:,} reserved positions, {uploaded:,} uploaded records): "
                f"if no other machine has it, "
                f"drop the plan with `knnstore plan {lease.folder} --drop`"
            )
    if len(orphans):  # a writer may have added or removed documents since
        for placed in (unsettled, catalog.unsettled_documents()):
            bounds = np.array([(d.start, d.stop) for d in placed], np.int64).reshape(-1, 2)
            orphans = orphans[~id_ranges_from_positions(bounds[:, 0], bounds[:, 1]).contains(orphans)]
        orphans = _select_orphans(orphans, catalog.snapshot())
    if len(orphans):
        problems.append(f"{len(orphans)} records belong to no document: run `knnstore repair`")
    return problems


def _name_documents(catalog: Catalog, rows: set[int]) -> list[str]:
    """Return a name of each document for messages: its id and domain, or its number if these are damaged.

    Documents that were removed meanwhile are left out.

    Args:
        catalog: catalog of the store.
        rows: primary keys of the documents.
    """
    names = []
    for row in sorted(rows):
        try:
            labels = catalog.ids_and_domains([row])
        except CatalogError:
            names.append(f"document number {row}")
        else:
            names += [f"document {id!r} of domain {domain!r}" for id, domain in labels.values()]
            if not labels and row in catalog.content_hashes([row]):  # of no domain that is there
                names.append(f"document number {row}")
    return names


def _read_texts(catalog: Catalog, snapshot: Snapshot, documents: list[int]) -> dict[int, Tokens]:
    """Read the tokens of documents.

    Args:
        catalog: catalog of the store.
        snapshot: the documents of the store at one revision.
        documents: indices of the documents in the snapshot's arrays.

    Returns:
        Token ids of each document, by its index in the snapshot. Damaged and removed documents are left out.
    """
    rows = snapshot.rows[documents].tolist()
    try:
        read = dict(catalog.iterate_tokens(rows))
    except CatalogError:  # some of them are damaged
        read = {row: tokens for row in rows if (tokens := _read_text(catalog, row)) is not None}
    lengths = snapshot.stops[documents] - snapshot.starts[documents]
    return {
        document: read[row]
        for document, row, length in zip(documents, rows, lengths.tolist(), strict=True)
        if row in read and len(read[row]) == length
    }


def _read_text(catalog: Catalog, row: int) -> Tokens | None:
    """Return the token ids of a document by its primary key.

    Returns None if the tokens are damaged, or the document was removed.
    """
    try:
        return catalog.tokens(row)
    except CatalogError:
        return None


def _select_orphans(ids: Ids, snapshot: Snapshot) -> Ids:
    """Return the record ids in `ids` that belong to no document of a snapshot, in the same order."""
    return ids[snapshot.documents_at(positions_from_ids(ids)) < 0]
