"""The parameters of the cells adapter, and the number of cells for a number of records."""

import math
from dataclasses import dataclass, fields
from typing import Any

from knnstore.datastore import Coding, sample_size, validate_kind, validate_params
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
    """The parameters of the cells adapter, and the choices that follow from them.

    A cell is a cluster of near keys. The records of each group (a numbered set of records, such as a domain)
    have their own cells.

    Args:
        cells: number of cells of each group; 0 chooses the number by the number of records.
        probes: number of cells whose records a search compares with a query; 0 chooses the number by k.
        memory: MiB of keys that stay in memory between searches, decoded keys and codes together.
        codes: how the keys of a large group are stored: ``none`` for half precision; ``int8``, ``pq32``,
            ``pq64`` and so on for codes (compressed keys); ``auto`` chooses by the number of components.
        coded_from: smallest number of records of a large group; 0 means the number of keys that a codec (the
            compressor) is fitted to.
        device: torch device in whose memory all keys are kept for searches, in their stored form. ``none``
            reads keys from their files when needed, for the CPU; ``auto`` uses a GPU if one has enough free
            memory, else ``none``.
    """

    cells: int = 0
    probes: int = 0
    memory: int = 512
    codes: str = "auto"
    coded_from: int = 0
    device: str = "auto"

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> "Policy":
        """Check the parameters that a user gave, and return the policy.

        Args:
            params: parameters by name; omitted parameters have their defaults.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**validate_params("cells", params, accepted))
        for name, most in _MOST.items():
            value = getattr(policy, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ConfigError(f"cells: {name} must be an integer from 0 to {most:,}, got {value!r}")
        if not isinstance(policy.device, str):
            raise ConfigError(
                f"cells: device must be auto, none, or a device of torch, got {policy.device!r}"
            )
        if policy.codes not in ("auto", "none"):
            validate_kind(policy.codes)
        return policy

    def choose_coding(self, dim: int) -> Coding | None:
        """Return how the keys of large groups (sets of records) are compressed to codes.

        Args:
            dim: number of components of a key.

        Returns:
            The kind of codes, and two numbers of records from which a group's keys are compressed: one for
            when its files are rewritten, and a larger one for when records are added. None if all keys stay
            in half precision.
        """
        kind = self.codes
        if kind == "auto":
            kind = next((kind for most, kind in _CODES if dim <= most), _LARGE)
        least = self.coded_from or sample_size(dim)
        return None if kind == "none" else Coding(kind, least, max(least, _WAITING // max(1, 2 * dim)))

    def choose_cell_count(self, group_rows: int) -> int:
        """Return the number of cells (clusters of near keys) for a group of records.

        If the parameter `cells` is not 0, the result is this parameter, but at most the number of records.
        Otherwise the result is 1 for a group of at most 8,192 records. For a larger group it is a power of
        two that grows with the number of records, at most 65,536.

        Args:
            group_rows: number of records of the group, without deleted and replaced records.
        """
        if self.cells:
            return min(self.cells, group_rows)
        if group_rows <= _ONE_CELL_UP_TO:
            return 1
        # Choosing among cells costs about as much as visiting some, so both should grow slowly.
        cell_count = min(group_rows / _RECORDS_PER_CELL, _PER_ROOT * math.sqrt(group_rows))
        return min(_MOST_CELLS, int(2 ** round(math.log2(cell_count))))

    def has_index(self, rows: int, group_rows: int) -> bool:
        """Check whether a segment (a set of files with records) gets an index file.

        The index file has the cell (a cluster of near keys) of each record. Without an index file, records
        are assigned to cells in memory when they are first searched.

        Args:
            rows: number of records of the segment, deleted records included.
            group_rows: number of records of the segment's group, without deleted and replaced records.

        Returns:
            True if the group has several cells and the segment is not very small, else False. A segment of at
            most 512 records is very small, unless the parameter `cells` is set.
        """
        small = 0 if self.cells else _ONE_CELL_UP_TO // _LEAST_SHARE
        return self.choose_cell_count(group_rows) > 1 and rows > small

    def choose_probe_count(self, k: int, cells: int, rows: int) -> int:
        """Return the number of cells (clusters of near keys) that a search for k neighbors visits.

        If the parameter `probes` is not 0, the result is this parameter. Otherwise the result is the number
        of cells that have about 8 * k matching records, plus 8.

        Args:
            k: number of neighbors.
            cells: number of cells with matching records; the result is at most this number.
            rows: number of matching records in these cells.
        """
        return min(cells, self.probes or math.ceil(_PER_NEIGHBOR * k * cells / rows) + _LEAST_PROBES)
