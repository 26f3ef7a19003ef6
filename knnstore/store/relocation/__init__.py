"""Moving a store's keys to another vector engine, or to a new location of the same engine."""

from knnstore.store.relocation.relocating import Moved, Relocation

__all__ = ["Moved", "Relocation"]
