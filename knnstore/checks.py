"""Checks of names and metadata from users, the same for every database, and escaping for terminals."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from knnstore.errors import ConfigError, InputError

MAX_DEPTH = 64
"""Maximum number of nested objects and lists in metadata, so that recursive readers do not overflow."""

TOO_DEEP = {"": "nested too deep to be read"}
"""Placeholder for metadata in a catalog that are nested too deeply to be parsed."""

MAX_NAME = 500
"""Maximum number of characters of an id, a domain or a tag; PostgreSQL indexes at most 2,700 bytes."""


def check_name(name: object, what: str) -> None:
    """Check that a value is a name that every supported database can store.

    Args:
        name: an id, a domain's name or a tag.
        what: name of the value in the message.

    Raises:
        InputError: the name is no string, is empty, is longer than `MAX_NAME`, holds a NUL or is not valid
            Unicode.
    """
    if not isinstance(name, str):
        raise InputError(f"{what} is {type(name).__name__}, not a string")
    if not name:
        raise InputError(f"{what} is empty")
    if len(name) > MAX_NAME:
        raise InputError(f"{what} has {len(name)} characters, at most {MAX_NAME} are allowed: {name[:40]!r}…")
    if "\0" in name or not _is_unicode(name):
        raise InputError(f"{what} contains a NUL or is not valid Unicode: {name!r}")


def check_distinct_names(names: Iterable[str], what: str) -> frozenset[str]:
    """Check several names, and return them without duplicates.

    Args:
        names: names to check; not a single string, whose letters would be taken as the names.
        what: noun for one name in the message, such as "tag".

    Raises:
        InputError: `names` is a string; or a name is no string, empty, too long, holds a NUL or is not valid
            Unicode.
    """
    if isinstance(names, str):
        raise InputError(f"{what}s must be a list: give [{names!r}], not {names!r}")
    unique_names = frozenset(names)
    for name in unique_names:
        check_name(name, f"a {what}")
    return unique_names


def convert_scalars(settings: object, *names: str) -> None:
    """Replace the fields of a frozen dataclass that are scalars of numpy or torch by numbers of Python.

    Numbers of Python can be compared, and saved as JSON. Other values stay.

    Args:
        settings: the dataclass, which calls this function in its ``__post_init__``.
        *names: names of the fields.
    """
    for name in names:
        value = getattr(settings, name)
        if getattr(value, "ndim", None) == 0:
            object.__setattr__(settings, name, value.item())


def convert_floats(settings: object, *names: str) -> None:
    """Replace the fields of a frozen dataclass that are sequences of numbers by tuples of floats.

    Args:
        settings: the dataclass, which calls this function in its ``__post_init__``.
        *names: names of the fields.

    Raises:
        ConfigError: a field is not a sequence of numbers.
    """
    for name in names:
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, tuple(map(float, value)))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{name} must be a list of numbers, got {value!r}") from error


def check_numbers(settings: object, *names: str) -> None:
    """Check that fields of a dataclass are numbers, after `convert_scalars`.

    Raises:
        ConfigError: a field is not a number.
    """
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{'lambda' if name == 'lam' else name} must be a number, got {value!r}")


def check_json(value: Mapping[str, Any], what: str) -> None:
    """Check that a mapping can be stored as JSON.

    Args:
        value: mapping to check, with its nested mappings and lists.
        what: name of the value in the message.

    Raises:
        InputError: a value has a type that JSON lacks, is NaN or infinite, or is nested more than `MAX_DEPTH`
            deep; or the mapping is the placeholder `TOO_DEEP`.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [part for part in level if isinstance(part, Mapping | list | tuple)]
        level = [
            part
            for container in containers
            for part in (container.values() if isinstance(container, Mapping) else container)
        ]
    if level:
        raise InputError(f"{what} is nested more than {MAX_DEPTH} deep: flatten it")
    if value == TOO_DEEP:
        raise InputError(f"{what} is nested too deep to be read, so it cannot be saved: give a new value")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be stored as JSON: {error}") from error


def _is_unicode(text: str) -> bool:
    """Check whether a string can be encoded as UTF-8: it has no unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, as in arguments that are not UTF-8
        return False
    return True


def escape_unprintable(text: str) -> str:
    """Replace line breaks and all unprintable characters by their escape sequences in Python.

    The result is one line that cannot control a terminal.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
