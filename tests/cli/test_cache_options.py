"""What --cache and its companions make of the settings that are saved."""

from dataclasses import replace

from knnstore import KNNSettings
from knnstore.cli.query import cache_of
from knnstore.lm.settings.parts import CacheSettings

STORE = KNNSettings(temperature=20.0)
SAVED = replace(STORE, cache=CacheSettings(400, 50.0, 0.15))


def test_the_saved_cache_is_used_and_changed_by_what_is_given():
    assert cache_of(STORE, None, None, None, only_store=False) is None
    assert cache_of(SAVED, None, None, None, only_store=False) == SAVED.cache
    assert cache_of(SAVED, 0, None, None, only_store=False) is None
    assert cache_of(SAVED, 100, None, None, only_store=False) == CacheSettings(100, 50.0, 0.15)
    assert cache_of(SAVED, None, 30.0, 0.3, only_store=False) == CacheSettings(400, 30.0, 0.3)
    assert cache_of(STORE, 100, None, None, only_store=False) == CacheSettings(100, 20.0, 0.1)


def test_a_lambda_given_for_the_store_is_that_of_all_retrieval_unless_a_cache_is_given_too():
    assert cache_of(SAVED, None, None, None, only_store=True) is None
    assert cache_of(SAVED, None, None, 0.2, only_store=True) == CacheSettings(400, 50.0, 0.2)
