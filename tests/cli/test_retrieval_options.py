"""What the options of a query make of the settings that are saved."""

import pytest
import torch

import knnstore as library
from knnstore import Selection
from knnstore.cli.retrieval_options import Query
from knnstore.lm import CacheSettings, JointGate, KNNSettings, NGramSettings, save_settings
from knnstore.lm.keys import describe_keys
from knnstore.lm.mixing import Network
from knnstore.store import SavedSettings

SAVED = {"size": 400, "temperature": 50.0, "lam": 0.15}


@pytest.fixture
def cache_of(store):
    with library.open(store, "a") as opened:

        def find(saved=SAVED, **given):
            query = {"temperature": 20.0, "mixer": {"name": "fixed", "lam": 0.5}, "cache": saved}
            opened.save_settings(SavedSettings(query))
            return Query(**given).resolve_settings(opened, Selection()).cache

        yield find


def test_the_saved_cache_is_used_and_changed_by_what_is_given(cache_of):
    assert cache_of(None) is None
    assert cache_of() == CacheSettings(400, 50.0, 0.15)
    assert cache_of(cache=0) is None
    assert cache_of(cache=100) == CacheSettings(100, 50.0, 0.15)
    assert cache_of(cache_temperature=30.0, cache_lambda=0.3) == CacheSettings(400, 30.0, 0.3)
    assert cache_of(None, cache=100) == CacheSettings(100, 20.0, 0.1)


def test_a_weight_by_hand_counts_in_place_of_the_gate(store):
    network = Network(torch.zeros(4), torch.ones(4), [0.0])
    with library.open(store, "a") as opened:
        purpose = {**describe_keys(opened.identity), "unit": 1.0, "experts": []}
        gate = JointGate(network.to_weights(purpose))
        save_settings(opened, KNNSettings(gate=gate, ngrams=NGramSettings(), cache=CacheSettings()))

        def find(**given):
            return Query(**given).resolve_settings(opened, Selection()).gate

        assert find() == find(ngrams=0) == find(cache=0) == gate
        assert find(ngram_lambda=0.1) is find(cache_lambda=0.1) is find(lam=0.1) is None


def test_what_counts_in_scoring_only_counts_in_writing_where_it_is_asked_for(store, knnstore):
    with library.open(store, "a") as opened:
        query = {"temperature": 20.0, "mixer": {"name": "fixed", "lam": 0.5}, "cache": SAVED}
        ngrams = {"order": 5, "lam": 0.6}
        saved = {**query, "ngrams": ngrams, "scoring_only": ["cache", "n-grams", "keys"]}
        opened.save_settings(SavedSettings(saved))

        def written(**given):
            return Query(**given).resolve_settings(opened, Selection()).for_writing.components

        assert written() == ()
        alone = "warning: the model generates alone, because text repeats itself more with the store"
        assert alone in knnstore("generate The --max-new-tokens 1").err
        assert alone not in knnstore("generate The --max-new-tokens 1 --lambda 0.5").err
        assert written(cache=100) == written(cache_lambda=0.1) == ("cache",)
        assert written(ngrams=3) == written(ngram_lambda=0.1) == ("n-grams",)
        assert written(k=3) == written(temperature=3.0) == written(lam=0.1) == ("keys",)
        assert written(cache=0, ngrams=0) == ()
        assert Query().resolve_settings(opened, Selection()).components == ("cache", "n-grams", "keys")


def test_saved_n_grams_are_used_and_changed_by_what_is_given(store):
    with library.open(store, "a") as opened:

        def find(**given):
            return Query(**given).resolve_settings(opened, Selection()).ngrams

        assert find() is None
        assert find(ngrams=3) == NGramSettings(3)
        query = {
            "temperature": 20.0,
            "mixer": {"name": "fixed", "lam": 0.5},
            "ngrams": {"order": 5, "lam": 0.6},
        }
        opened.save_settings(SavedSettings(query))
        assert find() == NGramSettings(5, 0.6)
        assert find(ngrams=0) is None
        assert find(ngram_lambda=0.1) == NGramSettings(5, 0.1)
        query["ngrams"]["by_length"] = [0.1, 0.9]
        opened.save_settings(SavedSettings(query))
        assert find() == NGramSettings(5, 0.6, (0.1, 0.9))
        assert find(ngrams=4) == NGramSettings(4, 0.6, (0.1, 0.9))
        assert find(ngram_lambda=0.1) == NGramSettings(5, 0.1)
        assert find(lam=0.5) is None
        assert find(lam=0.5, ngrams=4) == NGramSettings(4, 0.6, (0.1, 0.9))


def test_a_lambda_given_for_the_store_is_that_of_all_retrieval_unless_a_cache_is_given_too(cache_of):
    assert cache_of(lam=0.5) is None
    assert cache_of(lam=0.5, cache_lambda=0.2) == CacheSettings(400, 50.0, 0.2)
