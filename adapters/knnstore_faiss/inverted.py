"""Approximate search: a FAISS inverted file over the rows of one segment."""

import errno
import os
from pathlib import Path

import faiss
import numpy as np

from knnstore.datastore import (
    BLOCK,
    IdRanges,
    Keys,
    MappedColumns,
    MappedFile,
    Metric,
    Neighbors,
    Segment,
    StoredFile,
    StoredKeys,
    compare_rows,
    free_space,
    paired,
)
from knnstore.errors import CorruptDatastoreError, DatastoreError
from knnstore_faiss.flat import found_by_faiss, nearest_rows
from knnstore_faiss.policy import METRICS, Policy, new_index

_CHUNK = 1 << 16  # rows given to FAISS at a time
_LITTLE_SPACE = 1 << 20  # bytes that a disk has at most when a write to it has failed for want of space
_FEW_ROWS = 4096  # matching rows up to which they are compared one by one
_TABLES = 1 << 31  # bytes: the most that FAISS computes beside what is in the file of a product quantizer


def build(segment: Segment, factory: str, dim: int, metric: Metric, path: Path) -> None:
    """Train an index on a sample of a segment, fill it with all rows, and write it to a file.

    Entries are numbered by the rows of the segment, so they stay right when rows die.

    Raises:
        DatastoreError: FAISS cannot build or write it.
        OSError: the disk is full.
    """
    index = new_index(factory, dim, metric)
    keys = segment.columns.keys
    sampled = min(segment.rows, index.cp.max_points_per_centroid * index.nlist)
    sample = np.sort(np.random.default_rng(0).choice(segment.rows, sampled, replace=False))
    try:
        index.train(keys[sample].astype(np.float32))
        for start in range(0, segment.rows, _CHUNK):
            index.add(keys[start : start + _CHUNK].astype(np.float32))
        try:
            faiss.write_index(index, str(path))
        except RuntimeError as error:
            if free_space(path.parent) < _LITTLE_SPACE:  # FAISS says that it failed, and not why
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
    except RuntimeError as error:
        raise DatastoreError(f"FAISS cannot build {factory!r} over {segment.rows} rows: {error}") from error


def fits(factory: str, rows: int, dim: int, metric: Metric) -> bool:
    """Whether so many rows are enough for the lists of an index and for the training of its codes."""
    return rows >= max(8 * int(new_index(factory, dim, metric).nlist), 256)


class InvertedIndex:
    """Searches one segment through the index file that its entry names.

    Raises:
        FileNotFoundError: the file is gone; a newer manifest may have replaced it.
        CorruptDatastoreError: the file is damaged.
    """

    def __init__(self, root: Path, segment: Segment, dim: int, metric: Metric, policy: Policy) -> None:
        assert segment.index is not None
        assert isinstance(segment.columns, MappedColumns)
        self.file = segment.index.file
        self._columns = segment.columns
        self._metric = metric
        self._policy = policy
        self._index = _read(root, self.file, segment, dim, metric)
        self._coarse = not isinstance(self._index, (faiss.IndexIVFScalarQuantizer, faiss.IndexIVFFlat))
        self._ranking: faiss.IndexRefine | None = None
        self._stored: faiss.IndexFlatCodes | None = None
        self.update(segment)

    def update(self, segment: Segment) -> None:
        """Search the rows that are live in this version of the segment."""
        self.segment = segment
        self._live = segment.live_rows()
        self._live_selector = _selector(self._live, segment.rows)

    def matching(self, ids: IdRanges | None) -> IdRanges:
        """The live rows of the segment, of all records or of those with some ids."""
        return self._live if ids is None else self.segment.live_rows(ids)

    def search(self, queries: Keys, k: int, matching: IdRanges) -> Neighbors:
        """Find about the k nearest of some rows, and k always where there are k; see `SegmentIndex`."""
        if matching.size <= max(_FEW_ROWS, 4 * k):
            return compare_rows(self.segment, matching, queries, k, self._metric, nearest_rows)
        lists, rows = self._index.nlist, self.segment.rows
        selector = self._live_selector if matching is self._live else _selector(matching, rows)
        candidates = self._policy.candidates(k, matching.size, coarse=self._coarse)
        probes = self._policy.probes(k, rows, matching.size, lists)
        found = self._search_lists(queries, k, selector, probes, candidates)
        short = np.flatnonzero(found.ids[:, -1] < 0)
        if len(short):  # the lists visited did not hold enough matching rows: visit all of them
            found.put(short, self._search_lists(queries[short], k, selector, lists, candidates))
        return found.named(self._columns.ids)

    def _search_lists(
        self, queries: Keys, k: int, selector: faiss.IDSelector | None, probes: int, candidates: int
    ) -> Neighbors:
        """Search some lists for each query; found.ids are rows."""
        wanted = faiss.SearchParametersIVF(nprobe=probes, sel=selector)
        keys = self._columns.keys_file
        # Fewer bytes to check than the whole file: the first queries need not wait for all of it.
        if not keys.checked and len(queries) * candidates * BLOCK < keys.file.size:
            distances, rows = self._index.search(queries, candidates, params=wanted)
            return self._ranked(queries, found_by_faiss(rows, distances, self._metric), k)
        if self._ranking is None:
            self._stored = _view(self._columns.keys, self._metric)
            self._ranking = faiss.IndexRefine(self._index, self._stored)
        ranked = faiss.IndexRefineSearchParameters(k_factor=candidates / k, base_index_params=wanted)
        distances, rows = self._ranking.search(queries, k, params=ranked)
        return found_by_faiss(rows, distances, self._metric)

    def _ranked(self, queries: Keys, found: Neighbors, k: int) -> Neighbors:
        """Compute the distances of candidates from the stored keys and keep the nearest."""
        for query, rows, distances in zip(queries, found.ids, found.distances, strict=True):
            present = rows >= 0
            keys = self._columns.keys_at(rows[present]).astype(np.float32)
            distances[present] = paired(query, keys, self._metric)
        return found.nearest(k)


def _read(root: Path, file: StoredFile, segment: Segment, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Read an index whose bytes were checked; the lists stay on disk where FAISS can map them."""
    mapped = MappedFile(root, file)
    mapped.check()
    faiss.set_deserialization_vector_byte_limit(4 * mapped.file.size + _TABLES)
    if bytes(mapped.bytes[:2]) != b"Iw":  # the inverted files; nothing else is ever written
        raise CorruptDatastoreError(f"{mapped.path} is no inverted file")
    try:
        index = faiss.read_index(str(mapped.path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise CorruptDatastoreError(f"{mapped.path} cannot be read: {error}") from error
    expected = (dim, segment.rows, METRICS[metric])
    if not isinstance(index, faiss.IndexIVF) or (index.d, index.ntotal, index.metric_type) != expected:
        raise CorruptDatastoreError(f"{mapped.path} belongs to other keys")
    lists = faiss.downcast_InvertedLists(index.invlists)
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0  # 32 threads a search, which only cold disks would repay
    return index


def _selector(rows: IdRanges, total: int) -> faiss.IDSelectorBitmap | None:
    """A set of rows as FAISS tests it fastest; None for all."""
    if rows == IdRanges([(0, total)]):
        return None
    mask = np.zeros(total, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))


def _view(keys: StoredKeys, metric: Metric) -> faiss.IndexFlatCodes:
    """A flat index over keys that stay where they are: only to search, and while they are kept alive."""
    dim = keys.shape[1]
    if keys.dtype == np.float16:
        index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16, METRICS[metric])
    else:
        index = faiss.IndexFlat(dim, METRICS[metric])
    codes = faiss.MaybeOwnedVectorUInt8()
    codes.is_owned = False
    codes.view_data = codes.c_ptr = faiss.swig_ptr(keys.reshape(-1).view(np.uint8))
    codes.view_size = codes.c_size = keys.nbytes
    index.codes = codes
    index.ntotal = len(keys)
    index.is_trained = True
    return index
