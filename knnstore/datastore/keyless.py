"""No engine at all: what stands in the place of one where a store keeps no keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from knnstore.datastore.arguments import checked_params
from knnstore.datastore.arrays import Capabilities, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.protocol import BATCH_SIZE, Datastore, Mode
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import ConfigError


class KeylessDatastore:
    """Holds nothing, and writes no file: so there is nothing to remove, to check and to erase.

    No other adapter is like it, for it takes no records: adding and searching say why.

    Args:
        dim: number of components of the vectors that it does not keep.
        metric: how their distances would be measured.
    """

    def __init__(self, dim: int, metric: Metric) -> None:
        self._dim = dim
        self._metric = metric

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open nothing, wherever that is; no parameters are accepted."""
        checked_params("none", params, accepted={})
        return cls(dim, Metric(metric))

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """How distances are measured."""
        return self._metric

    @property
    def capabilities(self) -> Capabilities:
        """Nothing is kept exactly, for ever, and whole."""
        return Capabilities(
            exact_search=True, exact_keys=True, persistent=True, shared_writers=True, checks_keys=True
        )

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """See `SupportsSize.record_size`: a record takes nothing."""
        return 0

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> NoReturn:
        """Refuse records."""
        self._refuse()

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Refuse to search: whoever asks expects neighbors."""
        self._refuse()

    def delete(self, ids: IdRanges) -> None:
        """Do nothing: no record is there."""

    def count(self) -> int:
        """How many records there are: none."""
        return 0

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield nothing."""
        return iter(())

    def vacuum(self) -> None:
        """Do nothing: there is no file."""

    def flush(self) -> None:
        """Do nothing: there is no file."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "this store keeps no keys (`knnstore init --key none`), it knows its text by n-grams alone: for "
            "what needs keys make another store and add the documents to it"
        )


_conforms: type[Datastore] = KeylessDatastore
