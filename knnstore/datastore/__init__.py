"""The vector side: the `Datastore` protocol and what its implementations and users share.

This package needs numpy alone. Engines are found through `registry`.
"""

from knnstore.datastore import registry
from knnstore.datastore.checks import checked_k, checked_keys, checked_params, checked_records
from knnstore.datastore.protocol import Datastore, Mode, SupportsErase, SupportsOptimize, SupportsVerify
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.types import (
    Capabilities,
    Distances,
    Filter,
    Groups,
    Ids,
    Keys,
    Metric,
    Neighbors,
)

__all__ = [
    "Capabilities",
    "Datastore",
    "Distances",
    "Filter",
    "Groups",
    "IdRanges",
    "Ids",
    "Keys",
    "Metric",
    "Mode",
    "Neighbors",
    "SupportsErase",
    "SupportsOptimize",
    "SupportsVerify",
    "checked_k",
    "checked_keys",
    "checked_params",
    "checked_records",
    "registry",
]
