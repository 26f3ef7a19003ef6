"""Computing keys from captured hidden states: joining with earlier states, and projection.

`Joining` adds the hidden states of the previous tokens to the hidden state of a token:

    key_t = h_t + a_1 P h_(t-1) + a_2 P P h_(t-2) + ...

h_t is the hidden state of token t at one place in the model. P rotates a vector by one component, and the
discounts a_i weight the earlier states. The sum is as wide as one state, and no parameter is fitted. States
that were rotated by different amounts are close to orthogonal, so the squared distance of two sums is close
to the weighted sum of the squared distances of their states (Sahlgren, Holst & Kanerva 2008: permutations
encode the order of words). Positions before a text's first token count as zero vectors.

`Projection` maps keys to fewer dimensions by PCA, which `fit_projection` fits once, on a sample of keys, when
a store is made. For the metric L2 the directions are eigenvectors of the covariance, which preserve as much
as possible of the squared distances between keys. For inner products they are eigenvectors of the second
moment, and no mean is subtracted, because a mean would change the order of the inner products. A projection
to as many dimensions as the keys have preserves all distances.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import Keys, Metric
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.store import Identity, Weights

_FIRST_DISCOUNT, _DISCOUNT_RATIO = 0.5, 0.7  # 0.5 and 0.35 were the best first two discounts in tests

_CHUNK_KEYS = 4_096
"""Number of keys in a chunk when the covariance is computed."""

_KEYS_PER_DIRECTION = 30  # with fewer keys the directions overfit the sample
_KEYS_ENOUGH = 16_384  # enough for any number of directions: half of KEYS_FITTED_ON


@dataclass(frozen=True, slots=True)
class Joining:
    """Rule that computes a key from hidden states: a token's own state plus discounted earlier states.

    ``str(joining)`` is the part that follows the place's name in a store's identity, as in
    ``transformer.h.3.mlp:input +0.5 +0.35``. It is empty if a key is a single state.
    """

    discounts: tuple[float, ...] = ()
    """Discount of the previous token's state, then of the token before it, and so on; empty for one state."""

    @classmethod
    def from_state_count(cls, states: int, discounts: Sequence[float] | None = None) -> Self:
        """Create the object that computes a key as a weighted sum of the hidden states of `states` tokens.

        Args:
            states: number of states in a key, the token's own state included, >= 1.
            discounts: weight of each earlier state, > 0 and finite; default 0.5, 0.35 and so on, each 0.7
                times the weight before it.

        Raises:
            ConfigError: `states` or a discount is out of range, or the number of discounts is not ``states -
                1``.
        """
        if states < 1:
            raise ConfigError(f"a key needs at least 1 state, got {states}")
        if discounts is None:
            discounts = [round(_FIRST_DISCOUNT * _DISCOUNT_RATIO**back, 4) for back in range(states - 1)]
        if len(discounts) != states - 1:
            raise ConfigError(
                f"one discount is needed for each state before the last: {states - 1}, got {len(discounts)}"
            )
        if not all(0 < discount < float("inf") for discount in discounts):
            raise ConfigError(f"discounts must be numbers above 0, got {', '.join(map(str, discounts))}")
        return cls(tuple(map(float, discounts)))

    @classmethod
    def parse(cls, key: str) -> tuple[str, Self]:
        """Split a store's key name, such as ``mlp:input +0.5``, into the name of the place and the joining.

        Raises:
            ConfigError: the part after the place is not a list of discounts like ``+0.5 +0.35``.
        """
        place, *joined = key.split(" ")
        if all(part.startswith("+") for part in joined):
            with suppress(ValueError):
                return place, cls.from_state_count(1 + len(joined), [float(part) for part in joined])
        raise ConfigError(
            f"this version of knnstore does not know the key {key!r}: use the version that made the store"
        )

    def __str__(self) -> str:
        return "".join(f" +{discount}" for discount in self.discounts)

    @property
    def states(self) -> int:
        """Number of states in a key, the token's own state included, >= 1."""
        return 1 + len(self.discounts)

    def __call__(self, states: Tensor, attended: Tensor | None = None) -> Tensor:
        """Compute the keys of whole texts from the hidden states of all their tokens.

        Args:
            states: hidden states of b texts, shape (b, t, d).
            attended: bool, shape (b, t), False at padding, which may be anywhere; None means no padding.

        Returns:
            Shape (b, t, d), float32; the unchanged `states` if a key is a single state. Undefined at padding.
        """
        if not self.discounts:
            return states
        if attended is None:
            return self.join_states(pad(states, (0, 0, len(self.discounts), 0)))
        states = states.float()
        preceding = attended.cumsum(1) - 1  # number of tokens of the text before each position
        columns = (~attended).to(torch.uint8).argsort(dim=1, stable=True)  # columns of the tokens, in order
        keys = states
        for back, discount in enumerate(self.discounts, 1):
            at = columns.take_along_dim((preceding - back).clamp(min=0), 1)
            earlier = states.take_along_dim(at[..., None], 1).masked_fill((preceding < back)[..., None], 0)
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys

    def join_states(self, states: Tensor) -> Tensor:
        """Compute the keys of the last t positions of texts, from states that include earlier positions.

        Args:
            states: shape (b, len(discounts) + t, d): the states of the previous tokens, then of the t
                positions; zeros before the beginning of a text.

        Returns:
            float32, shape (b, t, d).
        """
        states, count = states.float(), len(self.discounts)
        length = states.shape[1] - count
        keys = states[:, count:]
        for back, discount in enumerate(self.discounts, 1):
            earlier = states[:, count - back :][:, :length]
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys


class KeyDescription(Protocol):
    """An object that says how keys are computed: a store, or the folder of a plan to add documents."""

    @property
    def identity(self) -> Identity:
        """Identity of the store."""

    def load_weights(self, name: str) -> Weights:
        """Read fitted weights; see `KNNStore.load_weights`."""


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear map (PCA) of keys to fewer dimensions."""

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

    def to_weights(self, metadata: Mapping[str, Any]) -> Weights:
        """Return the projection's tensors, together with `metadata`, in the form that a store saves."""
        return Weights({"mean": self.mean.numpy(), "matrix": self.matrix.numpy()}, metadata)

    @classmethod
    def load(cls, store: KeyDescription) -> Self | None:
        """Load the projection of a store's keys; return None if the store does not project its keys.

        Raises:
            CorruptWeightsError: the file of the projection is missing or damaged.
            FingerprintMismatchError: the projection was fitted for the keys of another store.
        """
        identity = store.identity
        if identity.projection is None:
            return None
        weights, expected = store.load_weights(identity.projection), describe_keys(identity)
        fitted_for = {name: weights.metadata.get(name) for name in expected}
        mean, matrix = (torch.from_numpy(weights.tensors[name]) for name in ("mean", "matrix"))
        if fitted_for != expected or matrix.shape[1] != identity.dim:
            raise FingerprintMismatchError(
                f"the projection {identity.projection} was fitted for {fitted_for}, the store's keys are "
                f"{expected}: "
                "restore the home's folder `weights` from a backup"
            )
        return cls(mean, matrix)


def describe_keys(identity: Identity) -> dict[str, Any]:
    """Return the properties of a store's keys that a projection or network depends on.

    They are ``model`` (hash of the model's weights), ``key`` (name of the key), ``metric`` and ``dim``. They
    are saved with the weights of a projection or network, and compared when the weights are used.
    """
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
        keys_per_direction: number of keys that the sample must have for each direction. A sample of 16,384
            keys is enough for any number of directions up to 16,384.

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
            f"{dim} components need a sample of at least {needed:,} tokens, but it has {count:,}: give more "
            "text or fewer components"
        )
    mean: NDArray[np.float64] = np.zeros(width)
    if metric == Metric.L2:
        mean = keys.mean(axis=0, dtype=np.float64)
    moment = np.zeros((width, width))
    for start in range(0, count, _CHUNK_KEYS):
        chunk = keys[start : start + _CHUNK_KEYS] - mean
        moment += chunk.T @ chunk
    values, vectors = np.linalg.eigh(moment)  # ascending
    matrix = np.ascontiguousarray(vectors[:, ::-1][:, :dim], np.float32)
    preserved = values[::-1][:dim].sum() / max(values.sum(), np.finfo(np.float64).tiny)
    return Projection(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(matrix)), float(preserved)
