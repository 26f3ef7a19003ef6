"""The FAISS adapter: durable key segments; large segments are searched with inverted files.

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
from typing import Any, Self

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
    Mode,
    Neighbors,
    Segment,
    StoredFile,
    StoredKeys,
    checked_params,
    compare_rows,
    free_space,
    paired,
)
from knnstore.datastore import nearest_rows as nearest_rows_by_numpy
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
"""Number of rows of a group up to which it is searched exactly: no training, and every neighbor is found."""

SCALAR_UP_TO = 1 << 20
"""Number of rows of a segment up to which its codes are 8-bit scalars; above, 4-bit product codes."""

_CODES_PER_NEIGHBOR = 8
"""Number of rows to visit for each of the k neighbors."""
_MIN_PROBES = 8
"""Number of lists that are visited in addition to the lists for these rows."""
_SMALLEST_INDEXED = 1 << 13
"""Number of rows from which a segment of a large group has an index."""
_RERANKED = 6
"""Number of candidates for each of the k neighbors if codes are coarse."""
_MIN_RERANKED = 1024
"""Smallest number of candidates if codes are coarse."""
_HNSW_FROM = 1 << 14
"""Number of lists from which the nearest lists are found with a graph."""
_ROWS_AT_ONCE = 1 << 16
"""Number of rows that are given to FAISS at once."""
_LITTLE_SPACE = 1 << 20
"""Largest free space in bytes at which a failed write is taken for a full disk."""
_FEW_ROWS = 4096
"""Number of matching rows up to which all are compared."""
_TABLES = 1 << 31
"""Largest size in bytes of the tables that FAISS computes for a product quantizer, besides its file."""

_REMOVED = {"exact_distances": True, "neighbors": "auto"}
"""Parameters of earlier versions, with their defaults, which a store may still have; they are ignored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, and the choices that follow from them.

    Args:
        index: ``"auto"`` (by size), ``"exact"``, or the FAISS factory string of an inverted file,
            such as ``"IVF1024,SQ8"``.
        nprobe: number of lists to visit for each query; 0 chooses by k.
        rerank: number of candidates for each neighbor that are compared again by exact distances; 0 chooses
            by the index, 1 is off.
    """

    index: str = "auto"
    nprobe: int = 0
    rerank: int = 0

    @classmethod
    def from_params(cls, params: dict[str, Any], dim: int, metric: Metric) -> "Policy":
        """Return the policy for the parameters that a user gave; removed parameters are ignored.

        Logs a warning if a removed parameter has another value than its default.

        Args:
            params: parameters that the user gave.
            dim: number of components of a key, with which a factory string is checked.
            metric: metric of the distances, with which a factory string is checked.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        ignored = [name for name, default in _REMOVED.items() if params.get(name, default) != default]
        if ignored:
            _warn_of_ignored(", ".join(ignored))
        params = {name: value for name, value in params.items() if name not in _REMOVED}
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**checked_params("faiss", params, accepted, minima={"nprobe": 0, "rerank": 0}))
        if policy.index not in ("auto", "exact"):
            new_index(policy.index, dim, metric)
        return policy

    def is_group_indexed(self, group_rows: int) -> bool:
        """Check whether a group with `group_rows` live rows is searched with indexes."""
        return self.index != "exact" and (self.index != "auto" or group_rows > EXACT_UP_TO)

    def choose_factory(self, rows: int, group_rows: int, dim: int) -> str | None:
        """Return the FAISS factory string for the index of a segment; None for exact search.

        In a large group even small segments have indexes: each segment holds few of the neighbors, so few
        rows must be visited, while exact search would visit all rows.

        Args:
            rows: number of rows of the segment.
            group_rows: number of live rows of its group.
            dim: number of components of a key.
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
        """Return the number of lists to visit to find about the k nearest of the matching rows.

        Args:
            k: number of neighbors.
            rows: number of rows of the segment.
            matching: number of rows that match the filter, >= 1.
            lists: number of lists of the index.
        """
        unfiltered = self.nprobe or math.ceil(_CODES_PER_NEIGHBOR * k * lists / rows) + _MIN_PROBES
        return min(math.ceil(unfiltered * rows / matching), lists)

    def count_candidates(self, k: int, matching: int, *, coarse: bool) -> int:
        """Return the number of candidates of a query that are compared again by exact distances, at least k.

        Args:
            k: number of neighbors.
            matching: number of rows that match the filter.
            coarse: True if the index's own distances are too inaccurate to choose the k nearest.
        """
        by_index = max(_RERANKED * k, _MIN_RERANKED) if coarse else k
        return max(k, min(k * self.rerank or by_index, matching))


@cache
def _warn_of_ignored(names: str) -> None:
    """Log a warning that the parameters `names` are ignored; once in a process for the same names."""
    _log.warning("faiss: this version ignores the parameter %s: distances are always exact", names)


def new_index(factory: str, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Return an empty, untrained FAISS index (an inverted file); training takes bounded time.

    Args:
        factory: FAISS factory string.
        dim: number of components of a key.
        metric: metric of the distances.

    Raises:
        ConfigError: FAISS does not know the factory string, or it is not a plain inverted file.
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


def nearest_rows(queries: Keys, keys: Keys, k: int, metric: Metric, norms: Distances) -> Neighbors:
    """Return the k nearest rows of a matrix, computed on all cores; see `knnstore.datastore.nearest_rows`.

    Args:
        queries: centered queries, float32, shape (q, dim).
        keys: centered keys, float32, shape (n, dim).
        k: number of rows to find for each query, >= 1; the result is padded if n < k.
        metric: metric of the distances.
        norms: squared norms of the keys, shape (n,).
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
    """Convert the result of a FAISS search to neighbors; changes the arrays and uses them in the result.

    FAISS marks missing neighbors with the id -1 and the largest float; the latter becomes +inf.
    """
    if metric is Metric.IP:
        np.negative(distances, out=distances)
    else:
        np.maximum(distances, 0, out=distances)  # x² + y² - 2xy rounds below zero
    if len(ids) and ids[:, -1].min() < 0:
        distances[ids < 0] = np.inf
    return Neighbors(ids, distances)


def build_index(segment: Segment, factory: str, dim: int, metric: Metric, path: Path) -> None:
    """Train an index on a sample of a segment, add all rows, and write the index to a file.

    The index returns row numbers of the segment, which stay valid when rows are deleted.

    Args:
        segment: the segment.
        factory: FAISS factory string of the index.
        dim: number of components of a key.
        metric: metric of the distances.
        path: file to create.

    Raises:
        DatastoreError: FAISS cannot build or write the index.
        OSError: the disk is full.
    """
    index = new_index(factory, dim, metric)
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
    """Check whether a segment has enough rows for the lists of an index and for the training of its codes.

    Args:
        factory: FAISS factory string of the index.
        rows: number of rows of the segment.
        dim: number of components of a key.
        metric: metric of the distances.
    """
    return rows >= max(8 * int(new_index(factory, dim, metric).nlist), 256)


class InvertedIndex:
    """Searches one segment with the index file that the segment's entry in the manifest names.

    Raises:
        FileNotFoundError: the file does not exist; a newer manifest may have replaced it.
        CorruptDatastoreError: the file is damaged.
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
        """Replace the segment by a newer version, with other live rows."""
        self.segment = segment
        self._live = segment.live_rows()
        self._live_selector = _make_selector(self._live, segment.rows)

    def matching(self, ids: IdRanges | None) -> IdRanges:
        """Return the live rows of the segment; with `ids` only the rows of these records."""
        return self._live if ids is None else self.segment.live_rows(ids)

    def search(self, queries: Keys, k: int, matching: IdRanges) -> Neighbors:
        """Find approximately the k nearest of the matching rows for each query; see `SegmentIndex.search`.

        Rows are padded only if fewer than k rows match.
        """
        if matching.size <= max(_FEW_ROWS, 4 * k):
            return compare_rows(self.segment, matching, queries, k, self._metric, nearest_rows)
        lists, rows = self._index.nlist, self.segment.rows
        selector = self._live_selector if matching is self._live else _make_selector(matching, rows)
        candidates = self._policy.count_candidates(k, matching.size, coarse=self._coarse)
        probes = self._policy.count_probes(k, rows, matching.size, lists)
        neighbors = self._search_lists(queries, k, selector, probes, candidates)
        short = np.flatnonzero(neighbors.ids[:, -1] < 0)
        if len(short):  # the visited lists have too few matching rows, so all lists are visited
            neighbors.put(short, self._search_lists(queries[short], k, selector, lists, candidates))
        return neighbors.named(self._columns.ids)

    def _search_lists(
        self, queries: Keys, k: int, selector: faiss.IDSelector | None, probes: int, candidates: int
    ) -> Neighbors:
        """Find the k nearest rows in the `probes` nearest lists of each query; rerank by exact distances.

        The ids of the returned neighbors are row numbers of the segment; missing neighbors are padded.

        Args:
            queries: float32, shape (q, dim).
            k: number of neighbors.
            selector: rows that may be returned; None for all rows.
            probes: number of lists to visit for each query.
            candidates: number of rows of a query that are reranked.
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
        """Compute the exact distances of candidates from the stored keys, and return the k nearest, sorted.

        Changes the distances of `candidates`.
        """
        for query, rows, distances in zip(queries, candidates.ids, candidates.distances, strict=True):
            present = rows >= 0
            keys = self._columns.keys_at(rows[present]).astype(np.float32)
            distances[present] = paired(query, keys, self._metric)
        return candidates.nearest(k)


def _read_index(root: Path, file: StoredFile, segment: Segment, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Check an index file against its SHA-256, and open it; the lists stay on disk if FAISS can map them.

    Args:
        root: the datastore's directory.
        file: entry of the index file.
        segment: segment whose rows are indexed.
        dim: number of components of a key.
        metric: metric of the distances.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptDatastoreError: the file is damaged, or not an inverted file over the rows of this segment.
    """
    mapped = MappedFile(root, file)
    mapped.check()
    faiss.set_deserialization_vector_byte_limit(4 * mapped.file.size + _TABLES)
    if bytes(mapped.bytes[:2]) != b"Iw":  # FAISS's mark of inverted files; this adapter writes no others
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
        lists.prefetch_nthread = 0  # 32 threads for each search would pay off on cold disks only
    return index


def _make_selector(rows: IdRanges, total: int) -> faiss.IDSelectorBitmap | None:
    """Return the FAISS selector of rows, out of `total` rows of a segment; None if all rows are selected."""
    if rows == IdRanges([(0, total)]):
        return None
    mask = np.zeros(total, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))


def _view_keys(keys: StoredKeys, metric: Metric) -> faiss.IndexFlatCodes:
    """Return a flat index that reads the keys in place, without a copy.

    The index can only be searched, and only as long as the caller keeps `keys` alive.
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
    """Vectors in a local folder, searched with FAISS.

    Args:
        segments: the open folder.
        dim: number of components of a vector.
        metric: metric of the distances.
        policy: chooses the indexes to build and how much of them to search.
    """

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric, nearest_rows)
        self._policy = policy

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a folder; see `Datastore.open`.

        The parameters are `index`, `nprobe` and `rerank`; see `Policy`.
        """
        metric = Metric(metric)
        policy = Policy.from_params(params, dim, metric)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return the largest size of a record in bytes, indexed; see `SupportsSize.record_size`."""
        is_exact = params.get("index") == "exact"
        is_coded = params.get("index", "auto") == "auto"  # at most 8 bits for each component
        return 2 * dim + 16 + (0 if is_exact else (dim if is_coded else 4 * dim) + 16)

    @property
    def capabilities(self) -> Capabilities:
        """Features of this datastore; searches are exact with ``index="exact"``."""
        return replace(super().capabilities, exact_search=self._policy.index == "exact")

    def _is_indexed(self, group_rows: int) -> bool:
        """Check whether a group with `group_rows` live rows is searched with indexes."""
        return self._policy.is_group_indexed(group_rows)

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return the factory string of a segment's index; None if the segment is searched exactly."""
        factory = self._policy.choose_factory(rows, group_rows, self._dim)
        if factory is None or not has_enough_rows(factory, rows, self._dim, self._metric):
            return None
        return {"faiss": factory}

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the index of a segment and write it to a file; see `build_index`."""
        build_index(segment, parameters["faiss"], self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> InvertedIndex | None:
        """Open the index of a segment; returns None if another engine built the index."""
        if "faiss" not in parameters:
            return None
        return InvertedIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = FaissDatastore  # a type checker compares every signature here
