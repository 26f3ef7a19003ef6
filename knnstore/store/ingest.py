"""The two-phase protocol that keeps the catalog and the datastore consistent.

The catalog (SQL) has a row for each document, with a state: pending, live or deleting. Readers see only live
documents. The datastore (vector engine) has a record with a key for each token::

    1 begin      the catalog saves the documents as pending, and gives each document a range of positions
    2 add        the datastore gets the records of the documents
    3 flush      the records become durable
    4 publish    pending documents become live, the versions that they replace become deleting
    5 purge      documents that are not live are deleted: fitted settings, then records, then rows

A crash before step 4 leaves pending documents, a crash after step 4 leaves deleting ones. Recovery is step 5
for both. Each step may be repeated, so recovery may be interrupted too.

A reader sees each document completely or not at all. A domain is removed in one transaction, except on a full
disk without room for the log: then its documents are removed in several transactions.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import CatalogWriter, Lease, NewDocument, PlacedDocument
from knnstore.datastore import Datastore, Keys, SupportsUploads, id_ranges_from_positions, record_ids
from knnstore.errors import DiskFullError, KnnstoreError
from knnstore.failpoints import failpoint
from knnstore.store.fitted import drop_settings_of_removed
from knnstore.store.soundness import (
    abandon_unneeded,
    compute_key_crcs,
    format_checksum,
    get_checksum_precision,
)

_BATCH_DOCUMENTS = 64  # documents, each of which takes some pages of a database's log
_BATCH_TOKENS = 1 << 17  # tokens, of four bytes; SQLite writes them to its log to overwrite them


def delete_unfinished_documents(
    catalog: CatalogWriter, datastore: Datastore, documents: Sequence[PlacedDocument]
) -> None:
    """Delete documents that are not live (half added or removed): their records, then their catalog rows.

    Also deletes saved settings that were fitted on removed documents, and damaged files of the datastore that
    hold no record of a live document.

    Args:
        catalog: writer of the catalog.
        datastore: datastore with the records, open for writing.
        documents: the documents to delete; if empty, only damaged files are deleted.
    """
    if not documents:
        abandon_unneeded(catalog.catalog, datastore)
        return
    bounds = np.array([(document.start, document.stop) for document in documents], np.int64)
    failpoint("purge.before")
    drop_settings_of_removed(catalog)
    failpoint("purge.fitted")
    datastore.delete(id_ranges_from_positions(bounds[:, 0], bounds[:, 1]))
    failpoint("purge.deleted")
    datastore.flush()
    failpoint("purge.flushed")
    abandon_unneeded(catalog.catalog, datastore)
    for group in _group_by_tokens(
        documents
    ):  # each frees, in the database, what the next one needs for its log
        change_in_batches_if_full(catalog, catalog.delete_documents, [document.row for document in group])


def change_in_batches_if_full(
    catalog: CatalogWriter, change: Callable[[Sequence[int]], None], rows: Sequence[int]
) -> None:
    """Change documents in one transaction; if the disk is full, in transactions of a few documents each.

    A small transaction needs less space for the database's log.

    Args:
        catalog: writer of the catalog; the database's log is emptied before the small transactions.
        change: function that changes documents in one transaction, called with their primary keys.
        rows: primary keys of the documents to change.

    Raises:
        DiskFullError: if the disk has no room for a small transaction either. The documents of earlier
            transactions stay changed.
    """
    try:
        change(rows)
    except DiskFullError:
        catalog.catalog.take_in_log()  # it has grown by what was tried, as far as the disk went
        for start in range(0, len(rows), _BATCH_DOCUMENTS):
            change(rows[start : start + _BATCH_DOCUMENTS])


def _group_by_tokens(documents: Sequence[PlacedDocument]) -> Iterator[list[PlacedDocument]]:
    """Yield the documents in lists, in the same order.

    A list ends when it has at least `_BATCH_TOKENS` tokens; the last list may have fewer tokens.
    """
    group: list[PlacedDocument] = []
    tokens = 0
    for document in documents:
        group.append(document)
        tokens += document.stop - document.start
        if tokens >= _BATCH_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


class Ingest:
    """New documents whose records are added to the datastore, invisible to readers until `commit`.

    `KNNStore.ingest` creates the object, and calls `commit` or `abandon`. The caller of `KNNStore.ingest`
    calls `add`. The constructor saves the documents in the catalog in the state "pending", invisible to
    readers.

    Args:
        catalog: writer of the catalog.
        datastore: datastore for the records, open for writing.
        documents: the new documents.
        starts: position of each document's first token, from a lease; None allocates new positions.
    """

    def __init__(
        self,
        catalog: CatalogWriter,
        datastore: Datastore,
        documents: Sequence[NewDocument],
        starts: Sequence[int] | None = None,
    ) -> None:
        self._catalog = catalog
        self._datastore = datastore
        self._placed = catalog.insert_pending_documents(documents, starts)
        self._starts = np.array([placed.start for placed in self._placed], np.int64)
        self._groups = np.array([placed.group for placed in self._placed], np.int32)
        self._precision = get_checksum_precision(datastore.capabilities)
        lengths = [placed.stop - placed.start if self._precision else 0 for placed in self._placed]
        self._sums = [np.zeros(length, np.uint32) for length in lengths]
        failpoint("ingest.begun")

    def add(
        self,
        documents: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        keys: Keys,
        *,
        is_stored: bool = False,
    ) -> None:
        """Store the records of n tokens of the new documents, in any order. Pass each token only once.

        Args:
            documents: index of each token's document among the new documents, shape (n,).
            positions: index of each token in its document, from 0, shape (n,).
            tokens: the token ids, shape (n,).
            keys: key of each token: the model's hidden state before the token, float32, shape (n, dim).
            is_stored: True if the datastore has these records already, because they were uploaded. Then only
                their checksums are computed.
        """
        if not is_stored:
            ids = record_ids(self._starts[documents] + positions, tokens)
            self._datastore.add(ids, keys, self._groups[documents])
        if self._precision:
            sums = compute_key_crcs(keys, self._precision)
            for document in np.unique(documents).tolist():
                is_of_document = documents == document
                self._sums[document][positions[is_of_document]] = sums[is_of_document]
        failpoint("ingest.added")

    def count_uploaded(self, upload: str) -> int:
        """Return how many records of the new documents the datastore already has from an upload.

        Returns 0 if the engine accepts no uploads.

        Args:
            upload: name of the upload, which its records carry.
        """
        if not isinstance(self._datastore, SupportsUploads):
            return 0
        stops = np.array([placed.stop for placed in self._placed], np.int64)
        count = 0
        for group in np.unique(self._groups).tolist():
            is_of_group = self._groups == group
            ids = id_ranges_from_positions(self._starts[is_of_group], stops[is_of_group])
            count += self._datastore.count_uploaded(ids, upload, group)
        return count

    def flush(self) -> dict[int, str | None]:
        """Make the records durable, and return a checksum of each document's keys.

        Returns:
            The checksums by primary key of the document; the values are None if the datastore checks its keys
            itself.
        """
        self._datastore.flush()
        failpoint("ingest.flushed")
        return {
            placed.row: format_checksum(sums, self._precision) if self._precision else None
            for placed, sums in zip(self._placed, self._sums, strict=True)
        }

    def commit(self) -> None:
        """Make the records durable, then make the new documents visible to readers.

        Afterwards the documents that the new documents replace are deleted, and so are all other documents
        that were half added or removed.
        """
        publish_documents(self._catalog, self._datastore, self.flush())

    def abandon(self) -> None:
        """Delete the new documents, unless they have become live.

        Errors are ignored, because the next writer deletes the rest. The catalog is read first, because a
        commit may have succeeded although its answer was lost. The method also works if another writer has
        deleted the documents already.
        """
        _abandon(self._catalog, self._datastore, self._placed)

    @property
    def placed(self) -> list[PlacedDocument]:
        """The new documents with their positions."""
        return self._placed


class LeasedIngest:
    """Documents with positions from a lease, added part by part, that become visible to readers together.

    `KNNStore.ingest_leased` creates the object, and calls `commit` or `abandon`. The caller of
    `KNNStore.ingest_leased` calls `add_part`.

    Args:
        catalog: writer of the catalog.
        datastore: datastore for the records, open for writing.
        lease: reserved positions, which only these documents may have.
    """

    def __init__(self, catalog: CatalogWriter, datastore: Datastore, lease: Lease) -> None:
        self._catalog = catalog
        self._datastore = datastore
        self._lease = lease
        self._placed: list[PlacedDocument] = []
        self._checksums: dict[int, str | None] = {}

    @contextlib.contextmanager
    def add_part(self, documents: Sequence[NewDocument], starts: Sequence[int]) -> Iterator[Ingest]:
        """Add some of the documents in a ``with`` block, in which the caller passes the key of every token.

        The block receives an `Ingest`, whose method `add` takes the keys. At the end of the block the records
        are durable, but readers do not see them before `commit`.

        Args:
            documents: the documents of this part.
            starts: position of each document's first token.
        """
        part = Ingest(self._catalog, self._datastore, documents, starts)
        self._placed += part.placed
        yield part
        self._checksums |= part.flush()

    def commit(self) -> None:
        """Make the documents of all parts visible to readers in one transaction; the lease becomes committed.

        Before the transaction, records that were uploaded for documents that are not added are deleted. After
        it, the documents that the new documents replace are deleted.
        """
        if isinstance(self._datastore, SupportsUploads):
            bounds = [(placed.start, placed.stop) for placed in self._placed]
            placed_starts, placed_stops = np.array(bounds, np.int64).reshape(-1, 2).T
            starts, stops = np.array([self._lease.start]), np.array([self._lease.stop])
            self._datastore.delete(
                id_ranges_from_positions(starts, stops)
                - id_ranges_from_positions(placed_starts, placed_stops)
            )
        publish_documents(self._catalog, self._datastore, self._checksums, lease=self._lease.id)

    def abandon(self) -> None:
        """Delete the documents of all parts, unless they have become live; see `Ingest.abandon`."""
        _abandon(self._catalog, self._datastore, self._placed)


def _abandon(catalog: CatalogWriter, datastore: Datastore, documents: Sequence[PlacedDocument]) -> None:
    """Delete documents unless they have become live, and ignore errors; see `Ingest.abandon`."""
    with contextlib.suppress(KnnstoreError, OSError):
        live = catalog.catalog.ids_and_domains(placed.row for placed in documents)
        delete_unfinished_documents(
            catalog, datastore, [placed for placed in documents if placed.row not in live]
        )


def publish_documents(
    catalog: CatalogWriter,
    datastore: Datastore,
    checksums: Mapping[int, str | None],
    *,
    lease: str | None = None,
) -> None:
    """Make documents visible to readers in one transaction, then delete the documents that they replace.

    All other documents that were half added or removed are deleted too.

    Args:
        catalog: writer of the catalog.
        datastore: datastore with the records of the documents, which are durable.
        checksums: checksum of each document's keys by its primary key; None if the datastore checks its keys
            itself.
        lease: id of the lease whose positions the documents have, or None.
    """
    known = {row: text for row, text in checksums.items() if text is not None}
    catalog.make_documents_live(list(checksums), known, lease=lease)
    delete_unfinished_documents(catalog, datastore, catalog.unsettled_documents())
