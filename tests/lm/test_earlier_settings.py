"""Settings that an earlier version saved, with fields that this version does not have."""

import logging
from dataclasses import asdict, replace

import numpy as np
import pytest

from knnstore.errors import ConfigError
from knnstore.lm import CalibrationRecord, KNNSettings, resolve
from knnstore.lm.components import registry as components
from knnstore.lm.mixing import registry
from knnstore.lm.settings import derive_default, saved
from knnstore.store import KNNStore, SavedSettings
from tests.lm.scored import AllNeighborsLambda

QUERY = {
    "k": 8, "temperature": 4.0, "mixer": {"name": "fixed", "lam": 0.5}, "cache": None, "ngrams": None,
    "gate": None, "substitute": None, "probes": None, "scoring_only": [],
}  # fmt: skip
RECORD = {
    "date": "2026-05-01T10:00:00+00:00", "mixer": "fixed", "documents": 20, "tokens": 4000,
    "text_hash": "0" * 64, "revision": 3, "records": 9000, "base_ppl": 30.0, "knn_ppl": 20.0, "domains": [],
    "skipped": 0.25, "stored": None, "held_out": [], "written": [],
}  # fmt: skip
REMOVED = {
    "skip": {"weights": f"{'0' * 64}.safetensors", "threshold": 0.01},
    "pointers": {"min_pointers": 2, "max_pointers": 1024, "cluster_size": None},
}
"""A value of each setting that is gone."""


@pytest.fixture(scope="module")
def filled(make_lm):
    with make_lm({"news": ["w5 w6 w7 w8 w9 w10 w11"]}, max_length=16).store as store:
        return store.home.path


@pytest.fixture
def store(lm):
    return lm.store


def test_settings_that_are_gone_are_ignored_with_one_warning(store, caplog) -> None:
    saved._warn_of_ignored_settings.cache_clear()
    store.save_settings(SavedSettings({**QUERY, **REMOVED}, RECORD))
    with caplog.at_level(logging.WARNING, "knnstore"):
        found = resolve(store), resolve(store)
    assert found == (KNNSettings(8, 4.0, lam=0.5),) * 2
    (line,) = caplog.messages
    assert all(name in line for name in REMOVED)
    assert "knnstore calibrate" in line
    assert store.verify() == [], "nothing needs the files that they name"
    record = CalibrationRecord.for_selection(store)
    assert record is not None
    assert (record.tokens, record.knn_ppl) == (4000, 20.0)


def test_a_record_without_the_fields_of_later_versions_is_shown(store) -> None:
    early = {
        name: RECORD[name] for name in RECORD if name not in ("domains", "stored", "held_out", "written")
    }
    store.save_settings(SavedSettings(QUERY, early))
    (line,) = store.info()["calibrated"]
    assert line.startswith("for the whole store: fixed, perplexity 30.00 -> 20.00")
    record = CalibrationRecord.for_selection(store)
    assert record is not None
    assert record.domains == ()


def test_a_record_counts_the_growth_of_its_own_domains(store) -> None:
    store.save_settings(SavedSettings(QUERY, {**RECORD, "records": 2}))
    record = CalibrationRecord.for_selection(store)
    assert record is not None
    (news,) = store.domains()
    for domains, expected in (((), news.records / 2), (("news",), news.records / 2), (("law",), 0)):
        assert replace(record, domains=domains).record_growth(store) == expected


def test_settings_whose_mixer_is_gone_are_not_used_unless_it_is_installed(store, caplog, monkeypatch) -> None:
    saved._warn_of_removed_mixer.cache_clear()
    monkeypatch.setattr(saved, "load_plugin_mixers", dict)
    store.save_settings(SavedSettings({**QUERY, "mixer": {"name": "sk-mt"}}, RECORD))
    with caplog.at_level(logging.WARNING, "knnstore"):
        found = resolve(store), resolve(store)
    assert found == (derive_default(store),) * 2
    (line,) = caplog.messages
    assert all(part in line for part in ("'sk-mt'", "knnstore-research", "knnstore calibrate"))
    assert CalibrationRecord.for_selection(store) is None
    monkeypatch.setattr(saved, "load_plugin_mixers", lambda: {"sk-mt": AllNeighborsLambda})
    monkeypatch.setattr(registry, "load_plugin_mixers", lambda: {"sk-mt": AllNeighborsLambda})
    assert isinstance(resolve(store).mixer, AllNeighborsLambda)


def test_settings_that_are_gone_and_had_no_value_are_ignored_silently(store, caplog) -> None:
    store.save_settings(SavedSettings({**QUERY, **dict.fromkeys(REMOVED)}))
    with caplog.at_level(logging.WARNING, "knnstore"):
        assert resolve(store) == KNNSettings(8, 4.0, lam=0.5)
    assert not caplog.messages


def test_a_trained_component_of_an_earlier_version_is_as_one_not_installed(store, monkeypatch) -> None:
    monkeypatch.setattr(components, "_registered", {})
    monkeypatch.setattr(components, "_load_installed_components", dict)
    weights = store.save_weights({"rows": np.zeros(3, np.float32)}, {})
    part = {"lam": 0.6, "weights": weights, "traces": {**asdict(store.lineage()), "domains": []}}
    record = {"substitute": part, "rows": 1, "tokens": 5}
    unused = {**QUERY, "trained_substitute": record}
    store.save_settings(SavedSettings.from_payload({**unused, "substitute": part}))
    with KNNStore.open(store.home.path) as opened:
        assert opened.info()["trained"] == ["substitute of the whole store: ready"]
        assert opened.verify() == []
        with pytest.raises(ConfigError) as former:
            resolve(opened)
    store.save_settings(SavedSettings({**QUERY, "others": {"substitute": part}}))
    with pytest.raises(ConfigError) as now:
        resolve(store)
    assert str(former.value) == str(now.value)
    assert "no component 'substitute' is installed" in str(now.value)
    # One that is not in use needs no package.
    store.save_settings(SavedSettings.from_payload(unused))
    assert resolve(store) == KNNSettings(8, 4.0, lam=0.5)
    assert store.settings().trained == {"substitute": record}
    store.remove_document(next(iter(store.documents())).id)
    assert not list((store.home.path / "weights").iterdir())
    assert store.settings().trained == {"substitute": record}
