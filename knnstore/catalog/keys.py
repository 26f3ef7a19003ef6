"""API keys of a server: rights, domains and limits. The catalog stores only the hash of a key.

An API key is a password with rights that a client sends to the server. Changes of API keys do not concern
readers of documents, so they run in separate transactions, which need no `CatalogWriter`.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import Engine as SqlEngine
from sqlalchemy import delete, select

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.connection import run_read_transaction, run_transaction
from knnstore.catalog.queries import convert_to_utc
from knnstore.catalog.tables import KeyRow
from knnstore.checks import check_name
from knnstore.errors import ConfigError, KeyNotFoundError

_FORM = re.compile(r"knn_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class Right(StrEnum):
    """A right on a server that an API key grants."""

    PREDICT = "predict"
    """Generate and score text."""
    READ = "read"
    """See documents and the provenance of predictions."""
    WRITE = "write"
    """Add and remove documents."""
    ADMIN = "admin"
    """All rights above, and the server's metrics."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Description of an API key (a password with rights), without its secret part."""

    id: str
    """Public part of the key."""
    name: str
    """Name for people, which need not be unique; may be empty."""
    rights: frozenset[Right]
    """Rights that the key grants."""
    domains: tuple[str, ...] | None
    """Names of the domains that the key can access; None means all domains."""
    created_at: str
    """Time of creation, ISO 8601, UTC."""
    expires_at: str | None
    """Time from which the key is no longer accepted, ISO 8601, UTC; None means never."""
    requests: int | None = None
    """Maximum number of concurrent requests; None means unlimited."""
    tokens: int | None = None
    """Maximum number of tokens a minute, prompt and generated; None means unlimited."""

    @property
    def has_expired(self) -> bool:
        """True if the key's time of expiry has passed; False if it has not, or if the key never expires."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


class AccessKeys:
    """Creates, lists, revokes and looks up the API keys (passwords with rights) of one store's server.

    Args:
        catalog: open catalog, which the caller closes.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @property
    def _sql(self) -> SqlEngine:
        return self._catalog.sql

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
        """Create a random API key, and store its description and the hash of its secret.

        Args:
            rights: rights that the key grants; at least one.
            name: name for people, which need not be unique; may be empty.
            domains: names of the domains that the key can access, which need not exist yet; None means all
                domains.
            expires_at: time of expiry, with a time zone; None means never.
            requests: maximum number of concurrent requests, >= 1; None means unlimited.
            tokens: maximum number of tokens a minute, prompt and generated, >= 1; None means unlimited.

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
            raise ConfigError(
                "a key needs at least one domain: name one, or leave the domains out to allow all"
            )
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

    def list_keys(self) -> list[AccessKey]:
        """Return descriptions of all API keys in the order of creation, expired keys included."""
        with run_read_transaction(self._sql) as session:
            rows = session.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id))
            return [_describe_key(row) for row in rows]

    def revoke(self, id: str) -> AccessKey:
        """Delete an API key, so that the server no longer accepts it, and return its description.

        Args:
            id: public part of the key.

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
        """Return True if a text has the format of an API key, else False.

        The text is not compared with stored keys.
        """
        return _FORM.fullmatch(text) is not None

    def find(self, text: str) -> AccessKey | None:
        """Look up an API key by its text, and return the description of the key.

        Returns None for an unknown, malformed or expired key. The look-up of a wrong key takes as long as the
        look-up of a right key, so that the time tells an attacker nothing.

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
    """Return the SHA-256 of the secret part of an API key as 64 hexadecimal digits.

    Secrets have 256 random bits, so a slow password hash is not needed.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def _describe_key(row: KeyRow) -> AccessKey:
    """Convert the database row of an API key to the key's description, with all times in UTC."""
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
