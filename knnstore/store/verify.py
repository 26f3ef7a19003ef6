"""Checking that catalog and datastore say the same of every token."""

import logging

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, PlacedDocument, Snapshot
from knnstore.datastore import Datastore, Ids, SupportsVerify, positions_of, ranges_of, tokens_of
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store.fitted import files_in_use, problem_of
from knnstore.store.home import Home
from knnstore.store.soundness import checking, reading_on
from knnstore.store.view import View

_logger = logging.getLogger(__name__)


def problems_of(home: Home, catalog: Catalog, view: View) -> list[str]:
    """Read everything that is stored and list what is wrong, one line each; nothing when it is sound."""
    problems, datastore = catalog.problems(), view.datastore
    exposed = home.exposed()
    if exposed is not None:  # no problem of the store's, and it may be meant
        _logger.warning(
            "every user of this machine can read %s: `chmod -R o= %s` ends that", exposed, home.path
        )
    unsettled = catalog.unsettled()
    if unsettled:
        problems.append(
            f"{len(unsettled)} documents are half added or half removed: a writer is at work, or "
            "`knnstore repair` settles what one has left"
        )
    if isinstance(datastore, SupportsVerify):
        problems += datastore.verify()
    try:
        problems += reading_on(datastore, lambda: _compare(catalog, datastore, unsettled))
    except KnnstoreError as error:
        problems.append(str(error))
    damaged = (problem_of(home.weights, name) for name in sorted(files_in_use(catalog, view.snapshot)))
    return problems + [problem for problem in damaged if problem]


def orphans_in(catalog: Catalog, datastore: Datastore) -> Ids:
    """The records that belong to no live document, ascending."""
    snapshot = catalog.snapshot()
    orphans = [_orphans(ids, snapshot) for ids, _, _ in datastore.iterate()]
    return np.concatenate([np.zeros(0, np.int64), *orphans])


def _compare(catalog: Catalog, datastore: Datastore, unsettled: list[PlacedDocument]) -> list[str]:
    """Compare each record with the token that the catalog has at its position."""
    snapshot = catalog.snapshot()
    first = 0 if catalog.identity.has_prefix else 1  # without one nothing predicts a first token
    representatives = snapshot.representatives
    records = np.zeros(len(snapshot.rows), np.int64)
    wrong = np.zeros(len(snapshot.rows), bool)
    foreign = [np.zeros(0, np.int64)]
    text: tuple[int, NDArray[np.uint32] | None] = (-1, None)  # the document read last
    stored = catalog.checksums()
    checked = checking(snapshot, stored)
    for ids, keys, groups in datastore.iterate():
        checked.add(ids, keys)
        foreign.append(_orphans(ids, snapshot))
        positions = positions_of(ids)
        at = snapshot.documents_at(positions)
        left = np.ones(len(ids), bool) if representatives is None else representatives.has_record(positions)
        for document in np.unique(at[at >= 0]).tolist():
            mine = at == document
            if text[0] != document:
                text = (document, _text(catalog, snapshot, document))
            offsets = positions[mine] - snapshot.starts[document]
            records[document] += len(offsets)
            wrong[document] |= (
                text[1] is None
                or bool((offsets < first).any())
                or not left[mine].all()
                or bool((text[1][offsets] != tokens_of(ids[mine])).any())
                or bool((groups[mine] != snapshot.groups[document]).any())
            )
    wrong |= records != snapshot.records
    names = catalog.labels(snapshot.rows[wrong].tolist())  # not of what was removed meanwhile
    problems = [
        f"document {id!r} of domain {domain!r} has lost records or has wrong ones: remove it and add it again"
        for id, domain in names.values()
    ]
    altered = set(checked.differing(stored)) - set(snapshot.rows[wrong].tolist())
    problems += [
        f"document {id!r} of domain {domain!r} has altered keys: remove it and add it again"
        for id, domain in catalog.labels(altered).values()
    ]
    orphans = np.concatenate(foreign)
    if len(orphans):  # a writer may have been at work since
        for documents in (unsettled, catalog.unsettled()):
            bounds = np.array([(d.start, d.stop) for d in documents], np.int64).reshape(-1, 2)
            orphans = orphans[~ranges_of(bounds[:, 0], bounds[:, 1]).contains(orphans)]
        orphans = _orphans(orphans, catalog.snapshot())
    if len(orphans):
        problems.append(f"{len(orphans)} records belong to no document: run `knnstore repair`")
    return problems


def _text(catalog: Catalog, snapshot: Snapshot, document: int) -> NDArray[np.uint32] | None:
    """The tokens of a document, None where they are not what they were."""
    try:
        tokens = catalog.tokens(int(snapshot.rows[document]))
    except CatalogError:
        return None
    whole = tokens is not None and len(tokens) == snapshot.stops[document] - snapshot.starts[document]
    return tokens if whole else None


def _orphans(ids: Ids, snapshot: Snapshot) -> Ids:
    return ids[snapshot.documents_at(positions_of(ids)) < 0]
