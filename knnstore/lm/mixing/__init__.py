"""How much retrieval is trusted: λ and T for each token."""

from knnstore.lm.mixing.bins import BinnedLambda, bins_of
from knnstore.lm.mixing.domains import DomainWeights
from knnstore.lm.mixing.formulas import FixedLambda, NearnessLambda, RelativeConfidence, relative_distance
from knnstore.lm.mixing.gate import (
    DISTINCT_AMONG,
    GateLambda,
    chosen_by,
    distinct_tokens,
    gate_features,
    neighbor_features,
    powers_up_to,
    start_of,
)
from knnstore.lm.mixing.interpolation import (
    LEAST_PROBABILITY,
    Contribution,
    Likelihoods,
    Mixture,
    PerQuery,
    mix_gold,
    mix_log_probs,
    mix_probs,
    neighbor_weights,
)
from knnstore.lm.mixing.joint import JointGate, known, shares_of
from knnstore.lm.mixing.likelihood import fit_lambdas, fit_weight
from knnstore.lm.mixing.meetings import VisitedCells
from knnstore.lm.mixing.mixer import MAX_LAMBDA, Chosen, Mixer, Retrieved, SimpleMixer
from knnstore.lm.mixing.network import fit_network
from knnstore.lm.mixing.registry import is_registered, mixer_of, register_mixer
from knnstore.lm.mixing.skipping import Skipping, entropy_of, skip_features
from knnstore.lm.mixing.visited import Visited, VisitedTokens, halving, nearest_of

__all__ = [
    "DISTINCT_AMONG", "LEAST_PROBABILITY", "MAX_LAMBDA", "BinnedLambda", "Chosen", "Contribution",
    "DomainWeights", "FixedLambda", "GateLambda", "JointGate", "Likelihoods", "Mixer",
    "Mixture", "NearnessLambda", "PerQuery", "RelativeConfidence", "Retrieved",
    "SimpleMixer", "Skipping", "Visited", "VisitedCells", "VisitedTokens", "bins_of", "chosen_by",
    "distinct_tokens", "entropy_of", "fit_lambdas", "fit_network", "fit_weight", "gate_features", "halving",
    "is_registered", "known", "mix_gold", "mix_log_probs", "mix_probs", "mixer_of", "nearest_of",
    "neighbor_features", "neighbor_weights", "powers_up_to", "register_mixer", "relative_distance",
    "shares_of", "skip_features", "start_of",
]  # fmt: skip
