"""Checking that catalogue and datastore say the same of every token."""

import numpy as np

from knnstore.catalog import Catalog
from knnstore.datastore import Datastore, SupportsVerify
from knnstore.errors import KnnstoreError
from knnstore.store.records import positions_of, tokens_of


def problems_of(catalog: Catalog, datastore: Datastore, unsettled: int) -> list[str]:
    """Read everything that is stored and list what is wrong, one line each.

    Args:
        catalog: what should be there.
        datastore: what is there; every record is read.
        unsettled: documents that an interrupted writer left behind.

    Returns:
        Nothing when the store is sound.
    """
    problems = []
    if unsettled:
        problems.append(f"{unsettled} documents are half added or half removed: run `knnstore repair`")
    if isinstance(datastore, SupportsVerify):
        problems += datastore.verify()
    try:
        problems += _compare(catalog, datastore, strangers_allowed=unsettled > 0)
    except KnnstoreError as error:
        problems.append(str(error))
    return problems


def _compare(catalog: Catalog, datastore: Datastore, *, strangers_allowed: bool) -> list[str]:
    """Compare each record with the token that the catalogue has at its position."""
    snapshot = catalog.snapshot()
    records = np.zeros(len(snapshot.rows), np.int64)
    wrong = np.zeros(len(snapshot.rows), bool)
    strangers = 0
    text: tuple[int, np.ndarray[tuple[int], np.dtype[np.uint32]] | None] = (
        -1,
        None,
    )  # the document read last
    for ids, _, groups in datastore.iterate():
        at = snapshot.documents_at(positions_of(ids))
        strangers += int((at < 0).sum())
        for document in np.unique(at[at >= 0]).tolist():
            mine = at == document
            if text[0] != document:
                text = (document, catalog.tokens(int(snapshot.rows[document])))
            offsets = positions_of(ids[mine]) - snapshot.starts[document]
            records[document] += len(offsets)
            wrong[document] |= (
                text[1] is None
                or bool((text[1][offsets] != tokens_of(ids[mine])).any())
                or bool((groups[mine] != snapshot.groups[document]).any())
            )
    # Without a prefix nothing predicts a document's first token, so it has no record.
    missing = (snapshot.stops - snapshot.starts) - records > 1
    names = catalog.labels(snapshot.rows[wrong | missing].tolist())
    problems = [
        f"document {id!r} of domain {domain!r} has lost records or has wrong ones: remove it and add it again"
        for id, domain in names.values()
    ]
    if strangers and not strangers_allowed:
        problems.append(f"{strangers} records belong to no document: run `knnstore repair`")
    return problems
