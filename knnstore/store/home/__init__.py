"""The home, the folder that a store is known by: finding it, making it, what is at places outside.

What is outside knows whose it is: see `Owner`.
"""

from knnstore.store.home.home import Home
from knnstore.store.home.key_owners import KeyOwner, Owner
from knnstore.store.home.key_places import Place, exists_and_is_not_empty
from knnstore.store.home.store_creation import check_new, make_store

__all__ = ["Home", "KeyOwner", "Owner", "Place", "check_new", "exists_and_is_not_empty", "make_store"]
