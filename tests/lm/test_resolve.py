"""`resolve`: which settings are in force, in the order that `knnstore.lm.settings.precedence` states."""

import json
import logging
from dataclasses import asdict, replace
from typing import ClassVar

import pytest

import knnstore
from knnstore.errors import ConfigError, CorruptWeightsError
from knnstore.lm import (
    CacheSettings,
    DistributionComponent,
    FixedLambda,
    KNNSettings,
    NGramSettings,
    Overrides,
    Purpose,
    find_outdated_components,
    resolve,
    save_settings,
)
from knnstore.lm.components import registry
from knnstore.lm.hosts import RequestOptions
from knnstore.lm.hosts.step_mixer import HostedSettings
from knnstore.server.scopes import Scope, Scopes
from knnstore.store import SavedSettings, Selection

NEWS, LAW, BOTH = (Selection(domains=domains) for domains in (("news",), ("law",), ("law", "news")))
STORED = {
    "news": [{"id": "a", "text": "w5 w6 w7 w8 w9 w10 w11"}],
    "law": [{"id": "b", "text": "w20 w21 w20 w22 w20 w23 w24 w25"}],
}
WHOLE = KNNSettings(5, 2.0, FixedLambda(0.5), cache=CacheSettings(9, 3.0, 0.2), scoring_only=("cache",))
OF_NEWS = KNNSettings(6, 4.0, FixedLambda(0.25))


@pytest.fixture(scope="module")
def filled(make_lm):
    with make_lm(STORED, max_length=16).store as store:
        store.save_settings(SavedSettings())  # the default was saved with the first documents
        return store.home.path


def fill(settings: KNNSettings, selection: Selection) -> KNNSettings:
    """Return saved settings as `resolve` returns them: with no field unset."""
    return replace(settings, selection=selection, unset=frozenset())


def break_network(store) -> None:
    """Let the whole store's settings name a network whose file is missing."""
    query = {"temperature": 2.0, "mixer": {"name": "fixed", "lam": 0.5}}
    store.save_settings(SavedSettings({**query, "gate": {"weights": f"{'0' * 64}.safetensors"}}))


def test_asked_values_come_before_saved_ones_and_these_before_the_default(lm) -> None:
    store = lm.store
    default = resolve(store)
    assert (default.unset, default.k, default.cache) == (frozenset(), 1024, None)
    assert resolve(store, KNNSettings(selection=NEWS)) == replace(
        default, selection=NEWS
    )  # the whole store's keys set T and λ
    save_settings(store, WHOLE)
    save_settings(store, OF_NEWS, ["news"])
    assert resolve(store) == resolve(store, KNNSettings()) == fill(WHOLE, Selection())
    assert resolve(store, KNNSettings(selection=LAW)) == fill(WHOLE, LAW)
    assert resolve(store, KNNSettings(selection=BOTH)) == fill(WHOLE, BOTH)
    assert resolve(store, KNNSettings(selection=NEWS)) == fill(OF_NEWS, NEWS)
    # A selection by more than domains has the settings of its domains.
    recent = Selection(domains=("news",), where="year > 2000")
    assert resolve(store, KNNSettings(selection=recent)) == fill(OF_NEWS, recent)
    for asked in (KNNSettings(k=3, selection=NEWS), Overrides(k=3, selection=NEWS)):
        assert resolve(store, asked) == replace(fill(OF_NEWS, NEWS), k=3)


class Rows(DistributionComponent):
    """A component that was trained on stored documents."""

    name = "rows"
    default_settings: ClassVar = {"lam": 0.1, "weights": "", "traces": None}

    def distribution(self, reader, contexts, settings, vocabulary):
        raise NotImplementedError


def test_only_selected_counts_nothing_that_other_documents_shaped(lm, monkeypatch) -> None:
    monkeypatch.setitem(registry._registered, "rows", Rows())
    store = lm.store
    alone = {
        selection: resolve(store, KNNSettings(selection=selection), only_selected=True)
        for selection in (NEWS, LAW)
    }
    assert len({one.temperature for one in (*alone.values(), resolve(store))}) == 3
    save_settings(store, WHOLE)
    save_settings(store, OF_NEWS, ["news"])
    assert resolve(store, KNNSettings(selection=LAW), only_selected=True) == alone[LAW]
    assert resolve(store, KNNSettings(selection=NEWS), only_selected=True) == fill(OF_NEWS, NEWS)
    # Saved settings of which nothing is left: the default is that of the domain here too.
    gone = {
        "weights": f"{'0' * 64}.safetensors", "traces": asdict(replace(store.lineage(["law"]), documents=9))
    }  # fmt: skip
    save_settings(store, KNNSettings(lam=0.0, others={"rows": gone}, selection=LAW), ["law"])
    assert find_outdated_components(store, LAW) == ("rows",)
    assert resolve(store, KNNSettings(selection=LAW), only_selected=True) == alone[LAW]
    assert resolve(store, KNNSettings(selection=LAW)) == replace(alone[LAW], **_scale(resolve_default(store)))


def resolve_default(store) -> KNNSettings:
    """Return the derived default of the whole store, whatever is saved."""
    saved = store.settings(())
    store.save_settings(SavedSettings())
    default = resolve(store)
    store.save_settings(saved)
    return default


def _scale(settings: KNNSettings) -> dict[str, object]:
    return {"temperature": settings.temperature, "mixer": settings.mixer}


def test_what_counts_in_scoring_only_is_left_out_of_generation_unless_it_is_asked_for(lm) -> None:
    save_settings(lm.store, WHOLE)

    def components(asked=None, purpose=Purpose.GENERATION):
        return resolve(lm.store, asked, purpose).components

    assert components(None, Purpose.SCORING) == ("cache", "keys")
    assert components() == components(KNNSettings(k=3)) == components(Overrides(k=3)) == ("keys",)
    assert components(WHOLE) == components(fill(WHOLE, Selection())) == ("keys",)
    assert components(KNNSettings(cache=CacheSettings())) == ("cache", "keys")
    assert components(Overrides(cache_lam=0.3)) == ("cache", "keys")


def test_overrides_change_single_values_of_saved_parts(lm) -> None:
    save_settings(lm.store, replace(WHOLE, ngrams=NGramSettings(4, 0.3)))
    stored = resolve(lm.store)

    def find(**values):
        return resolve(lm.store, Overrides(**values))

    assert find() == stored
    assert find(cache_lam=0.4).cache == CacheSettings(9, 3.0, 0.4)
    assert find(cache_size=0, ngram_order=0).components == ("keys",)
    alone = find(lam=0.1)
    assert (alone.components, alone.k, alone.temperature) == (("keys",), 5, 2.0)
    assert find(lam=0.1, cache_lam=0.4).cache == CacheSettings(9, 3.0, 0.4)
    for values, message in (({"k": 2, "probes": 2}, "k or probes, not both"), ({"lam": 1.5}, "lambda")):
        with pytest.raises(ConfigError, match=message):
            Overrides(**values)
    with pytest.raises(ConfigError, match="settings must be KNNSettings"):
        resolve(lm.store, {"k": 3})


def test_a_network_that_cannot_be_used_is_an_error_unless_a_weight_is_asked_for(lm, caplog) -> None:
    default = resolve(lm.store)
    break_network(lm.store)
    scopes = Scopes(lm.store, "m")
    for ask in (
        lambda: resolve(lm.store),
        lambda: resolve(lm.store, KNNSettings(k=3)),
        lambda: resolve(lm.store, Overrides(k=3)),
        lambda: scopes.resolve_settings(Scope(("news",))),
        lambda: knnstore.load(lm.store.home.path, tokenizer=lm.tokenizer, model=lm.base),
    ):
        with pytest.raises(CorruptWeightsError):
            ask()
    for asked in (KNNSettings(lam=0.5), Overrides(lam=0.5)):
        assert resolve(lm.store, asked) == replace(default, mixer=FixedLambda(0.5))
    assert scopes.resolve_settings(Scope(("news",), lam=0.5)).mixer == FixedLambda(0.5)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resolve(lm.store, default_if_unusable=True) == default
    assert "the saved settings are not used" in caplog.text


@pytest.mark.parametrize(
    "scope",
    [
        Scope(("news",)),
        Scope(("law", "news"), only_selected=True),
        Scope(("law", "news")),
        Scope(("news",), tags=("a", "b"), where="id = 'x'", lam=0.5, temperature=2.0, k=3),
        Scope(("news", "gone")),
        Scope(("gone",)),
        Scope(()),
    ],
    ids=str,
)
def test_another_engine_with_the_store_resolves_a_scope_as_the_server_does(lm, scope) -> None:
    save_settings(lm.store, WHOLE)
    scopes, hosted = Scopes(lm.store, "m"), HostedSettings(lm.store)
    options = RequestOptions.parse(json.loads(json.dumps(scopes.build_options(scope).to_values())))
    assert hosted.resolve(options, Purpose.SCORING) == scopes.resolve_settings(scope)
    assert hosted.find_missing_domains(options) == []  # vLLM refuses a request that names one


def test_a_model_resolves_to_the_same_object_until_the_store_changes(lm) -> None:
    save_settings(lm.store, WHOLE)
    asked = KNNSettings(k=3)
    first = lm.resolve_settings(asked)
    generating = lm.resolve_settings(asked, Purpose.GENERATION)
    assert first == resolve(lm.store, asked)
    assert generating == resolve(lm.store, asked, Purpose.GENERATION) != first
    assert lm.resolve_settings(asked) is first
    assert lm.resolve_settings(asked, Purpose.GENERATION) is generating
    assert lm.resolve_settings(first) is first
    assert lm.resolve_settings(first, Purpose.GENERATION) is lm.resolve_settings(first, Purpose.GENERATION)
    save_settings(lm.store, OF_NEWS)
    assert lm.resolve_settings(asked) == replace(fill(OF_NEWS, Selection()), k=3)


def test_search_takes_the_temperature_of_the_store(lm) -> None:
    save_settings(lm.store, OF_NEWS)
    found = lm.search("w5 w6 w7", KNNSettings())
    assert found == lm.search("w5 w6 w7", resolve(lm.store))
    assert found != lm.search("w5 w6 w7", replace(resolve(lm.store), temperature=1e-3))


def test_a_trained_component_goes_with_the_selections_that_reach_its_documents(lm, monkeypatch) -> None:
    monkeypatch.setitem(registry._registered, "rows", Rows())
    rows = {"lam": 0.6, "weights": f"{'0' * 64}.safetensors", "traces": asdict(lm.store.lineage(["law"]))}
    settings = KNNSettings(lam=0.25, others={"rows": rows}, selection=LAW)
    assert settings.trained_components == ("rows",)
    for selection in (NEWS, Selection(tags=("a",)), Selection(documents=("x",))):
        with pytest.raises(ConfigError, match="leaves out documents that the component 'rows'"):
            replace(settings, selection=selection)
    save_settings(lm.store, settings)
    assert resolve(lm.store, KNNSettings(selection=LAW)).components == ("keys", "rows")
    assert resolve(lm.store, KNNSettings(selection=BOTH)).components == ("keys", "rows")
    assert resolve(lm.store, KNNSettings(selection=NEWS)).components == ("keys",)
    assert find_outdated_components(lm.store) == ()
    assert lm.store.info()["trained"] == ["rows of law: ready"]
    with pytest.raises(ConfigError, match="the list of documents that a component was trained on is invalid"):
        KNNSettings(others={"rows": {"traces": {"domains": []}}})
