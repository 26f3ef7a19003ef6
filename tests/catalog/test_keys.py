"""Keys of a server: shown once, kept as a hash, of use until they are revoked or have expired."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from knnstore.catalog import AccessKeys, Catalog, CatalogWriter, Right
from knnstore.errors import ConfigError, KeyNotFoundError

Opener = Callable[[], Catalog]


def test_a_key_is_found_by_the_whole_of_it_until_it_is_revoked(opener: Opener) -> None:
    keys = AccessKeys(opener())
    made, secret = keys.add([Right.READ, Right.PREDICT], name="ci", domains=["b", "a", "b"])
    other, other_secret = keys.add([Right.ADMIN])
    elsewhere = AccessKeys(opener())
    assert elsewhere.find(secret) == made
    assert (made.rights, made.domains) == ({Right.READ, Right.PREDICT}, ("a", "b"))
    assert elsewhere.find(other_secret) == other
    assert other.domains is None
    mixed = f"knn_{made.id}_{other_secret.rpartition('_')[2]}"[: len(secret)]
    wrong = ["", "x", secret[:-1], secret + "x", secret.upper(), mixed, f"knn_{'0' * 12}_{secret[17:]}"]
    assert [keys.find(text) for text in wrong] == [None] * len(wrong)
    assert [key.id for key in keys.list_keys()] == [made.id, other.id]
    assert keys.revoke(made.id) == made
    assert elsewhere.find(secret) is None
    with pytest.raises(KeyNotFoundError, match="no key"):
        keys.revoke(made.id)


def test_a_key_expires(opener: Opener) -> None:
    keys = AccessKeys(opener())
    soon = datetime.now(UTC) + timedelta(milliseconds=300)
    key, secret = keys.add([Right.READ], expires_at=soon)
    assert keys.find(secret) == key
    while datetime.now(UTC) < soon:
        pass
    assert keys.find(secret) is None
    with pytest.raises(ConfigError, match="expired"):
        keys.add([Right.READ], expires_at=soon)


@pytest.mark.parametrize("given", [{"rights": []}, {"rights": [Right.READ], "domains": []}])
def test_a_key_for_nothing_is_refused(opener: Opener, given: dict[str, list[str]]) -> None:
    keys = AccessKeys(opener())
    with pytest.raises(ConfigError):
        keys.add(**given)  # type: ignore[arg-type]
    assert keys.list_keys() == []


def test_keys_are_made_beside_a_writer_which_goes_on(opener: Opener) -> None:
    writer = CatalogWriter(opener())
    keys = AccessKeys(opener())
    before = writer.catalog.revision()
    _, secret = keys.add([Right.WRITE])
    writer.save_settings([], {"k": 1})
    assert keys.find(secret) is not None
    assert writer.catalog.revision() == before + 1


def test_the_database_holds_no_secret(tmp_path: Path, create: Callable[..., Catalog]) -> None:
    from knnstore.catalog import parse_url

    catalog = create(parse_url(f"sqlite:///{tmp_path}/catalog.db"))
    _, secret = AccessKeys(catalog).add([Right.READ], name="seen")
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"seen" in stored
    assert secret.encode() not in stored
    assert secret[17:].encode() not in stored
