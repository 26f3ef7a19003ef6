"""Options of a request: what is parsed, and what is refused by name."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from knnstore.errors import ConfigError
from knnstore.lm.hosts import RequestOptions


def test_names_of_other_programs_are_ignored_and_nothing_is_the_default() -> None:
    assert RequestOptions.parse(None) == RequestOptions.parse({"other": object()}) == RequestOptions()


def test_all_options_are_parsed() -> None:
    values = {"knn_domains": "b+a%2Bc+b%2525", "knn_lambda": 1, "knn_temperature": 3.5, "knn_k": 16.0}
    options = RequestOptions.parse(values)
    assert options == RequestOptions(domains=("a+c", "b", "b%25"), lam=1.0, temperature=3.5, k=16)
    assert options.overrides(("b",)).selection.domains == ("b",)
    assert RequestOptions.parse({"knn_domains": ["z", "a+b", "z"]}).domains == ("a+b", "z")
    assert RequestOptions.parse({"knn_probes": 0, "knn_k": 3}) == RequestOptions(k=3, probes=0)
    assert RequestOptions.parse({"knn_off": 1}).is_off
    assert not RequestOptions.parse({"knn_off": False}).is_off
    narrow = RequestOptions(tags=("x",), where="year > 1", only_selected=True, store="s")
    selection = narrow.overrides(None).selection
    assert (selection.tags, selection.where) == (("x",), "year > 1")


@given(
    st.builds(
        RequestOptions,
        domains=st.none() | st.sets(st.text(min_size=1), min_size=1).map(sorted).map(tuple),
        tags=st.none() | st.sets(st.text(min_size=1), min_size=1).map(sorted).map(tuple),
        where=st.none() | st.sampled_from(["year > 1", "a = 'b'"]),
        lam=st.none() | st.floats(0, 1),
        temperature=st.none() | st.floats(0.1, 100),
        k=st.none() | st.integers(1, 99),
        is_off=st.booleans(),
        only_selected=st.booleans(),
        store=st.none() | st.text(),
    )
)
def test_options_survive_the_way_to_another_program(options: RequestOptions) -> None:
    assert RequestOptions.parse(json.loads(json.dumps(options.to_values()))) == options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("knn_lamda", 0.5),
        ("knn_domains", 3),
        ("knn_tags", "a++b"),
        ("knn_where", 3),
        ("knn_where", "year >"),
        ("knn_store", ["a"]),
        ("knn_only_selected", "no"),
        ("knn_domains", ["a", 3]),
        ("knn_domains", []),
        ("knn_domains", "a++b"),
        ("knn_lambda", 1.1),
        ("knn_lambda", "0.5"),
        ("knn_lambda", float("nan")),
        ("knn_lambda", True),
        ("knn_temperature", 0),
        ("knn_temperature", float("inf")),
        ("knn_k", 0),
        ("knn_k", 2.5),
        ("knn_probes", -1),
        ("knn_off", "yes"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name if name != "knn_temperature" else "temperature"):
        RequestOptions.parse({name: value})


def test_k_and_probes_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="knn_k"):
        RequestOptions.parse({"knn_k": 3, "knn_probes": 2})
