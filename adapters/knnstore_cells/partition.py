"""Where cells are: centers that are fitted to keys, and the cell of each key."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Keys, Metric, RoundedCodec, Segment, StoredKeys
from knnstore_cells.index import SegmentCells

CHUNK = 1 << 14
"""Rows that are read and compared at a time."""

_SAMPLE_PER_CELL = 64
_LEAST_SAMPLE = 4096
_ROUNDS = 8


def fit_centers(segments: list[Segment], cells: int) -> Keys:
    """Fit the centers of cells by k-means (Lloyd 1982) to a sample of the live rows of some segments.

    The same rows give the same centers. Where there are fewer different keys than cells, some stay empty.

    Returns:
        Shape (cells, dim), rounded as the files hold them: where they are exactly is no matter, for every key
        of a cell counts.
    """
    keys = torch.from_numpy(_sample(segments, max(_LEAST_SAMPLE, _SAMPLE_PER_CELL * cells)))
    generator = torch.Generator().manual_seed(0)
    centers = keys[torch.randperm(len(keys), generator=generator)[:cells]]
    if len(centers) < cells:
        centers = torch.cat([centers, centers[:1].expand(cells - len(centers), -1)])
    for _ in range(_ROUNDS):
        owners = nearest_center(keys, centers)
        counts = torch.bincount(owners, minlength=cells)
        sums = torch.zeros_like(centers).index_add_(0, owners, keys)
        moved = sums / counts.clamp(min=1)[:, None]
        empty = (counts == 0).nonzero()[:, 0]
        moved[empty] = keys[torch.randint(len(keys), (len(empty),), generator=generator)]
        centers = moved
    codec = RoundedCodec(centers.shape[1])
    return codec.turned(codec.encode(centers.numpy()))


def nearest_center(keys: Tensor, centers: Tensor) -> Tensor:
    """The center that is nearest to each key, int64, shape (n,).

    Args:
        keys: float32, shape (n, dim).
        centers: float32, shape (cells, dim).
    """
    norms = (centers * centers).sum(1)
    parts = [torch.addmm(norms, some, centers.T, alpha=-2).argmin(1) for some in torch.split(keys, CHUNK)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def center_distances(queries: Tensor, centers: Tensor, metric: Metric) -> Tensor:
    """How far each query is from each center, up to something that is the same for all: (q, cells)."""
    if metric is Metric.IP:
        return -(queries @ centers.T)
    return torch.addmm((centers * centers).sum(1), queries, centers.T, alpha=-2)


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
