"""A small network over what is known of a token: fitted in seconds, the same each time, kept as `Weights`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from knnstore.store import Weights

_HIDDEN = (128, 64)
_DROPOUT = 0.2
_DROPOUT_OF_QUERY = 0.5
"""Each of its hundreds of features says little; all together tell the tokens apart that were learned from."""
_EPOCHS = 12
_STEPS = 160  # at least, where there is little text
_PATIENCE = 0.25  # of all epochs
_BATCH = 512
_RATE = 2e-3
_DECAY = 1e-2
_FARTHEST = 8.0
"""Standard deviations from the mean: beyond, where nothing was seen, a feature says no more than there."""
_LEAST_SPREAD = 1e-5
"""A feature that hardly varied, by so much of its size, says nothing."""
_APART = 8  # an eighth of the documents decides when to stop

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of some tokens, from the network's outputs, shape (m, o), and their indices, shape (m,)."""


class Network(nn.Module):
    """A multilayer perceptron over standardized features.

    Args:
        mean: of the features, shape (f,).
        scale: their standard deviation, above 0, shape (f,).
        start: the outputs that it begins with for every token, shape (o,).
        hidden: units of each hidden layer.
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

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs, float32, shape (n, o), of features of shape (n, f)."""
        standardized = ((features - self.mean) / self.scale).clamp(-_FARTHEST, _FARTHEST)
        outputs: Tensor = self.layers(standardized)
        return outputs

    def weights(self, metadata: Mapping[str, Any]) -> Weights:
        """What `of` makes this network from again, with what else is to be known about it."""
        return Weights({name: value.numpy() for name, value in self.state_dict().items()}, metadata)

    @classmethod
    def mean_of(cls, networks: Sequence[Self]) -> Self:
        """One network, for use, that says what several say on average.

        Their hidden units lie side by side in its own, and hear only those of the same network.

        Args:
            networks: at least one, over the same features with the same `mean` and `scale`, of one depth.
        """
        first = networks[0]
        depths = list(zip(*(network._linear for network in networks), strict=True))
        hidden = [sum(one.out_features for one in side_by_side) for side_by_side in depths[:-1]]
        made = cls(first.mean, first.scale, [0.0] * first._linear[-1].out_features, hidden)
        for layer, side_by_side in zip(made._linear, depths, strict=True):
            weights, biases = [one.weight for one in side_by_side], [one.bias for one in side_by_side]
            if layer is made._linear[-1]:
                weight, bias = torch.cat(weights, 1) / len(networks), torch.stack(biases).mean(0)
            else:
                is_first = layer is made._linear[0]
                weight = torch.cat(weights) if is_first else torch.block_diag(*weights)  # type: ignore[no-untyped-call]
                bias = torch.cat(biases)
            layer.load_state_dict({"weight": weight, "bias": bias})
        return made.eval().requires_grad_(requires_grad=False)

    @property
    def _linear(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """Make a network from its `weights`, for use."""
        state = {name: torch.from_numpy(value.copy()) for name, value in weights.tensors.items()}
        biases = sorted(
            (name for name in state if name.endswith(".bias")), key=lambda name: int(name.split(".")[1])
        )
        *hidden, outputs = (len(state[name]) for name in biases)
        made = cls(state["mean"], state["scale"], [0.0] * outputs, hidden)
        made.load_state_dict(state)
        return made.eval().requires_grad_(requires_grad=False)


def fit_network(
    features: Tensor,
    loss: Loss,
    documents: Tensor,
    start: Sequence[float],
    *,
    query: slice = slice(0),
    members: int = 1,
) -> Network:
    """Fit a network by Adam, until it becomes no better on documents kept apart.

    Deterministic on one machine. When nothing that is learned helps there, `start` is what remains.

    Args:
        features: float32, shape (n, f).
        loss: to be minimized.
        documents: of each token, int64, shape (n,); whole ones are kept apart, or an eighth of a single one.
        start: the best constant outputs.
        query: the columns of the query, half of which are hidden at each step; default none.
        members: how many are fitted to become one, see `Network.mean_of`: each errs in its own way, and
            their mean less, but the time goes with their number.
    """
    names, order = torch.unique(documents, return_inverse=True)
    if len(names) == 1:
        order = torch.arange(len(documents)) * _APART // len(documents)
    apart = order % _APART == 0
    inner, outer = (~apart).nonzero()[:, 0], apart.nonzero()[:, 0]
    scale, mean = torch.std_mean(features[inner], 0)
    scale = scale.where(scale > _LEAST_SPREAD * (1 + mean.abs()), torch.inf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fitted = [Network(mean, scale, start) for _ in range(members)]
        for network in fitted:
            _fit(network, features, loss, inner, outer, query)
    return Network.mean_of(fitted)


def _fit(network: Network, features: Tensor, loss: Loss, inner: Tensor, outer: Tensor, query: slice) -> None:
    """Fit a network to the tokens `inner`, until it becomes no better on those `outer`."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
    batches = -(-len(inner) // _BATCH)
    epochs = max(_EPOCHS, -(-_STEPS // batches))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=epochs * batches)
    best, kept, worse = _judged(network, features, loss, outer), _copied(network), 0
    for _ in range(epochs):
        network.train()
        for rows in torch.split(inner[torch.randperm(len(inner))], _BATCH):
            seen, mean = features[rows], network.mean[query]
            seen[:, query] = mean + dropout(seen[:, query] - mean, _DROPOUT_OF_QUERY)
            optimizer.zero_grad()
            loss(network(seen), rows).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        found = _judged(network, features, loss, outer)
        worse = 0 if found < best else worse + 1
        if not worse:
            best, kept = found, _copied(network)
        if worse >= _PATIENCE * epochs:
            break
    network.load_state_dict(kept)


def _judged(network: Network, features: Tensor, loss: Loss, rows: Tensor) -> float:
    with torch.inference_mode():
        return float(loss(network.eval()(features[rows]), rows))


def _copied(network: Network) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}
