"""The adapter ``none``: the datastore of a store that keeps no keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from knnstore.datastore.arguments import validate_params
from knnstore.datastore.arrays import Capabilities, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.protocol import BATCH_SIZE, Datastore, Mode
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import ConfigError


class KeylessDatastore:
    """A datastore without records and files, for a store that keeps no keys.

    `search` and `add` raise ConfigError. `count` returns 0, `iterate` yields nothing, and the other methods
    do nothing.

    Args:
        dim: number of components of the vectors; only reported by the property `dim`.
        metric: metric of the distances; only reported by the property `metric`.
    """

    def __init__(self, dim: int, metric: Metric) -> None:
        self._dim = dim
        self._metric = metric

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Return a datastore without records. No file is read or created.

        Args:
            location: ignored.
            dim: number of components of a vector; only reported by the property `dim`.
            metric: metric of the distances; only reported by the property `metric`.
            mode: ignored.
            **params: must be empty, because this adapter has no parameters.

        Raises:
            ConfigError: `params` is not empty.
        """
        validate_params("none", params, accepted={})
        return cls(dim, Metric(metric))

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """Metric of the distances, as given to `open`."""
        return self._metric

    @property
    def capabilities(self) -> Capabilities:
        """The features of this datastore, which stores nothing.

        All features that are bool are True, because no operation on an empty datastore can fail. `codes` and
        `coded_from` are None, because no key is compressed.
        """
        return Capabilities(
            exact_search=True, exact_keys=True, persistent=True, shared_writers=True, checks_keys=True
        )

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return 0, the bytes of a record on disk, because no record is ever stored."""
        return 0

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> NoReturn:
        """Raise ConfigError, because this store keeps no keys."""
        self._raise_no_keys()

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Raise ConfigError, because the caller expects neighbors, and this store has no records."""
        self._raise_no_keys()

    def delete(self, ids: IdRanges) -> None:
        """Do nothing, because no record exists."""

    def count(self) -> int:
        """Return 0."""
        return 0

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Return an empty iterator, because no record exists."""
        return iter(())

    def vacuum(self) -> None:
        """Do nothing, because no file exists."""

    def flush(self) -> None:
        """Do nothing, because no file exists."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _raise_no_keys(self) -> NoReturn:
        """Raise ConfigError; the message says how to get a store with keys."""
        raise ConfigError(
            "this store keeps no keys (`knnstore init --key none`), only n-grams: to use keys, make "
            "another store and add the documents to it"
        )


_conforms: type[Datastore] = KeylessDatastore
