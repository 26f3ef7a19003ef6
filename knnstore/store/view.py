"""A view: the documents of a store at one revision (state of the store), and searching these documents."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import (
    Datastore,
    DeviceVisits,
    Filter,
    IdRanges,
    Ids,
    Keys,
    Neighbors,
    SupportsCells,
    SupportsDeviceVisits,
    Visits,
    id_ranges_from_positions,
    positions_from_ids,
)
from knnstore.errors import CatalogError, CorruptDatastoreError, DocumentNotFoundError, DomainNotFoundError
from knnstore.store.ngrams import KNOWN, RUN_LETTERS, Letters, Overlap, Runs
from knnstore.store.provenance import Tokens
from knnstore.store.reader_protocol import Records
from knnstore.store.selection import EVERYTHING, Selection

_MAX_CACHED = 64
_LOST_RECORDS = (
    "the engine has none of the records that the catalog lists: it lost them, or was started without its "
    "data; restore its data, or run `knnstore verify`"
)


class Scope(NamedTuple):
    """The records of the documents that a selection contains, at one revision (state of the store)."""

    live: IdRanges
    """Ids of the records of all selected documents. A search must return no other record."""

    where: Filter | None
    """Filter with which a search of the datastore returns only these records. None if all documents are
    selected; then the search also returns records of documents that are half added or removed."""

    records: int
    """Number of records that the selected documents have according to the catalog."""


class View:
    """The documents of a store at one revision (state of the store), with methods to search and read them.

    The datastore may have records of other documents, for example of a document that is just being added. So
    the view compares every neighbor with the documents of this revision. Methods with a selection raise
    DomainNotFoundError or DocumentNotFoundError if the selection names an unknown domain or document.

    Args:
        snapshot: positions and domains of the documents at the revision.
        datastore: open datastore of the store's keys.
        catalog: open catalog of the store.
    """

    def __init__(self, snapshot: Snapshot, datastore: Datastore, catalog: Catalog) -> None:
        self.snapshot = snapshot
        self.datastore = datastore
        self.has_cells = isinstance(datastore, SupportsCells)
        """True if the engine divides records into cells (clusters of near keys)."""
        self._has_device_visits = isinstance(datastore, SupportsDeviceVisits)
        self._catalog = catalog
        self._scopes: OrderedDict[Selection, Scope] = OrderedDict()
        self._counts: tuple[Selection, NDArray[np.int64]] | None = None
        self._masks: OrderedDict[Selection, NDArray[np.bool_]] = OrderedDict()

    def document_numbers(self, ids: Ids) -> NDArray[np.int64]:
        """Return the primary key of the document to which each record belongs, int64, in the shape of `ids`.

        The result is -1 where no document of this view has the record, and for the id -1.
        """
        document_indices = self.snapshot.documents_at(positions_from_ids(ids))
        return (
            np.where(document_indices >= 0, self.snapshot.rows[document_indices], -1)
            if len(self.snapshot.rows)
            else document_indices
        )

    def search(self, queries: Keys, k: int, selection: Selection) -> Neighbors:
        """Find the k nearest records of each query among the selected documents; see `KNNStore.search`.

        Records that are not live are left out. Raises CorruptDatastoreError if a query has no neighbor,
        although the selected documents have records.
        """
        live, where, records = self.build_scope(selection)
        neighbors = self.datastore.search(queries, k, where=where)
        orphans = ~live.contains(neighbors.ids) & (neighbors.ids >= 0)
        if orphans.any():
            # A record that is not live yet, or no more, took a place: search by exact ids.
            neighbors = self.datastore.search(queries, k, where=Filter(live))
            orphans = ~live.contains(neighbors.ids) & (neighbors.ids >= 0)
        if records and (neighbors.ids[:, 0] < 0).any():
            raise CorruptDatastoreError(_LOST_RECORDS)
        if orphans.any():
            neighbors = neighbors.mask_neighbors(orphans).select_nearest(k)
        return neighbors

    def visit(self, queries: Keys, probes: int, selection: Selection) -> list[Visits]:
        """Compare each query with all records of its nearest cells; see `KNNStore.visit`.

        Records of other documents are replaced by padding (id -1, distance +inf). Raises
        CorruptDatastoreError if a query has no record, although the selected documents have records.
        """
        live, where, records = self.build_scope(selection)
        visits = self._visit_cells(queries, probes, live, where)
        all_meet = _has_record_for_each_query(visits, len(queries))
        if not all_meet:  # what is not live yet, or no more, took all places
            visits = self._visit_cells(queries, probes, live, Filter(live))
            all_meet = _has_record_for_each_query(visits, len(queries))
        if records and not all_meet:
            raise CorruptDatastoreError(_LOST_RECORDS)
        return visits

    def visit_on_device(self, queries: Any, probes: int, selection: Selection) -> DeviceVisits | None:
        """Compute what `visit` computes, and leave the results on the device; see `KNNStore.visit_on_device`.

        Returns None if `visit` has to be called.
        """
        if not self._has_device_visits:
            return None
        live, where, _ = self.build_scope(selection)
        datastore: Any = self.datastore
        exact = Filter(live, None if where is None else where.groups)
        visits: DeviceVisits | None = datastore.visit_on_device(queries, probes, exact)
        return visits

    def build_scope(self, selection: Selection) -> Scope:
        """Return the scope of a selection: ids, filter and number of the records of its documents.

        The scopes of the latest selections are cached.

        Raises:
            DomainNotFoundError: if the selection names a domain without documents.
            DocumentNotFoundError: if the selection names an id without a document.
        """
        scope = self._scopes.get(selection)
        if scope is None:
            scope = self._scopes[selection] = self._resolve_scope(selection)
            if len(self._scopes) > _MAX_CACHED:
                self._scopes.popitem(last=False)
        return scope

    def find_stored_hashes(self, hashes: Iterable[str], selection: Selection) -> set[str]:
        """Return the hashes that are the SHA-256 of a selected document's text; drop all other hashes."""
        duplicates = self._catalog.rows_by_content(hashes)
        reached = self.mask_documents(selection) & self._mask_rows(chain(*duplicates.values()))
        selected_rows = set(self.snapshot.rows[reached].tolist())
        return {hash for hash, rows in duplicates.items() if not selected_rows.isdisjoint(rows)}

    def measure_overlaps(
        self, texts: Sequence[Tokens], selection: Selection, letters: Letters | None = None
    ) -> list[Overlap]:
        """Measure how much of each text selected documents contain word for word.

        Each selected document is read once.
        """
        same, others = [set[int]() for _ in texts], [set[int]() for _ in texts]
        runs = (
            Runs(texts)
            if letters is None
            else Runs([letters.from_tokens(text) for text in texts], RUN_LETTERS)
        )
        for row, tokens in self._catalog.iterate_tokens(
            self.snapshot.rows[self.mask_documents(selection)].tolist()
        ):
            shared = runs.compare_document(tokens if letters is None else letters.from_tokens(tokens))
            for number in shared.same:
                same[number].add(row)
            for number in shared.others:
                others[number].add(row)
        for number, share in enumerate(runs.covered_shares(elsewhere=True)):
            if share >= KNOWN:
                same[number] |= others[number]
        hashes = self._catalog.content_hashes(set().union(*same))
        return [
            Overlap(share, frozenset(hashes[row] for row in rows if row in hashes))
            for share, rows in zip(runs.covered_shares(), same, strict=True)
        ]

    def token_counts(self, selection: Selection, vocabulary: int) -> NDArray[np.int64]:
        """Return how often each token occurs in the selected documents, int64, shape (vocabulary,).

        The array is read-only. The array of the last selection is cached.

        Args:
            selection: documents whose tokens are counted.
            vocabulary: number of tokens of the vocabulary.

        Raises:
            CatalogError: if a stored token id is outside the vocabulary.
        """
        latest = self._counts
        if latest is not None and latest[0] == selection:
            return latest[1]
        counts = np.zeros(vocabulary, np.int64)
        selected_rows = self.snapshot.rows[self.mask_documents(selection)]
        for tokens in _join_texts(self._catalog.iterate_tokens(selected_rows.tolist()), vocabulary):
            if tokens.max(initial=0) >= vocabulary:
                raise CatalogError(
                    "the catalog is damaged: a token is outside the vocabulary; run `knnstore verify`"
                )
            counts += np.bincount(tokens, minlength=vocabulary)
        counts.setflags(write=False)
        self._counts = selection, counts
        return counts

    def document_rows(self, selection: Selection) -> list[int]:
        """Return the primary keys of the selected documents, in the order in which they were added."""
        selected_rows: list[int] = self.snapshot.rows[self.mask_documents(selection)].tolist()
        return selected_rows

    def lengths(self, selection: Selection) -> dict[int, int]:
        """Return a dict from primary key to the number of tokens, for each selected document.

        The documents are in the order of their positions.
        """
        mask = self.mask_documents(selection)
        lengths = self.snapshot.stops - self.snapshot.starts
        return dict(zip(self.snapshot.rows[mask].tolist(), lengths[mask].tolist(), strict=True))

    def read_tokens(self, mask: NDArray[np.bool_]) -> list[NDArray[np.uint32]] | None:
        """Return the token ids of some documents, uint32 arrays, in the order of the documents' positions.

        Args:
            mask: True for each document of the snapshot to read, shape (n,).

        Returns:
            The token ids of each document; None if one of the documents was removed since.
        """
        rows = self.snapshot.rows[mask].tolist()
        tokens_by_row = dict(self._catalog.iterate_tokens(rows))
        return [tokens_by_row[row] for row in rows] if len(tokens_by_row) == len(rows) else None

    def records(self, selection: Selection, without: Collection[int], batch_size: int) -> Iterator[Records]:
        """Yield the records (ids and keys) of the selected documents in batches, by ascending id.

        The records of the documents `without` (primary keys) are left out.
        """
        mask = self.mask_documents(selection) & ~self._mask_rows(without)
        live = id_ranges_from_positions(self.snapshot.starts[mask], self.snapshot.stops[mask])
        for ids, keys, _ in self.datastore.iterate(ids=live, batch_size=batch_size):
            yield Records(ids, keys)

    def _visit_cells(self, queries: Keys, probes: int, live: IdRanges, where: Filter | None) -> list[Visits]:
        """Compare each query with all records of its nearest cells, and return the distances.

        A cell is a cluster of records with near keys.

        Args:
            queries: query vectors, float32, shape (q, dim).
            probes: number of cells to search for each query.
            live: ids of the records that may be found; other records are replaced by padding.
            where: filter for the datastore; None filters nothing there.
        """
        datastore: Any = self.datastore  # to ask again whether it has cells takes longer than all this
        visits: list[Visits] = datastore.visit(queries, probes, where=where)
        # All ids at once: of scored text there are a thousand small visits.
        ids = [cell_visits.ids.ravel() for cell_visits in visits] or [np.empty(0, np.int64)]
        every = ids[0] if len(ids) == 1 else np.concatenate(ids)
        alive = live.contains(every)
        if not alive.all() and (every[~alive] >= 0).any():
            ends = np.cumsum([len(part) for part in ids])[:-1]
            parts = zip(visits, np.split(alive, ends), strict=True)
            visits = [
                cell_visits.select_records(part.reshape(cell_visits.ids.shape)) for cell_visits, part in parts
            ]
        return visits

    def _resolve_scope(self, selection: Selection) -> Scope:
        """Compute the scope of a selection: ids, filter and number of the records of its documents.

        Raises DomainNotFoundError or DocumentNotFoundError for an unknown name.
        """
        mask = self.mask_documents(selection)
        live = id_ranges_from_positions(self.snapshot.starts[mask], self.snapshot.stops[mask])
        records = int(self.snapshot.records[mask].sum())
        if selection == EVERYTHING:
            return Scope(live, None, records)
        groups = None
        if selection.domains is not None and Selection(domains=selection.domains) == selection:
            groups = frozenset(self._get_domain_number(name) for name in selection.domains)
        return Scope(live, Filter(live, groups), records)

    def mask_documents(self, selection: Selection) -> NDArray[np.bool_]:
        """Return a mask of the snapshot's documents that a selection contains, bool, shape (n,).

        The mask is all True for a selection without conditions. A tag that no document has selects nothing.

        Masks of selections with a condition on metadata are cached, because the database evaluates the
        condition for every document. Metadata and tags do not change within a view: each change makes a new
        revision.

        Raises:
            DomainNotFoundError: if the selection names a domain without documents.
            DocumentNotFoundError: if the selection names an id without a document.
        """
        if selection.where is None:
            return self._compute_mask(selection)
        mask = self._masks.get(selection)
        if mask is None:
            mask = self._compute_mask(selection)
            mask.setflags(write=False)
            self._masks[selection] = mask
            while len(self._masks) > _MAX_CACHED:
                self._masks.popitem(last=False)
        return mask

    def _compute_mask(self, selection: Selection) -> NDArray[np.bool_]:
        """Compute the mask of the snapshot's documents that a selection contains, bool, shape (n,).

        Raises DomainNotFoundError or DocumentNotFoundError for an unknown name.
        """
        snapshot = self.snapshot
        mask = np.ones(len(snapshot.rows), bool)
        if selection.domains is not None:
            mask &= np.isin(snapshot.groups, [self._get_domain_number(name) for name in selection.domains])
        if selection.tags is not None:
            mask &= self._mask_rows(chain(*self._catalog.rows_by_tag(selection.tags).values()))
        if selection.documents is not None:
            mask &= self._mask_rows(self._find_rows(selection.documents))
        if selection.where is not None:
            groups = np.unique(snapshot.groups[mask]).tolist()  # of others it is not even asked
            mask &= self._mask_rows(self._catalog.rows_where(selection.where, groups))
        if selection.exclude:
            mask &= ~self._mask_rows(chain(*self._catalog.rows_by_content(selection.exclude).values()))
        return mask

    def _get_domain_number(self, domain: str) -> int:
        """Return the primary key of a domain by its name.

        Raises DomainNotFoundError if the domain has no document. The message lists all domains.
        """
        if domain not in self.snapshot.domains:
            domain_names = ", ".join(sorted(map(str, self.snapshot.domains))) or "none"
            raise DomainNotFoundError(f"no domain {domain!r} in the store; the domains are: {domain_names}")
        return self.snapshot.domains[domain]

    def _find_rows(self, ids: Collection[str]) -> list[int]:
        """Return the primary keys of all documents with the given ids, in any domain.

        Raises DocumentNotFoundError for an id that no document has.
        """
        rows = self._catalog.rows_by_id(ids)
        for id in ids:
            if id not in rows:
                raise DocumentNotFoundError(f"no document {id!r} in the store")
        return list(chain.from_iterable(rows.values()))

    def _mask_rows(self, rows: Iterable[int]) -> NDArray[np.bool_]:
        """Return a mask of the snapshot's documents whose primary keys are in `rows`, bool, shape (n,)."""
        return np.isin(self.snapshot.rows, np.fromiter(rows, np.int64))


def _has_record_for_each_query(visits: Sequence[Visits], queries: int) -> bool:
    """Check whether each query was compared with at least one record.

    Args:
        visits: arrays with queries, record ids and distances.
        queries: number of queries; their row numbers are 0 to queries - 1.
    """
    met = np.zeros(queries, bool)
    for visit in visits:
        met[visit.find_nonempty_queries()] = True
    return bool(met.all())


def _join_texts(texts: Iterable[tuple[int, NDArray[np.uint32]]], least: int) -> Iterator[NDArray[np.uint32]]:
    """Concatenate the tokens of texts to blocks, and yield the blocks.

    Args:
        texts: pairs (any number, token ids); the number is ignored.
        least: smallest number of tokens in a block; the last block may have fewer.
    """
    held, size = [np.zeros(0, np.uint32)], 0
    for _, tokens in texts:
        held.append(tokens)
        size += len(tokens)
        if size >= least:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)
