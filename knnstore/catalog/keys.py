"""Keys of a server: who may do what with the store. A key itself is kept nowhere, only its hash.

These rows are no part of what readers of the store see, so whoever may write the database changes them beside
its writer, in transactions of their own.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import delete, select

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.connection import reading, session
from knnstore.catalog.queries import utc
from knnstore.catalog.tables import KeyRow
from knnstore.checks import check_name
from knnstore.errors import ConfigError, KeyNotFoundError

_FORM = re.compile(r"knn_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Right(StrEnum):
    """What a key may allow."""

    PREDICT = "predict"
    """Have text written and scored."""
    READ = "read"
    """See documents, and where predictions come from."""
    WRITE = "write"
    """Add and remove documents."""
    ADMIN = "admin"
    """All of these, and the server's metrics."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """What is known of a key."""

    id: str
    """The part of it that is no secret."""
    name: str
    rights: frozenset[Right]
    domains: tuple[str, ...] | None
    """The only domains that there are for it; None is all."""
    created_at: str
    """ISO 8601, UTC."""
    expires_at: str | None
    requests: int | None = None
    """That it may have at once; None is any number."""
    tokens: int | None = None
    """That it may have read and written in a minute; None is any number."""

    @property
    def has_expired(self) -> bool:
        """Whether it is of no use any more."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


class AccessKeys:
    """The keys of one store.

    Args:
        catalog: an open catalog; never closed here.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._sql = catalog.sql

    def add(
        self,
        rights: Iterable[Right],
        *,
        name: str = "",
        domains: Iterable[str] | None = None,
        expires_at: datetime | None = None,
        requests: int | None = None,
        tokens: int | None = None,
    ) -> tuple[AccessKey, str]:
        """Make a key.

        Args:
            rights: what it allows; at least one.
            name: whatever it is to be known by.
            domains: the only ones that it is for, also such as are not there yet; None is all.
            expires_at: when it ends, with a time zone; None is never.
            requests: at once, >= 1; None is any number.
            tokens: a minute, read and written, >= 1; None is any number.

        Returns:
            What is known of it, and the key itself, which nobody can read again.

        Raises:
            ConfigError: no right or no domain is given, a limit is below 1, or it would have ended already.
            InputError: a name cannot be stored.
        """
        given, named = sorted(set(rights)), None if domains is None else sorted(set(domains))
        if not given:
            raise ConfigError("a key needs at least one right")
        if named is not None and not named:
            raise ConfigError("a key for no domain is of no use: name one, or give none for all")
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise ConfigError("the key would have expired already")
        for limit in (requests, tokens):
            if limit is not None and not 1 <= limit < 2**31:
                raise ConfigError(f"a limit of a key is at least 1 and below 2**31, got {limit}")
        for domain in named or ():
            check_name(domain, "the domain")
        if name:
            check_name(name, "the key's name")
        id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        with session(self._sql) as current:
            row = KeyRow(
                id=id,
                name=name,
                hash=_hashed(secret),
                rights=[right.value for right in given],
                domains=named,
                expires_at=expires_at,
                requests=requests,
                tokens=tokens,
            )
            current.add(row)
            current.flush()
            return _read(row), f"knn_{id}_{secret}"

    def all(self) -> list[AccessKey]:
        """Every key, in the order in which they were made."""
        with reading(self._sql) as current:
            rows = current.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id))
            return [_read(row) for row in rows]

    def revoke(self, id: str) -> AccessKey:
        """Make a key useless from now on, and return what it was.

        Raises:
            KeyNotFoundError: there is none of this id.
        """
        with session(self._sql) as current:
            row = current.get(KeyRow, id)
            if row is None:
                raise KeyNotFoundError(f"there is no key {id!r}; `knnstore key list` shows all")
            gone = _read(row)
            current.execute(delete(KeyRow).where(KeyRow.id == id))
            return gone

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text has the form of a key."""
        return _FORM.fullmatch(text) is not None

    def find(self, text: str) -> AccessKey | None:
        """The key that a text is; None where it is none, or has expired. Takes as long for a wrong one."""
        found = _FORM.fullmatch(text)
        id, secret = (found[1], found[2]) if found else ("", "")
        with reading(self._sql) as current:
            row = current.get(KeyRow, id)
            is_right = hmac.compare_digest(_hashed(secret), row.hash if row else _hashed("none"))
            key = _read(row) if row and is_right else None
        return None if key is None or key.has_expired else key


def _hashed(secret: str) -> str:
    """256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(row: KeyRow) -> AccessKey:
    return AccessKey(
        id=row.id,
        name=row.name,
        rights=frozenset(map(Right, row.rights)),
        domains=None if row.domains is None else tuple(row.domains),
        created_at=utc(row.created_at).isoformat(),
        expires_at=None if row.expires_at is None else utc(row.expires_at).isoformat(),
        requests=row.requests,
        tokens=row.tokens,
    )
