"""What was pruned: for each token of a document whether its record is kept, dropped or merged into another.

Kept by document, so that whatever is removed later takes what it stood for along: the weight of a record
that survived is counted anew from the documents that are live.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

DROPPED = -1
"""Stands in place of a position for a token that has no record, and that no other record stands for."""

_ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class PrunedDocument:
    """Where the records of one document are."""

    representatives: NDArray[np.int64]
    """For each token the position of the record that stands for it, shape (n,): its own where it is kept,
    `DROPPED` where there is none."""

    scale: float = 1.0
    """What each of its tokens counts, since others of its domain were dropped at random."""

    def kept(self, start: int) -> NDArray[np.bool_]:
        """Which tokens have a record, shape (n,), when the first is at position `start`."""
        kept: NDArray[np.bool_] = self.representatives == start + np.arange(len(self.representatives))
        return kept

    def packed(self, start: int) -> bytes:
        """A compact form for SQL: mostly zeros, the same wherever the document is."""
        own = start + np.arange(len(self.representatives))
        offsets = np.where(self.representatives == DROPPED, _ABSENT, self.representatives - own)
        return zlib.compress(offsets.astype("<i8").tobytes())

    @classmethod
    def unpacked(cls, blob: bytes, scale: float, start: int) -> Self:
        """Read what `packed` made."""
        offsets = np.frombuffer(zlib.decompress(blob), "<i8")
        own = start + np.arange(len(offsets))
        return cls(np.where(offsets == _ABSENT, DROPPED, own + offsets), scale)


@dataclass(frozen=True, slots=True)
class Representatives:
    """The records of every pruned document that is live, at one revision."""

    starts: NDArray[np.int64]
    """First position of each pruned document, shape (m,), ascending."""

    origins: NDArray[np.int64]
    """Where each document's tokens begin in the arrays below, and where the last end; shape (m + 1,)."""

    kept: NDArray[np.bool_]
    """Whether each token has a record, shape (t,)."""

    log_weights: NDArray[np.float32] | None
    """The log of how many records each stands for, shape (t,), 0 without one; None when all are 0."""

    @classmethod
    def of(cls, documents: Mapping[int, PrunedDocument]) -> Self:
        """Count what each record stands for.

        Args:
            documents: the live ones, by their first position; none is empty.
        """
        starts = np.array(sorted(documents), np.int64)
        ordered = [documents[start] for start in starts.tolist()]
        origins = np.cumsum([0, *(len(document.representatives) for document in ordered)], dtype=np.int64)
        representatives = np.concatenate([document.representatives for document in ordered])
        scale = np.repeat([document.scale for document in ordered], np.diff(origins))
        made = cls(starts, origins, np.empty(len(representatives), bool), None)
        # -1 for what is dropped, and where the representative was removed
        into = made._index(representatives)
        kept = into == np.arange(len(representatives))
        there = into >= 0
        weights = np.bincount(into[there], scale[there], minlength=len(representatives))
        log_weights = np.log(weights, where=kept, out=np.zeros(len(kept))).astype(np.float32)
        return cls(starts, origins, kept, log_weights if log_weights.any() else None)

    def log_weights_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The log weight of the record at each position, any shape, 0 in documents that are not pruned.

        Returns:
            float32 of the same shape; None when all are 0.
        """
        if self.log_weights is None:
            return None
        at = self._index(positions)
        weights: NDArray[np.float32] = np.where(at >= 0, self.log_weights[at], np.float32(0))
        return weights

    def has_record(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the token at each position is one that pruning has left; bool of the same shape."""
        at = self._index(positions)
        left: NDArray[np.bool_] = (at < 0) | self.kept[at]
        return left

    def _index(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the arrays each position is; -1 where it is in no pruned document."""
        at = np.searchsorted(self.starts, positions, side="right") - 1
        index = self.origins[at] + positions - self.starts[at]
        return np.where((at >= 0) & (index < self.origins[at + 1]), index, -1)
