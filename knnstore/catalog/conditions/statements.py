"""Conditions in SQL: for SQLite by its `json_each`, for PostgreSQL by its operators of JSON.

Names and values are bound, never written into a statement. Text is compared by its code points in both.
"""

import re
from decimal import Decimal
from operator import ge, gt, le, lt
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Numeric,
    Text,
    and_,
    case,
    cast,
    false,
    func,
    literal,
    not_,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.orm import InstrumentedAttribute

from knnstore.catalog.conditions.condition import (
    Comparison,
    Condition,
    Every,
    Exists,
    Not,
    Some,
    Value,
)

Metadata = ColumnElement[Any] | InstrumentedAttribute[Any]

_ORDERS: dict[str, Any] = {"<": lt, "<=": le, ">": gt, ">=": ge}
_KINDS: dict[str, dict[type, tuple[str, ...]]] = {  # what the databases call the kinds of values
    "sqlite": {str: ("text",), float: ("integer", "real"), bool: ("true", "false")},
    "postgresql": {str: ("string",), float: ("number",), bool: ("boolean",)},
}
_LOW, _HIGH = r"\\ud[c-f][0-9a-f]{2}", r"\\ud[89ab][0-9a-f]{2}"
_NO_TEXT = rf"\\u0000|{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}"
"""Escapes of what is no text to PostgreSQL: NUL, and half a surrogate pair."""


def meets(condition: Condition, metadata: Metadata, dialect: str) -> ColumnElement[bool]:
    """Whether the metadata of a row meet a condition; never NULL.

    Args:
        condition: see `parsed`.
        metadata: a column of JSON.
        dialect: ``sqlite`` or ``postgresql``.
    """
    document = _readable(metadata)
    if dialect == "sqlite":  # which takes any value in any column
        is_json = func.json_valid(cast(metadata, Text)) == 1
        document = case((is_json, document), else_=literal("{}"))
        return _written(condition, lambda one: _of_sqlite(document, one))
    whole = cast(document, JSON)
    return _written(condition, lambda one: _of_postgresql(whole, one))


def _written(condition: Condition, test: Any) -> ColumnElement[bool]:
    match condition:
        case Not(part):
            return not_(_written(part, test))
        case Every(parts):
            return and_(*(_written(part, test) for part in parts))
        case Some(parts):
            return or_(*(_written(part, test) for part in parts))
        case _:
            found: ColumnElement[bool] = test(condition)
            return found


def _readable(metadata: Metadata) -> ColumnElement[str]:
    """Metadata as text, with U+FFFD in place of what is no text: one such document would fail all."""
    backslash = "\x01"  # stands for an escaped one, so that every other begins an escape
    text = cast(metadata, Text)
    escaped = func.replace(text, "\\\\", backslash)
    whole = func.regexp_replace(escaped, _NO_TEXT, r"\\ufffd", "g")
    has_escapes = text.contains(r"\u", autoescape=True)  # few have: the others cost less
    return case((has_escapes, func.replace(whole, backslash, "\\\\")), else_=text)


def regexp_replace(text: Any, pattern: str, replacement: str, _global: str) -> Any:
    """PostgreSQL's function of this name, for SQLite, which has none."""
    return re.sub(pattern, replacement, text) if isinstance(text, str) else None


def _of_sqlite(document: ColumnElement[str], test: Comparison | Exists) -> ColumnElement[bool]:
    """Whether a field is there and meets a test: each level of objects is a table of its fields."""
    levels: list[Any] = []
    for _ in test.field:
        inside: Any = document
        if levels:
            inside = case((levels[-1].c.type == "object", levels[-1].c.value))
        levels.append(func.json_each(inside).table_valued("key", "value", "type", joins_implicitly=True))
    at = levels[-1].c
    found = select(literal(1)).select_from(*levels)
    found = found.where(*(level.c.key == name for level, name in zip(levels, test.field, strict=True)))
    if isinstance(test, Exists):
        return found.where(at.type != "null").exists()
    values = [int(value) if isinstance(value, bool) else value for value in test.values]
    if test.operator == "in":
        holds = at.value.in_(values)
    elif test.operator == "like":
        holds = at.value.op("GLOB", is_comparison=True)(_glob(str(values[0])))
    else:
        holds = _ORDERS[test.operator](at.value, values[0])
    is_of_kind = at.type.in_(_KINDS["sqlite"][_kind(test.values[0])])
    return found.where(is_of_kind, not_(holds) if test.negated else holds).exists()


def _of_postgresql(document: Any, test: Comparison | Exists) -> ColumnElement[bool]:
    """Whether a field is there and meets a test: CASE looks at the kind before the value is read."""
    *above, name = test.field
    for part in above:
        document = document[part]
    kind = func.json_typeof(document[name])
    if isinstance(test, Exists):
        return func.coalesce(kind != "null", false())
    compared = _kind(test.values[0])
    text, values = document[name].astext, list[Any](test.values)
    if compared is float:
        values = [Decimal(repr(value)) for value in values]
        written: Any = cast(text, Numeric)
    elif compared is bool:
        written, values = text, [str(value).lower() for value in values]
    else:
        written = text.collate("C")
    if test.operator == "in":
        holds = written.in_(values)
    elif test.operator == "like":
        holds = written.like(values[0], escape="\\")
    else:
        holds = _ORDERS[test.operator](written, values[0])
    is_of_kind = kind.in_(_KINDS["postgresql"][compared])
    return case((is_of_kind, not_(holds) if test.negated else holds), else_=false())


def _kind(value: Value) -> type:
    return str if isinstance(value, str) else bool if isinstance(value, bool) else float


def _glob(pattern: str) -> str:
    """A pattern of `like` as SQLite's GLOB has it, which tells small letters from capitals."""
    parts = re.findall(r"\\?.", pattern, re.DOTALL)  # a backslash goes with the character that it makes plain
    return "".join({"%": "*", "_": "?"}.get(part) or _plain(part[-1]) for part in parts)


def _plain(character: str) -> str:
    return f"[{character}]" if character in "*?[" else character
