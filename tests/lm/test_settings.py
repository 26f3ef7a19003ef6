"""Settings: their values, to JSON and back, and what a mixer of one's own may do."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import (
    CacheSettings,
    Chosen,
    DomainWeights,
    FixedLambda,
    KNNSettings,
    NGramSettings,
    SimpleMixer,
    register_mixer,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.store import SavedSettings, Selection

PHRASES = Selection(domains=("phrases",))
SETTINGS = [
    KNNSettings(),
    KNNSettings(k=7, temperature=3.5, lam=0.125, selection=Selection(("law", "news"), exclude=("ab12",))),
    KNNSettings(16, 3.0, DomainWeights(("a", "b"), (0.25, 0.5), (1.0, 2.0))),
    KNNSettings(cache=CacheSettings(size=6, temperature=15.0, lam=0.3)),
    KNNSettings(lam=0.25, selection=PHRASES),
    KNNSettings(cache=CacheSettings(), scoring_only=("cache", "keys")),
]


@pytest.mark.parametrize("scalar", [np.array, torch.tensor])
def test_scalars_of_numpy_and_torch_are_numbers(scalar):
    def make(number):
        ngrams = NGramSettings(number(3), number(0.25), by_length=[number(0.5)])
        cache = CacheSettings(number(6), number(15.0), number(0.5))
        kept = {"temperature": number(3.5), "lam": number(0.125), "ngrams": ngrams, "cache": cache}
        return [KNNSettings(k=number(7), **kept), KNNSettings(probes=number(7), **kept)]

    made = make(scalar)
    assert made == make(lambda number: number)
    assert [settings_from_dict(json.loads(json.dumps(settings_to_dict(one)))) for one in made] == made
    for wrong in scalar(2.0), scalar(0), scalar([7, 8]):
        with pytest.raises(ConfigError, match="k must be an integer of at least 1"):
            KNNSettings(k=wrong)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_survive_json(settings):
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(settings)))) == settings


def test_what_was_not_saved_has_its_default():
    assert settings_from_dict({}) == KNNSettings()
    assert settings_from_dict({"lambda": 0.125}).mixer == FixedLambda(0.125)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        *((KNNSettings, {"k": k}, "k must") for k in (0, 2.5)),
        *((KNNSettings, {"temperature": t}, "temperature") for t in (0.0, math.nan, math.inf)),
        *((KNNSettings, {"lam": lam}, "lambda") for lam in (-0.1, 1.1, math.nan)),
        (KNNSettings, {"scoring_only": ["cash"]}, "no component 'cash'; known: cache, n-grams, keys"),
        (CacheSettings, {"size": 0}, "the cache's size"),
        (CacheSettings, {"temperature": 0.0}, "the cache's temperature"),
        (CacheSettings, {"lam": 1.5}, "the cache's lambda"),
        *(
            (make, {name: "x"}, f"{shown} must be a number, got 'x'")
            for make in (KNNSettings, CacheSettings, NGramSettings, FixedLambda)
            for name, shown in (("lam", "lambda"), ("temperature", "temperature"))
            if name == "lam" or make in (KNNSettings, CacheSettings)
        ),
        *(
            (NGramSettings, {"by_length": value}, "by_length must be a list of numbers, got")
            for value in (("x",), 0.5, (None,))
        ),
        (DomainWeights, {"domains": ("a",), "lambdas": ("x",)}, "lambdas must be a list of numbers, got"),
    ],
)
def test_values_out_of_range_are_refused(make, values, message):
    with pytest.raises(ConfigError, match=message):
        make(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lamda": 0.5}, "lamda"),
        ({"selection": {"domain": ["law"]}}, "domain"),
        ({"mixer": {"name": "gate"}}, "mixer"),
        ({"mixer": {"lam": 0.5}}, "mixer"),
        ({"mixer": {"name": "fixed"}}, "mixer"),
        ({"mixer": {"name": "fixed", "lam": 0.5, "x": 1}}, "mixer"),
        ({"cache": {"size": 0}}, "the cache's size"),
        ({"cache": {"reach": 3}}, "the settings of CacheSettings are invalid: .*reach"),
        ({"rows": {"weights": "x"}}, "unknown setting 'rows'"),
        ({"rows": {"weights": "x", "traces": {}}}, "no component 'rows' is installed"),
    ],
)
def test_what_was_not_saved_by_settings_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        settings_from_dict(values)


def test_probes_decide_k_and_k_decides_probes():
    unset = {"k", "probes"}
    assert KNNSettings().unset >= unset
    assert not KNNSettings(probes=4).unset & unset
    assert not KNNSettings(k=4).unset & unset
    assert KNNSettings(probes=None).unset & unset == {"k"}


def test_lam_is_short_for_a_fixed_mixer():
    assert KNNSettings(lam=0.5) == KNNSettings(mixer=FixedLambda(0.5))
    assert dataclasses.replace(KNNSettings(lam=0.5), k=3).mixer == FixedLambda(0.5)
    assert not KNNSettings(lam=0).retrieves
    assert KNNSettings(lam=1e-9).retrieves
    assert KNNSettings(mixer=Nearer(0.5, 20.0)).retrieves


# -- mixers of one's own


@register_mixer
@dataclasses.dataclass(frozen=True)
class Nearer(SimpleMixer):
    """λ where the nearest neighbor is nearer than a limit, else 0."""

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


def test_settings_with_a_mixer_that_is_not_registered_are_not_saved():
    with pytest.raises(ConfigError, match=r"'elsewhere' cannot be saved: call .*register_mixer"):
        settings_to_dict(KNNSettings(mixer=Elsewhere(PHRASES)))


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
