"""From a record to those that come after it, and to those near them."""

from knnstore.store.pointers.clusters import Clusters
from knnstore.store.pointers.following import follow

__all__ = ["Clusters", "follow"]
