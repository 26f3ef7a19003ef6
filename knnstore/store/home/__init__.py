"""The home, the folder that a store is known by: finding it, making it, what is at places outside."""

from knnstore.store.home.creation import make_store
from knnstore.store.home.home import Home
from knnstore.store.home.places import Place, holds_something

__all__ = ["Home", "Place", "holds_something", "make_store"]
