"""Fitting the centers of cells (clusters of near keys), and finding the nearest center of a key."""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Keys, RoundedCodec, Segment
from knnstore.errors import CorruptDatastoreError
from knnstore_cells.index import ArrangedSegment, SegmentCells

CHUNK = 1 << 14
"""Number of keys that are read and compared with centers at a time."""

_SAMPLE_PER_CELL = 64
_LEAST_PER_CELL = 16
_LEAST_SAMPLE = 4096
_MOST_SAMPLE = 1 << 16  # keys; more if a cell would have fewer than `_LEAST_PER_CELL`
_ROUNDS = 8
_ONE_LEVEL = 256  # most cells that are fitted in one level
_ALL_COMPARED = 1024  # most centers that are all compared with a key
_IN_CACHE = 1 << 11  # keys whose distances to all centers stay in the CPU's cache
_PARTS_COMPARED = 4  # parts whose centers are compared with a key


def fit_centers(segments: list[Segment], cells: int) -> Keys:
    """Fit the centers of cells (clusters of near keys) by k-means (Lloyd 1982) to a sample of stored keys.

    More than 256 cells are fitted in two levels: first the keys are divided into parts, then each part into
    cells. The same keys give the same centers. If there are fewer different keys than cells, some cells stay
    empty.

    Args:
        segments: sets of records. At least one of their records must be neither deleted nor replaced.
        cells: number of cells.

    Returns:
        The centers, float32, shape (cells, dim), rounded as they are stored in index files.
    """
    sample = max(_LEAST_SAMPLE, min(_SAMPLE_PER_CELL * cells, max(_MOST_SAMPLE, _LEAST_PER_CELL * cells)))
    keys = torch.from_numpy(_sample_keys(segments, sample))
    generator = torch.Generator().manual_seed(0)
    if cells <= _ONE_LEVEL:
        centers = _fit_k_means(keys, cells, _ROUNDS, generator)
    else:
        parts = _fit_k_means(
            keys[:: max(1, len(keys) // _MOST_SAMPLE)], _count_parts(cells), _ROUNDS, generator
        )
        owners = NearestCenter(parts)(keys)
        shares = _divide_cells_proportionally(torch.bincount(owners, minlength=len(parts)), cells)
        centers = torch.cat(
            [
                _fit_k_means(keys[owners == part], share, _ROUNDS, generator)
                for part, share in enumerate(shares)
                if share
            ]
        )
        centers = _move_centers(keys, centers, generator)
    codec = RoundedCodec(centers.shape[1])
    return codec.decode_rotated(codec.encode(centers.numpy()))


class NearestCenter:
    """Finds for each key the nearest of several cell centers; call the object with the keys.

    A cell is a cluster of records with near keys. If there are more than 1024 centers, the result is
    approximate: usually the nearest center, sometimes another near center.

    Args:
        centers: the centers, float32, shape (cells, dim).
    """

    def __init__(self, centers: Tensor) -> None:
        self.centers, self._norms = centers, (centers * centers).sum(1)

    def __call__(self, keys: Tensor) -> Tensor:
        """Return for each key the index of its nearest center by Euclidean distance, int64, shape (n,).

        Args:
            keys: float32, shape (n, dim); n may be 0.
        """
        compare_all = len(self.centers) <= _ALL_COMPARED
        search, size = (self._find_nearest_centers, _IN_CACHE) if compare_all else (self._search_parts, CHUNK)
        parts = [search(chunk) for chunk in torch.split(keys, size)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @cached_property
    def _part_members(self) -> tuple[Tensor, list[Tensor]]:
        """The centers divided by k-means into parts of near centers.

        Because of the parts, a key need not be compared with all centers. The value is a pair: the mean of
        each part, float32, shape (parts, dim), and a list with the indices of the centers that belong to each
        part.
        """
        centers = self.centers
        parts = _fit_k_means(centers, _count_parts(len(centers)), _ROUNDS, torch.Generator().manual_seed(0))
        owners = NearestCenter(parts)(centers)
        used = torch.unique(owners)
        return parts[used], [(owners == part).nonzero()[:, 0] for part in used.tolist()]

    def _find_nearest_centers(self, keys: Tensor) -> Tensor:
        """Return for each key the index of its nearest center, by comparing each key with all centers.

        Args:
            keys: float32, shape (n, dim).
        """
        return torch.addmm(self._norms, keys, self.centers.T, alpha=-2).argmin(1)

    def _search_parts(self, keys: Tensor) -> Tensor:
        """Return for each key the index of a near center, usually the nearest.

        The centers are divided into parts of near centers (see `_part_members`). A key is compared only with
        the centers in the 4 parts whose means are nearest to the key.

        Args:
            keys: float32, shape (n, dim).
        """
        parts, members = self._part_members
        away = torch.addmm((parts * parts).sum(1), keys, parts.T, alpha=-2)
        near_parts = away.topk(min(_PARTS_COMPARED, len(parts)), largest=False).indices
        smallest = torch.full((len(keys),), torch.inf)
        nearest = torch.zeros(len(keys), dtype=torch.int64)
        for part, members_of_part in enumerate(members):
            rows = (near_parts == part).any(1).nonzero()[:, 0]
            if len(rows):
                away = torch.addmm(
                    self._norms[members_of_part], keys[rows], self.centers[members_of_part].T, alpha=-2
                )
                part_minima = away.min(1)
                nearer = part_minima.values < smallest[rows]
                smallest[rows[nearer]] = part_minima.values[nearer]
                nearest[rows[nearer]] = members_of_part[part_minima.indices[nearer]]
        return nearest


def _fit_k_means(keys: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """Fit centers to keys by Lloyd's algorithm (k-means).

    Args:
        keys: float32, shape (n, dim), n >= 1.
        count: number of centers. If there are fewer keys than centers, the missing centers are copies of the
            first center, until an iteration moves them.
        rounds: number of iterations.
        generator: source of random numbers.

    Returns:
        The centers, float32, shape (count, dim).
    """
    centers = keys[torch.randperm(len(keys), generator=generator)[:count]]
    if len(centers) < count:
        centers = torch.cat([centers, centers[:1].expand(count - len(centers), -1)])
    for _ in range(rounds):
        centers = _move_centers(keys, centers, generator)
    return centers


def _move_centers(keys: Tensor, centers: Tensor, generator: torch.Generator) -> Tensor:
    """Do one iteration of k-means: return new centers, float32, shape (count, dim).

    A new center is the mean of the keys whose nearest center was the old center. A center without such keys
    becomes a random key.

    Args:
        keys: float32, shape (n, dim).
        centers: old centers, float32, shape (count, dim).
        generator: source of random numbers.
    """
    owners = NearestCenter(centers)(keys)
    counts = torch.bincount(owners, minlength=len(centers))
    means = torch.zeros_like(centers).index_add_(0, owners, keys) / counts.clamp(min=1)[:, None]
    empty = (counts == 0).nonzero()[:, 0]
    means[empty] = keys[torch.randint(len(keys), (len(empty),), generator=generator)]
    return means


def _count_parts(cells: int) -> int:
    """Return into how many parts cells are divided: a power of two near the square root of `cells`.

    Args:
        cells: number of cells (clusters of near keys), >= 1.
    """
    return 1 << (cells.bit_length() // 2)


def _divide_cells_proportionally(counts: Tensor, cells: int) -> list[int]:
    """Divide cells (clusters of near keys) among parts in proportion to the parts' numbers of keys.

    Args:
        counts: number of keys of each part.
        cells: number of cells.

    Returns:
        The number of cells of each part, whose sum is `cells`; 0 for a part without keys.
    """
    ends = (counts.cumsum(0).double() / counts.sum() * cells).round().long()
    shares: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return shares


def assign_cells(
    segment: Segment, nearest: NearestCenter, former: Sequence[ArrangedSegment] = ()
) -> SegmentCells:
    """Assign each record of a segment, also deleted records, to the cell with the nearest center.

    Args:
        segment: a new or rewritten set of records.
        nearest: the object that finds the nearest center of a key.
        former: segments that had some of the records before. If a former segment has the same centers, its
            records stay in their cells, and the keys of these records are not read.

    Returns:
        The centers, and for each record of `segment` the number of its cell.
    """
    owners, centers = np.zeros(segment.rows, np.uint16), nearest.centers.numpy()
    if len(centers) > 1:
        is_unassigned, reusable = (
            np.ones(segment.rows, bool),
            [arranged for arranged in former if arranged.has_centers(centers)],
        )
        ids = segment.columns.ids if reusable else np.empty(0, np.int64)
        for arranged_segment in reusable:
            with suppress(CorruptDatastoreError):  # the former segment is damaged
                former_cells = arranged_segment.find_cells_of(ids)
                is_unassigned &= former_cells < 0
                np.copyto(owners, former_cells, "unsafe", where=former_cells >= 0)
        rows = np.flatnonzero(is_unassigned)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            keys: Keys = segment.columns.keys_at(chunk).astype(np.float32)
            owners[chunk] = nearest(torch.from_numpy(keys)).numpy()
    return SegmentCells(centers, owners)


def _sample_keys(segments: list[Segment], count: int) -> Keys:
    """Read a sample of the keys of several segments, evenly spaced.

    Keys of deleted and replaced records are left out. If there are fewer than `count` keys, all are read.

    Args:
        segments: immutable sets of records.
        count: approximate number of keys to read.

    Returns:
        The keys, float32, shape (n, dim).
    """
    step = max(1, math.ceil(sum(segment.live for segment in segments) / count))
    parts = []
    for segment in segments:
        rows = segment.live_rows().ids()[::step]
        parts += [
            segment.columns.keys_at(rows[start : start + CHUNK]).astype(np.float32)
            for start in range(0, len(rows), CHUNK)
        ]
    return np.concatenate(parts)
