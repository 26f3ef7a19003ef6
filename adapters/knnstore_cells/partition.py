"""Fitting the centers of cells to keys, and finding the nearest center of a key."""

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
"""Number of rows that are read and compared at a time."""

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
    """Fit the centers of cells by k-means (Lloyd 1982) to a sample of the live rows of some segments.

    Many cells are fitted in two levels: first some hundred parts, then the cells of each part. The fit is
    deterministic. If there are fewer different keys than cells, some cells stay empty.

    Returns:
        Centers, float32, shape (cells, dim), rounded as in the files.
    """
    sample = max(_LEAST_SAMPLE, min(_SAMPLE_PER_CELL * cells, max(_MOST_SAMPLE, _LEAST_PER_CELL * cells)))
    keys = torch.from_numpy(_sample(segments, sample))
    generator = torch.Generator().manual_seed(0)
    if cells <= _ONE_LEVEL:
        centers = _k_means(keys, cells, _ROUNDS, generator)
    else:
        parts = _k_means(keys[:: max(1, len(keys) // _MOST_SAMPLE)], _parts_of(cells), _ROUNDS, generator)
        owners = NearestCenter(parts)(keys)
        shares = _shared(torch.bincount(owners, minlength=len(parts)), cells)
        centers = torch.cat(
            [
                _k_means(keys[owners == part], share, _ROUNDS, generator)
                for part, share in enumerate(shares)
                if share
            ]
        )
        centers = _moved(keys, centers, generator)
    codec = RoundedCodec(centers.shape[1])
    return codec.turned(codec.encode(centers.numpy()))


class NearestCenter:
    """Finds the nearest center of a key; with more than 1024 centers approximately.

    Args:
        centers: float32, shape (cells, dim).
    """

    def __init__(self, centers: Tensor) -> None:
        self.centers, self._norms = centers, (centers * centers).sum(1)

    def __call__(self, keys: Tensor) -> Tensor:
        """Return the index of the center of each key: keys (n, dim), int64, shape (n,)."""
        compare_all = len(self.centers) <= _ALL_COMPARED
        search, size = (self._search_all, _IN_CACHE) if compare_all else (self._search_parts, CHUNK)
        parts = [search(chunk) for chunk in torch.split(keys, size)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @cached_property
    def _parts(self) -> tuple[Tensor, list[Tensor]]:
        """Centers of some hundred parts, and the indices of the centers in each part."""
        centers = self.centers
        parts = _k_means(centers, _parts_of(len(centers)), _ROUNDS, torch.Generator().manual_seed(0))
        owners = NearestCenter(parts)(centers)
        used = torch.unique(owners)
        return parts[used], [(owners == part).nonzero()[:, 0] for part in used.tolist()]

    def _search_all(self, keys: Tensor) -> Tensor:
        """Compare each key with all centers."""
        return torch.addmm(self._norms, keys, self.centers.T, alpha=-2).argmin(1)

    def _search_parts(self, keys: Tensor) -> Tensor:
        """Compare each key only with the centers in the parts that are nearest to it."""
        parts, members = self._parts
        away = torch.addmm((parts * parts).sum(1), keys, parts.T, alpha=-2)
        near = away.topk(min(_PARTS_COMPARED, len(parts)), largest=False).indices
        least = torch.full((len(keys),), torch.inf)
        found = torch.zeros(len(keys), dtype=torch.int64)
        for part, at in enumerate(members):
            rows = (near == part).any(1).nonzero()[:, 0]
            if len(rows):
                away = torch.addmm(self._norms[at], keys[rows], self.centers[at].T, alpha=-2)
                of_part = away.min(1)
                nearer = of_part.values < least[rows]
                least[rows[nearer]] = of_part.values[nearer]
                found[rows[nearer]] = at[of_part.indices[nearer]]
        return found


def _k_means(keys: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """Fit `count` centers, shape (count, dim), to keys by Lloyd's algorithm."""
    centers = keys[torch.randperm(len(keys), generator=generator)[:count]]
    if len(centers) < count:
        centers = torch.cat([centers, centers[:1].expand(count - len(centers), -1)])
    for _ in range(rounds):
        centers = _moved(keys, centers, generator)
    return centers


def _moved(keys: Tensor, centers: Tensor, generator: torch.Generator) -> Tensor:
    """Move each center to the mean of its keys, or to a random key if it has none."""
    owners = NearestCenter(centers)(keys)
    counts = torch.bincount(owners, minlength=len(centers))
    moved = torch.zeros_like(centers).index_add_(0, owners, keys) / counts.clamp(min=1)[:, None]
    empty = (counts == 0).nonzero()[:, 0]
    moved[empty] = keys[torch.randint(len(keys), (len(empty),), generator=generator)]
    return moved


def _parts_of(cells: int) -> int:
    """Return the number of parts for a number of cells, about its root."""
    return 1 << (cells.bit_length() // 2)


def _shared(counts: Tensor, cells: int) -> list[int]:
    """Divide cells among parts in proportion to their numbers of keys. A part without keys gets none."""
    ends = (counts.cumsum(0).double() / counts.sum() * cells).round().long()
    shares: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return shares


def arranged(
    segment: Segment, nearest: NearestCenter, former: Sequence[ArrangedSegment] = ()
) -> SegmentCells:
    """Put each row of a segment, dead or not, into the cell with the nearest center.

    Args:
        segment: a new or rewritten segment.
        nearest: finds the center of a key.
        former: segments that held some of the records before. Records stay in their cells if the centers are
            the same.
    """
    owners, centers = np.zeros(segment.rows, np.uint16), nearest.centers.numpy()
    if len(centers) > 1:
        left, same = np.ones(segment.rows, bool), [one for one in former if one.has(centers)]
        ids = segment.columns.ids if same else np.empty(0, np.int64)
        for arranged_segment in same:
            with suppress(CorruptDatastoreError):  # the former segment is damaged
                known = arranged_segment.owners_of(ids)
                left &= known < 0
                np.copyto(owners, known, "unsafe", where=known >= 0)
        rows = np.flatnonzero(left)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            keys: Keys = segment.columns.keys_at(chunk).astype(np.float32)
            owners[chunk] = nearest(torch.from_numpy(keys)).numpy()
    return SegmentCells(centers, owners)


def _sample(segments: list[Segment], count: int) -> Keys:
    """Read about `count` live rows at equal distances, or all rows if they are fewer."""
    step = max(1, math.ceil(sum(segment.live for segment in segments) / count))
    parts = []
    for segment in segments:
        rows = segment.live_rows().ids()[::step]
        parts += [
            segment.columns.keys_at(rows[start : start + CHUNK]).astype(np.float32)
            for start in range(0, len(rows), CHUNK)
        ]
    return np.concatenate(parts)
