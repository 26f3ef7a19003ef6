"""Reading conditions: ``year >= 2020 and (author = 'Ida' or not draft = true)``.

::

    condition   a or b, a and b, not a, (a); `not` binds closest, then `and`
    comparison  FIELD = != < <= > >= VALUE, FIELD [not] in (VALUE, ...), FIELD [not] like STRING, FIELD exists
    field       names with dots between them, those of objects within objects; any name in double quotes
    value       'text', where '' is a quote; a number; true; false
    like        % stands for any characters, _ for one, a backslash takes the meaning of the next one away
"""

import math
import re
from functools import cache, lru_cache
from typing import Any

from knnstore.catalog.conditions.condition import (
    Comparison,
    Condition,
    Every,
    Exists,
    Not,
    Some,
    Value,
    depth,
    fields,
)
from knnstore.errors import ConfigError

EXAMPLE = "year >= 2020 and author = 'Ida'"
LONGEST = 4096
"""Characters of a condition."""
DEEPEST = 12
"""Conditions within each other: SQLite's parser has 100 places on its stack."""
DEEPEST_FIELD = 63
"""Names of a field, one for each level of objects: SQLite joins 64 tables at most, one for each level."""

_WORDS = {"or", "and", "not", "in", "like", "exists", "true", "false"}
_GRAMMAR = r"""
?start: some
?some: every ("or"i every)*
?every: inverse ("and"i inverse)*
?inverse: "not"i inverse -> negation
    | "(" some ")"
    | test
?test: field COMPARED value -> compared
    | field "in"i "(" value ("," value)* ")" -> among
    | field "not"i "in"i "(" value ("," value)* ")" -> not_among
    | field "like"i text -> like
    | field "not"i "like"i text -> not_like
    | field "exists"i -> exists
field: name ("." name)*
name: NAME -> plain
    | QUOTED -> quoted
?value: text
    | NUMBER -> number
    | "true"i -> true
    | "false"i -> false
text: STRING
COMPARED: "=" | "!=" | "<=" | ">=" | "<" | ">"
NAME: /[^\W\d]\w*/i
QUOTED: /"(?:[^"]|"")*"/
STRING: /'(?:[^']|'')*'/
NUMBER: /[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?/i
%ignore /[ \t\r\n]+/
"""


def check_condition(text: object) -> None:
    """Refuse what is not a condition.

    Raises:
        ConfigError: says where it cannot be read, or what of it is not possible.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a condition is a string such as {EXAMPLE!r}, not {type(text).__name__}")
    parsed(text)


def fields_of(text: str) -> tuple[str, ...]:
    """The fields that a condition looks at, as one writes them in a condition.

    Raises:
        ConfigError: see `check_condition`.
    """
    return tuple(".".join(map(_written, field)) for field in fields(parsed(text)))


def _written(name: str) -> str:
    plain = re.fullmatch(r"[^\W\d]\w*", name) and name.lower() not in _WORDS
    return name if plain else '"{}"'.format(name.replace('"', '""'))


@lru_cache(256)
def parsed(text: str) -> Condition:
    """Read a condition.

    Raises:
        ConfigError: see `check_condition`.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"the condition has {len(text):,} characters, at most {LONGEST:,} are allowed")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError("the condition holds a NUL or is not valid Unicode")
    from lark.exceptions import UnexpectedInput

    try:
        condition: Any = _parser().parse(text)
    except UnexpectedInput as error:
        at = error.pos_in_stream
        is_end = getattr(getattr(error, "token", None), "type", "") == "$END"
        found = "its end" if at is None or is_end else repr(text[at : at + 20])
        raise ConfigError(
            f"the condition cannot be read from {found} on: {text[:200]!r}; write it as {EXAMPLE!r}, "
            "strings in single quotes"
        ) from error
    if depth(condition) > DEEPEST:
        raise ConfigError(f"the condition is nested more than {DEEPEST} deep: write it flatter")
    return condition  # type: ignore[no-any-return]


@cache
def _parser() -> Any:
    from lark import Lark, Transformer, v_args  # who selects by no condition need not wait for it

    class Conditions(Transformer[Any, Condition]):
        """Makes conditions while the text is read, so that nothing recurs."""

        number = v_args(inline=True)(staticmethod(_number))
        compared = v_args(inline=True)(staticmethod(_compared))
        exists = v_args(inline=True)(Exists)
        like = v_args(inline=True)(lambda _, field, text: _like(field, text))
        not_like = v_args(inline=True)(lambda _, field, text: _like(field, text, negated=True))
        negation = v_args(inline=True)(lambda _, part: part.part if isinstance(part, Not) else Not(part))

        def some(self, parts: list[Condition]) -> Condition:
            return Some(tuple(parts))

        def every(self, parts: list[Condition]) -> Condition:
            return Every(tuple(parts))

        def among(self, parts: list[Any]) -> Condition:
            return Comparison(parts[0], "in", _of_one_kind(parts[1:]))

        def not_among(self, parts: list[Any]) -> Condition:
            return Comparison(parts[0], "in", _of_one_kind(parts[1:]), negated=True)

        def field(self, names: list[str]) -> tuple[str, ...]:
            if len(names) > DEEPEST_FIELD:
                raise ConfigError(
                    f"the field {'.'.join(names)[:40]!r}... has {len(names):,} levels, at most "
                    f"{DEEPEST_FIELD} are allowed"
                )
            return tuple(names)

        def plain(self, parts: list[Any]) -> str:
            return str(parts[0])

        def quoted(self, parts: list[Any]) -> str:
            return str(parts[0])[1:-1].replace('""', '"')

        def text(self, parts: list[Any]) -> str:
            return str(parts[0])[1:-1].replace("''", "'")

        def true(self, _: list[Any]) -> bool:
            return True

        def false(self, _: list[Any]) -> bool:
            return False

    return Lark(_GRAMMAR, parser="lalr", transformer=Conditions())


def _number(written: str) -> int | float:
    try:
        whole = int(written)
    except ValueError:
        number = float(written)
        if math.isinf(number):
            raise ConfigError(f"the number {written} is too large") from None
        return number
    if not -(2**63) <= whole < 2**63:
        raise ConfigError(f"the number {written[:40]} has more than 64 bits")
    return whole


def _compared(field: tuple[str, ...], operator: str, value: Value) -> Condition:
    if operator in ("=", "!="):
        return Comparison(field, "in", (value,), negated=operator == "!=")
    if isinstance(value, bool):
        raise ConfigError(f"true and false are compared by = and !=, not by {operator}")
    return Comparison(field, str(operator), (value,))


def _like(field: tuple[str, ...], pattern: str, *, negated: bool = False) -> Condition:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ConfigError(f"the pattern {pattern!r} ends with a backslash that nothing follows: write two")
    return Comparison(field, "like", (pattern,), negated)


def _of_one_kind(values: list[Value]) -> tuple[Value, ...]:
    kinds = {
        str if isinstance(value, str) else bool if isinstance(value, bool) else float for value in values
    }
    if len(kinds) > 1:
        raise ConfigError("values after `in` must be all strings, all numbers, or all true and false")
    return tuple(values)
