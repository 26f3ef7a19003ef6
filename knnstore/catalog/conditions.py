"""Conditions on document metadata: data classes, parser, and translation to SQL.

An example is ``year >= 2020 and (author = 'Ida' or not draft = true)``. The grammar::

    condition   a or b, a and b, not a, (a); `not` binds closest, then `and`
    comparison  FIELD = != < <= > >= VALUE, FIELD [not] in (VALUE, ...), FIELD [not] like STRING, FIELD exists
    field       names joined by dots for nested objects; double quotes allow any name
    value       'text', where '' is a quote; a number; true; false
    like        % matches any characters, _ matches one, a backslash makes the next character literal

A comparison is true if the document has the field, the field's value has the same kind as the compared
value (string, number or boolean), and the operator holds. A comparison is false for every other document,
also if it is negated (``!=``, ``not in``, ``not like``). `Not` inverts the result of a condition, so ``not
year = 2020`` is true for documents without a year.

The SQL uses `json_each` in SQLite and the JSON operators in PostgreSQL. Names and values are bound
parameters, never part of the statement text. Both databases compare text by code points.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from operator import ge, gt, le, lt
from typing import Any

from sqlalchemy import ColumnElement, Numeric, Text, and_, case, cast, false, func, literal, not_, or_, select
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.orm import InstrumentedAttribute

from knnstore.errors import ConfigError

Value = str | int | float | bool
Field = tuple[str, ...]
"""Path of a field: the top-level name, then the names inside nested objects."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Condition that compares a metadata field with values of one kind (strings, numbers or booleans)."""

    field: Field
    """Path of the field."""
    operator: str
    """``in``, ``<``, ``<=``, ``>``, ``>=`` or ``like``. ``in`` is true if the field equals any of `values`;
    the other operators use the only element of `values`."""
    values: tuple[Value, ...]
    """Values to compare with."""
    negated: bool = False
    """True for ``!=``, ``not in`` and ``not like``."""


@dataclass(frozen=True, slots=True)
class Exists:
    """Condition that is true if a document has the field with a value other than null."""

    field: Field
    """Path of the field."""


@dataclass(frozen=True, slots=True)
class Not:
    """Condition that is true if the condition `part` is false."""

    part: "Condition"


@dataclass(frozen=True, slots=True)
class Every:
    """Condition that is true if all conditions in `parts` are true."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class Some:
    """Condition that is true if at least one condition in `parts` is true."""

    parts: "tuple[Condition, ...]"


Condition = Comparison | Exists | Not | Every | Some


def _collect_fields(condition: Condition) -> tuple[Field, ...]:
    """Return the paths of the metadata fields that a condition uses, each once, in order of first use."""
    match condition:
        case Not(part):
            return _collect_fields(part)
        case Every(parts) | Some(parts):
            return tuple(dict.fromkeys(field for part in parts for field in _collect_fields(part)))
    return (condition.field,)


def _compute_nesting_depth(condition: Condition) -> int:
    """Return the nesting depth of a condition: 1 for one comparison, 1 more for each enclosing operator."""
    match condition:
        case Not(part):
            return 1 + _compute_nesting_depth(part)
        case Every(parts) | Some(parts):
            return 1 + max(map(_compute_nesting_depth, parts))
    return 1


EXAMPLE = "year >= 2020 and author = 'Ida'"
LONGEST = 4096
"""Maximum length of a condition in characters."""
DEEPEST = 12
"""Maximum nesting depth of conditions: SQLite's parser stack has 100 entries."""
DEEPEST_FIELD = 63
"""Maximum number of names in a field: SQLite joins at most 64 tables, and each nested object needs one."""

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
    """Check that a value is a string with a valid condition on metadata.

    Args:
        text: the value, for example ``"year >= 2020"``.

    Raises:
        ConfigError: `text` is not a string, has a syntax error, is too long, or is nested too deeply. For a
            syntax error, the message says where it is.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a condition is a string such as {EXAMPLE!r}, not {type(text).__name__}")
    parse_condition(text)


def list_condition_fields(text: str) -> tuple[str, ...]:
    """Return the metadata fields that a condition uses, each once, in order of first use.

    A field is returned as it is written in a condition: names joined by dots, in double quotes if needed.

    Args:
        text: the condition, for example ``"author.name = 'Ida'"``, which gives ``("author.name",)``.

    Raises:
        ConfigError: the condition has a syntax error, is too long, or is nested too deeply.
    """
    return tuple(".".join(map(_quote_field_name, field)) for field in _collect_fields(parse_condition(text)))


def _quote_field_name(name: str) -> str:
    """Return a field name as it must be written in a condition.

    The name is put in double quotes if it is a keyword, begins with a digit, or contains other characters
    than letters, digits and underscores.
    """
    plain = re.fullmatch(r"[^\W\d]\w*", name) and name.lower() not in _WORDS
    return name if plain else '"{}"'.format(name.replace('"', '""'))


@lru_cache(256)
def parse_condition(text: str) -> Condition:
    """Parse the text of a condition on metadata, and return it as nested condition objects.

    The results for the 256 conditions that were used last are cached.

    Args:
        text: the condition, for example ``"year >= 2020 and not draft = true"``.

    Raises:
        ConfigError: the text has a syntax error (the message says where), is too long, or is nested too
            deeply.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"the condition has {len(text):,} characters, at most {LONGEST:,} are allowed")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError("the condition contains a NUL character or is not valid Unicode")
    from lark.exceptions import UnexpectedInput

    try:
        condition: Any = _build_parser().parse(text)
    except UnexpectedInput as error:
        position = error.pos_in_stream
        is_end = getattr(getattr(error, "token", None), "type", "") == "$END"
        place = "its end" if position is None or is_end else repr(text[position : position + 20])
        raise ConfigError(
            f"the condition has a syntax error at {place}: {text[:200]!r}; write it like {EXAMPLE!r}, "
            "with strings in single quotes"
        ) from error
    if _compute_nesting_depth(condition) > DEEPEST:
        raise ConfigError(
            f"the condition is nested more than {DEEPEST} deep: use fewer parentheses and `not`"
        )
    return condition  # type: ignore[no-any-return]


@cache
def _build_parser() -> Any:
    """Return the parser of conditions. The first call builds the parser; later calls return the same parser.

    The parser's method `parse` converts the text of a condition to a `Condition`.
    """
    from lark import Lark, Transformer, v_args  # imported late: most runs parse no condition

    class Conditions(Transformer[Any, Condition]):
        """Builds the condition objects while the text is parsed, by one method for each rule of the grammar.

        So no recursive pass over a parse tree is needed.
        """

        number = v_args(inline=True)(staticmethod(_parse_number))
        compared = v_args(inline=True)(staticmethod(_make_comparison))
        exists = v_args(inline=True)(Exists)
        like = v_args(inline=True)(lambda _, field, text: _make_like(field, text))
        not_like = v_args(inline=True)(lambda _, field, text: _make_like(field, text, negated=True))
        negation = v_args(inline=True)(lambda _, part: part.part if isinstance(part, Not) else Not(part))

        def some(self, parts: list[Condition]) -> Condition:
            """Build the condition "a or b or ..."."""
            return Some(tuple(parts))

        def every(self, parts: list[Condition]) -> Condition:
            """Build the condition "a and b and ..."."""
            return Every(tuple(parts))

        def among(self, parts: list[Any]) -> Condition:
            """Build the condition "FIELD in (VALUE, ...)"; the first part is the field."""
            return Comparison(parts[0], "in", _check_same_kind(parts[1:]))

        def not_among(self, parts: list[Any]) -> Condition:
            """Build the condition "FIELD not in (VALUE, ...)"; the first part is the field."""
            return Comparison(parts[0], "in", _check_same_kind(parts[1:]), negated=True)

        def field(self, names: list[str]) -> tuple[str, ...]:
            """Return the names of a nested field; raises ConfigError if it is nested too deeply."""
            if len(names) > DEEPEST_FIELD:
                raise ConfigError(
                    f"the field {'.'.join(names)[:40]!r}... has {len(names):,} levels, at most "
                    f"{DEEPEST_FIELD} are allowed"
                )
            return tuple(names)

        def plain(self, parts: list[Any]) -> str:
            """Return a field name that is written without quotes."""
            return str(parts[0])

        def quoted(self, parts: list[Any]) -> str:
            """Return a field name that is written in double quotes, without the quotes."""
            return str(parts[0])[1:-1].replace('""', '"')

        def text(self, parts: list[Any]) -> str:
            """Return a string that is written in single quotes, without the quotes."""
            return str(parts[0])[1:-1].replace("''", "'")

        def true(self, _: list[Any]) -> bool:
            """Return the value of the word "true"."""
            return True

        def false(self, _: list[Any]) -> bool:
            """Return the value of the word "false"."""
            return False

    return Lark(_GRAMMAR, parser="lalr", transformer=Conditions())


def _parse_number(digits: str) -> int | float:
    """Parse a number of a condition: return an int if the text is a whole number, else a float.

    Raises:
        ConfigError: the int does not fit into 64 bits with sign, or the float is infinite.
    """
    try:
        whole = int(digits)
    except ValueError:
        number = float(digits)
        if math.isinf(number):
            raise ConfigError(f"the number {digits} is too large") from None
        return number
    if not -(2**63) <= whole < 2**63:
        raise ConfigError(f"the number {digits[:40]} has more than 64 bits")
    return whole


def _make_comparison(field: tuple[str, ...], operator: str, value: Value) -> Condition:
    """Build the comparison of a field with one value.

    Args:
        field: path of the field.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``. ``=`` becomes ``in`` with one value, and
            ``!=`` the negation of this ``in``.
        value: value to compare with.

    Raises:
        ConfigError: a boolean is compared with another operator than ``=`` and ``!=``.
    """
    if operator in ("=", "!="):
        return Comparison(field, "in", (value,), negated=operator == "!=")
    if isinstance(value, bool):
        raise ConfigError(f"true and false can be compared only with = and !=, not with {operator}")
    return Comparison(field, str(operator), (value,))


def _make_like(field: tuple[str, ...], pattern: str, *, negated: bool = False) -> Condition:
    """Build a ``like`` comparison of a field with a pattern.

    Args:
        field: path of the field.
        pattern: pattern with the wildcards ``%`` and ``_``; a backslash makes the next character literal.
        negated: True for ``not like``.

    Raises:
        ConfigError: the pattern ends with a single backslash, after which no character follows.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ConfigError(f"the pattern {pattern!r} ends with a single backslash: write two")
    return Comparison(field, "like", (pattern,), negated)


def _check_same_kind(values: list[Value]) -> tuple[Value, ...]:
    """Return the values in the list after ``in`` as a tuple, if all values have the same kind.

    Raises:
        ConfigError: the values are not all strings, all numbers, or all booleans.
    """
    if len(set(map(_get_value_kind, values))) > 1:
        raise ConfigError("values after `in` must be all strings, all numbers, or all true and false")
    return tuple(values)


Metadata = ColumnElement[Any] | InstrumentedAttribute[Any]

_ORDER_OPERATORS: dict[str, Any] = {"<": lt, "<=": le, ">": gt, ">=": ge}
_JSON_KINDS: dict[str, dict[type, tuple[str, ...]]] = {  # JSON type names in each database
    "sqlite": {str: ("text",), float: ("integer", "real"), bool: ("true", "false")},
    "postgresql": {str: ("string",), float: ("number",), bool: ("boolean",)},
}
_LOW, _HIGH = r"\\ud[c-f][0-9a-f]{2}", r"\\ud[89ab][0-9a-f]{2}"
_INVALID_ESCAPES = rf"\\u0000|{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}"
"""Pattern of the JSON escapes that PostgreSQL rejects in text: NUL and unpaired surrogates."""


def build_condition_clause(condition: Condition, metadata: Metadata, dialect: str) -> ColumnElement[bool]:
    """Translate a condition on metadata to a SQL expression, for the WHERE part of a statement.

    The expression is true for a row whose metadata meet the condition, and false for any other row; it is
    never NULL.

    Args:
        condition: the condition, a result of `parse_condition`.
        metadata: JSON column that holds the metadata.
        dialect: database for which the SQL is built, ``sqlite`` or ``postgresql``.
    """
    document = _replace_invalid_escapes(metadata)
    if dialect == "sqlite":  # SQLite stores any value in any column: invalid JSON counts as an empty object
        is_json = func.json_valid(cast(metadata, Text)) == 1
        document = case((is_json, document), else_=literal("{}"))
        return _translate_condition(condition, lambda test: _translate_for_sqlite(document, test))
    whole = cast(document, JSON)
    return _translate_condition(condition, lambda test: _translate_for_postgresql(whole, test))


def _translate_condition(condition: Condition, test: Any) -> ColumnElement[bool]:
    """Translate a condition to a SQL expression, with AND, OR and NOT for combined conditions.

    Args:
        condition: condition to translate.
        test: function that translates a condition on one field, a `Comparison` or `Exists`, to SQL.
    """
    match condition:
        case Not(part):
            return not_(_translate_condition(part, test))
        case Every(parts):
            return and_(*(_translate_condition(part, test) for part in parts))
        case Some(parts):
            return or_(*(_translate_condition(part, test) for part in parts))
        case _:
            clause: ColumnElement[bool] = test(condition)
            return clause


def _replace_invalid_escapes(metadata: Metadata) -> ColumnElement[str]:
    """Build the SQL expression for the metadata as JSON text without escapes that PostgreSQL rejects.

    In the text, each escape of NUL and of an unpaired surrogate is replaced by the escape of U+FFFD. Without
    this, PostgreSQL would refuse the whole query because of one such escape in one document.

    Args:
        metadata: JSON column that holds the metadata.
    """
    backslash = "\x01"  # placeholder for an escaped backslash: each remaining backslash starts an escape
    text = cast(metadata, Text)
    escaped = func.replace(text, "\\\\", backslash)
    whole = func.regexp_replace(escaped, _INVALID_ESCAPES, r"\\ufffd", "g")
    has_escapes = text.contains(
        r"\u", autoescape=True
    )  # few documents have escapes; the others skip the regular expression
    return case((has_escapes, func.replace(whole, backslash, "\\\\")), else_=text)


def regexp_replace(text: Any, pattern: str, replacement: str, _global: str) -> Any:
    """Replace all matches of a regular expression in a text, and return the new text.

    SQLite calls this function as the SQL function ``regexp_replace``, which PostgreSQL has built in.

    Args:
        text: the text; for a value that is no string, the function returns None.
        pattern: regular expression of Python's module `re`.
        replacement: text to insert for each match.
        _global: ignored; PostgreSQL's function has an argument for flags here.
    """
    return re.sub(pattern, replacement, text) if isinstance(text, str) else None


def _translate_for_sqlite(document: ColumnElement[str], test: Comparison | Exists) -> ColumnElement[bool]:
    """Translate a condition on one field to a SQL expression for SQLite.

    Each level of nested objects becomes a ``json_each`` table in the expression.

    Args:
        document: SQL expression of the metadata as valid JSON text.
        test: condition on one field.
    """
    levels: list[Any] = []
    for _ in test.field:
        inside: Any = document
        if levels:
            inside = case((levels[-1].c.type == "object", levels[-1].c.value))
        levels.append(func.json_each(inside).table_valued("key", "value", "type", joins_implicitly=True))
    field_level = levels[-1].c
    matches = select(literal(1)).select_from(*levels)
    matches = matches.where(*(level.c.key == name for level, name in zip(levels, test.field, strict=True)))
    if isinstance(test, Exists):
        return matches.where(field_level.type != "null").exists()
    values = [int(value) if isinstance(value, bool) else value for value in test.values]
    if test.operator == "in":
        holds = field_level.value.in_(values)
    elif test.operator == "like":
        holds = field_level.value.op("GLOB", is_comparison=True)(_convert_like_to_glob(str(values[0])))
    else:
        holds = _ORDER_OPERATORS[test.operator](field_level.value, values[0])
    is_of_kind = field_level.type.in_(_JSON_KINDS["sqlite"][_get_value_kind(test.values[0])])
    return matches.where(is_of_kind, not_(holds) if test.negated else holds).exists()


def _translate_for_postgresql(document: Any, test: Comparison | Exists) -> ColumnElement[bool]:
    """Translate a condition on one field to a SQL expression for PostgreSQL.

    The expression checks the JSON type of the field before it casts the value, so a cast never fails.

    Args:
        document: SQL expression of the metadata as JSON.
        test: condition on one field.
    """
    *above, name = test.field
    for part in above:
        document = document[part]
    kind = func.json_typeof(document[name])
    if isinstance(test, Exists):
        return func.coalesce(kind != "null", false())
    compared = _get_value_kind(test.values[0])
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
        holds = _ORDER_OPERATORS[test.operator](written, values[0])
    is_of_kind = kind.in_(_JSON_KINDS["postgresql"][compared])
    return case((is_of_kind, not_(holds) if test.negated else holds), else_=false())


def _get_value_kind(value: Value) -> type:
    """Return the kind of a value as a Python type: str, bool, or float for ints and floats."""
    return str if isinstance(value, str) else bool if isinstance(value, bool) else float


def _convert_like_to_glob(pattern: str) -> str:
    """Convert a ``like`` pattern to a pattern for SQLite's operator GLOB.

    GLOB is used because it is case-sensitive; SQLite's LIKE is not.

    Args:
        pattern: pattern with the wildcards ``%`` and ``_``; a backslash makes the next character literal.
    """
    parts = re.findall(r"\\?.", pattern, re.DOTALL)  # keep a backslash together with the character it escapes
    return "".join({"%": "*", "_": "?"}.get(part) or _escape_glob(part[-1]) for part in parts)


def _escape_glob(character: str) -> str:
    """Return a pattern for SQLite's GLOB that matches one character and nothing else."""
    return f"[{character}]" if character in "*?[" else character
