"""The adapter's parameters: how graphs are built, how far they are searched, and which rows have one."""

from dataclasses import dataclass, fields
from typing import Any

from knnstore.datastore import checked_params
from knnstore.errors import ConfigError

# Measured with keys of a language model (the last FFN's input of a 4-layer GPT-2, dim 256) over technical
# prose, 256 queries of other documents a batch, by hnswlib 0.8 with ef=128 on two busy cores.
# Time is relative to exact search over the same rows; recall is against exact search.
#
#      rows    k=1024: time  recall    k=64: time  recall
#    16 384             4.5    .996           .69    .997
#    32 768             2.3    .995           .44    .989
#    65 536              .8    .994           .16    .995
#   100 000              .9    .993           .17    .997
#   200 000              .36   .992           .08    .993
#
# With ef=200 time at k=64 is 1.4 times as long and recall .999. In some graphs (they differ from run to run,
# for several threads build them) one query in 256 still finds none of its 64 neighbors, in most none does.
_LARGEST_M = 512
_SMALL_SHARE = 8  # a segment has a graph from this fraction of `exact_up_to` on


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, checked.

    Args:
        M: links of a row, twice as many in the lowest layer; more find more and take more memory.
        ef_construction: candidates for the links of a row; more make a better graph, more slowly.
        ef: candidates of a search at least; there are never fewer than the neighbors wanted.
        exact_up_to: rows of a group up to which every neighbor is found, without a graph.
    """

    M: int = 16
    ef_construction: int = 200
    ef: int = 200
    exact_up_to: int = 1 << 16

    @classmethod
    def of(cls, params: dict[str, Any]) -> "Policy":
        """Check the parameters that a user gave.

        Raises:
            ConfigError: one is unknown or has a bad value.
        """
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**checked_params("hnswlib", params, accepted))
        for name, least in (("M", 2), ("ef_construction", 1), ("ef", 1), ("exact_up_to", 0)):
            value = getattr(policy, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"hnswlib: {name} must be an integer >= {least}, got {value!r}")
        if policy.M > _LARGEST_M:
            raise ConfigError(f"hnswlib: M must be at most {_LARGEST_M}, got {policy.M}")
        return policy

    @property
    def of_graph(self) -> dict[str, Any]:
        """What a graph is built with, as a manifest keeps it."""
        return {"hnswlib": {"M": self.M, "ef_construction": self.ef_construction}}

    def indexes(self, group_rows: int) -> bool:
        """Whether a group of so many live rows is searched by graphs."""
        return group_rows > self.exact_up_to

    def has_graph(self, rows: int, group_rows: int) -> bool:
        """Whether a segment of so many rows in a group of so many has a graph."""
        return self.indexes(group_rows) and rows >= self.exact_up_to // _SMALL_SHARE
