"""p_kNN of all tokens from search results that an engine left on a device such as a GPU (`DeviceSums`)."""

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from knnstore.datastore import DeviceVisits
from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery
from knnstore.lm.mixing.token_sums import count_distinct_tokens
from knnstore.lm.transfers import upload_floats


class DeviceSums:
    """The results of one search for n queries, summed by token over all records of the probed cells.

    A cell is a group of stored records with near keys; a query probes (searches) the cells nearest to it. No
    method waits for the device.

    Args:
        visits: distances and tokens of the records, on the device.
        vocabulary: number of tokens v, the number of columns of `weights`.
        features: number of nearest records in `distances`, >= 1.
    """

    tokens = None
    hits = None

    def __init__(self, visits: DeviceVisits, vocabulary: int, features: int) -> None:
        self._visits, self._vocabulary, self._features = visits, vocabulary, features
        self._weights: dict[float, Tensor] = {}

    @property
    def distances(self) -> Tensor:
        """Distances of the nearest records, ascending, float32, shape (n, m), m >= 1; +inf if missing.

        m is `features` of the constructor, or less if no query was compared with so many records.
        """
        return self._nearest_records[0]

    @cached_property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... records of each query.

        int16, shape (n, r).
        """
        distances, tokens = self._nearest_records
        return count_distinct_tokens(tokens, distances)

    @cached_property
    def _nearest_records(self) -> tuple[Tensor, Tensor]:
        """Distances and tokens of the nearest records, shape (n, m)."""
        count = min(self._features, self._visits.distances.shape[1])
        distances, columns = self._visits.distances.topk(count, largest=False)
        return distances, self._visits.tokens.gather(1, columns).long()

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Compute and keep the results of `weights` for these temperatures, in one pass over the records."""
        if not self._weights.keys() >= set(temperatures):
            at = upload_floats(tuple(temperatures), self._visits.distances.device)
            weights = self._compute_weights(at.expand(len(self._visits.distances), -1))
            self._weights.update(zip(temperatures, weights.unbind(1), strict=True))

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the probability of each token by the records, a softmax of -distance / T over the records.

        Args:
            temperature: T > 0: one value for all queries, or one for each query, shape (n,).

        Returns:
            Float32, shape (n, v). A row sums to 1, or is 0 if nothing was found.
        """
        if isinstance(temperature, Tensor) and temperature.ndim:
            return self._compute_weights(temperature.float()[:, None])[:, 0]
        self.precompute_weights([float(temperature)])
        return self._weights[float(temperature)]

    def select_rows(self, rows: slice | Tensor) -> "DeviceSums":
        """Return the results of some of the queries; `rows` is a slice, indices or a mask."""
        return DeviceSums(self._visits.select_rows(rows), self._vocabulary, self._features)

    def _compute_weights(self, temperatures: Tensor) -> Tensor:
        """Compute the result of `weights` at several temperatures of each query.

        Args:
            temperatures: t temperatures of each of n queries, shape (n, t).

        Returns:
            Float32, shape (n, t, v).
        """
        sums: Tensor = self._visits.sum_by_token(temperatures, self._vocabulary)
        return sums.div_(sums.sum(2, keepdim=True).clamp_(min=LEAST_PROBABILITY))
