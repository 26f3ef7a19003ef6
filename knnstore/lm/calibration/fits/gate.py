"""Fitting the gate of the keys (`GateLambda`), a network that chooses λ and T, on scored text."""

import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits.mixers import fit_temperature_and_lambda, interpolate_columns
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import (
    FixedLambda,
    GateLambda,
    compute_gate_features,
    decode_gate,
    fit_network,
    make_gate_start,
    mix_probs,
)
from knnstore.lm.scoring import assign_blocks
from knnstore.lm.settings import KNNSettings


def fit_gate(evidence: GridEvidence, scored: ScoredText) -> KNNSettings:
    """Train a network that chooses the weight λ and the temperature T of each token; return settings with it.

    The fit starts from the best fixed λ and T. The loss is the negative log-likelihood of the mixture. The
    evidence has the probability by the neighbors (p_kNN) at the temperatures of a grid. For other
    temperatures it is interpolated linearly, so that the cost does not depend on k.

    Args:
        evidence: probabilities of the tokens to fit on.
        scored: the text, from which the network's input features are computed.
    """
    fixed_temperature, fixed_lam = fit_temperature_and_lambda(evidence)
    scale = float(evidence.nearest.distances[:, 0].abs().median().clamp(min=1e-6))
    settings = evidence.build_settings(fixed_temperature, FixedLambda(fixed_lam))
    chunks = scored.split_into_chunks(evidence.k, evidence.tokens)
    found = (scored.select_evidence(settings, some) for some in chunks)
    features = torch.cat([compute_gate_features(some, evidence.k, scale) for some in found])
    lm, grid = evidence.lm[:, 0], evidence.temperatures.log2()

    def compute_loss(outputs: Tensor, rows: Tensor) -> Tensor:
        lam, temperature = decode_gate(outputs, fixed_temperature)
        assert isinstance(temperature, Tensor)
        knn = interpolate_columns(evidence.knn[rows], (temperature.log2() - grid[0]) / (grid[1] - grid[0]))
        return -mix_probs(lm[rows], (lam, knn)).log().mean()

    network = fit_network(
        features, compute_loss, assign_document_blocks(scored, evidence.tokens), make_gate_start(fixed_lam)
    )
    purpose = {**(scored.fitted_for or {}), "of": "gate", "k": evidence.k, "scale": scale}
    return evidence.build_settings(fixed_temperature, GateLambda(network.to_weights(purpose)))


def assign_document_blocks(scored: ScoredText, tokens: Tensor) -> Tensor:
    """Return the number of each token's document, or of its block in a long document.

    The fit of a network holds out some of these documents or blocks, to decide when to stop.

    Args:
        scored: the text.
        tokens: indices of tokens of the text, int64, shape (m,).

    Returns:
        int64, shape (m,).
    """
    return torch.from_numpy(assign_blocks(scored.documents[tokens].numpy()))
