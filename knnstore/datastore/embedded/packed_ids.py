"""Packing of ascending record ids into two or three bytes each.

A record id encodes a position and a token id. The tokens are stored in full. Positions are stored as runs: a
run is a series of consecutive positions, and only its start is stored. A file of packed ids holds, in this
order: the low 16 bits of each token; if a token needs more bits, one byte with the high bits of each token;
and for each run two int64: the index of the first id in the run, and the first position.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Ids
from knnstore.datastore.records import positions_from_ids, record_ids, tokens_from_ids

_LOW_BITS = 16
_RUN_SIZE = 16
_NONE = -2  # a last position that no position follows


def is_worth_packing(parts: Iterable[Ids]) -> bool:
    """Check whether a file of record ids is smaller if the ids are packed than if they are stored as int64.

    A packed id takes two or three bytes, and each run (a series of consecutive positions) takes 16 bytes
    more.

    Args:
        parts: arrays of ids, each ascending. All arrays together are the ids of one file.

    Returns:
        True if the packed file is smaller, else False. Three bytes for each id are assumed.
    """
    rows = runs = 0
    for ids in parts:
        rows += len(ids)
        runs += int(_mark_run_starts(positions_from_ids(ids), _NONE).sum())
    return packed_size(rows, runs, wide=True) < 8 * rows


def packed_size(rows: int, runs: int, *, wide: bool) -> int:
    """Return the size of a file of packed ids in bytes.

    Args:
        rows: number of ids.
        runs: number of runs (series of consecutive positions).
        wide: True if a token id needs more than 16 bits, so that the file also holds high bits.
    """
    return (3 if wide else 2) * rows + _RUN_SIZE * runs


class IdsPacker:
    """Packs the record ids of one file into two or three bytes each.

    Call `add_ids` with batches of ids in ascending order, then `finish`.
    """

    def __init__(self) -> None:
        self._rows, self._last = 0, _NONE
        self._runs: list[NDArray[np.int64]] = []
        self._high: list[NDArray[np.uint8]] = []

    def add_ids(self, ids: Ids) -> NDArray[np.uint16]:
        """Add a batch of ids, and return the array whose bytes the caller must append to the file.

        The rest of the batch is kept in memory, until `finish` writes it.

        Args:
            ids: record ids, int64, ascending, shape (n,), n >= 1, larger than all ids of earlier calls.

        Returns:
            The low 16 bits of each id's token, uint16, shape (n,).
        """
        positions, tokens = positions_from_ids(ids), tokens_from_ids(ids)
        run_starts = np.flatnonzero(_mark_run_starts(positions, self._last))
        self._runs.append(np.stack([run_starts + self._rows, positions[run_starts]], axis=1))
        self._high.append((tokens >> _LOW_BITS).astype(np.uint8))
        self._rows, self._last = self._rows + len(ids), int(positions[-1])
        return tokens.astype(np.uint16)

    def finish(self, write: Callable[[NDArray[Any]], None]) -> int:
        """Write the rest of the file: the high bits of the tokens, then the runs of positions.

        A run is a series of consecutive positions. The high bits are written only if a token id needs more
        than 16 bits. Call this method once, after the last batch.

        Args:
            write: function that appends an array to the file.

        Returns:
            The number of runs (series of consecutive positions), which `PackedIds` needs.
        """
        high, runs = np.concatenate(self._high), np.concatenate(self._runs)
        if high.any():
            write(high)
        write(runs)
        return len(runs)


class PackedIds:
    """Reads record ids from the content of a file that `IdsPacker` packed.

    Args:
        content: the file's bytes.
        rows: number of ids in the file.
        runs: number of runs (series of consecutive positions), the result of `IdsPacker.finish`.
    """

    def __init__(self, content: NDArray[np.uint8], rows: int, runs: int) -> None:
        low_bits, high_bits, run_bytes = np.split(content, [2 * rows, len(content) - _RUN_SIZE * runs])
        self._low, self._high = low_bits.view(np.uint16), high_bits
        table = np.frombuffer(run_bytes.tobytes(), np.int64).reshape(runs, 2)
        self._starts = np.ascontiguousarray(table[:, 0])
        self._before = table[:, 1] - table[:, 0]  # position minus row number, the same in a run

    def decode_rows(self, rows: NDArray[np.int64]) -> Ids:
        """Return the record ids with some indices in the file, int64, in the shape of `rows`.

        Args:
            rows: indices of the ids, int64; the first id of the file has index 0.
        """
        run_indices = np.searchsorted(self._starts, rows, side="right") - 1
        tokens = self._low[rows].astype(np.int64)
        if len(self._high):
            tokens |= self._high[rows].astype(np.int64) << _LOW_BITS
        return record_ids(self._before[run_indices] + rows, tokens)

    def decode_all(self) -> Ids:
        """Return all record ids of the file, int64, ascending."""
        rows = np.arange(len(self._low))
        lengths = np.diff(self._starts, append=len(rows))
        tokens = self._low.astype(np.int64)
        if len(self._high):
            tokens |= self._high.astype(np.int64) << _LOW_BITS
        return record_ids(np.repeat(self._before, lengths) + rows, tokens)


def _mark_run_starts(positions: NDArray[np.int64], last: int) -> NDArray[np.bool_]:
    """Return a mask of the positions that begin a run, which is a series of consecutive positions.

    The mask, shape (n,), is True for each position that is not the previous position plus one.

    Args:
        positions: ascending positions, shape (n,).
        last: the position before positions[0]; `_NONE` if there is none, so that positions[0] begins a run.
    """
    is_start: NDArray[np.bool_] = np.diff(positions, prepend=last) != 1
    return is_start
