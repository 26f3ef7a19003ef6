"""Settings and the mixers."""

import dataclasses
import json

import pytest
import torch

from knnstore.errors import ConfigError
from knnstore.lm.mixing.fixed import FixedLambda
from knnstore.lm.mixing.mixer import MIXERS, Chosen, Retrieved
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import Selection


class HalfWhereNear:
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
        KNNSettings(mixer=HalfWhereNear()).to_dict()
    assert settings_from_dict({"lambda": 0.125}).mixer == FixedLambda(0.125)
    for mixer in ({"name": "gate"}, {"lam": 0.5}, {"name": "fixed"}, {"name": "fixed", "lam": 0.5, "x": 1}):
        with pytest.raises(ConfigError, match="mixer"):
            settings_from_dict({"mixer": mixer})


@dataclasses.dataclass(frozen=True)
class Nearer:
    """λ where the nearest neighbour is nearer than a limit, else 0."""

    lam: float
    limit: float
    name = "nearer"

    def __call__(self, retrieved, temperature):
        return Chosen((retrieved.distances[:, 0] < self.limit) * self.lam, temperature)


def test_a_mixer_needs_one_entry_to_be_saved(monkeypatch):
    monkeypatch.setitem(MIXERS, "nearer", Nearer)
    settings = KNNSettings(k=3, mixer=Nearer(0.5, 20.0))
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(settings)))) == settings


def test_lam_is_short_for_a_fixed_mixer():
    assert KNNSettings(lam=0.5) == KNNSettings(mixer=FixedLambda(0.5))
    assert dataclasses.replace(KNNSettings(lam=0.5), k=3).mixer == FixedLambda(0.5)
    assert not KNNSettings(lam=0).retrieves
    assert KNNSettings(lam=1e-9).retrieves
    assert KNNSettings(mixer=HalfWhereNear()).retrieves


def test_a_fixed_mixer_gives_one_float32_a_query():
    retrieved = Retrieved(torch.zeros(3, 2), torch.zeros(3))
    assert torch.equal(FixedLambda(0.5)(retrieved, 2.0).lam, torch.full((3,), 0.5))
