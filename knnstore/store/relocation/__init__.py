"""Putting a store's keys elsewhere: all of them in another engine, or fewer of them in the same one."""

from knnstore.store.relocation.choices import Choice, drop_highest
from knnstore.store.relocation.moving import Moved, settle_quietly, unfinished
from knnstore.store.relocation.pruning import (
    Chooser,
    DomainRecords,
    Pruned,
    PrunedDomain,
    merge_chooser,
    random_chooser,
)
from knnstore.store.relocation.relocating import RelocatableStore

__all__ = [
    "Choice", "Chooser", "DomainRecords", "Moved", "Pruned", "PrunedDomain", "RelocatableStore",
    "drop_highest", "merge_chooser", "random_chooser", "settle_quietly", "unfinished",
]  # fmt: skip
