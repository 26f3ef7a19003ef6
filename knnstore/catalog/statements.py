"""Small parts of statements, shared by reading and writing the catalogue."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

_IDS_A_STATEMENT = 500  # far below SQLite's limit of bound values


def in_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Cut values into lists short enough for one SQL statement."""
    listed = list(values)
    return (listed[at : at + _IDS_A_STATEMENT] for at in range(0, len(listed), _IDS_A_STATEMENT))


def utc(moment: datetime) -> datetime:
    """A moment as it was stored, in UTC: SQLite drops the zone."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)


def scope_of(domains: Iterable[str]) -> tuple[str, list[str]]:
    """The key under which settings for a set of domains are saved, and their names in order."""
    names = sorted(set(domains))
    return hashlib.sha256(json.dumps(names).encode()).hexdigest(), names
