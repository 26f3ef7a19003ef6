"""Moving a store's keys to another engine, or to a new place of the same engine."""

from knnstore.store.relocation.moving import Moved
from knnstore.store.relocation.relocating import Relocation

__all__ = ["Moved", "Relocation"]
