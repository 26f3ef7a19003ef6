"""The parameters of the cells adapter, and the number of cells for a number of records."""

import math
from dataclasses import dataclass, fields
from typing import Any

from knnstore.datastore import Coding, checked_kind, checked_params, sample_size
from knnstore.errors import ConfigError

_MOST_CELLS = 1 << 16
_MOST = {"cells": _MOST_CELLS, "probes": _MOST_CELLS, "memory": 1 << 20, "coded_from": 1 << 40}
_RECORDS_PER_CELL = 256
_PER_ROOT = 4  # cells for each unit of the root of the number of records, from a million records on
_ONE_CELL_UP_TO = 1 << 13  # comparing a query with so many records costs no more than choosing among cells
_PER_NEIGHBOR = 8  # records to visit for each neighbor
_LEAST_PROBES = 8
_CODES = (16, "none"), (512, "pq32"), (2048, "pq64")  # (number of components up to which, codes)
_LARGE = "pq128"
_WAITING = 1 << 28  # bytes of keys in half precision that may wait for `optimize` to code them
_LEAST_SHARE = 16  # a segment with less than 1/16 of `_ONE_CELL_UP_TO` rows has no index


@dataclass(frozen=True, slots=True)
class Policy:
    """The parameters of the adapter, checked.

    Args:
        cells: number of cells of each group; 0 chooses it by the number of records.
        probes: number of cells that a search compares with a query; 0 chooses it by k.
        memory: MiB of keys that stay in memory between searches, decoded keys and codes together.
        codes: form of the keys of a large group: ``none`` (half precision), ``int8``, or ``pq32``, ``pq64``,
            ...; ``auto`` chooses by the number of components.
        coded_from: number of records from which on a group is large; 0 for the size of a codec's sample.
        device: torch device whose memory holds all keys for searches, in their stored form. ``none`` reads
            keys from their files as needed, for the CPU; ``auto`` uses a GPU with enough free memory, if any.
    """

    cells: int = 0
    probes: int = 0
    memory: int = 512
    codes: str = "auto"
    coded_from: int = 0
    device: str = "auto"

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> "Policy":
        """Return the policy for the parameters that a user gave; omitted parameters have their defaults.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
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
        """Return how keys of `dim` components are coded in large groups; None for half precision."""
        kind = self.codes
        if kind == "auto":
            kind = next((kind for most, kind in _CODES if dim <= most), _LARGE)
        least = self.coded_from or sample_size(dim)
        return None if kind == "none" else Coding(kind, least, max(least, _WAITING // max(1, 2 * dim)))

    def cells_for(self, group_rows: int) -> int:
        """Return the number of cells for a group with `group_rows` live records.

        This is the parameter `cells`, but at most `group_rows`. If the parameter is 0, it is 1 for a small
        group, else a power of two that grows with the number of records.
        """
        if self.cells:
            return min(self.cells, group_rows)
        if group_rows <= _ONE_CELL_UP_TO:
            return 1
        # Choosing among cells costs about as much as visiting some, so both should grow slowly.
        cell_count = min(group_rows / _RECORDS_PER_CELL, _PER_ROOT * math.sqrt(group_rows))
        return min(_MOST_CELLS, int(2 ** round(math.log2(cell_count))))

    def has_index(self, rows: int, group_rows: int) -> bool:
        """Check whether a segment needs an index on disk; otherwise its rows are assigned to cells in memory.

        Args:
            rows: number of rows of the segment.
            group_rows: number of live records of its group.
        """
        small = 0 if self.cells else _ONE_CELL_UP_TO // _LEAST_SHARE
        return self.cells_for(group_rows) > 1 and rows > small

    def probes_for(self, k: int, cells: int, rows: int) -> int:
        """Return the number of cells to search for approximately the k nearest records, at most `cells`.

        Args:
            k: number of neighbors.
            cells: number of cells with matching records.
            rows: number of matching records in these cells.
        """
        return min(cells, self.probes or math.ceil(_PER_NEIGHBOR * k * cells / rows) + _LEAST_PROBES)
