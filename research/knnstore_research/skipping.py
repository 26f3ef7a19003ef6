"""Skipping searches that would hardly help: "Efficient Nearest Neighbor Language Models" (He et al. 2021).

https://arxiv.org/abs/2109.04212. Before a search, only the query and the model's confidence and entropy are
known. From these, a network estimates how much the search will raise the log-probability of the target token.
(The network of the paper estimates λ instead.)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from knnstore.lm.calibration import ScoredText
from knnstore.lm.mixing import fit_network
from knnstore.lm.scoring import assign_blocks


class ExpectedGains(NamedTuple):
    """A fitted network that estimates how much a search will raise log p; `fit_gains` creates it."""

    network: Callable[[Tensor], Tensor]
    """Returns the gain in units of `scale`, shape (n, 1), from features of n tokens, shape (n, d + 2)."""
    scale: float
    """Standard deviation, in nats, of the gains that the network was fitted to."""

    def __call__(self, scored: ScoredText) -> Tensor:
        """Estimate by how many nats a search will raise log p of each token, float32, shape (n,)."""
        return self.network(_build_features(scored))[:, 0] * self.scale


def fit_gains(scored: ScoredText, gains: Tensor) -> ExpectedGains:
    """Fit a network that estimates before a search how much the search will raise log p of the target token.

    Args:
        scored: the text, with n tokens and their keys.
        gains: log p of each token with a search minus log p without, shape (n,), from settings that were not
            fitted on the token.
    """
    scale = float(gains.std().clamp(min=1e-6))
    wanted = gains / scale

    def loss(outputs: Tensor, rows: Tensor) -> Tensor:
        return (outputs[:, 0] - wanted[rows]).square().mean()

    documents = torch.from_numpy(assign_blocks(scored.documents.numpy()))
    network = fit_network(_build_features(scored), loss, documents, [float(wanted.mean())])
    return ExpectedGains(network, scale)


def _build_features(scored: ScoredText) -> Tensor:
    """Return the features of each token that are known before a search, float32, shape (n, d + 2).

    The columns are the model's confidence (log-probability of its most probable token), its entropy, and the
    d components of the query vector.
    """
    evidence = scored.evidence
    assert evidence.keys is not None
    assert evidence.lm_entropy is not None
    return torch.cat([evidence.lm_max[:, None], evidence.lm_entropy[:, None], evidence.keys.float()], 1)
