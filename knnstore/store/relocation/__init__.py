"""Putting a store's keys elsewhere: in another engine, or written anew in the same one."""

from knnstore.store.relocation.moving import Moved
from knnstore.store.relocation.relocating import Relocation

__all__ = ["Moved", "Relocation"]
