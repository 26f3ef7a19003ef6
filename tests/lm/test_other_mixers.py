"""Mixers that another package offers: loaded, saved, fitted and tried by `calibrate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from knnstore.errors import ConfigError
from knnstore.lm import Chosen, KNNSettings, SimpleMixer, register_mixer, settings_from_dict, settings_to_dict
from knnstore.lm.calibration import compare_candidates
from knnstore.lm.mixing import registry
from tests.lm.scored import near_and_far


@dataclass(frozen=True)
class Nearer(SimpleMixer):
    """λ where the nearest neighbor is nearer than a limit, else 0."""

    lam: float
    limit: float
    name = "nearer-than"

    def __call__(self, evidence, temperature):
        return Chosen((evidence.distances[:, 0] < self.limit) * self.lam, temperature)

    @classmethod
    def fit(cls, evidence, scored):
        assert torch.equal(scored.distances[evidence.tokens, :1], evidence.nearest.distances)
        limit = float(evidence.nearest.distances.median())
        return evidence.build_settings(float(evidence.temperatures[8]), cls(0.4, limit))


@dataclass(frozen=True)
class Unfit(Nearer):
    name = "unfit"

    @classmethod
    def fit(cls, evidence, scored):
        return None


def fail() -> None:
    raise ImportError("no module named torch3")


@pytest.fixture
def install(monkeypatch) -> Iterator:
    """Install a package whose entry points load these."""

    def installed(*loads) -> None:
        entries = [SimpleNamespace(value="a_package:Mixer", load=load) for load in loads]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)
        registry._load_installed_mixers.cache_clear()

    yield installed
    registry._load_installed_mixers.cache_clear()


def test_the_mixer_of_a_package_is_a_candidate_if_it_goes_with_the_text(install) -> None:
    install(lambda: Nearer, lambda: Unfit)
    found = {one.name: one for one in compare_candidates(near_and_far()).candidates}
    assert isinstance(found["nearer-than"].settings.mixer, Nearer)
    assert found["nearer-than"].held_out.ppl < compare_candidates(near_and_far()).base.ppl
    assert "unfit" not in found
    assert "nearer-than" not in {one.name for one in compare_candidates(near_and_far(), fits={}).candidates}


def test_settings_with_the_mixer_of_a_package_are_saved_while_it_is_installed(install) -> None:
    settings = KNNSettings(k=3, temperature=2.0, mixer=Nearer(0.75, 0.5))
    install(lambda: Nearer)
    values = settings_to_dict(settings)
    assert settings_from_dict(values) == settings
    install()
    with pytest.raises(ConfigError, match=r"no mixer 'nearer-than' is known .*install the package"):
        settings_from_dict(values)


def test_a_mixer_that_cannot_be_loaded_or_has_the_name_of_another_is_named(install) -> None:
    unknown = {"mixer": {"name": "any"}}
    install(fail)
    with pytest.raises(ConfigError, match="a_package:Mixer cannot be loaded: no module named torch3"):
        settings_from_dict(unknown)
    settings_from_dict({"mixer": {"name": "fixed", "lam": 0.5}})  # needs no package
    install(lambda: Nearer, lambda: Nearer)
    with pytest.raises(ConfigError, match="'nearer-than', which is the name of another one"):
        settings_from_dict(unknown)
    with pytest.raises(ConfigError, match="the name of a mixer of knnstore"):
        register_mixer(type("Fixed", (Nearer,), {"name": "fixed"}))
