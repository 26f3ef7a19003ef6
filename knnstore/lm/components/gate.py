"""The gate over all components: it weighs each token's experts in place of the components' own λ and T.

An expert is a component at one temperature. `JointGate` of `knnstore.lm.mixing` is the network; this module
collects the experts with their features, turns the network's weights into contributions, and fits it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.components.component import Component, find_by_name
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    Contribution,
    Evidence,
    JointGate,
    PerQuery,
    fill_unknown,
    fit_network,
    mixture_shares,
)

_LEAST_SHARE = 1e-3
_ROUNDS = 50  # of expectation maximization, for where the network begins

Factors = Mapping[str, Sequence[float]]
"""Factors of each component's temperature, one for each expert of a gate."""


class Experts(NamedTuple):
    """The e experts of all components at n tokens, which a gate weighs."""

    contributions: Mapping[str, Sequence[Contribution]]
    """The experts of each component; none of a component that is not in use."""

    features: Tensor
    """Features that are known before the token, NaN where one is unknown: float32, shape (n, f)."""

    found: Tensor
    """True where an expert has found something, bool, shape (n, e)."""

    query: slice
    """The features that are the query itself."""


def collect_experts(
    components: Sequence[Component],
    parts: Mapping[str, Any],
    evidence: Evidence,
    factors: Factors,
    unit: float,
) -> Experts:
    """Collect the experts of a gate with their features.

    Args:
        components: all that this version knows.
        parts: settings of the components in use, by name. A component of `factors` that is not in use finds
            nothing, and its features are NaN.
        evidence: for n positions, with their keys and the model's entropy.
        factors: the components that the gate weighs, and at which temperatures.
        unit: distance that is counted as 1.

    Raises:
        ConfigError: the gate weighs a component that this version does not have.
    """
    unknown = factors.keys() - {one.name for one in components}
    if unknown:
        raise ConfigError(
            f"the gate weighs {min(unknown)!r}, which this version does not know; upgrade knnstore"
        )
    assert evidence.keys is not None
    assert evidence.lm_entropy is not None
    like = evidence.lm_max
    contributions: dict[str, list[Contribution]] = {}
    features = [torch.stack([like, evidence.lm_entropy], 1), evidence.keys.float()]
    found = []
    for component in (one for one in components if one.name in factors):
        contributions[component.name] = []
        if component.name in parts:
            own, of_component = parts[component.name], find_by_name(evidence, component.name)
            experts = [component.contribute(own, of_component, factor) for factor in factors[component.name]]
            contributions[component.name] = experts
            is_found = experts[0].is_found
            features.append(component.features(of_component, unit).where(is_found[:, None], torch.nan))
        else:
            is_found = torch.zeros_like(like, dtype=torch.bool)
            features.append(like.new_full((len(like), component.width), torch.nan))
        found += [is_found] * len(factors[component.name])
    query = slice(2, 2 + evidence.keys.shape[1])
    return Experts(contributions, torch.cat(features, 1), torch.stack(found, 1), query)


def weigh_by_gate(
    gate: JointGate, components: Sequence[Component], parts: Mapping[str, Any], evidence: Evidence
) -> dict[str, Contribution]:
    """Return the contribution of each component in use over the earlier ones, with the gate's shares."""
    experts = collect_experts(components, parts, evidence, gate.factors, gate.unit)
    shares = gate.shares(experts.features, experts.found)
    below, every = shares[:, 0], torch.split(shares[:, 1:], [len(of) for of in gate.factors.values()], 1)
    weighed = {}
    for (name, contributions), own in zip(experts.contributions.items(), every, strict=True):
        if contributions:
            weighed[name] = _merge_experts(contributions, own, below)
            below = below + own.sum(1)
    return weighed


class ScoredPart(NamedTuple):
    """Some tokens to fit a gate on."""

    evidence: Evidence
    """Evidence in target form, n positions."""
    targets: Tensor
    """The tokens, int64, shape (n,)."""
    lm_log_probs: Tensor
    """log p_LM of each, float32, shape (n,)."""


def fit_gate_over(
    components: Sequence[Component],
    parts: Mapping[str, Any],
    scored: Iterable[ScoredPart],
    blocks: Tensor,
    unit: float,
    purpose: Mapping[str, Any],
) -> JointGate:
    """Fit a gate over components. It starts from the best shares that are equal for all tokens.

    Args:
        components: all that this version knows.
        parts: settings of the components in use, by name, each with a temperature of its own.
        scored: the tokens to fit on, n in all.
        blocks: the document of each, or its block of a long one, int64, shape (n,): some are kept apart
            while the network is fitted.
        unit: distance that is counted as 1.
        purpose: store and model for which the weights are fitted; it is saved with them.
    """
    # 1) Collect what each expert gives to each token.
    factors = {one.name: one.factors for one in components if one.name in parts}
    features, found, probs, query = [], [], [], slice(0)
    for evidence, targets, lm_log_probs in scored:
        experts = collect_experts(components, parts, evidence, factors, unit)
        features.append(experts.features)
        found.append(experts.found)
        query = experts.query
        every = [one.probs(targets) for of in experts.contributions.values() for one in of]
        probs.append(torch.stack([lm_log_probs.exp(), *every], 1))
    present, given = torch.cat(found), torch.cat(probs).clamp_(min=LEAST_PROBABILITY)
    seen = torch.cat(features)
    seen = fill_unknown(seen, seen.nanmean(0).nan_to_num())

    # 2) Fit the network to the likelihood of the mixture.
    def loss(outputs: Tensor, rows: Tensor) -> Tensor:
        return -(mixture_shares(outputs, present[rows]) * given[rows]).sum(1).log().mean()

    start = _fit_constant_shares(given, present).clamp(min=_LEAST_SHARE).log().tolist()
    network = fit_network(seen, loss, blocks, start, query)
    listed = [[name, list(of)] for name, of in factors.items()]
    return JointGate(network.weights({**purpose, "of": "all components", "unit": unit, "experts": listed}))


def _fit_constant_shares(probs: Tensor, present: Tensor) -> Tensor:
    """Find the likeliest shares of the model and of each expert, the same for all tokens; shape (1 + e,)."""
    shares = torch.full((probs.shape[1],), 1 / probs.shape[1])
    allowed = torch.cat([present.new_ones((len(present), 1)), present], 1)
    for _ in range(_ROUNDS):
        parts = probs * allowed * shares
        shares = (parts / parts.sum(1, keepdim=True)).mean(0)
    return shares


def _merge_experts(experts: Sequence[Contribution], shares: Tensor, below: Tensor) -> Contribution:
    """Merge the experts of a component, which have the same places.

    Args:
        experts: e of them.
        shares: share of each in the whole mixture, shape (n, e).
        below: share of all that lies below the component, shape (n,).
    """
    total = shares.sum(1)
    merged = experts[0]._replace(lam=total / (below + total))
    if len(experts) == 1:
        return merged
    inside = (shares / total[:, None]).where(total[:, None] > 0, 1 / len(experts))

    def mean(values: Sequence[PerQuery | None]) -> Tensor | None:
        given = [one for one in values if one is not None]
        return (inside * _stack_columns(given, total)).sum(1) if given else None

    weights = torch.stack([one.weights for one in experts], 1)
    return merged._replace(
        weights=(inside[:, None] @ weights)[:, 0],
        rest=mean([one.rest for one in experts]),
        temperature=mean([one.temperature for one in experts]),
    )


def _stack_columns(values: Sequence[PerQuery], like: Tensor) -> Tensor:
    """Put values, each for all rows or of shape (n,), in columns; shape (n, len(values))."""
    if not any(isinstance(one, Tensor) for one in values):
        return like.new_tensor(values)
    return torch.stack([torch.as_tensor(one, device=like.device).expand(len(like)) for one in values], 1)
