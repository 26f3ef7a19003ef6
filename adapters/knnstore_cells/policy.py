"""The adapter's parameters, and how many cells for how many records."""

import math
from dataclasses import dataclass, fields
from typing import Any

from knnstore.datastore import Coding, checked_kind, checked_params, sample_size
from knnstore.errors import ConfigError

_MOST_CELLS = 1 << 16
_MOST = {"cells": _MOST_CELLS, "probes": _MOST_CELLS, "memory": 1 << 20, "coded_from": 1 << 40}
_RECORDS_PER_CELL = 256
_PER_ROOT = 4  # cells for the root of the records, from a million records on
_ONE_CELL_UP_TO = 1 << 13  # to compare a query with so many costs no more than to choose among cells
_PER_NEIGHBOR = 8  # records to visit for each neighbor wanted
_LEAST_PROBES = 8
_CODES = (16, "none"), (512, "pq32"), (2048, "pq64")  # up to so many components
_LARGE = "pq128"
_WAITING = 1 << 28  # bytes of keys in half precision that wait for `optimize` to code them
_LEAST_SHARE = 16  # a segment has an index from this fraction of the rows on from which its group has cells


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, checked.

    Args:
        cells: cells of each group; 0 chooses by its records.
        probes: cells that a search for the k nearest visits; 0 chooses by k.
        memory: MiB of keys that are kept ready between searches, decoded and as codes together.
        codes: what a large group is kept as: ``none`` (half precision), ``int8``, or ``pq32`` and its like;
            ``auto`` chooses by the number of components.
        coded_from: records from which on a group is large; 0 takes as many as a codec is fitted to.
        device: of torch, whose memory holds all keys while searching, as they are stored; ``none`` leaves
            them in their files, of which the processor reads what it needs; ``auto`` takes the GPU where
            there is one with room.
    """

    cells: int = 0
    probes: int = 0
    memory: int = 512
    codes: str = "auto"
    coded_from: int = 0
    device: str = "auto"

    @classmethod
    def of(cls, params: dict[str, Any]) -> "Policy":
        """Check the parameters that a user gave.

        Raises:
            ConfigError: one is unknown or has a bad value.
        """
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**checked_params("cells", params, accepted))
        for name, most in _MOST.items():
            value = getattr(policy, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ConfigError(f"cells: {name} must be an integer from 0 to {most:,}, got {value!r}")
        if not isinstance(policy.device, str):
            raise ConfigError(
                f"cells: device must be auto, none, or a device of torch, got {policy.device!r}"
            )
        if policy.codes not in ("auto", "none"):
            checked_kind(policy.codes)
        return policy

    def coding_for(self, dim: int) -> Coding | None:
        """What large groups of keys of so many components are kept as; None is as they are."""
        kind = self.codes
        if kind == "auto":
            kind = next((kind for most, kind in _CODES if dim <= most), _LARGE)
        least = self.coded_from or sample_size(dim)
        return None if kind == "none" else Coding(kind, least, max(least, _WAITING // max(1, 2 * dim)))

    def cells_for(self, group_rows: int) -> int:
        """How many cells a group of so many live records has."""
        if self.cells:
            return min(self.cells, group_rows)
        if group_rows <= _ONE_CELL_UP_TO:
            return 1
        # To choose among cells costs as much as to visit some: both are to grow slowly.
        wanted = min(group_rows / _RECORDS_PER_CELL, _PER_ROOT * math.sqrt(group_rows))
        return min(_MOST_CELLS, int(2 ** round(math.log2(wanted))))

    def has_index(self, rows: int, group_rows: int) -> bool:
        """Whether it is on disk which rows of a segment are in which cell, else it is found out in memory."""
        small = 0 if self.cells else _ONE_CELL_UP_TO // _LEAST_SHARE
        return self.cells_for(group_rows) > 1 and rows > small

    def probes_for(self, k: int, cells: int, rows: int) -> int:
        """How many of some cells to visit for about the k nearest of the records in them."""
        return min(cells, self.probes or math.ceil(_PER_NEIGHBOR * k * cells / rows) + _LEAST_PROBES)
