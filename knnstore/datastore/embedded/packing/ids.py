"""Record ids in two or three bytes each: positions as runs, tokens as they are.

A file of them holds the low 16 bits of each token, then where one needs more the high bits of each (a byte),
then the runs: where each begins, and with which position, two int64.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Ids
from knnstore.datastore.records import positions_of, record_ids, tokens_of

_LOW_BITS = 16
_RUN_SIZE = 16
_NONE = -2  # after which no position comes


def is_worth_packing(parts: Iterable[Ids]) -> bool:
    """Whether ids that lie in several arrays, each ascending, take less room packed than as they are."""
    rows = runs = 0
    for ids in parts:
        rows += len(ids)
        runs += int(_begins(positions_of(ids), _NONE).sum())
    return packed_size(rows, runs, wide=True) < 8 * rows


def packed_size(rows: int, runs: int, *, wide: bool) -> int:
    """Bytes of a file of them; wide is with high bits."""
    return (3 if wide else 2) * rows + _RUN_SIZE * runs


class IdsPacker:
    """Packs ids that come in ascending batches."""

    def __init__(self) -> None:
        self._rows, self._last = 0, _NONE
        self._runs: list[NDArray[np.int64]] = []
        self._high: list[NDArray[np.uint8]] = []

    def low(self, ids: Ids) -> NDArray[np.uint16]:
        """Take the next batch: what is written of it now."""
        positions, tokens = positions_of(ids), tokens_of(ids)
        begins = np.flatnonzero(_begins(positions, self._last))
        self._runs.append(np.stack([begins + self._rows, positions[begins]], axis=1))
        self._high.append((tokens >> _LOW_BITS).astype(np.uint8))
        self._rows, self._last = self._rows + len(ids), int(positions[-1])
        return tokens.astype(np.uint16)

    def finish(self, write: Callable[[NDArray[Any]], None]) -> int:
        """Write the rest, after all batches: high bits, if one token has some, and the runs.

        Returns:
            How many runs these are.
        """
        high, runs = np.concatenate(self._high), np.concatenate(self._runs)
        if high.any():
            write(high)
        write(runs)
        return len(runs)


class PackedIds:
    """The ids of a file.

    Args:
        content: of the file.
        rows: how many ids.
        runs: of positions.
    """

    def __init__(self, content: NDArray[np.uint8], rows: int, runs: int) -> None:
        low, high, of_runs = np.split(content, [2 * rows, len(content) - _RUN_SIZE * runs])
        self._low, self._high = low.view(np.uint16), high
        table = np.frombuffer(of_runs.tobytes(), np.int64).reshape(runs, 2)
        self._starts = np.ascontiguousarray(table[:, 0])
        self._before = table[:, 1] - table[:, 0]  # what a row's number lacks to its position

    def at(self, rows: NDArray[np.int64]) -> Ids:
        """Those of some rows."""
        run = np.searchsorted(self._starts, rows, side="right") - 1
        tokens = self._low[rows].astype(np.int64)
        if len(self._high):
            tokens |= self._high[rows].astype(np.int64) << _LOW_BITS
        return record_ids(self._before[run] + rows, tokens)

    def all(self) -> Ids:
        """Those of every row."""
        rows = np.arange(len(self._low))
        lengths = np.diff(self._starts, append=len(rows))
        tokens = self._low.astype(np.int64)
        if len(self._high):
            tokens |= self._high.astype(np.int64) << _LOW_BITS
        return record_ids(np.repeat(self._before, lengths) + rows, tokens)


def _begins(positions: NDArray[np.int64], last: int) -> NDArray[np.bool_]:
    """Which positions do not follow the one before, shape (n,)."""
    begins: NDArray[np.bool_] = np.diff(positions, prepend=last) != 1
    return begins
