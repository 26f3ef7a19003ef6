"""Where cells are: centers that are fitted to keys, and the cell of each key."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Keys, RoundedCodec, Segment, StoredKeys
from knnstore_cells.index import SegmentCells

CHUNK = 1 << 14
"""Rows that are read and compared at a time."""

_SAMPLE_PER_CELL = 64
_LEAST_PER_CELL = 16
_LEAST_SAMPLE = 4096
_MOST_SAMPLE = 1 << 16  # keys, where that is enough for each cell
_ROUNDS = 8
_ONE_LEVEL = 256  # cells
_ALL_COMPARED = 1024  # centers
_PARTS_COMPARED = 4


def fit_centers(segments: list[Segment], cells: int) -> Keys:
    """Fit the centers of cells by k-means (Lloyd 1982) to a sample of the live rows of some segments.

    Many cells are fitted in two levels: some hundred parts first, then the cells of each. The same rows give
    the same centers. Where there are fewer different keys than cells, some stay empty.

    Returns:
        Shape (cells, dim), rounded as the files hold them: where they are exactly is no matter, for every key
        of a cell counts.
    """
    sample = max(_LEAST_SAMPLE, min(_SAMPLE_PER_CELL * cells, max(_MOST_SAMPLE, _LEAST_PER_CELL * cells)))
    keys = torch.from_numpy(_sample(segments, sample))
    generator = torch.Generator().manual_seed(0)
    if cells <= _ONE_LEVEL:
        centers = _k_means(keys, cells, _ROUNDS, generator)
    else:
        parts = _k_means(keys[:: max(1, len(keys) // _MOST_SAMPLE)], _parts_of(cells), _ROUNDS, generator)
        owners = nearest_center(keys, parts)
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


def nearest_center(keys: Tensor, centers: Tensor) -> Tensor:
    """The center that is nearest to each key, int64, shape (n,); of very many centers one that is near.

    Args:
        keys: float32, shape (n, dim).
        centers: float32, shape (cells, dim).
    """
    if len(centers) > _ALL_COMPARED:
        return _near_center(keys, centers)
    norms = (centers * centers).sum(1)
    parts = [torch.addmm(norms, some, centers.T, alpha=-2).argmin(1) for some in torch.split(keys, CHUNK)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _near_center(keys: Tensor, centers: Tensor) -> Tensor:
    """The nearest center among those in the parts, of some hundred, that are nearest to each key."""
    parts = _k_means(centers, _parts_of(len(centers)), _ROUNDS, torch.Generator().manual_seed(0))
    owners = nearest_center(centers, parts)
    there = torch.unique(owners)
    members = [(owners == part).nonzero()[:, 0] for part in there.tolist()]
    parts = parts[there]
    norms = (parts * parts).sum(1)
    found = torch.empty(len(keys), dtype=torch.int64)
    for start in range(0, len(keys), CHUNK):
        some = keys[start : start + CHUNK]
        near = torch.addmm(norms, some, parts.T, alpha=-2)
        near = near.topk(min(_PARTS_COMPARED, len(parts)), largest=False).indices
        least = torch.full((len(some),), torch.inf)
        for part, at in enumerate(members):
            rows = (near == part).any(1).nonzero()[:, 0]
            if len(rows):
                mine = centers[at]
                away = torch.addmm((mine * mine).sum(1), some[rows], mine.T, alpha=-2).min(1)
                nearer = away.values < least[rows]
                least[rows[nearer]] = away.values[nearer]
                found[start + rows[nearer]] = at[away.indices[nearer]]
    return found


def _k_means(keys: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    centers = keys[torch.randperm(len(keys), generator=generator)[:count]]
    if len(centers) < count:
        centers = torch.cat([centers, centers[:1].expand(count - len(centers), -1)])
    for _ in range(rounds):
        centers = _moved(keys, centers, generator)
    return centers


def _moved(keys: Tensor, centers: Tensor, generator: torch.Generator) -> Tensor:
    """Each center where the mean of its keys is; those without keys at some key."""
    owners = nearest_center(keys, centers)
    counts = torch.bincount(owners, minlength=len(centers))
    moved = torch.zeros_like(centers).index_add_(0, owners, keys) / counts.clamp(min=1)[:, None]
    empty = (counts == 0).nonzero()[:, 0]
    moved[empty] = keys[torch.randint(len(keys), (len(empty),), generator=generator)]
    return moved


def _parts_of(cells: int) -> int:
    return 1 << (cells.bit_length() // 2)


def _shared(counts: Tensor, cells: int) -> list[int]:
    """Share out cells by numbers of keys: none without a key."""
    ends = (counts.cumsum(0).double() / counts.sum() * cells).round().long()
    shares: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return shares


def arranged(segment: Segment, centers: Keys) -> SegmentCells:
    """Put each row of a segment, dead or not, into the cell with the nearest center."""
    owners, to = np.zeros(segment.rows, np.uint16), torch.from_numpy(centers)
    if len(centers) > 1:
        for rows, keys in _chunks(segment):
            owners[rows] = nearest_center(torch.from_numpy(keys), to).numpy()
    return SegmentCells.of(centers, owners)


def _chunks(segment: Segment) -> Iterator[tuple[slice, Keys]]:
    for start in range(0, segment.rows, CHUNK):
        rows = slice(start, min(start + CHUNK, segment.rows))
        keys: StoredKeys = segment.columns.keys_at(np.arange(rows.start, rows.stop))
        yield rows, keys.astype(np.float32)


def _sample(segments: list[Segment], count: int) -> Keys:
    """About so many live rows at equal distances, or all; at least one."""
    step = max(1, math.ceil(sum(segment.live for segment in segments) / count))
    parts = []
    for segment in segments:
        rows = segment.live_rows().ids()[::step]
        parts += [
            segment.columns.keys_at(rows[start : start + CHUNK]).astype(np.float32)
            for start in range(0, len(rows), CHUNK)
        ]
    return np.concatenate(parts)
