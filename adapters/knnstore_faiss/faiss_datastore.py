"""The FAISS adapter: records in files (segments). Large segments are searched with inverted files.

A segment is an immutable set of files with records of one group, which is a numbered set of records such as a
domain. An inverted file is an index that divides keys into lists of near keys; a search visits some lists.
`Policy` has the parameters and chooses indexes, `InvertedIndex` searches one segment, and `FaissDatastore` is
the adapter.
"""

import errno
import logging
import math
import os
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from knnstore.datastore import (
    BLOCK,
    Capabilities,
    Datastore,
    Distances,
    EmbeddedDatastore,
    IdRanges,
    Ids,
    Keys,
    KeySegments,
    MappedColumns,
    MappedFile,
    Metric,
    Neighbors,
    Segment,
    StoredFile,
    StoredKeys,
    compare_rows,
    free_space,
    paired_distances,
    validate_params,
)
from knnstore.datastore import find_nearest_rows as nearest_rows_by_numpy
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreError

METRICS = {Metric.L2: faiss.METRIC_L2, Metric.IP: faiss.METRIC_INNER_PRODUCT}
"""FAISS's names of the metrics."""

# Measured with keys of a language model (the last FFN's input of a 4-layer GPT-2, dim 256) over technical
# prose, 256 queries of other documents a batch, exact distances included, by FAISS 1.15 on two busy cores.
# Time is relative to exact search over the same rows; recall is against exact search.
#
#      rows  index              k=1024: time  recall    k=64: time  recall
#    16 384  IVF256,SQ8                1.52    .998            .37    .978
#    32 768  IVF256,SQ8                1.01    .996            .17    .975
#    65 536  IVF512,SQ8                 .64    .992            .10    .977
#   131 072  IVF1024,SQ8                .39    .990            .06    .977   (12 rows visited a neighbor
#   300 000  IVF1024,SQ8                .15    .971            .034   .979    up to here, 8 below)
#   300 000  IVF1024,PQ64x4fs           .16    .970            .046   .979
# 1 000 000  IVF1024,SQ8                .05    .970            .03    .980   (16 and 8 probes)
# 1 000 000  IVF2048,PQ64x4fs             -    .966              -    .980
#
# So inverted lists are faster than exact search from 32 768 rows on, even at k=1024. Product codes with
# reranking are neither faster nor worse than scalars; they take 40 bytes a row instead of 264, which matters
# when memory is short.
_FACTORY = re.compile(r"[A-Za-z0-9,_()+-]{1,64}")
_LARGEST_NUMBER = 1 << 20
"""Largest number in a factory string."""

EXACT_UP_TO = 1 << 15
"""Largest number of records of a group that is searched exactly: no training, and every neighbor is found."""

SCALAR_UP_TO = 1 << 20
"""Largest number of records of a segment whose index has 8-bit scalar codes. The index of a larger segment
has 4-bit product codes."""

_CODES_PER_NEIGHBOR = 8
"""Number of records to visit for each of the k neighbors."""
_MIN_PROBES = 8
"""Number of lists that a search visits in addition to the lists that have 8 · k records on average."""
_SMALLEST_INDEXED = 1 << 13
"""Number of records from which a segment of a large group has an index."""
_RERANKED = 6
"""Number of candidates for each of the k neighbors if the codes of the index are coarse."""
_MIN_RERANKED = 1024
"""Smallest number of candidates if the codes of the index are coarse."""
_HNSW_FROM = 1 << 14
"""Number of lists from which a graph is used to find the lists that are nearest to a query."""
_ROWS_AT_ONCE = 1 << 16
"""Number of keys that are given to FAISS in one call."""
_LITTLE_SPACE = 1 << 20
"""Largest free space in bytes at which a failed write is taken for a full disk."""
_FEW_ROWS = 4096
"""Largest number of matching records that are all compared with a query, without the index."""
_TABLES = 1 << 31
"""Largest size in bytes of the tables that FAISS computes for a product quantizer when it loads an index. The
tables are not in the index file."""

_REMOVED = {"exact_distances": True, "neighbors": "auto"}
"""Default values of parameters of earlier versions, by name. Old stores may have them; they are ignored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """The parameters of the FAISS adapter, and the choices that follow from them.

    Args:
        index: ``"auto"`` chooses an index by the number of records; ``"exact"`` uses no index; any other
            value is the FAISS factory string of an inverted file, such as ``"IVF1024,SQ8"``.
        nprobe: number of lists of the inverted file to visit for each query; 0 chooses the number by k.
        rerank: number of candidates for each neighbor whose exact distances are computed; 0 chooses the
            number by the index, 1 means the k nearest by the index's own distances.
    """

    index: str = "auto"
    nprobe: int = 0
    rerank: int = 0

    @classmethod
    def from_params(cls, params: dict[str, Any], dim: int, metric: Metric) -> "Policy":
        """Check the parameters that a user gave, and return the policy.

        Parameters of earlier versions that do not exist any more are ignored. A warning is logged if such a
        parameter has another value than its default.

        Args:
            params: parameters by name; omitted parameters have their defaults.
            dim: number of components of a key; a factory string must work for this number.
            metric: metric of the distances; a factory string must work for this metric.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        ignored = [name for name, default in _REMOVED.items() if params.get(name, default) != default]
        if ignored:
            _warn_of_ignored(", ".join(ignored))
        params = {name: value for name, value in params.items() if name not in _REMOVED}
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**validate_params("faiss", params, accepted, minima={"nprobe": 0, "rerank": 0}))
        if policy.index not in ("auto", "exact"):
            create_empty_index(policy.index, dim, metric)
        return policy

    def is_group_indexed(self, group_rows: int) -> bool:
        """Check whether the records of a group are searched with indexes.

        A group is a numbered set of records, such as a domain. With ``index="auto"``, only a group of more
        than 32,768 records is searched with indexes. A group that is not searched with indexes is searched
        exactly: each query is compared with all records.

        Args:
            group_rows: number of records of the group, without deleted and replaced records.

        Returns:
            True if indexes are used; False if the group is searched exactly.
        """
        return self.index != "exact" and (self.index != "auto" or group_rows > EXACT_UP_TO)

    def choose_factory(self, rows: int, group_rows: int, dim: int) -> str | None:
        """Choose the index of a segment (a set of files with records of one group).

        In a large group, segments of at least `_SMALLEST_INDEXED` records have an index. A small segment of a
        large group has only few of a query's neighbors, so comparing the query with all of its records would
        be wasteful.

        Args:
            rows: number of records of the segment, deleted records included.
            group_rows: number of records of the segment's group, without deleted and replaced records.
            dim: number of components of a key.

        Returns:
            FAISS factory string of the index; None if the segment needs no index.
        """
        if self.index != "auto":
            return None if self.index == "exact" else self.index
        if not self.is_group_indexed(group_rows) or rows < _SMALLEST_INDEXED:
            return None
        lists = 2 ** round(math.log2(2 * math.sqrt(rows)))
        quantizer = f"IVF{lists}_HNSW32" if lists >= _HNSW_FROM else f"IVF{lists}"
        if rows <= SCALAR_UP_TO:
            return f"{quantizer},SQ8"
        codes = next(m for m in range(max(1, dim // 4), dim + 1) if dim % m == 0)
        return f"{quantizer},PQ{codes}x4fs"

    def count_probes(self, k: int, rows: int, matching: int, lists: int) -> int:
        """Return the number of lists that a search visits for each query.

        A list has the records with keys that are near each other. The k nearest records are searched only in
        the visited lists, so the search is approximate.

        Args:
            k: number of neighbors.
            rows: number of records of the segment (an immutable set of records).
            matching: number of records that match the filter of the search, >= 1. With fewer matching
                records, more lists are visited.
            lists: number of lists of the inverted file; the result is at most this number.
        """
        unfiltered = self.nprobe or math.ceil(_CODES_PER_NEIGHBOR * k * lists / rows) + _MIN_PROBES
        return min(math.ceil(unfiltered * rows / matching), lists)

    def count_candidates(self, k: int, matching: int, *, coarse: bool) -> int:
        """Return the number of candidates of a query whose exact distances are computed, at least k.

        A candidate is a record that the index finds; the k nearest candidates become the result.

        Args:
            k: number of neighbors.
            matching: number of records that match the filter of the search. The result is at most this number
                if the number is more than k.
            coarse: True if the index's own distances are too inaccurate to choose the k nearest records.
        """
        by_index = max(_RERANKED * k, _MIN_RERANKED) if coarse else k
        return max(k, min(k * self.rerank or by_index, matching))


@cache
def _warn_of_ignored(names: str) -> None:
    """Log a warning that some parameters are ignored; only once in a process for the same parameters.

    Args:
        names: names of the parameters, joined by commas.
    """
    _log.warning("faiss: this version ignores the parameter %s: distances are always exact", names)


def create_empty_index(factory: str, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Create an empty, untrained inverted file of FAISS, and limit the work of its training.

    An inverted file is an index that divides keys into lists of near keys.

    Args:
        factory: FAISS factory string, such as "IVF1024,SQ8".
        dim: number of components of a key.
        metric: metric of the distances.

    Raises:
        ConfigError: FAISS does not know the factory string, the string is too long, has a too large number,
            or describes another index than an inverted file.
    """
    # FAISS parses the string recursively and allocates all lists at once, so a bad string could end the
    # process.
    if not (isinstance(factory, str) and _FACTORY.fullmatch(factory)) or any(
        int(number) > _LARGEST_NUMBER for number in re.findall(r"\d+", factory)
    ):
        raise ConfigError(
            "faiss: index must be at most 64 letters, digits and ,_()+- with numbers up to "
            f"{_LARGEST_NUMBER:,}, got {str(factory)[:64]!r}"
        )
    try:
        index = faiss.index_factory(dim, factory, METRICS[metric])
    except (RuntimeError, TypeError, MemoryError) as error:
        reason = str(error).rsplit(": ", 1)[-1]
        raise ConfigError(f"faiss: index {factory!r} does not work for dim {dim}: {reason}") from error
    if not isinstance(index, faiss.IndexIVF):
        raise ConfigError(
            f"faiss: index must be 'auto', 'exact' or an inverted file such as 'IVF1024,SQ8', got {factory!r}"
        )
    if isinstance(index, faiss.IndexIVFPQ):  # as `np` in the string does; else training may take hours
        index.do_polysemous_training = False
    index.cp.niter = 10
    index.cp.min_points_per_centroid = 1
    index.cp.max_points_per_centroid = 64
    return index


# By default, FAISS multiplies matrices from 20 queries on only, and compares fewer queries row by row. That
# is 4 to 6 times slower, even for the 16 to 256 queries of a small batch.
faiss.cvar.distance_compute_blas_threshold = 1


def find_nearest_rows(queries: Keys, keys: Keys, k: int, metric: Metric, norms: Distances) -> Neighbors:
    """Find the k nearest rows of a matrix of keys for each query exactly, on all CPU cores.

    The same vector, such as the mean key, may have been subtracted from queries and keys.

    Args:
        queries: query vectors, float32, shape (q, dim).
        keys: keys, float32, shape (n, dim).
        k: number of rows to find for each query, >= 1.
        metric: metric of the distances.
        norms: squared norm of each key, shape (n,).

    Returns:
        Row numbers (in `ids`) and distances, each of shape (q, k), nearest first. If n < k, each missing
        neighbor has row number -1 and distance +inf.
    """
    if len(queries) == 1:  # numpy multiplies a matrix by one vector in half the time
        return nearest_rows_by_numpy(queries, keys, k, metric, norms)
    rows = np.empty((len(queries), k), np.int64)
    distances = np.empty((len(queries), k), np.float32)
    shape = (keys.shape[1], len(queries), len(keys), k)
    queries_at, keys_at = faiss.swig_ptr(queries), faiss.swig_ptr(keys)
    distances_at, rows_at = faiss.swig_ptr(distances), faiss.swig_ptr(rows)
    if metric is Metric.L2:  # faiss.knn would compute the norms of all keys for each search
        faiss.knn_L2sqr(queries_at, keys_at, *shape, distances_at, rows_at, faiss.swig_ptr(norms))
    else:
        faiss.knn_inner_product(queries_at, keys_at, *shape, distances_at, rows_at)
    return _convert_hits(rows, distances, metric)


def _convert_hits(ids: Ids, distances: Distances, metric: Metric) -> Neighbors:
    """Convert the result of a FAISS search to neighbors. The arrays are changed in place and returned.

    Inner products become negative inner products. Negative L2 distances, which rounding can cause, become 0.
    FAISS marks a missing neighbor with id -1 and the largest float; the largest float becomes +inf.

    Args:
        ids: ids from FAISS, nearest first, int64, shape (q, k).
        distances: distances or inner products from FAISS, float32, shape (q, k).
        metric: metric of the search.

    Returns:
        The ids and distances; each missing neighbor has id -1 and distance +inf.
    """
    if metric is Metric.IP:
        np.negative(distances, out=distances)
    else:
        np.maximum(distances, 0, out=distances)  # x² + y² - 2xy rounds below zero
    if len(ids) and ids[:, -1].min() < 0:
        distances[ids < 0] = np.inf
    return Neighbors(ids, distances)


def build_index(segment: Segment, factory: str, dim: int, metric: Metric, path: Path) -> None:
    """Train an inverted file on a sample of a segment's keys, add all keys, and write it to a file.

    An inverted file is an index that divides keys into lists of near keys. A search of this index returns row
    numbers: row i is the i-th record of the segment, also after records were deleted.

    Args:
        segment: the segment, which is a set of files with records of one group.
        factory: FAISS factory string of the index.
        dim: number of components of a key.
        metric: metric of the distances.
        path: file to create.

    Raises:
        DatastoreError: FAISS cannot build or write the index.
        OSError: the disk is full.
    """
    index = create_empty_index(factory, dim, metric)
    keys = segment.columns.keys
    size = min(segment.rows, index.cp.max_points_per_centroid * index.nlist)
    sample = np.sort(np.random.default_rng(0).choice(segment.rows, size, replace=False))
    try:
        index.train(keys[sample].astype(np.float32))
        for start in range(0, segment.rows, _ROWS_AT_ONCE):
            index.add(keys[start : start + _ROWS_AT_ONCE].astype(np.float32))
        try:
            faiss.write_index(index, str(path))
        except RuntimeError as error:
            if free_space(path.parent) < _LITTLE_SPACE:  # FAISS gives no reason for a failed write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise
    except RuntimeError as error:
        raise DatastoreError(f"FAISS cannot build {factory!r} over {segment.rows} rows: {error}") from error


def has_enough_rows(factory: str, rows: int, dim: int, metric: Metric) -> bool:
    """Check whether a segment has enough records to train an index, which is an inverted file.

    Training fits the centers of the lists, and the codes (compressed keys) of the index. It needs at least 8
    records for each list, and at least 256 records.

    Args:
        factory: FAISS factory string of the index.
        rows: number of records of the segment (a set of files with records).
        dim: number of components of a key.
        metric: metric of the distances.

    Returns:
        True if the segment has enough records, else False.

    Raises:
        ConfigError: FAISS does not know the factory string, or it is not a plain inverted file.
    """
    return rows >= max(8 * int(create_empty_index(factory, dim, metric).nlist), 256)


class InvertedIndex:
    """Searches one segment (a set of files with records of one group) with its index, an inverted file.

    Args:
        root: the datastore's directory.
        segment: the segment, which has an index file.
        dim: number of components of a key.
        metric: metric of the distances.
        policy: parameters of the adapter.

    Raises:
        FileNotFoundError: the index file does not exist; a writer may have replaced it.
        CorruptDatastoreError: the index file is damaged.
    """

    def __init__(self, root: Path, segment: Segment, dim: int, metric: Metric, policy: Policy) -> None:
        assert segment.index is not None
        assert isinstance(segment.columns, MappedColumns)
        self.file = segment.index.file
        self._columns = segment.columns
        self._metric = metric
        self._policy = policy
        self._index = _read_index(root, self.file, segment, dim, metric)
        self._coarse = not isinstance(self._index, (faiss.IndexIVFScalarQuantizer, faiss.IndexIVFFlat))
        self._ranking: faiss.IndexRefine | None = None
        self._stored: faiss.IndexFlatCodes | None = None
        self.update(segment)

    def update(self, segment: Segment) -> None:
        """Set a newer version of the segment. No search may run during the call."""
        self.segment = segment
        self._live = segment.live_rows()
        self._live_selector = _make_selector(self._live, segment.rows)

    def select_records(self, ids: IdRanges | None) -> IdRanges:
        """Select live records by id (None: all); returns their row numbers in the segment, as ranges."""
        return self._live if ids is None else self.segment.live_rows(ids)

    def search(self, queries: Keys, k: int, matching: IdRanges) -> Neighbors:
        """Find approximately the k nearest of the selected records for each query; see `SegmentIndex`.

        If at least k records are selected, no neighbor is missing: a query that finds too few is repeated in
        all lists.
        """
        if matching.size <= max(_FEW_ROWS, 4 * k):
            return compare_rows(self.segment, matching, queries, k, self._metric, find_nearest_rows)
        lists, rows = self._index.nlist, self.segment.rows
        selector = self._live_selector if matching is self._live else _make_selector(matching, rows)
        candidates = self._policy.count_candidates(k, matching.size, coarse=self._coarse)
        probes = self._policy.count_probes(k, rows, matching.size, lists)
        neighbors = self._search_lists(queries, k, selector, probes, candidates)
        short = np.flatnonzero(neighbors.ids[:, -1] < 0)
        if len(short):  # the visited lists have too few matching rows, so all lists are visited
            neighbors.replace_rows(short, self._search_lists(queries[short], k, selector, lists, candidates))
        return neighbors.map_rows_to_ids(self._columns.ids)

    def _search_lists(
        self, queries: Keys, k: int, selector: faiss.IDSelector | None, probes: int, candidates: int
    ) -> Neighbors:
        """Find the k nearest records of each query in the nearest lists of the inverted file.

        The index chooses the nearest candidates by its own distances. Then the exact distances of the
        candidates are computed, and the k nearest candidates are returned.

        Args:
            queries: query vectors, float32, shape (q, dim).
            k: number of neighbors.
            selector: rows of the segment (an immutable set of records) that may be returned; None allows all
                rows.
            probes: number of lists to visit for each query.
            candidates: number of candidates of each query whose exact distances are computed.

        Returns:
            Row numbers of the segment (in `ids`) and distances, each of shape (q, k), nearest first. If the
            lists have fewer than k allowed rows, each missing neighbor has row number -1 and distance +inf.
        """
        params = faiss.SearchParametersIVF(nprobe=probes, sel=selector)
        keys = self._columns.keys_file
        # The first queries check only the blocks of their candidates if these are less than the whole file.
        if not keys.checked and len(queries) * candidates * BLOCK < keys.file.size:
            distances, rows = self._index.search(queries, candidates, params=params)
            return self._rerank_candidates(queries, _convert_hits(rows, distances, self._metric), k)
        if self._ranking is None:
            self._stored = _view_keys(self._columns.keys, self._metric)
            self._ranking = faiss.IndexRefine(self._index, self._stored)
        reranking = faiss.IndexRefineSearchParameters(k_factor=candidates / k, base_index_params=params)
        distances, rows = self._ranking.search(queries, k, params=reranking)
        return _convert_hits(rows, distances, self._metric)

    def _rerank_candidates(self, queries: Keys, candidates: Neighbors, k: int) -> Neighbors:
        """Return the k candidates of each query that are nearest by exact distances, nearest first.

        The exact distances are computed from the stored keys.

        Args:
            queries: query vectors, float32, shape (q, dim).
            candidates: row numbers of the segment (in `ids`) and distances, each of shape (q, c). The
                distances are replaced in place. A missing candidate has row number -1 and distance +inf.
            k: number of candidates to return for each query.
        """
        for query, rows, distances in zip(queries, candidates.ids, candidates.distances, strict=True):
            present = rows >= 0
            keys = self._columns.keys_at(rows[present]).astype(np.float32)
            distances[present] = paired_distances(query, keys, self._metric)
        return candidates.select_nearest(k)


def _read_index(root: Path, file: StoredFile, segment: Segment, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Check an index file by its SHA-256, open the file with FAISS, and return the index.

    If FAISS can map the file into memory, the lists of the index stay on disk. Otherwise they are loaded.

    Args:
        root: the datastore's directory.
        file: name, size and hash of the index file.
        segment: segment (set of files with records) whose records are in the index.
        dim: number of components of a key.
        metric: metric of the distances.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptDatastoreError: the file is damaged, or is not an inverted file of this segment.
    """
    mapped = MappedFile(root, file)
    mapped.check()
    faiss.set_deserialization_vector_byte_limit(4 * mapped.file.size + _TABLES)
    if bytes(mapped.bytes[:2]) != b"Iw":  # FAISS's mark of inverted files; this adapter writes no others
        raise CorruptDatastoreError(f"{mapped.path} is not an inverted file")
    try:
        index = faiss.read_index(str(mapped.path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise CorruptDatastoreError(f"{mapped.path} cannot be read: {error}") from error
    expected = (dim, segment.rows, METRICS[metric])
    if not isinstance(index, faiss.IndexIVF) or (index.d, index.ntotal, index.metric_type) != expected:
        raise CorruptDatastoreError(f"{mapped.path} belongs to other keys")
    lists = faiss.downcast_InvertedLists(index.invlists)
    if isinstance(lists, faiss.OnDiskInvertedLists):
        lists.prefetch_nthread = 0  # 32 threads for each search would pay off on cold disks only
    return index


def _make_selector(rows: IdRanges, total: int) -> faiss.IDSelectorBitmap | None:
    """Make the object by which FAISS restricts a search to some rows of a segment.

    Args:
        rows: numbers of the rows that may be found, as ranges. Row i is the i-th record of the segment.
        total: number of all rows of the segment (a set of files with records).

    Returns:
        The selector; None if `rows` has all rows.
    """
    if rows == IdRanges([(0, total)]):
        return None
    mask = np.zeros(total, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))


def _view_keys(keys: StoredKeys, metric: Metric) -> faiss.IndexFlatCodes:
    """Return a FAISS index that compares queries with all keys of an array, without a copy of the array.

    The index can be searched, but not changed. The caller must keep `keys` alive while the index is used.

    Args:
        keys: float16 or float32, shape (n, dim).
        metric: metric of the distances.
    """
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


class FaissDatastore(EmbeddedDatastore):
    """A datastore in a local folder that is searched with FAISS, approximately in large groups of records.

    The parameters of `open` are those of `Policy`.
    """

    _policy: Policy

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric, policy, nearest=find_nearest_rows)

    @classmethod
    def _make_policy(cls, params: dict[str, Any], dim: int, metric: Metric) -> Policy:
        """Check the parameters that a user gave, and return the policy. Raises ConfigError for bad ones."""
        return Policy.from_params(params, dim, metric)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Estimate the number of bytes that a record takes on disk, including its part of an index.

        The estimate counts keys of 16-bit floats. Keys with components above 65,504 are stored as 32-bit
        floats and take more.

        Args:
            dim: number of components of a vector.
            **params: parameters of the adapter; `index` decides the size of the index.
        """
        is_exact = params.get("index") == "exact"
        is_coded = params.get("index", "auto") == "auto"  # at most 8 bits for each component
        return 2 * dim + 16 + (0 if is_exact else (dim if is_coded else 4 * dim) + 16)

    @property
    def capabilities(self) -> Capabilities:
        """The features of this datastore; searches are exact only with the parameter ``index="exact"``."""
        return replace(super().capabilities, exact_search=self._policy.index == "exact")

    def _is_indexed(self, group_rows: int) -> bool:
        """Return True if the policy searches a group with this number of records with inverted files."""
        return self._policy.is_group_indexed(group_rows)

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return ``{"faiss": FACTORY_STRING}``; None if it needs no index or is too small."""
        factory = self._policy.choose_factory(rows, group_rows, self._dim)
        if factory is None or not has_enough_rows(factory, rows, self._dim, self._metric):
            return None
        return {"faiss": factory}

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the inverted file of a segment by its factory string, and write it to a file."""
        build_index(segment, parameters["faiss"], self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> InvertedIndex | None:
        """Open the inverted file of a segment; None if another engine than FAISS built the index file."""
        if "faiss" not in parameters:
            return None
        return InvertedIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = FaissDatastore  # a type checker compares every signature here
