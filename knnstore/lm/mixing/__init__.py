"""How much retrieval is trusted: λ and T for each token."""

from knnstore.lm.mixing.bins import BinnedLambda, bins_of
from knnstore.lm.mixing.cell_sums import CellSums, ProbedCells, halving
from knnstore.lm.mixing.domains import DomainWeights
from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.fixed import FixedLambda
from knnstore.lm.mixing.gate import GateLambda, chosen_by, gate_features, neighbor_features, start_of
from knnstore.lm.mixing.interpolation import (
    LEAST_PROBABILITY,
    LEAST_TEMPERATURE,
    Contribution,
    Likelihoods,
    Mixture,
    PerQuery,
    entropy_of,
    mix_gold,
    mix_log_probs,
    mix_probs,
    neighbor_weights,
)
from knnstore.lm.mixing.joint import JointGate, known, shares_of
from knnstore.lm.mixing.likelihood import PRIOR_TOKENS, fit_lambdas, fit_weight
from knnstore.lm.mixing.mixer import MAX_LAMBDA, Chosen, Mixer, SimpleMixer
from knnstore.lm.mixing.network import fit_network
from knnstore.lm.mixing.registry import is_registered, mixer_of, other_mixers, register_mixer
from knnstore.lm.mixing.target_sums import CHUNK_VALUES, TargetSums, between_points, grid, targets_on_grid
from knnstore.lm.mixing.token_sums import (
    DISTINCT_AMONG,
    NeighborSums,
    TokenSums,
    distinct_tokens,
    powers_up_to,
)

__all__ = [
    "CHUNK_VALUES", "DISTINCT_AMONG", "LEAST_PROBABILITY", "LEAST_TEMPERATURE", "MAX_LAMBDA",
    "PRIOR_TOKENS", "BinnedLambda",
    "CellSums", "Chosen", "Contribution", "DomainWeights", "Evidence", "FixedLambda", "GateLambda",
    "JointGate", "Likelihoods", "Mixer", "Mixture", "NeighborSums", "PerQuery",
    "ProbedCells", "SimpleMixer", "TargetSums", "TokenSums",
    "between_points", "bins_of", "chosen_by", "distinct_tokens", "entropy_of", "fit_lambdas",
    "fit_network", "fit_weight", "gate_features", "grid", "halving", "is_registered", "known", "mix_gold",
    "mix_log_probs", "mix_probs", "mixer_of", "neighbor_features", "neighbor_weights",
    "other_mixers", "powers_up_to", "register_mixer", "shares_of", "start_of", "targets_on_grid",
]  # fmt: skip
