"""A small network over what is known of a token: fitted in seconds, the same each time, kept as `Weights`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

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
        self._linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs, float32, shape (n, o), of features of shape (n, f)."""
        standardized = ((features - self.mean) / self.scale).clamp(-_FARTHEST, _FARTHEST)
        if self.training:
            outputs: Tensor = self.layers(standardized)
            return outputs
        # With every token that is written: to call each module, and dropouts, takes longer than to compute.
        *hidden, last = self._linear
        for layer in hidden:
            standardized = linear(standardized, layer.weight, layer.bias).relu_()
        return linear(standardized, last.weight, last.bias)

    def on(self, device: torch.device) -> Self:
        """This network on a device; `to` takes longer than all of it where there is nothing to move."""
        return self if self.mean.device == device else self.to(device)

    def weights(self, metadata: Mapping[str, Any]) -> Weights:
        """What `of` makes this network from again, with what else is to be known about it."""
        return Weights({name: value.numpy() for name, value in self.state_dict().items()}, metadata)

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
    features: Tensor, loss: Loss, documents: Tensor, start: Sequence[float], query: slice = slice(0)
) -> Network:
    """Fit a network by Adam, until it becomes no better on documents kept apart.

    Deterministic on one machine. When nothing that is learned helps there, `start` is what remains.

    Args:
        features: float32, shape (n, f).
        loss: to be minimized.
        documents: of each token, int64, shape (n,); whole ones are kept apart, or an eighth of a single one.
        start: the best constant outputs.
        query: which features are the query itself; half of them are hidden at each step.
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
        best, kept, worse = _judged(network, features, loss, outer), _copied(network), 0
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
            found = _judged(network, features, loss, outer)
            worse = 0 if found < best else worse + 1
            if not worse:
                best, kept = found, _copied(network)
            if worse >= _PATIENCE * epochs:
                break
        network.load_state_dict(kept)
    return network.eval().requires_grad_(requires_grad=False)


def _judged(network: Network, features: Tensor, loss: Loss, rows: Tensor) -> float:
    with torch.inference_mode():
        return float(loss(network.eval()(features[rows]), rows))


def _copied(network: Network) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}
