"""A view: the documents that are live at one revision, and search in exactly these documents."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import (
    Datastore,
    Filter,
    IdRanges,
    Ids,
    Keys,
    Neighbors,
    SupportsCells,
    Visits,
    positions_of,
    ranges_of,
)
from knnstore.errors import CatalogError, CorruptDatastoreError, DocumentNotFoundError, DomainNotFoundError
from knnstore.store.ngrams import KNOWN, RUN_LETTERS, Letters, Overlap, Runs
from knnstore.store.provenance import Tokens
from knnstore.store.reader_protocol import Records
from knnstore.store.selection import EVERYTHING, Selection

_MAX_CACHED = 64
_LOST_RECORDS = (
    "the engine has none of the records that the catalog lists: it lost them, or came back without its data; "
    "restore it, or see `knnstore verify`"
)


class Scope(NamedTuple):
    """A selection resolved to ids of records, at one revision."""

    live: IdRanges
    """Id ranges of the live selected records: no other record may be returned."""

    where: Filter | None
    """Filter of these records for the datastore; None if all live records are selected."""

    records: int
    """Number of records that the datastore must have for the selection."""


class View:
    """The store at one revision.

    The datastore may hold records of documents that are not live, for example of a document that is just
    being added. So the view checks every neighbor against the catalog. For unknown names see `scope`.
    """

    def __init__(self, snapshot: Snapshot, datastore: Datastore, catalog: Catalog) -> None:
        self.snapshot = snapshot
        self.datastore = datastore
        self.has_cells = isinstance(datastore, SupportsCells)
        """True if the engine has cells."""
        self._catalog = catalog
        self._scopes: OrderedDict[Selection, Scope] = OrderedDict()
        self._counts: tuple[Selection, NDArray[np.int64]] | None = None
        self._masks: OrderedDict[Selection, NDArray[np.bool_]] = OrderedDict()

    def holders(self, ids: Ids) -> NDArray[np.int64]:
        """Return the number of each record's document, in the shape of `ids`; -1 if it is not live."""
        document_indices = self.snapshot.documents_at(positions_of(ids))
        return (
            np.where(document_indices >= 0, self.snapshot.rows[document_indices], -1)
            if len(self.snapshot.rows)
            else document_indices
        )

    def search(self, queries: Keys, k: int, selection: Selection) -> Neighbors:
        """Return the k nearest live records of each query in a selection.

        Missing records have id -1 and distance +inf; see `StoreReader.search`.

        Raises:
            CorruptDatastoreError: if the datastore finds no record, although the catalog lists some.
        """
        live, where, records = self.scope(selection)
        neighbors = self.datastore.search(queries, k, where=where)
        orphans = ~live.contains(neighbors.ids) & (neighbors.ids >= 0)
        if orphans.any():
            # A record that is not live yet, or no more, took a place: search by exact ids.
            neighbors = self.datastore.search(queries, k, where=Filter(live))
            orphans = ~live.contains(neighbors.ids) & (neighbors.ids >= 0)
        if records and (neighbors.ids[:, 0] < 0).any():
            raise CorruptDatastoreError(_LOST_RECORDS)
        if orphans.any():
            neighbors = neighbors.without(orphans).nearest(k)
        return neighbors

    def visit(self, queries: Keys, probes: int, selection: Selection) -> list[Visits]:
        """Return all live records of the cells nearest to each query; see `StoreReader.visit`.

        Raises:
            CorruptDatastoreError: if the datastore finds no record, although the catalog lists some.
        """
        live, where, records = self.scope(selection)
        visits = self._visit_cells(queries, probes, live, where)
        all_meet = _has_record_for_each_query(visits, len(queries))
        if not all_meet:  # what is not live yet, or no more, took all places
            visits = self._visit_cells(queries, probes, live, Filter(live))
            all_meet = _has_record_for_each_query(visits, len(queries))
        if records and not all_meet:
            raise CorruptDatastoreError(_LOST_RECORDS)
        return visits

    def scope(self, selection: Selection) -> Scope:
        """Resolve a selection to records. The latest scopes are cached.

        Raises:
            DomainNotFoundError: if the selection names a domain without live documents.
            DocumentNotFoundError: if the selection names an id without a live document.
        """
        scope = self._scopes.get(selection)
        if scope is None:
            scope = self._scopes[selection] = self._resolve_scope(selection)
            if len(self._scopes) > _MAX_CACHED:
                self._scopes.popitem(last=False)
        return scope

    def content(self, hashes: Iterable[str], selection: Selection) -> set[str]:
        """Return the hashes in `hashes` that are content hashes of selected documents."""
        duplicates = self._catalog.rows_by_content(hashes)
        reached = self.mask_documents(selection) & self._mask_rows(chain(*duplicates.values()))
        selected_rows = set(self.snapshot.rows[reached].tolist())
        return {hash for hash, rows in duplicates.items() if not selected_rows.isdisjoint(rows)}

    def overlaps(
        self, texts: Sequence[Tokens], selection: Selection, letters: Letters | None = None
    ) -> list[Overlap]:
        """Return the parts of each text that selected documents contain. The documents are read once."""
        same, others = [set[int]() for _ in texts], [set[int]() for _ in texts]
        runs = Runs(texts) if letters is None else Runs([letters.of(text) for text in texts], RUN_LETTERS)
        for row, tokens in self._catalog.texts(self.snapshot.rows[self.mask_documents(selection)].tolist()):
            shared = runs.compare_document(tokens if letters is None else letters.of(tokens))
            for number in shared.same:
                same[number].add(row)
            for number in shared.others:
                others[number].add(row)
        for number, share in enumerate(runs.shares(elsewhere=True)):
            if share >= KNOWN:
                same[number] |= others[number]
        hashes = self._catalog.content_hashes(set().union(*same))
        return [
            Overlap(share, frozenset(hashes[row] for row in rows if row in hashes))
            for share, rows in zip(runs.shares(), same, strict=True)
        ]

    def token_counts(self, selection: Selection, vocabulary: int) -> NDArray[np.int64]:
        """Return how often each token occurs in the selected documents, int64, shape (vocabulary,).

        The array is read-only, and the latest one is cached. Raises CatalogError if a token is out of range.
        """
        latest = self._counts
        if latest is not None and latest[0] == selection:
            return latest[1]
        counts = np.zeros(vocabulary, np.int64)
        selected_rows = self.snapshot.rows[self.mask_documents(selection)]
        for tokens in _join_texts(self._catalog.texts(selected_rows.tolist()), vocabulary):
            if tokens.max(initial=0) >= vocabulary:
                raise CatalogError(
                    "the catalog is damaged: a token is outside the vocabulary; see `knnstore verify`"
                )
            counts += np.bincount(tokens, minlength=vocabulary)
        counts.setflags(write=False)
        self._counts = selection, counts
        return counts

    def rows(self, selection: Selection) -> list[int]:
        """Return the primary keys of the selected documents, in the order of their positions."""
        selected_rows: list[int] = self.snapshot.rows[self.mask_documents(selection)].tolist()
        return selected_rows

    def lengths(self, selection: Selection) -> dict[int, int]:
        """Return the token count of each selected document by primary key, in the order of positions."""
        mask = self.mask_documents(selection)
        lengths = self.snapshot.stops - self.snapshot.starts
        return dict(zip(self.snapshot.rows[mask].tolist(), lengths[mask].tolist(), strict=True))

    def texts(self, mask: NDArray[np.bool_]) -> list[NDArray[np.uint32]] | None:
        """Return the tokens of the documents in a mask, in the snapshot's order; None if one was removed."""
        rows = self.snapshot.rows[mask].tolist()
        tokens_by_row = dict(self._catalog.texts(rows))
        return [tokens_by_row[row] for row in rows] if len(tokens_by_row) == len(rows) else None

    def records(self, selection: Selection, without: Collection[int], batch_size: int) -> Iterator[Records]:
        """Yield records of the selected documents in batches, by ascending id.

        Documents whose primary keys are in `without` are left out.
        """
        mask = self.mask_documents(selection) & ~self._mask_rows(without)
        live = ranges_of(self.snapshot.starts[mask], self.snapshot.stops[mask])
        for ids, keys, _ in self.datastore.iterate(ids=live, batch_size=batch_size):
            yield Records(ids, keys)

    def _visit_cells(self, queries: Keys, probes: int, live: IdRanges, where: Filter | None) -> list[Visits]:
        """Read the nearest cells of each query, and drop the records that are not live."""
        datastore: Any = self.datastore  # to ask again whether it has cells takes longer than all this
        visits: list[Visits] = datastore.visit(queries, probes, where=where)
        # All ids at once: of scored text there are a thousand small visits.
        ids = [cell_visits.ids.ravel() for cell_visits in visits] or [np.empty(0, np.int64)]
        every = ids[0] if len(ids) == 1 else np.concatenate(ids)
        alive = live.contains(every)
        if not alive.all() and (every[~alive] >= 0).any():
            ends = np.cumsum([len(part) for part in ids])[:-1]
            parts = zip(visits, np.split(alive, ends), strict=True)
            visits = [cell_visits.only(part.reshape(cell_visits.ids.shape)) for cell_visits, part in parts]
        return visits

    def _resolve_scope(self, selection: Selection) -> Scope:
        """Resolve a selection to records, without the cache. Raises the errors of `scope`."""
        mask = self.mask_documents(selection)
        live = ranges_of(self.snapshot.starts[mask], self.snapshot.stops[mask])
        records = int(self.snapshot.records[mask].sum())
        if selection == EVERYTHING:
            return Scope(live, None, records)
        groups = None
        if selection.domains is not None and Selection(domains=selection.domains) == selection:
            groups = frozenset(self._get_domain_number(name) for name in selection.domains)
        return Scope(live, Filter(live, groups), records)

    def mask_documents(self, selection: Selection) -> NDArray[np.bool_]:
        """Return a mask of the documents that the selection contains; all True for an empty one.

        Masks of selections with a condition on metadata are cached, because the database evaluates the
        condition for every document. Metadata and tags do not change within a view: each change makes a new
        revision.

        Raises:
            DomainNotFoundError: if the selection names a domain without live documents.
            DocumentNotFoundError: if the selection names an id without a live document.
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
        """Return a mask of the documents that a selection contains, without the cache."""
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
        """Return the number of a domain. Raises DomainNotFoundError, which lists all domains."""
        if domain not in self.snapshot.domains:
            domain_names = ", ".join(sorted(map(str, self.snapshot.domains))) or "none"
            raise DomainNotFoundError(f"no domain {domain!r} in the store; there are: {domain_names}")
        return self.snapshot.domains[domain]

    def _find_rows(self, ids: Collection[str]) -> list[int]:
        """Return the primary keys of all documents with these ids. Raises DocumentNotFoundError."""
        rows = self._catalog.rows_by_id(ids)
        for id in ids:
            if id not in rows:
                raise DocumentNotFoundError(f"no document {id!r} in the store")
        return list(chain.from_iterable(rows.values()))

    def _mask_rows(self, rows: Iterable[int]) -> NDArray[np.bool_]:
        """Return a mask of the snapshot's documents with these primary keys."""
        return np.isin(self.snapshot.rows, np.fromiter(rows, np.int64))


def _has_record_for_each_query(visits: Sequence[Visits], queries: int) -> bool:
    """Check whether each of the first `queries` queries has at least one record in `visits`."""
    met = np.zeros(queries, bool)
    for visit in visits:
        met[visit.meeting()] = True
    return bool(met.all())


def _join_texts(texts: Iterable[tuple[int, NDArray[np.uint32]]], least: int) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of texts in blocks of at least `least` tokens; the last may be smaller."""
    held, size = [np.zeros(0, np.uint32)], 0
    for _, tokens in texts:
        held.append(tokens)
        size += len(tokens)
        if size >= least:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)
