"""The home, the folder that a store is known by: finding it, making it, what is at places outside.

What is outside knows whose it is: see `Owner`.
"""

from knnstore.store.home.creation import check_new, make_store
from knnstore.store.home.home import Home
from knnstore.store.home.owners import Owner, Whose
from knnstore.store.home.places import Place, holds_something

__all__ = ["Home", "Owner", "Place", "Whose", "check_new", "holds_something", "make_store"]
