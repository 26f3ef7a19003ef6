"""Projection of keys to fewer dimensions: PCA, fitted once on a sample of keys when a store is made.

For the metric L2 the directions are eigenvectors of the covariance, which preserve as much as possible of the
squared distances between keys. For inner products they are eigenvectors of the second moment, and no mean is
subtracted, because a mean would change the order of the inner products. A projection to as many dimensions as
the keys have preserves all distances.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Metric
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.store import Identity, Reader, Weights

_ROWS = 4_096
"""Number of keys in a chunk when the covariance is computed."""

_KEYS_PER_DIRECTION = 30  # with fewer keys the directions overfit the sample
_KEYS_ENOUGH = 16_384  # enough for any number of directions: half of KEYS_FITTED_ON


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear map of keys to fewer dimensions."""

    mean: Tensor
    """Vector that is subtracted from each key first, float32, shape (d,); zeros for inner products."""
    matrix: Tensor
    """The directions as orthonormal columns, float32, shape (d, dim)."""

    def __call__(self, keys: Tensor) -> Tensor:
        """Project keys, in float32.

        Args:
            keys: shape (..., d).

        Returns:
            float32, shape (..., dim), on the keys' device.

        Raises:
            ConfigError: the keys have another number of components than d.
        """
        if keys.shape[-1] != len(self.mean):
            raise ConfigError(f"the store projects keys of {len(self.mean)} components, got {keys.shape[-1]}")
        projected: Tensor = (keys.float() - self.mean.to(keys.device)) @ self.matrix.to(keys.device)
        return projected

    def weights(self, metadata: Mapping[str, Any]) -> Weights:
        """Return the tensors of this projection together with metadata, as a file of weights to save."""
        return Weights({"mean": self.mean.numpy(), "matrix": self.matrix.numpy()}, metadata)

    @classmethod
    def of(cls, store: Reader) -> Self | None:
        """Load the projection of a store's keys; None if the store does not project its keys.

        Raises:
            CorruptWeightsError: the file of the projection is missing or damaged.
            FingerprintMismatchError: the projection was fitted for the keys of another store.
        """
        identity = store.identity
        if identity.projection is None:
            return None
        weights, expected = store.load_weights(identity.projection), described(identity)
        found = {name: weights.metadata.get(name) for name in expected}
        mean, matrix = (torch.from_numpy(weights.tensors[name]) for name in ("mean", "matrix"))
        if found != expected or matrix.shape[1] != identity.dim:
            raise FingerprintMismatchError(
                f"the projection {identity.projection} is for {found}, the store's keys are {expected}: "
                "restore the home's folder `weights` from a backup"
            )
        return cls(mean, matrix)


def described(identity: Identity) -> dict[str, Any]:
    """Return the metadata that must match between a projection and its store: model, key, metric and dim."""
    return {
        "model": identity.model_fingerprint.partition(":")[0],
        "key": identity.key,
        "metric": identity.metric,
        "dim": identity.dim,
    }


def fit_projection(
    keys: Keys, dim: int, metric: str = Metric.L2, *, keys_per_direction: int = _KEYS_PER_DIRECTION
) -> tuple[Projection, float]:
    """Fit a projection to the leading principal components of a sample of keys.

    Args:
        keys: the sample, float32, shape (n, d).
        dim: number of directions, 1 to d.
        metric: ``l2`` or ``ip``.
        keys_per_direction: least number of keys for each direction; 16,384 keys are enough for any `dim`.

    Returns:
        The projection, and the fraction of the variance (for ``ip``: of the squared norms) that it preserves,
        0 to 1.

    Raises:
        ConfigError: `dim` is out of range, or the sample has too few keys for `dim`.
    """
    count, width = keys.shape
    if not 1 <= dim <= width:
        raise ConfigError(f"the keys have {width} components: dim must be between 1 and {width}, got {dim}")
    needed = max(dim, min(keys_per_direction * dim, _KEYS_ENOUGH))
    if count < needed:
        raise ConfigError(
            f"{dim} components need a sample of at least {needed:,} tokens, it has {count:,}: give more text "
            "or fewer components"
        )
    mean: NDArray[np.float64] = np.zeros(width)
    if metric == Metric.L2:
        mean = keys.mean(axis=0, dtype=np.float64)
    moment = np.zeros((width, width))
    for start in range(0, count, _ROWS):
        part = keys[start : start + _ROWS] - mean
        moment += part.T @ part
    values, vectors = np.linalg.eigh(moment)  # ascending
    matrix = np.ascontiguousarray(vectors[:, ::-1][:, :dim], np.float32)
    kept = values[::-1][:dim].sum() / max(values.sum(), np.finfo(np.float64).tiny)
    return Projection(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(matrix)), float(kept)
