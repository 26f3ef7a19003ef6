"""The gate over all components: a network that chooses the weight of each expert for each token.

An expert is a component at one temperature. The weights replace λ and T of the components' settings.
`JointGate` of `knnstore.lm.mixing` is the network. This module collects the experts with their features
(`collect_experts`), converts the network's weights to contributions (`weigh_by_gate`), and fits the network
(`fit_gate_over`).
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
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
    compute_mixture_shares,
    fill_unknown_features,
    fit_network,
)
from knnstore.lm.transfers import upload_floats

_LEAST_SHARE = 1e-3  # of an expert, where the fit of the network begins
_ROUNDS = 50  # of expectation maximization, to fit the shares where the fit of the network begins

Factors = Mapping[str, Sequence[float]]
"""For each component name, the factors of its temperature; each factor is one expert of a gate."""


class Experts(NamedTuple):
    """The experts of all components at n positions, with the features from which a gate chooses weights.

    An expert is one component at one temperature; e is the number of experts.
    """

    contributions: Mapping[str, Sequence[Contribution]]
    """For each component name, the distributions of its experts; an empty list if the component is not in
    use."""

    features: Tensor
    """Inputs of the gate, which do not depend on the target token, float32, shape (n, f); NaN where
    unknown."""

    found: Tensor
    """True where an expert has a prediction, bool, shape (n, e)."""

    query: slice
    """The slice of the columns of `features` that contain the query vector."""


def collect_experts(
    components: Sequence[Component],
    parts: Mapping[str, Any],
    evidence: Evidence,
    factors: Factors,
    unit: float,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> Experts:
    """Collect the distributions of a gate's experts, and compute the features that are the gate's input.

    A gate is a network that weighs the experts. An expert is one component at one temperature.

    Args:
        components: all available components.
        parts: settings of the components in use, by name. A component of `factors` that is not in use has no
            predictions, and its features are NaN.
        evidence: look-up results of the components for n positions, with the query vectors and the model's
            entropy.
        factors: for each component that the gate weighs, the factors of its temperature; each factor gives
            one expert.
        unit: distance by which distances are divided, so that features do not depend on the model.
        widths: number of features of components, by name, if a gate takes only the first ones; default is
            `Component.width`.

    Returns:
        The distributions of each expert, the features of each position, and which experts have a prediction.

    Raises:
        ConfigError: the gate weighs a component that this version does not have.
    """
    unknown = factors.keys() - {component.name for component in components}
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
    for component in (component for component in components if component.name in factors):
        contributions[component.name] = []
        width = widths.get(component.name, component.width)
        if component.name in parts:
            settings, result = parts[component.name], find_by_name(evidence, component.name)
            experts = [component.contribute(settings, result, factor) for factor in factors[component.name]]
            contributions[component.name] = experts
            is_found = experts[0].is_found
            of_component = component.features(result, unit)[:, :width]
            features.append(of_component.where(is_found[:, None], torch.nan))
        else:
            is_found = torch.zeros_like(like, dtype=torch.bool)
            features.append(like.new_full((len(like), width), torch.nan))
        found += [is_found] * len(factors[component.name])
    query = slice(2, 2 + evidence.keys.shape[1])
    return Experts(contributions, torch.cat(features, 1), torch.stack(found, 1), query)


def weigh_by_gate(
    gate: JointGate, components: Sequence[Component], parts: Mapping[str, Any], evidence: Evidence
) -> dict[str, Contribution]:
    """Weigh the predictions of each component by a gate, which chooses λ at each of n positions.

    A gate is a network that weighs the experts. An expert is one component at one temperature. The experts of
    a component are merged into one distribution.

    Args:
        gate: the network.
        components: all available components.
        parts: settings of the components in use, by name.
        evidence: look-up results of the components for the n positions, with the query vectors and the
            model's entropy.

    Returns:
        The distributions of each component with their weights λ, by the component's name. A component that
        the gate was not fitted for is left out. Components are mixed in the order of the result: p becomes
        λ p_component + (1 - λ) p, and begins as the model's distribution.

    Raises:
        ConfigError: the gate weighs a component that this version does not have, or was fitted with another
            number of features.
    """
    experts = collect_experts(components, parts, evidence, gate.factors, gate.unit, gate.widths)
    shares = gate.compute_mixture_weights(experts.features, experts.found)
    expert_counts = [len(factors) for factors in gate.factors.values()]
    below, shares_of_components = shares[:, 0], torch.split(shares[:, 1:], expert_counts, 1)
    weighed = {}
    for (name, contributions), own_shares in zip(
        experts.contributions.items(), shares_of_components, strict=True
    ):
        if contributions:
            weighed[name] = _merge_experts(contributions, own_shares, below)
            below = below + own_shares.sum(1)
    return weighed


class ScoredPart(NamedTuple):
    """A group of n scored tokens, to fit a gate (a network that weighs all components) on."""

    evidence: Evidence
    """Look-up results of the components for the tokens, with `Form.TARGET`."""
    targets: Tensor
    """The tokens, int64, shape (n,)."""
    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""


def fit_gate_over(
    components: Sequence[Component],
    parts: Mapping[str, Any],
    scored: Iterable[ScoredPart],
    blocks: Tensor,
    unit: float,
    purpose: Mapping[str, Any],
) -> JointGate:
    """Train a gate (a network that weighs all components in use) to give scored tokens a high likelihood.

    At the beginning of the fit, the gate gives all tokens the same weights: the constant weights with the
    largest likelihood.

    Args:
        components: all available components.
        parts: settings of the components in use, by name.
        scored: groups of tokens to fit on, n tokens in all; at least one group.
        blocks: number of each token's document, or of its block in a long document, int64, shape (n,). Some
            blocks are held out to decide when the fit of the network stops.
        unit: a typical distance. Distances are divided by it, so that features do not depend on the scale of
            the model's keys.
        purpose: metadata that is saved with the weights: the store and the model that they were fitted for.

    Returns:
        The trained gate.
    """
    # 1) Collect each expert's probability of each token.
    factors = {component.name: component.factors for component in components if component.name in parts}
    features, found, probs, query = [], [], [], slice(0)
    for evidence, targets, lm_log_probs in scored:
        experts = collect_experts(components, parts, evidence, factors, unit)
        features.append(experts.features)
        found.append(experts.found)
        query = experts.query
        expert_probs = [
            contribution.token_probs(targets)
            for contributions in experts.contributions.values()
            for contribution in contributions
        ]
        probs.append(torch.stack([lm_log_probs.exp(), *expert_probs], 1))
    present, token_probs = torch.cat(found), torch.cat(probs).clamp_(min=LEAST_PROBABILITY)
    inputs = torch.cat(features)
    inputs = fill_unknown_features(inputs, inputs.nanmean(0).nan_to_num())

    # 2) Fit the network to the likelihood of the mixture.
    def compute_loss(outputs: Tensor, rows: Tensor) -> Tensor:
        return -(compute_mixture_shares(outputs, present[rows]) * token_probs[rows]).sum(1).log().mean()

    start = _fit_constant_shares(token_probs, present).clamp(min=_LEAST_SHARE).log().tolist()
    network = fit_network(inputs, compute_loss, blocks, start, query)
    experts_of_gate = [[name, list(of_component)] for name, of_component in factors.items()]
    widths = {component.name: component.width for component in components if component.name in factors}
    metadata = {
        **purpose,
        "of": "all components",
        "unit": unit,
        "experts": experts_of_gate,
        "widths": widths,
    }
    return JointGate(network.to_weights(metadata))


def _fit_constant_shares(probs: Tensor, present: Tensor) -> Tensor:
    """Fit one constant mixture weight for the model and for each expert, by expectation maximization.

    An expert is one component at one temperature.

    Args:
        probs: probability of each token by the model and by each expert, float32, shape (n, 1 + e).
        present: True where an expert has a prediction, bool, shape (n, e).

    Returns:
        The weight of the model, then of each expert; float32, shape (1 + e,). The weights sum to 1.
    """
    shares = torch.full((probs.shape[1],), 1 / probs.shape[1])
    allowed = torch.cat([present.new_ones((len(present), 1)), present], 1)
    for _ in range(_ROUNDS):
        parts = probs * allowed * shares
        shares = (parts / parts.sum(1, keepdim=True)).mean(0)
    return shares


def _merge_experts(experts: Sequence[Contribution], shares: Tensor, below: Tensor) -> Contribution:
    """Merge one component's distributions at several temperatures into one distribution for each position.

    An expert is the component at one temperature. The merged distribution is the mean of the experts'
    distributions, weighted by their shares.

    Args:
        experts: the distributions of the e experts, with the same tokens in the same columns.
        shares: weight of each expert in the whole mixture, shape (n, e).
        below: sum of the weights of the model and of all earlier components, shape (n,).

    Returns:
        The merged distributions with their weights λ. Components are mixed one after another, so λ is s /
        (below + s), where s is the sum of the shares of the experts.
    """
    total = shares.sum(1)
    merged = experts[0]._replace(lam=total / (below + total))
    if len(experts) == 1:
        return merged
    inside = (shares / total[:, None]).where(total[:, None] > 0, 1 / len(experts))

    def compute_mean(values: Sequence[PerQuery | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        return (inside * _stack_columns(present, total)).sum(1) if present else None

    weights = torch.stack([expert.weights for expert in experts], 1)
    return merged._replace(
        weights=(inside[:, None] @ weights)[:, 0],
        rest=compute_mean([expert.rest for expert in experts]),
        temperature=compute_mean([expert.temperature for expert in experts]),
    )


def _stack_columns(values: Sequence[PerQuery], like: Tensor) -> Tensor:
    """Stack values as columns that broadcast to shape (n, len(values)), with dtype and device of `like`.

    Args:
        values: floats and tensors of shape (n,); a float is repeated in all rows. If all values are floats,
            the result has shape (len(values),).
        like: a tensor of shape (n,).
    """
    if not any(isinstance(value, Tensor) for value in values):
        return upload_floats(tuple(float(value) for value in values), like.device)
    columns = [torch.as_tensor(value, device=like.device).expand(len(like)) for value in values]
    return torch.stack(columns, 1)
