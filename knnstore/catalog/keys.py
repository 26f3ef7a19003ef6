"""API keys of a server: rights, domains and limits. The catalog stores only the hash of a key.

Readers of the store do not see the rows of keys. So keys are changed in separate transactions, which need no
`CatalogWriter`.
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
from knnstore.catalog.connection import run_read_transaction, run_transaction
from knnstore.catalog.queries import convert_to_utc
from knnstore.catalog.tables import KeyRow
from knnstore.checks import check_name
from knnstore.errors import ConfigError, KeyNotFoundError

_FORM = re.compile(r"knn_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Right(StrEnum):
    """Right that an API key grants."""

    PREDICT = "predict"
    """Generate and score text."""
    READ = "read"
    """See documents and the provenance of predictions."""
    WRITE = "write"
    """Add and remove documents."""
    ADMIN = "admin"
    """All other rights, and the server's metrics."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Description of an API key, without its secret."""

    id: str
    """Public part of the key."""
    name: str
    rights: frozenset[Right]
    domains: tuple[str, ...] | None
    """Names of the domains that the key can access; None is all."""
    created_at: str
    """ISO 8601, UTC."""
    expires_at: str | None
    """ISO 8601, UTC; None is never."""
    requests: int | None = None
    """Maximum number of concurrent requests; None is unlimited."""
    tokens: int | None = None
    """Maximum number of tokens a minute, prompt and generated; None is unlimited."""

    @property
    def has_expired(self) -> bool:
        """True if the time of expiry has passed."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


class AccessKeys:
    """Creates, lists, revokes and looks up the API keys of one store.

    Args:
        catalog: open catalog, which the caller closes.
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
        """Create a random key and store its hash.

        Args:
            rights: rights that the key grants; at least one.
            name: name for people, which need not be unique; may be empty.
            domains: names of the domains that the key can access, which need not exist yet; None is all.
            expires_at: time of expiry, with a time zone; None is never.
            requests: maximum number of concurrent requests, >= 1; None is unlimited.
            tokens: maximum number of tokens a minute, prompt and generated, >= 1; None is unlimited.

        Returns:
            The key's description, and the text of the key, which cannot be read again.

        Raises:
            ConfigError: `rights` or `domains` is empty, a limit is out of range, or the expiry has passed.
            InputError: a name is not valid, see `check_name`.
        """
        sorted_rights, sorted_domains = sorted(set(rights)), None if domains is None else sorted(set(domains))
        if not sorted_rights:
            raise ConfigError("a key needs at least one right")
        if sorted_domains is not None and not sorted_domains:
            raise ConfigError("a key for no domain is of no use: name one, or give none for all")
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise ConfigError("the key would have expired already")
        for limit in (requests, tokens):
            if limit is not None and not 1 <= limit < 2**31:
                raise ConfigError(f"a limit of a key is at least 1 and below 2**31, got {limit}")
        for domain in sorted_domains or ():
            check_name(domain, "the domain")
        if name:
            check_name(name, "the key's name")
        id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        with run_transaction(self._sql) as session:
            row = KeyRow(
                id=id,
                name=name,
                hash=_hash_secret(secret),
                rights=[right.value for right in sorted_rights],
                domains=sorted_domains,
                expires_at=expires_at,
                requests=requests,
                tokens=tokens,
            )
            session.add(row)
            session.flush()
            return _describe_key(row), f"knn_{id}_{secret}"

    def all(self) -> list[AccessKey]:
        """Return all keys in the order of their creation, expired keys included."""
        with run_read_transaction(self._sql) as session:
            rows = session.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id))
            return [_describe_key(row) for row in rows]

    def revoke(self, id: str) -> AccessKey:
        """Delete a key, and return its description.

        Raises:
            KeyNotFoundError: no key has this id.
        """
        with run_transaction(self._sql) as session:
            row = session.get(KeyRow, id)
            if row is None:
                raise KeyNotFoundError(f"there is no key {id!r}; `knnstore key list` shows all")
            revoked_key = _describe_key(row)
            session.execute(delete(KeyRow).where(KeyRow.id == id))
            return revoked_key

    @staticmethod
    def has_key_format(text: str) -> bool:
        """Check whether a text has the format of an API key; the key itself need not exist."""
        return _FORM.fullmatch(text) is not None

    def find(self, text: str) -> AccessKey | None:
        """Look up an API key. Returns its description, or None for an unknown, malformed or expired key.

        The secret is compared in constant time, also if no key has the id.

        Args:
            text: the whole key, as `add` returned it.
        """
        match = _FORM.fullmatch(text)
        id, secret = (match[1], match[2]) if match else ("", "")
        with run_read_transaction(self._sql) as session:
            row = session.get(KeyRow, id)
            is_match = hmac.compare_digest(_hash_secret(secret), row.hash if row else _hash_secret("none"))
            key = _describe_key(row) if row and is_match else None
        return None if key is None or key.has_expired else key


def _hash_secret(secret: str) -> str:
    """Return the SHA-256 of a secret, hexadecimal.

    Secrets have 256 random bits, so a slow hash is not needed.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def _describe_key(row: KeyRow) -> AccessKey:
    """Convert a key's row to its description, with all times in UTC."""
    return AccessKey(
        id=row.id,
        name=row.name,
        rights=frozenset(map(Right, row.rights)),
        domains=None if row.domains is None else tuple(row.domains),
        created_at=convert_to_utc(row.created_at).isoformat(),
        expires_at=None if row.expires_at is None else convert_to_utc(row.expires_at).isoformat(),
        requests=row.requests,
        tokens=row.tokens,
    )
