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
from knnstore.lm.mixing.token_sums import DISTINCT_AMONG, get_rank_columns, list_powers_of_two
from knnstore.store import Weights

_MISSING_DISTANCE = 1e30
"""Replaces the distance of a missing neighbor, where λ does not matter."""
_HIDDEN = (128, 64)
_DROPOUT = 0.2
_DROPOUT_OF_QUERY = 0.5
"""Dropout of the features that are the query vector. The query vector has hundreds of features, which
together could memorize the training tokens."""
_EPOCHS = 12
_MIN_STEPS = 160  # of the optimizer; with little text there are more epochs
_PATIENCE = 0.25  # the fit stops after this fraction of all epochs without an improvement
_BATCH_TOKENS = 512
_LEARNING_RATE = 2e-3
_WEIGHT_DECAY = 1e-2
_MAX_DEVIATION = 8.0
"""Features are limited to this many standard deviations from the mean; the fit saw little beyond."""
_MIN_DEVIATION = 1e-5
"""A feature with a standard deviation below this fraction of 1 + |mean| is constant, and is ignored."""
_HELD_OUT_DIVISOR = 8  # one document in 8 is held out, to decide when the fit stops
_FORMER_WIDTHS = {"n-grams": 3}
"""Numbers of features of components whose number has grown, for gates whose weights do not name numbers."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function that returns the mean loss of m tokens. Its arguments are the network's outputs for these
tokens, shape (m, o), and the indices of these tokens, shape (m,)."""


class Network(nn.Module):
    """A multilayer perceptron that standardizes its input features first.

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
        standardized = ((features - self.mean) / self.scale).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
        if self.training:
            outputs: Tensor = self.layers(standardized)
            return outputs
        # This runs for every generated token: calling modules and dropouts takes longer than computing.
        *hidden, last = self._linear
        for layer in hidden:
            standardized = linear(standardized, layer.weight, layer.bias).relu_()
        return linear(standardized, last.weight, last.bias)

    def to_device(self, device: torch.device) -> Self:
        """Move this network to a device if it is on another one, and return it.

        Calling `to` without need would take longer than a forward pass.
        """
        return self if self.mean.device == device else self.to(device)

    def to_weights(self, metadata: Mapping[str, Any]) -> Weights:
        """Return the parameters with metadata as `Weights`; `from_weights` creates the network again."""
        return Weights({name: value.numpy() for name, value in self.state_dict().items()}, metadata)

    @classmethod
    def from_weights(cls, weights: Weights) -> Self:
        """Create the network whose parameters are in `weights`, in evaluation mode, without gradients."""
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
    """Fit a network with AdamW until the loss on held-out documents no longer improves.

    The fit is deterministic on one machine; the global random state stays unchanged.

    Args:
        features: float32, shape (n, f).
        loss: the loss to minimize.
        documents: number of each token's document, int64, shape (n,). One document in eight is held out, or
            the first eighth of a single document.
        start: the network's outputs before the fit, shape (o,). Callers give the best constant outputs; a
            constant output has the same value for all tokens.
        query: slice of the columns of `features` that are the query vector. At each step a random half of
            these columns is replaced by the mean. Default: no columns.

    Returns:
        The network with the lowest held-out loss, in evaluation mode. If the fit never improves, its outputs
        are `start` for all features.
    """
    names, order = torch.unique(documents, return_inverse=True)
    if len(names) == 1:
        order = torch.arange(len(documents)) * _HELD_OUT_DIVISOR // len(documents)
    is_held_out = order % _HELD_OUT_DIVISOR == 0
    inner, outer = (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]
    scale, mean = torch.std_mean(features[inner], 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        varied = scale > _MIN_DEVIATION * (1 + mean.abs())
        network = Network(mean, scale.where(varied, torch.inf), start)
        optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
        batches = -(-len(inner) // _BATCH_TOKENS)
        epochs = max(_EPOCHS, -(-_MIN_STEPS // batches))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, _LEARNING_RATE, total_steps=epochs * batches
        )
        best, kept, worse = _mean_loss(network, features, loss, outer), _copy_weights(network), 0
        for _ in range(epochs):
            network.train()
            for rows in inner[torch.randperm(len(inner))].split(_BATCH_TOKENS):
                seen = features[rows]
                seen[:, query] = mean[query] + dropout(seen[:, query] - mean[query], _DROPOUT_OF_QUERY)
                optimizer.zero_grad()
                loss(network(seen), rows).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            network.eval()
            held_out_loss = _mean_loss(network, features, loss, outer)
            worse = 0 if held_out_loss < best else worse + 1
            if not worse:
                best, kept = held_out_loss, _copy_weights(network)
            if worse >= _PATIENCE * epochs:
                break
        network.load_state_dict(kept)
    return network.eval().requires_grad_(requires_grad=False)


def _mean_loss(network: Network, features: Tensor, loss: Loss, rows: Tensor) -> float:
    """Return the mean loss of some tokens; set the network to evaluation mode.

    Args:
        network: the network.
        features: input features of all tokens, shape (n, f).
        loss: the function that computes the loss.
        rows: indices of the tokens, shape (m,).
    """
    with torch.inference_mode():
        return float(loss(network.eval()(features[rows]), rows))


def _copy_weights(network: Network) -> dict[str, Tensor]:
    """Return a copy of all weights of a network, by name."""
    return {name: value.clone() for name, value in network.state_dict().items()}


@dataclass(frozen=True)
class GateLambda(SimpleMixer):
    """The mixer with λ and T from a network: "Efficient Nearest Neighbor Language Models" (He et al. 2021).

    https://arxiv.org/abs/2109.04212. The input features are the query vector, the model's confidence and
    entropy, the distances of the nearest 1, 2, 4, ... neighbors, and the number of different tokens among
    them. Unlike the paper's network, it runs after the search.
    """

    weights: Weights
    """Weights of the network. Their metadata has ``scale``, the unit of distances, and ``k``, the number of
    neighbors in the fit. If a search returns fewer neighbors, the last neighbor replaces the missing
    neighbors."""

    name = "gate"

    _network: Network = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)
    _k: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.from_weights(self.weights))
        object.__setattr__(self, "_scale", float(self.weights.metadata["scale"]))
        object.__setattr__(self, "_k", int(self.weights.metadata["k"]))

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Return the weight λ and the temperature T of each query, computed by the network.

        Args:
            evidence: the search result, query vectors, and the model's confidence and entropy for n queries.
            temperature: T of the settings, which the network scales.

        Raises:
            ConfigError: the network was fitted with another number of features.
        """
        features = compute_gate_features(evidence, self._k, self._scale)
        expected = len(self._network.mean)
        if features.shape[1] != expected:
            raise ConfigError(
                f"the gate was fitted for another model, or by an older version: it takes {expected} "
                f"features, here are {features.shape[1]}; calibrate again"
            )
        return decode_gate(self._network.to_device(features.device)(features), temperature)


def decode_gate(outputs: Tensor, temperature: float) -> Chosen:
    """Compute the weight λ and the temperature T of each token from the outputs of a gate network.

    Args:
        outputs: the logit of λ, and the binary logarithm of T / `temperature`, shape (n, 2).
        temperature: T of the settings.

    Returns:
        λ, at most `MAX_LAMBDA`, and T, each of shape (n,).
    """
    return Chosen(outputs[:, 0].sigmoid() * MAX_LAMBDA, temperature * outputs[:, 1].exp2())


def make_gate_start(lam: float) -> list[float]:
    """Return the two gate outputs for which `decode_gate` returns about this weight λ, and an unchanged T.

    Args:
        lam: the weight λ; λ / `MAX_LAMBDA` is limited to the range from 0.001 to 0.999.
    """
    share = min(max(lam / MAX_LAMBDA, 1e-3), 1 - 1e-3)
    return [math.log(share / (1 - share)), 0.0]


def compute_gate_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute the input features of the network that chooses weight λ and temperature T of the keys.

    Args:
        evidence: the search result for n queries, with the query vectors (`keys`) and the model's entropy.
        k: largest rank of a neighbor whose distance is used. Only ranks that are powers of two are used.
        scale: a typical distance, by which distances are divided.

    Returns:
        The model's confidence and entropy, features of the neighbors, and the d components of the query
        vector: float32, shape (n, f), f = 2 + ⌊log₂ k⌋ + 1 + ⌊log₂ min(k, 16)⌋ + 1 + d.
    """
    assert evidence.keys is not None
    assert evidence.lm_entropy is not None
    of_model = [evidence.lm_max[:, None], evidence.lm_entropy[:, None]]
    return torch.cat([*of_model, compute_neighbor_features(evidence, k, scale), evidence.keys.float()], 1)


def compute_neighbor_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute input features of a gate network from distances and tokens of the k nearest neighbors.

    Args:
        evidence: the search result for n queries.
        k: number of nearest neighbors whose distances are used. If a search returned fewer neighbors, the
            farthest neighbor replaces the missing neighbors.
        scale: a typical distance, by which distances are divided.

    Returns:
        Columns: asinh(distance / scale) of the neighbors with rank 1, 2, 4, ... up to k; then log(1 + number
        of different tokens) among the nearest 1, 2, 4, ... neighbors, up to min(k, 16). Float32, shape (n,
        f).
    """
    distances, distinct = evidence.distances, evidence.distinct
    near = distances.index_select(1, get_rank_columns(k, distances.shape[1], distances.device))
    found = near < torch.inf
    if near.device.type != "cpu" or not found.all():  # to ask a GPU would mean to wait for it
        farthest = (
            distances.where(distances.isfinite(), -torch.inf)
            .amax(1, keepdim=True)
            .clamp(min=-_MISSING_DISTANCE)
        )
        near = near.where(found, farthest)
    counted = len(list_powers_of_two(min(k, DISTINCT_AMONG)))
    distinct = distinct[:, :counted].float().log1p()
    if distinct.shape[1] < counted:
        distinct = torch.cat([distinct, distinct[:, -1:].expand(-1, counted - distinct.shape[1])], 1)
    # asinh grows like a logarithm, and is defined for negative distances (inner products).
    return torch.cat([(near / scale).asinh(), distinct], 1)


@dataclass(frozen=True)
class JointGate:
    """The gate over all components: a network that weighs the model and all experts for each token.

    An expert is one component at one temperature. The input features come from all components. An expert
    without a prediction has no weight; its weight is distributed to the model and the other experts in
    proportion to their weights.
    """

    weights: Weights
    """Weights of the network. Their metadata has ``experts``, the components, each with the factors of its
    temperature, ``widths``, the number of features of each component, and ``unit``, the unit of distances."""

    _network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.from_weights(self.weights))

    @property
    def name(self) -> str:
        """Name of this network in reports, in which mixers (rules that choose λ) have names too."""
        return "gate over all"

    @property
    def factors(self) -> Mapping[str, Sequence[float]]:
        """For each component name, the factors of its temperature.

        Each factor is one expert, in the order of the outputs.
        """
        return dict(self.weights.metadata["experts"])

    @property
    def widths(self) -> Mapping[str, int]:
        """Number of features that the gate takes of components, by name.

        The features are the first ones that a component computes. A component that is not named has as many
        as in earlier versions.
        """
        return dict(self.weights.metadata.get("widths", _FORMER_WIDTHS))

    @property
    def unit(self) -> float:
        """Distance by which distances are divided in the input features."""
        return float(self.weights.metadata["unit"])

    def compute_mixture_weights(self, features: Tensor, found: Tensor) -> Tensor:
        """Compute the weights of the model and of all experts in the mixture at n positions.

        An expert is one component at one temperature.

        Args:
            features: float32, shape (n, f); nan where a feature is unknown.
            found: True for an expert that has a prediction, bool, shape (n, e).

        Returns:
            Weight of the model, then of each expert; float32, shape (n, 1 + e). Each row sums to 1.

        Raises:
            ConfigError: the network was fitted with another number of features.
        """
        network = self._network.to_device(features.device)
        if features.shape[1] != len(network.mean):
            raise ConfigError(
                f"the gate over all components takes {len(network.mean)} features, here are "
                f"{features.shape[1]}: it was fitted for others, or by an older version; calibrate again"
            )
        return compute_mixture_shares(network(fill_unknown_features(features, network.mean)), found)


def fill_unknown_features(features: Tensor, mean: Tensor) -> Tensor:
    """Replace unknown features by the mean of their column.

    Args:
        features: shape (n, f); an unknown feature is NaN or infinite.
        mean: mean of each column, shape (f,).
    """
    return features.where(features.abs() < torch.inf, mean)


def compute_mixture_shares(outputs: Tensor, found: Tensor) -> Tensor:
    """Convert outputs of a gate network to mixture weights of the model and all experts, by a softmax.

    An expert is one component at one temperature. The weights of the experts sum to at most `MAX_LAMBDA`, so
    that no token gets the probability 0.

    Args:
        outputs: logits of the model and of each expert, shape (n, 1 + e).
        found: True for an expert that has a prediction, bool, shape (n, e).

    Returns:
        Weights, shape (n, 1 + e). Each row sums to 1, and experts without a prediction have 0.
    """
    shares = outputs.where(pad(found, (1, 0), value=True), -torch.inf).softmax(1) * MAX_LAMBDA
    shares[:, 0] += 1 - MAX_LAMBDA
    return shares
