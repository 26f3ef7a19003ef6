"""Putting a store's keys elsewhere: all of them in another engine, or fewer of them in the same one."""

from knnstore.store.relocation.choices import Choice, drop_highest
from knnstore.store.relocation.moving import Moved
from knnstore.store.relocation.pruning import (
    Chooser,
    DomainRecords,
    Pruned,
    PrunedDomain,
    merge_chooser,
    random_chooser,
)
from knnstore.store.relocation.relocating import Inspector, Relocation

__all__ = [
    "Choice", "Chooser", "DomainRecords", "Inspector", "Moved", "Pruned", "PrunedDomain", "Relocation",
    "drop_highest", "merge_chooser", "random_chooser",
]  # fmt: skip
