"""Settings and the mixers."""

import dataclasses
import json

import pytest
import torch

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import (
    Chosen,
    FixedLambda,
    KNNSettings,
    Retrieved,
    SimpleMixer,
    register_mixer,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.store import SavedSettings, Selection


class HalfWhereNear(SimpleMixer):
    name = "half-where-near"

    def __call__(self, retrieved, temperature):
        return Chosen((retrieved.distances[:, 0] < 1).float() / 2, temperature)


@pytest.mark.parametrize(
    "values",
    [
        {"k": 0},
        {"k": 2.5},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"lam": -0.1},
        {"lam": 1.1},
        {"lam": float("nan")},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values)).replace("lam", "lambda")):
        KNNSettings(**values)


def test_settings_survive_json():
    settings = KNNSettings(
        k=7,
        temperature=3.5,
        lam=0.125,
        selection=Selection(domains=("law", "news"), exclude=("ab12",)),
    )
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(settings)))) == settings
    assert settings_from_dict({}) == KNNSettings()
    with pytest.raises(ConfigError, match="lamda"):
        settings_from_dict({"lamda": 0.5})
    with pytest.raises(ConfigError, match="domain"):
        settings_from_dict({"selection": {"domain": ["law"]}})
    with pytest.raises(ConfigError, match="half-where-near"):
        settings_to_dict(KNNSettings(mixer=HalfWhereNear()))
    assert settings_from_dict({"lambda": 0.125}).mixer == FixedLambda(0.125)
    for mixer in ({"name": "gate"}, {"lam": 0.5}, {"name": "fixed"}, {"name": "fixed", "lam": 0.5, "x": 1}):
        with pytest.raises(ConfigError, match="mixer"):
            settings_from_dict({"mixer": mixer})


@register_mixer
@dataclasses.dataclass(frozen=True)
class Nearer(SimpleMixer):
    """λ where the nearest neighbour is nearer than a limit, else 0."""

    lam: float
    limit: float
    name = "nearer"

    def __call__(self, retrieved, temperature):
        return Chosen((retrieved.distances[:, 0] < self.limit) * self.lam, temperature)


@dataclasses.dataclass(frozen=True)
class Elsewhere(SimpleMixer):
    """Searches where it likes, whatever is selected."""

    part: Selection
    name = "elsewhere"

    def searches(self, selection):
        return (self.part,)

    def __call__(self, retrieved, temperature):
        return Chosen(torch.full((len(retrieved.distances),), 0.5), temperature)


@pytest.fixture(scope="module")
def lm(make_lm):
    stored = {"open": [{"id": "a", "text": "w5 w6 w7 w8"}], "secret": [{"id": "b", "text": "w5 w6 w9 w10"}]}
    return make_lm(stored, max_length=16)


def test_a_mixer_of_ones_own_is_saved_in_a_store_and_in_force_when_it_is_loaded(lm):
    settings = KNNSettings(k=3, temperature=2.0, mixer=Nearer(0.75, 0.5))
    lm.store.save_settings(SavedSettings(settings_to_dict(settings)))
    explained = lm.explain("w5 w6 w20", settings)
    assert [token.lam for token in explained] == [0.75, 0.75, 0.75]
    assert [token.lam for token in lm.explain("w20 w5", settings)] == [0.75, 0.0]
    with (again := knnstore.load(lm.store.home.path)).store:
        assert again.knn == settings
        assert again.explain("w5 w6 w20") == explained


@pytest.mark.parametrize(
    ("selection", "part", "found"),
    [
        (Selection(), Selection(domains=("secret",)), {"b"}),
        (Selection(domains=("open",)), Selection(domains=("secret",)), set()),
        (Selection(domains=("open",)), Selection(domains=("open", "secret")), set()),
        (Selection(domains=("open",)), Selection(), {"a"}),
        (Selection(documents=("a",)), Selection(domains=("secret",)), set()),
        (Selection(documents=("a",)), Selection(), {"a"}),
    ],
)
def test_a_mixer_never_searches_what_is_not_selected(lm, selection, part, found):
    settings = KNNSettings(k=9, mixer=Elsewhere(part), selection=selection)
    explained = lm.explain("w5 w6", settings)
    assert {source.document for token in explained for source in token.neighbors} == found
    assert [token.lam for token in explained] == [0.5 if found else 0.0] * 2


def test_lam_is_short_for_a_fixed_mixer():
    assert KNNSettings(lam=0.5) == KNNSettings(mixer=FixedLambda(0.5))
    assert dataclasses.replace(KNNSettings(lam=0.5), k=3).mixer == FixedLambda(0.5)
    assert not KNNSettings(lam=0).retrieves
    assert KNNSettings(lam=1e-9).retrieves
    assert KNNSettings(mixer=HalfWhereNear()).retrieves


def test_a_fixed_mixer_gives_one_float32_a_query():
    retrieved = Retrieved(torch.zeros(3, 2), torch.zeros(3))
    assert torch.equal(FixedLambda(0.5)(retrieved, 2.0).lam, torch.full((3,), 0.5))
