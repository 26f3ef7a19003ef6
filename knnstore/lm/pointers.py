"""Pointers in place of searches: what was retrieved for one token leads to what to retrieve for the next.

Where a retrieved record predicts the token that then came, the record after it in its document is likely near
the next query (RetoMaton, Alon et al. 2022, https://arxiv.org/abs/2201.12431). With P such pointers::

    |P| >= min_pointers       no search: p_kNN is over P alone, with the true distances to its keys
    else                      a search: p_kNN is over the k nearest and P, each record once

Either set leads on from here. Pointers cost no space, since the next position of a document holds the next
record; so none crosses into another document, or leads to one that was removed. With clusters the first line
is over the k nearest of all records that share a cluster of near keys with one of P.
"""

from dataclasses import dataclass

from knnstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PointerSettings:
    """When pointers take the place of a search.

    Raises:
        ConfigError: a value is out of range.
    """

    min_pointers: int | None = 1
    """So many suffice, >= 1: 1 saves most searches. None searches for every token, and adds the pointers."""

    max_pointers: int = 1024
    """At most so many are followed, those of the nearest records, >= 1."""

    cluster_size: int | None = None
    """How many records a cluster has on average, >= 1; None compares with no others than those pointed to."""

    def __post_init__(self) -> None:
        for name in ("min_pointers", "max_pointers", "cluster_size"):
            value = getattr(self, name)
            if value is None and name != "max_pointers":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.min_pointers is not None and self.min_pointers > self.max_pointers:
            raise ConfigError(
                f"min_pointers, {self.min_pointers}, is above max_pointers, {self.max_pointers}"
            )
