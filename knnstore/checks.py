"""Checks of names and text from users, the same for every database, and their printable form."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from knnstore.errors import InputError

MAX_DEPTH = 64
"""Levels of objects and lists in metadata: whoever reads it may do so by recursion."""

TOO_DEEP = {"": "nested too deep to be read"}
"""Stands for metadata of a catalog that cannot be read."""

MAX_NAME = 500
"""Characters in an id, a domain or a tag; PostgreSQL indexes no more than 2,700 bytes."""


def check_name(name: object, what: str) -> None:
    """Refuse what is no text, and text that some database could not store.

    Args:
        name: an id, a domain's name or a tag.
        what: name of the value in the message.

    Raises:
        InputError: it is no string, empty, too long, holds a NUL or is not valid Unicode.
    """
    if not isinstance(name, str):
        raise InputError(f"{what} is {type(name).__name__}, not a string")
    if not name:
        raise InputError(f"{what} is empty")
    if len(name) > MAX_NAME:
        raise InputError(f"{what} has {len(name)} characters, at most {MAX_NAME} are allowed: {name[:40]!r}…")
    if "\0" in name or not _is_unicode(name):
        raise InputError(f"{what} holds a NUL or is not valid Unicode: {name!r}")


def distinct_names(names: Iterable[str], what: str) -> frozenset[str]:
    """Several names, each once.

    Raises:
        InputError: they are one string, whose letters would be the names; or as `check_name`.
    """
    if isinstance(names, str):
        raise InputError(f"{what}s are several: give [{names!r}], not {names!r}")
    found = frozenset(names)
    for name in found:
        check_name(name, f"a {what}")
    return found


def check_json(value: Mapping[str, Any], what: str) -> None:
    """Refuse what JSON cannot hold.

    Raises:
        InputError: a value is of another type, NaN or infinite, or nested too deep.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [part for part in level if isinstance(part, Mapping | list | tuple)]
        level = [
            part for whole in parts for part in (whole.values() if isinstance(whole, Mapping) else whole)
        ]
    if level:
        raise InputError(f"{what} is nested more than {MAX_DEPTH} deep: flatten it")
    if value == TOO_DEEP:
        raise InputError(f"{what} cannot be kept, it is nested too deep to be read: give it anew")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be stored as JSON: {error}") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as in arguments that are not UTF-8
        return False
    return True


def printable(text: str) -> str:
    """Write line breaks and control characters visibly: a text is one line and cannot steer a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
