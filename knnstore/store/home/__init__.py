"""The home, which is the folder of a store: opening it, creating it, and keys that are outside of it.

A store writes its name beside its keys, so that keys outside the home can be recognized; see `Owner`.
"""

from knnstore.store.home.home import Home
from knnstore.store.home.key_places import KeyOwner, Owner, Place, exists_and_is_not_empty
from knnstore.store.home.store_creation import check_new, make_store

__all__ = ["Home", "KeyOwner", "Owner", "Place", "check_new", "exists_and_is_not_empty", "make_store"]
