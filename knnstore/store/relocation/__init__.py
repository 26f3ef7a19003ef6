"""Moving a store's keys to another vector engine, or to a new location of the same engine."""

from knnstore.store.relocation.moving import Moved
from knnstore.store.relocation.relocating import Relocation

__all__ = ["Moved", "Relocation"]
