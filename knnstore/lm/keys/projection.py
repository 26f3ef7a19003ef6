"""Keys in fewer dimensions: principal component analysis, fitted once on a sample when a store is made.

For L2 the components are those of the covariance, which keep the most of the squared distances between
keys; for inner products those of the second moment, without a mean to subtract, which would change
their order. With as many dimensions as the keys have, no distance changes.
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
"""Keys that are multiplied at once, in float64."""

_KEYS_PER_DIRECTION = 30  # of fewer keys the directions fit this sample alone, and others lose more
_KEYS_ENOUGH = 16_384  # for however many directions: half of what a store is made with


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear map of keys to fewer dimensions."""

    mean: Tensor
    """Subtracted first: float32, shape (d,)."""
    matrix: Tensor
    """Orthonormal columns, float32, shape (d, dim)."""

    def __call__(self, keys: Tensor) -> Tensor:
        """Project keys, in float32.

        Args:
            keys: shape (..., d).

        Returns:
            float32, shape (..., dim), on the keys' device.
        """
        if keys.shape[-1] != len(self.mean):
            raise ConfigError(f"the store projects keys of {len(self.mean)} components, got {keys.shape[-1]}")
        projected: Tensor = (keys.float() - self.mean.to(keys.device)) @ self.matrix.to(keys.device)
        return projected

    def weights(self, metadata: Mapping[str, Any]) -> Weights:
        """The file of this projection, with what is to be known about it."""
        return Weights({"mean": self.mean.numpy(), "matrix": self.matrix.numpy()}, metadata)

    @classmethod
    def of(cls, store: Reader) -> Self | None:
        """The projection of a store's keys; None when they are stored as they are.

        Raises:
            CorruptWeightsError: its file is missing or damaged.
            FingerprintMismatchError: it was fitted for other keys than the store's.
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
    """What a projection is fitted for, as the metadata of its file."""
    return {
        "model": identity.model_fingerprint.partition(":")[0],
        "key": identity.key,
        "metric": identity.metric,
        "dim": identity.dim,
    }


def fit_projection(
    keys: Keys, dim: int, metric: str = Metric.L2, *, keys_per_direction: int = _KEYS_PER_DIRECTION
) -> tuple[Projection, float]:
    """Find the directions that keep the most of the keys.

    Args:
        keys: a sample, float32, shape (n, d).
        dim: how many directions, 1 to d.
        metric: ``l2`` or ``ip``.
        keys_per_direction: fewer are refused.

    Returns:
        The projection, and the share of the variance (for ``ip`` of the squared norms) that it keeps.

    Raises:
        ConfigError: dim is out of range, or there are too few keys for it.
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
