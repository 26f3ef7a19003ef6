"""Options of a request: what is parsed, and what is refused by name."""

import pytest

from knnstore.errors import ConfigError
from knnstore.lm.hosts import RequestOptions


def test_names_of_other_programs_are_ignored_and_nothing_is_the_default() -> None:
    assert RequestOptions.parse(None) == RequestOptions.parse({"other": object()}) == RequestOptions()


def test_all_options_are_parsed() -> None:
    values = {"knn_domains": "b+a%2Bc+b%2525", "knn_lambda": 1, "knn_temperature": 3.5, "knn_k": 16.0}
    options = RequestOptions.parse(values)
    assert options == RequestOptions(("a+c", "b", "b%25"), 1.0, 3.5, 16)
    assert options.overrides(("b",)).selection.domains == ("b",)
    assert RequestOptions.parse({"knn_domains": ["z", "a+b", "z"]}).domains == ("a+b", "z")
    assert RequestOptions.parse({"knn_probes": 0, "knn_k": 3}) == RequestOptions(k=3, probes=0)
    assert RequestOptions.parse({"knn_off": 1}).is_off
    assert not RequestOptions.parse({"knn_off": False}).is_off


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("knn_lamda", 0.5),
        ("knn_domains", 3),
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
