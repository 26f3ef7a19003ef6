"""Conditions on metadata: what SQL finds is what ten lines of Python find, whatever names and values hold."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text as sql

from knnstore.catalog import Catalog, CatalogWriter, NewDocument, check_condition, list_condition_fields
from knnstore.catalog.conditions import parse_condition
from knnstore.errors import ConfigError

Make = Callable[..., NewDocument]

TEXTS = [
    "", "a", "B", "ab", "Ab", "a%b", "a_b", "a*?[b]", "\\", "it's", '"', "é", "日本🦊", "2020", "true",
    "null", "'; DROP TABLE knnstore_documents; --", "') OR 1=1 --", "$.a", "\\u0000", ":x %(x)s ?", "x" * 99,
]  # fmt: skip
NAMES = ["a", "b", "Año", 'q"uote', "", "$.a", "0", "a.b", "'; --", "\\u00e9", "🦊", "not"]
NO_TEXT = ["a\0b", "\0", "half \ud83e", "\udd8a\ud83e", "\\\0"]

names = st.sampled_from(NAMES)
texts = st.sampled_from(TEXTS) | st.text("abA%_\\é🦊", max_size=3)
numbers = st.integers(-3, 3) | st.sampled_from([2020, 2**53, -0.5, 0.1, 1e30, 2.5e-7])
scalars = texts | numbers | st.booleans()
values = st.recursive(
    st.none() | scalars | st.sampled_from(NO_TEXT) | st.sampled_from([2**70, 1e308, [1], {}]),
    lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)
fields = st.lists(names, min_size=1, max_size=2)
kinds = st.sampled_from([texts, numbers, st.booleans()])
conditions = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(["=", "!="]), fields, st.tuples(scalars)),
        st.tuples(st.sampled_from(["<", "<=", ">", ">="]), fields, st.tuples(texts | numbers)),
        st.tuples(
            st.sampled_from(["in", "not in"]),
            fields,
            kinds.flatmap(lambda kind: st.lists(kind, min_size=1, max_size=3)),
        ),
        st.tuples(
            st.sampled_from(["like", "not like"]), fields, st.tuples(texts.map(lambda t: t.rstrip("\\")))
        ),
        st.tuples(st.just("exists"), fields),
    ),
    lambda inner: st.tuples(st.just("not"), inner) | st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    max_leaves=4,
)
some = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip


def written(condition: Any) -> str:
    """A condition as a user writes it."""
    operator, *parts = condition
    if operator in ("and", "or"):
        return f"({written(parts[0])} {operator} {written(parts[1])})"
    if operator == "not":
        return f"not ({written(parts[0])})"
    quoted = ['"{}"'.format(name.replace('"', '""')) for name in parts[0]]
    if operator == "exists":
        return f"{'.'.join(quoted)} exists"
    literals = [
        "'{}'".format(one.replace("'", "''")) if isinstance(one, str) else str(one).lower()
        for one in parts[1]
    ]
    value = f"({', '.join(literals)})" if operator.endswith("in") else literals[0]
    return f"{'.'.join(quoted)} {operator} {value}"


def is_met(condition: Any, metadata: Any) -> bool:
    """The evaluator."""
    operator, *parts = condition
    if operator in ("and", "or"):
        return (all if operator == "and" else any)(is_met(part, metadata) for part in parts)
    if operator == "not":
        return not is_met(parts[0], metadata)
    for name in parts[0]:
        metadata = metadata.get(name) if isinstance(metadata, dict) else None
    kind = {bool: bool, int: float, float: float, str: str}.get(type(metadata))
    if (
        operator == "exists"
        or kind is not {bool: bool, int: float, float: float, str: str}[type(parts[1][0])]
    ):
        return operator == "exists" and metadata is not None
    tests: dict[str, Callable[[Any, Any], bool]] = {
        "=": lambda x, y: x == y[0], "!=": lambda x, y: x != y[0], "<": lambda x, y: x < y[0],
        "<=": lambda x, y: x <= y[0], ">": lambda x, y: x > y[0], ">=": lambda x, y: x >= y[0],
        "in": lambda x, y: x in y, "not in": lambda x, y: x not in y,
        "like": lambda x, y: bool(pattern(y[0]).fullmatch(x)),
        "not like": lambda x, y: not pattern(y[0]).fullmatch(x),
    }  # fmt: skip
    if kind is str:  # what is no text is compared as U+FFFD
        metadata = re.sub("[\0\ud800-\udfff]", "\ufffd", metadata)
    return tests[operator](metadata, parts[1])


def pattern(like: str) -> re.Pattern[str]:
    parts = re.findall(r"\\.|.", like, re.DOTALL)
    special = {"%": ".*", "_": "."}
    return re.compile("".join(special.get(part) or re.escape(part[-1]) for part in parts), re.DOTALL)


@given(
    st.lists(st.dictionaries(names, values, max_size=4), min_size=1, max_size=12),
    st.lists(conditions, min_size=1, max_size=12),
)
@some
def test_sql_finds_what_an_evaluator_finds(
    catalog: Catalog, writer: CatalogWriter, document: Make, documents: list[dict[str, Any]], asked: list[Any]
) -> None:
    placed = writer.insert_pending_documents(
        [document(str(at), metadata=one) for at, one in enumerate(documents)]
    )
    writer.make_documents_live([one.row for one in placed])
    for condition in asked:
        found = set(catalog.rows_where(written(condition), [placed[0].group]))
        expected = {
            one.row for one, metadata in zip(placed, documents, strict=True) if is_met(condition, metadata)
        }
        assert found == expected, written(condition)
    writer.mark_as_deleting([one.row for one in placed])
    writer.delete_documents([one.row for one in placed])


@given(conditions)
@some
def test_fields_are_named_as_one_writes_them(condition: Any) -> None:
    def looked_at(operator: str, *parts: Any) -> set[tuple[str, ...]]:
        below = parts if operator in ("and", "or", "not") else ()
        return set().union(*(looked_at(*part) for part in below)) if below else {tuple(parts[0])}

    named = list_condition_fields(written(condition))
    assert len(named) == len(set(named))
    assert {parse_condition(f"{field} exists").field for field in named} == looked_at(*condition)


LIKE = [
    ("Ab", "a_", False), ("Ab", "A_", True), ("Ab", "%B", False), ("a*b", "a*b", True), ("axb", "a*b", False),
    ("a?b", "a?b", True), ("axb", "a?b", False), ("[ab]", "[ab]", True), ("a", "[ab]", False),
    ("a%b", "a\\%b", True), ("axb", "a\\%b", False), ("a\\b", "a\\\\b", True), ("日本", "__", True),
    ("", "%", True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("text", "like", "matches"), LIKE)
def test_like_tells_small_letters_from_capitals_and_takes_nothing_else_for_special(
    text: str, like: str, matches: bool, catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    (placed,) = writer.insert_pending_documents([document("a", metadata={"a": text})])
    writer.make_documents_live([placed.row])
    assert bool(catalog.rows_where(f"a like '{like}'", [placed.group])) == matches
    assert bool(catalog.rows_where(f"a not like '{like}'", [placed.group])) != matches


@pytest.mark.slow
def test_deep_and_long_conditions_are_answered_or_refused(
    catalog: Catalog, writer: CatalogWriter, document: Make
) -> None:
    (placed,) = writer.insert_pending_documents(
        [document("a", metadata={"a": 1, "deep": {"er": {"still": "x"}}})]
    )
    writer.make_documents_live([placed.row])
    alternating = "a = 1"
    for _ in range(5):
        alternating = f"not (a = 2 or {alternating})"
    for condition in (
        alternating.replace("not (a = 2 or a = 1)", "a = 1"),
        " and ".join(["a = 1"] * 300),
        "(" * 1000 + "a = 1" + ")" * 1000,
        "not " * 1000 + "a = 1",
        f"a in ({', '.join(map(str, range(600)))})",
        "deep.er.still like 'x%'",
        "A exists or a >= .5",
    ):
        assert catalog.rows_where(condition, [placed.group]) == [placed.row]
    assert catalog.rows_where("a = 1", []) == []
    for condition in ("a = 1 and " * 410 + "a = 1", "not (a = 1 or " * 20 + "b = 1" + ")" * 20):
        with pytest.raises(ConfigError):
            catalog.rows_where(condition, [placed.group])


@pytest.mark.slow
def test_deep_fields_are_answered_or_refused(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    nested: Any = 1
    for _ in range(63):
        nested = {"a": nested}
    (placed,) = writer.insert_pending_documents([document("a", metadata=nested)])
    writer.make_documents_live([placed.row])
    deepest = ".".join(["a"] * 63) + " = 1"
    for condition in (deepest, " and ".join([deepest] * 20)):
        assert catalog.rows_where(condition, [placed.group]) == [placed.row]
    for levels in (64, 65, 200, 1000):
        for condition in (
            ".".join(["a"] * levels) + " = 1",
            ".".join(['"a"'] * (levels // 2 + 32)) + " exists",
        ):
            with pytest.raises(ConfigError, match="levels, at most 63"):
                catalog.rows_where(condition, [placed.group])


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("", "its end"),
        ("year >=", "its end"),
        ("year >= 2020 and", "its end"),
        ('author = "Ida"', "strings in single quotes"),
        ("year = null", "'null'"),
        ("year = 2020; DROP TABLE knnstore_documents", "'; DROP"),
        ("year in (1, 'a')", "all strings, all numbers"),
        ("draft < true", "only with = and !="),
        ("a like 'x\\'", "backslash"),
        ("a = 9223372036854775808", "64 bits"),
        ("a = 1e999", "too large"),
        ("a = 'x\0'", "NUL"),
        ("a = '\ud83e'", "Unicode"),
        (7, "not int"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(condition: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        check_condition(condition)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_damaged_metadata_have_no_fields(catalog: Catalog, writer: CatalogWriter, document: Make) -> None:
    if catalog.sql.dialect.name != "sqlite":
        pytest.skip("PostgreSQL takes no other value in a column of JSON")
    placed = writer.insert_pending_documents([document(str(at), metadata={"a": 1}) for at in range(3)])
    writer.make_documents_live([one.row for one in placed])
    with catalog.sql.begin() as connection:
        for one, damaged in zip(placed, ("{half", b"\xff\xfe"), strict=False):
            statement = sql("UPDATE knnstore_documents SET metadata = :value WHERE id = :row")
            connection.execute(statement, {"value": damaged, "row": one.row})
    assert catalog.rows_where("a = 1", [placed[0].group]) == [placed[2].row]
    assert catalog.rows_where("not a = 1", [placed[0].group]) == [placed[0].row, placed[1].row]
