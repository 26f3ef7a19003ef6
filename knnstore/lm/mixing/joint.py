"""One gate over all that is mixed: the weights of each token, a softmax of what a network says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.errors import ConfigError
from knnstore.lm.mixing.mixer import MAX_LAMBDA
from knnstore.lm.mixing.network import Network
from knnstore.store import Weights


@dataclass(frozen=True)
class JointGate:
    """A mixture of experts: the model, and whatever else says something of the next token.

    It sees what each of these contributes before the token comes, and nothing of it is special to one. An
    expert that says nothing has no weight: what it had falls to the others, in proportion.
    """

    weights: Weights
    """Of the network; in their metadata ``experts`` lists the components, each with the factors of its
    temperature, and ``unit`` is the unit of distances."""

    _network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.of(self.weights))

    @property
    def name(self) -> str:
        """What it is called beside the mixers."""
        return "gate over all"

    @property
    def factors(self) -> Mapping[str, Sequence[float]]:
        """By which the temperature of each component is multiplied, for each of its experts, in order."""
        return dict(self.weights.metadata["experts"])

    @property
    def unit(self) -> float:
        """Of distances: a typical one."""
        return float(self.weights.metadata["unit"])

    def shares(self, features: Tensor, found: Tensor) -> Tensor:
        """Weigh the model and all experts.

        Args:
            features: what is known of n tokens, nan where nothing is; float32, shape (n, f).
            found: which of the experts say something, bool, shape (n, e).

        Returns:
            The model's share, then that of each expert; float32, shape (n, 1 + e). Rows sum to 1.

        Raises:
            ConfigError: there are other features than it was fitted with.
        """
        network = self._network.on(features.device)
        if features.shape[1] != len(network.mean):
            raise ConfigError(
                f"the gate over all components takes {len(network.mean)} features, here are "
                f"{features.shape[1]}: it was fitted for others, or by an older version; calibrate again"
            )
        return shares_of(network(known(features, network.mean)), found)


def known(features: Tensor, mean: Tensor) -> Tensor:
    """Features, shape (n, f), with their mean, shape (f,), in place of what is not known."""
    return features.where(features.abs() < torch.inf, mean)


def shares_of(outputs: Tensor, found: Tensor) -> Tensor:
    """What each has of the mixture; see `JointGate.shares`.

    Of all but the model's own share at most `MAX_LAMBDA` goes to the others, so that what none of them says
    remains possible.

    Args:
        outputs: logits of the model and of each expert, shape (n, 1 + e).
        found: which of the experts say something, bool, shape (n, e).
    """
    shares = outputs.where(pad(found, (1, 0), value=True), -torch.inf).softmax(1) * MAX_LAMBDA
    shares[:, 0] += 1 - MAX_LAMBDA
    return shares
