"""Checking that catalog and datastore agree on every token."""

import base64
import hashlib
import json
import logging

import numpy as np

from knnstore.catalog import Catalog, PlacedDocument, Snapshot
from knnstore.datastore import Datastore, Ids, SupportsVerify, positions_of, ranges_of, tokens_of
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store.fitted import find_file_problem, find_files_in_use
from knnstore.store.home import Home
from knnstore.store.provenance import Tokens
from knnstore.store.soundness import make_checksum_checker, retry_past_damage
from knnstore.store.view import View

_logger = logging.getLogger(__name__)

_NO_TOKENS: Tokens = np.zeros(0, np.uint32)


def find_problems(home: Home, catalog: Catalog, view: View) -> list[str]:
    """Read all stored data and return its problems, one line each; empty if the store is sound."""
    problems, datastore = catalog.problems(), view.datastore
    exposed = home.exposed()
    if exposed is not None:  # no problem of the store's, and it may be meant
        _logger.warning(
            "every user of this machine can read %s: `chmod -R o= %s` ends that", exposed, home.path
        )
    unsettled = catalog.unsettled()
    if unsettled:
        problems.append(
            f"{len(unsettled)} documents are half added or half removed: a writer is at work, or the next "
            "command that writes settles what one has left, as `knnstore repair` does"
        )
    if isinstance(datastore, SupportsVerify):
        problems += datastore.verify()
    try:
        problems += retry_past_damage(datastore, lambda: _compare(catalog, datastore, unsettled))
    except KnnstoreError as error:
        problems.append(str(error))
    fingerprint = _fingerprint_problem(catalog.identity.model_fingerprint)
    problems += [fingerprint] if fingerprint else []
    try:
        names = sorted(find_files_in_use(catalog, view.snapshot))
        damaged = [find_file_problem(home.weights, name) for name in names]
    except KnnstoreError as error:  # saved settings cannot be read
        return [*problems, str(error)]
    return problems + [problem for problem in damaged if problem]


def _fingerprint_problem(fingerprint: str) -> str | None:
    """Return what is wrong with a model's fingerprint, see `knnstore.lm.keys.model_fingerprint`."""
    digest, *parts = fingerprint.split(":")
    try:
        sample, *config = (base64.b64decode(part, validate=True) for part in parts or [""])
        sound = not parts or (hashlib.sha256(sample).hexdigest() == digest and len(sample) % 4 == 0)
        for part in config:
            json.loads(part)
    except (ValueError, RecursionError):
        sound = False
    if sound:
        return None
    return "the catalog is damaged: the fingerprint of the model is none; restore it from a backup"


def find_orphans(catalog: Catalog, datastore: Datastore) -> Ids:
    """Return the records that belong to no live document, ascending."""
    snapshot = catalog.snapshot()
    orphans = [_orphans(ids, snapshot) for ids, _, _ in datastore.iterate()]
    return np.concatenate([np.zeros(0, np.int64), *orphans])


def _compare(catalog: Catalog, datastore: Datastore, unsettled: list[PlacedDocument]) -> list[str]:
    """Compare each record with the token that the catalog has at its position."""
    snapshot = catalog.snapshot()
    first = 0 if catalog.identity.has_prefix else 1  # without one nothing predicts a first token
    records = np.zeros(len(snapshot.rows), np.int64)
    wrong = np.zeros(len(snapshot.rows), bool)
    foreign = [np.zeros(0, np.int64)]
    stored = catalog.checksums()
    checked = make_checksum_checker(snapshot, stored)
    texts: dict[int, Tokens] = {}
    for every_id, every_key, every_group in datastore.iterate():
        checked.add(every_id, every_key)
        every_document = snapshot.documents_at(positions_of(every_id))
        owned = every_document >= 0
        foreign.append(every_id[~owned])
        ids, groups, at = every_id[owned], every_group[owned], every_document[owned]
        positions = positions_of(ids)
        documents, which, counts = np.unique(at, return_inverse=True, return_counts=True)
        records[documents] += counts
        # Of the documents read last, the last one may go on here.
        texts = {document: texts[document] for document in documents.tolist() if document in texts}
        texts |= _texts(catalog, snapshot, [at for at in documents.tolist() if at not in texts])
        read = [texts.get(document, _NO_TOKENS) for document in documents.tolist()]
        lengths = np.array([len(tokens) for tokens in read], np.int64)
        origins = np.cumsum(lengths) - lengths
        offsets = positions - snapshot.starts[at]
        there = (first <= offsets) & (offsets < lengths[which])
        there &= groups == snapshot.groups[at]
        tokens = np.concatenate([_NO_TOKENS, *read])
        there[there] = tokens[(origins[which] + offsets)[there]] == tokens_of(ids[there])
        wrong[at[~there]] = True
    wrong |= records != snapshot.records
    damaged = catalog.altered(snapshot.rows.tolist())
    lacking = set(snapshot.rows[wrong].tolist()) - damaged
    altered = set(checked.differing(stored)) - lacking - damaged
    problems = []
    for rows, what in (
        (damaged, "is damaged in the catalog"),
        (lacking, "has lost records or has wrong ones"),
        (altered, "has altered keys"),
    ):
        problems += [f"{name} {what}: remove it and add it again" for name in _names(catalog, rows)]
    orphans = np.concatenate(foreign)
    if len(orphans):  # a writer may have been at work since
        for placed in (unsettled, catalog.unsettled()):
            bounds = np.array([(d.start, d.stop) for d in placed], np.int64).reshape(-1, 2)
            orphans = orphans[~ranges_of(bounds[:, 0], bounds[:, 1]).contains(orphans)]
        orphans = _orphans(orphans, catalog.snapshot())
    if len(orphans):
        problems.append(f"{len(orphans)} records belong to no document: run `knnstore repair`")
    return problems


def _names(catalog: Catalog, rows: set[int]) -> list[str]:
    """Name documents by id and domain, but for those that were removed meanwhile; by number if damaged."""
    names = []
    for row in sorted(rows):
        try:
            found = catalog.labels([row])
        except CatalogError:
            names.append(f"document number {row}")
        else:
            names += [f"document {id!r} of domain {domain!r}" for id, domain in found.values()]
            if not found and row in catalog.content_hashes([row]):  # of no domain that is there
                names.append(f"document number {row}")
    return names


def _texts(catalog: Catalog, snapshot: Snapshot, documents: list[int]) -> dict[int, Tokens]:
    """Return the tokens of documents, without the documents whose tokens are damaged."""
    rows = snapshot.rows[documents].tolist()
    try:
        read = dict(catalog.texts(rows))
    except CatalogError:  # some of them are damaged
        read = {row: tokens for row in rows if (tokens := _text(catalog, row)) is not None}
    lengths = snapshot.stops[documents] - snapshot.starts[documents]
    return {
        document: read[row]
        for document, row, length in zip(documents, rows, lengths.tolist(), strict=True)
        if row in read and len(read[row]) == length
    }


def _text(catalog: Catalog, row: int) -> Tokens | None:
    try:
        return catalog.tokens(row)
    except CatalogError:
        return None


def _orphans(ids: Ids, snapshot: Snapshot) -> Ids:
    return ids[snapshot.documents_at(positions_of(ids)) < 0]
