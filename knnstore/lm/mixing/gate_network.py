"""Gates: small networks that choose λ and T for each token, and their fit.

`GateLambda` is the mixer of the keys alone (He et al. 2021). `JointGate` weighs the model and all components.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad

from knnstore.errors import ConfigError
from knnstore.lm.mixing.interpolation import MAX_LAMBDA
from knnstore.lm.mixing.mixer import Chosen, Evidence, SimpleMixer
from knnstore.lm.mixing.token_sums import DISTINCT_AMONG, powers_up_to
from knnstore.store import Weights

_FAR = 1e30
"""Replaces the distance of a missing neighbor, where λ does not matter."""
_HIDDEN = (128, 64)
_DROPOUT = 0.2
_DROPOUT_OF_QUERY = 0.5
"""Dropout of the query's features. There are hundreds, and together they identify a token of the fit."""
_EPOCHS = 12
_STEPS = 160  # at least this many, also with little text
_PATIENCE = 0.25  # fraction of all epochs without an improvement
_BATCH = 512
_RATE = 2e-3
_DECAY = 1e-2
_FARTHEST = 8.0
"""Features are limited to this many standard deviations from the mean; the fit saw little beyond."""
_LEAST_SPREAD = 1e-5
"""A feature whose standard deviation is below this fraction of 1 + |mean| is not used."""
_APART = 8  # one document in so many decides when to stop

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the mean loss of m tokens from the network's outputs, shape (m, o), and their indices, (m,)."""


class Network(nn.Module):
    """A multilayer perceptron over standardized features.

    Args:
        mean: mean of the features, shape (f,).
        scale: standard deviation of the features, above 0, shape (f,).
        start: outputs before the fit, the same for every token, shape (o,).
        hidden: number of units of each hidden layer.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, mean: Tensor, scale: Tensor, start: Sequence[float], hidden: Sequence[int] = _HIDDEN
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        widths = [len(mean), *hidden]
        layers: list[nn.Module] = []
        for width, following in zip(widths, hidden, strict=False):
            layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(_DROPOUT)]
        last = nn.Linear(widths[-1], len(start))
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor(start))
        self.layers = nn.Sequential(*layers, last)
        self._linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, features: Tensor) -> Tensor:
        """Compute the outputs, float32, shape (n, o), from features of shape (n, f)."""
        standardized = ((features - self.mean) / self.scale).clamp(-_FARTHEST, _FARTHEST)
        if self.training:
            outputs: Tensor = self.layers(standardized)
            return outputs
        # This runs for every generated token: calling modules and dropouts takes longer than computing.
        *hidden, last = self._linear
        for layer in hidden:
            standardized = linear(standardized, layer.weight, layer.bias).relu_()
        return linear(standardized, last.weight, last.bias)

    def on(self, device: torch.device) -> Self:
        """Return this network on a device. `to` without a move would take longer than a forward pass."""
        return self if self.mean.device == device else self.to(device)

    def weights(self, metadata: Mapping[str, Any]) -> Weights:
        """Return the weights from which `of` creates this network again, with metadata."""
        return Weights({name: value.numpy() for name, value in self.state_dict().items()}, metadata)

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """Create a network from its `weights`, ready for use."""
        state = {name: torch.from_numpy(value.copy()) for name, value in weights.tensors.items()}
        biases = sorted(
            (name for name in state if name.endswith(".bias")), key=lambda name: int(name.split(".")[1])
        )
        *hidden, outputs = (len(state[name]) for name in biases)
        made = cls(state["mean"], state["scale"], [0.0] * outputs, hidden)
        made.load_state_dict(state)
        return made.eval().requires_grad_(requires_grad=False)


def fit_network(
    features: Tensor, loss: Loss, documents: Tensor, start: Sequence[float], query: slice = slice(0)
) -> Network:
    """Fit a network with AdamW until it no longer improves on held-out documents.

    Deterministic on one machine. If the fit never improves on `start`, the network returns `start`.

    Args:
        features: float32, shape (n, f).
        loss: the loss to minimize.
        documents: document of each token, int64, shape (n,). One document in eight is held out, or the first
            eighth of a single document.
        start: the best constant outputs.
        query: the columns of the query; half of their values are dropped at each step.
    """
    names, order = torch.unique(documents, return_inverse=True)
    if len(names) == 1:
        order = torch.arange(len(documents)) * _APART // len(documents)
    apart = order % _APART == 0
    inner, outer = (~apart).nonzero()[:, 0], apart.nonzero()[:, 0]
    scale, mean = torch.std_mean(features[inner], 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        varied = scale > _LEAST_SPREAD * (1 + mean.abs())
        network = Network(mean, scale.where(varied, torch.inf), start)
        optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
        batches = -(-len(inner) // _BATCH)
        epochs = max(_EPOCHS, -(-_STEPS // batches))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=epochs * batches)
        best, kept, worse = _mean_loss(network, features, loss, outer), _copy_weights(network), 0
        for _ in range(epochs):
            network.train()
            for rows in inner[torch.randperm(len(inner))].split(_BATCH):
                seen = features[rows]
                seen[:, query] = mean[query] + dropout(seen[:, query] - mean[query], _DROPOUT_OF_QUERY)
                optimizer.zero_grad()
                loss(network(seen), rows).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            network.eval()
            found = _mean_loss(network, features, loss, outer)
            worse = 0 if found < best else worse + 1
            if not worse:
                best, kept = found, _copy_weights(network)
            if worse >= _PATIENCE * epochs:
                break
        network.load_state_dict(kept)
    return network.eval().requires_grad_(requires_grad=False)


def _mean_loss(network: Network, features: Tensor, loss: Loss, rows: Tensor) -> float:
    """Compute the mean loss of some tokens."""
    with torch.inference_mode():
        return float(loss(network.eval()(features[rows]), rows))


def _copy_weights(network: Network) -> dict[str, Tensor]:
    """Copy the weights of a network."""
    return {name: value.clone() for name, value in network.state_dict().items()}


@dataclass(frozen=True)
class GateLambda(SimpleMixer):
    """The mixer with λ and T from a network: "Efficient Nearest Neighbor Language Models" (He et al. 2021).

    https://arxiv.org/abs/2109.04212. Its features are the query, the model's confidence and entropy, the
    distances of the nearest 1, 2, 4, ... neighbors, and the number of different tokens among them. Unlike the
    paper's network, it runs after the search.
    """

    weights: Weights
    """Weights of the network. Their metadata has ``scale``, the unit of distances, and ``k``, the number of
    neighbors in the fit. If a search returns fewer, the last one replaces the missing ones."""

    name = "gate"

    _network: Network = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)
    _k: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.of(self.weights))
        object.__setattr__(self, "_scale", float(self.weights.metadata["scale"]))
        object.__setattr__(self, "_k", int(self.weights.metadata["k"]))

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and T of each query.

        Raises:
            ConfigError: the gate was fitted with other features.
        """
        features = gate_features(evidence, self._k, self._scale)
        expected = len(self._network.mean)
        if features.shape[1] != expected:
            raise ConfigError(
                f"the gate was fitted for another model, or by an older version: it takes {expected} "
                f"features, here are {features.shape[1]}; calibrate again"
            )
        return decode_gate(self._network.on(features.device)(features), temperature)


def decode_gate(outputs: Tensor, temperature: float) -> Chosen:
    """Compute λ and T from a gate's outputs, shape (n, 2): the logit of λ, and the change of T in octaves."""
    return Chosen(outputs[:, 0].sigmoid() * MAX_LAMBDA, temperature * outputs[:, 1].exp2())


def gate_start(lam: float) -> list[float]:
    """Return the outputs for which `decode_gate` returns this λ and an unchanged T."""
    share = min(max(lam / MAX_LAMBDA, 1e-3), 1 - 1e-3)
    return [math.log(share / (1 - share)), 0.0]


def gate_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute the features of a gate.

    Args:
        evidence: the evidence for n queries, with `keys` and `lm_entropy`.
        k: number of neighbors.
        scale: unit of distances.

    Returns:
        float32, shape (n, f): f = 2 + ⌊log₂ k⌋ + 1 + ⌊log₂ min(k, 16)⌋ + 1 + d.
    """
    assert evidence.keys is not None
    assert evidence.lm_entropy is not None
    of_model = [evidence.lm_max[:, None], evidence.lm_entropy[:, None]]
    return torch.cat([*of_model, neighbor_features(evidence, k, scale), evidence.keys.float()], 1)


def neighbor_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute those features of a gate that come from the k nearest neighbors; see `gate_features`."""
    distances, distinct = evidence.distances, evidence.distinct
    ranks = [min(rank, distances.shape[1]) - 1 for rank in powers_up_to(k)]
    near = distances[:, ranks]
    found = near < torch.inf
    if not found.all():
        farthest = distances.where(distances.isfinite(), -torch.inf).amax(1, keepdim=True).clamp(min=-_FAR)
        near = near.where(found, farthest)
    counted = len(powers_up_to(min(k, DISTINCT_AMONG)))
    columns = [min(column, distinct.shape[1] - 1) for column in range(counted)]
    # asinh grows like a logarithm, and is defined for negative distances (inner products).
    return torch.cat([(near / scale).asinh(), distinct[:, columns].float().log1p()], 1)


@dataclass(frozen=True)
class JointGate:
    """A mixture of experts: a network weighs the model and all components.

    The features come from all components, see `knnstore.lm.components`. An expert with an empty distribution
    has no weight; its weight goes to the others, in proportion.
    """

    weights: Weights
    """Weights of the network. Their metadata has ``experts``, the components, each with the factors of its
    temperature, and ``unit``, the unit of distances."""

    _network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.of(self.weights))

    @property
    def name(self) -> str:
        """Name in reports, beside those of the mixers."""
        return "gate over all"

    @property
    def factors(self) -> Mapping[str, Sequence[float]]:
        """Factors of each component's temperature, one for each of its experts, in order."""
        return dict(self.weights.metadata["experts"])

    @property
    def unit(self) -> float:
        """Unit of distances."""
        return float(self.weights.metadata["unit"])

    def shares(self, features: Tensor, found: Tensor) -> Tensor:
        """Compute the shares of the model and all experts.

        Args:
            features: float32, shape (n, f); nan where a feature is unknown.
            found: True for an expert whose distribution is not empty, bool, shape (n, e).

        Returns:
            Share of the model, then of each expert; float32, shape (n, 1 + e). Rows sum to 1.

        Raises:
            ConfigError: the gate was fitted with other features.
        """
        network = self._network.on(features.device)
        if features.shape[1] != len(network.mean):
            raise ConfigError(
                f"the gate over all components takes {len(network.mean)} features, here are "
                f"{features.shape[1]}: it was fitted for others, or by an older version; calibrate again"
            )
        return mixture_shares(network(fill_unknown(features, network.mean)), found)


def fill_unknown(features: Tensor, mean: Tensor) -> Tensor:
    """Replace unknown features (nan or infinite), shape (n, f), by their mean, shape (f,)."""
    return features.where(features.abs() < torch.inf, mean)


def mixture_shares(outputs: Tensor, found: Tensor) -> Tensor:
    """Turn a network's outputs into shares of the mixture; see `JointGate.shares`.

    The shares of the experts sum to `MAX_LAMBDA` at most, so that every token remains possible.

    Args:
        outputs: logits of the model and of each expert, shape (n, 1 + e).
        found: True for an expert whose distribution is not empty, bool, shape (n, e).
    """
    shares = outputs.where(pad(found, (1, 0), value=True), -torch.inf).softmax(1) * MAX_LAMBDA
    shares[:, 0] += 1 - MAX_LAMBDA
    return shares
