"""What a condition says, free of its spelling and of SQL.

A comparison is true of a document that has the field with a value of the kind compared with (a string, a
number, or true and false) for which it holds. Of every other document it is false, also where it is negated.
`Not` turns true and false around, so it is true of documents that lack the field.
"""

from dataclasses import dataclass

Value = str | int | float | bool
Field = tuple[str, ...]
"""A name, and below it the names within objects."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field compared with values of one kind."""

    field: Field
    operator: str
    """``in``: one of the values; ``<``, ``<=``, ``>``, ``>=``, ``like``: the only one."""
    values: tuple[Value, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Exists:
    """Whether a document has the field, with any value but null."""

    field: Field


@dataclass(frozen=True, slots=True)
class Not:
    """Whether a condition is false."""

    part: "Condition"


@dataclass(frozen=True, slots=True)
class Every:
    """Whether all conditions are true."""

    parts: "tuple[Condition, ...]"


@dataclass(frozen=True, slots=True)
class Some:
    """Whether a condition is true at least."""

    parts: "tuple[Condition, ...]"


Condition = Comparison | Exists | Not | Every | Some


def fields(condition: Condition) -> tuple[Field, ...]:
    """What it looks at, each once, as they stand there."""
    match condition:
        case Not(part):
            return fields(part)
        case Every(parts) | Some(parts):
            return tuple(dict.fromkeys(field for part in parts for field in fields(part)))
    return (condition.field,)


def depth(condition: Condition) -> int:
    """How many conditions stand within each other."""
    match condition:
        case Not(part):
            return 1 + depth(part)
        case Every(parts) | Some(parts):
            return 1 + max(map(depth, parts))
    return 1
