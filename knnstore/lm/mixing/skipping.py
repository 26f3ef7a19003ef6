"""Whether a search is worth its while, judged before it is made (He et al. 2021)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing.network import Network
from knnstore.store import Weights

_LOWEST = -1e30  # p = 0 adds nothing to an entropy


@dataclass(frozen=True)
class Skipping:
    """Searches only where retrieval is expected to help enough.

    As "Efficient Nearest Neighbor Language Models" (He et al. 2021, https://arxiv.org/abs/2109.04212)
    do, from the query and the model's confidence and entropy; what their network estimates is λ, what
    this one estimates is how much log p will gain. Where no search is made, λ is 0.
    """

    weights: Weights
    """Of the network; ``scale`` in their metadata is the unit of what it estimates, in nats."""

    threshold: float
    """The least expected gain, in nats for each token, for which a search is made."""

    _network: Network = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or math.isnan(self.threshold):
            raise ConfigError(f"the threshold of what is skipped must be a number, got {self.threshold!r}")
        object.__setattr__(self, "_network", Network.of(self.weights))
        object.__setattr__(self, "_scale", float(self.weights.metadata["scale"]))

    def searched(self, keys: Tensor, lm_max: Tensor, lm_entropy: Tensor) -> Tensor:
        """Choose the queries to search for.

        Args:
            keys: the queries, shape (n, d).
            lm_max: log p_LM of the likeliest token, float32, shape (n,).
            lm_entropy: of p_LM in nats, float32, shape (n,).

        Returns:
            bool, shape (n,).
        """
        return self.expected(keys, lm_max, lm_entropy) >= self.threshold

    def expected(self, keys: Tensor, lm_max: Tensor, lm_entropy: Tensor) -> Tensor:
        """Estimate by how much log p will gain, in nats: float32, shape (n,); arguments as of `searched`."""
        features = skip_features(keys, lm_max, lm_entropy)
        if features.shape[1] != len(self._network.mean):
            raise ConfigError(
                f"what is skipped was fitted for another model: keys of {len(self._network.mean) - 2} "
                f"components, here they have {keys.shape[1]}; calibrate again"
            )
        gains: Tensor = self._network.on(features.device)(features)[:, 0] * self._scale
        return gains


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy of distributions in nats, shape (n,), from log p of shape (n, v); -inf is a p of 0."""
    return -(log_probs.exp() * log_probs.clamp(min=_LOWEST)).sum(-1)


def skip_features(keys: Tensor, lm_max: Tensor, lm_entropy: Tensor) -> Tensor:
    """What is known of n queries before a search: float32, shape (n, d + 2)."""
    return torch.cat([lm_max[:, None], lm_entropy[:, None], keys.float()], 1)
