"""All components: the evidence that they find for some positions, and the mixture that settings make of it.

A host of the mixture makes a `Batch` of the positions that it predicts, calls `look_up` once, and mixes::

    evidence = look_up(reader, settings, batch, Form.DISTRIBUTION)
    log_probs = mixture_of(settings, evidence).distribution(lm_log_probs)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.batch import Batch
from knnstore.lm.components.component import Component, Form, TextComponent
from knnstore.lm.components.keys import Keys
from knnstore.lm.components.ngrams import NGrams
from knnstore.lm.components.own_ngrams import OwnNGrams
from knnstore.lm.components.recent import RecentText
from knnstore.lm.mixing import Contribution, Evidence, JointGate, Mixture, PerQuery
from knnstore.lm.settings import KNNSettings, other_components
from knnstore.store import Reader

_KEYS = Keys()
_TEXT_COMPONENTS: Sequence[TextComponent] = (NGrams(), RecentText(), OwnNGrams())
_BUILT_IN: Sequence[Component] = (_KEYS, *_TEXT_COMPONENTS)
"""Order matters: by their own weights each component is mixed over the result of the earlier ones."""

Factors = Mapping[str, Sequence[float]]
"""The factors of each component's temperature, one for each of its experts in a gate."""


class Experts(NamedTuple):
    """What a gate weighs at n tokens: e experts of all components, side by side."""

    contributions: Mapping[str, Sequence[Contribution]]
    """The experts of each component; none of a component that is not in use."""

    features: Tensor
    """What is known before the token comes, NaN where nothing is: float32, shape (n, f)."""

    found: Tensor
    """Which experts say something, bool, shape (n, e)."""

    query: slice
    """The features that are the query itself."""


def all_components() -> Sequence[Component]:
    """Return the built-in components, then those of other packages."""
    return (*_BUILT_IN, *other_components().values())


def look_up(reader: Reader, settings: KNNSettings, batch: Batch, form: Form) -> Evidence:
    """Look up what every component in use knows of some positions.

    Args:
        reader: the store.
        settings: in force.
        batch: the positions. It has contexts if `settings.needs_text`, and targets unless the form is
            `Form.DISTRIBUTION`.
        form: how much is kept of what is found.

    Returns:
        The evidence, on the device of the batch.

    Raises:
        ConfigError: the store holds a token that the model does not predict.
    """
    searches, searched = _KEYS.look_up(reader, settings, batch, form)
    found = {}
    if settings.needs_text:
        assert batch.contexts is not None
        components: Sequence[TextComponent] = (*_TEXT_COMPONENTS, *other_components().values())
        found = {
            component.name: component.look_up(reader, settings, batch.contexts, form, batch.vocabulary)
            for component in components
            if component.is_used(settings)
        }
    device = batch.lm_max.device
    return Evidence(
        batch.lm_max,
        searches,
        batch.keys,
        batch.lm_entropy,
        searched,
        {name: one.to(device) for name, one in found.items()},
    )


def mixture_of(settings: KNNSettings, evidence: Evidence) -> Mixture:
    """Mix all components with the model.

    Args:
        settings: whose mixer chooses λ and T, unless a gate over all components does.
        evidence: for n positions, of the components that the settings have in use.
    """
    weighed = {} if settings.gate is None else _weigh_by_gate(settings.gate, settings, evidence)
    every = [weighed.get(one.name) or one.contribute(settings, evidence) for one in all_components()]
    contributions = [one for one in every if one is not None]
    temperature = contributions[0].temperature
    return Mixture(contributions, 1.0 if temperature is None else temperature)


def factors_in_use(settings: KNNSettings) -> Factors:
    """Return the factors of the components that settings have in use."""
    return {one.name: one.factors for one in all_components() if one.is_used(settings)}


def experts_of(settings: KNNSettings, evidence: Evidence, factors: Factors, unit: float) -> Experts:
    """Collect the experts of a gate with their features.

    Args:
        settings: which components are in use; the others named say nothing and have no features.
        evidence: for n positions, with their keys and the model's entropy.
        factors: which components, and at which temperatures.
        unit: of distances.

    Raises:
        ConfigError: a component is not known.
    """
    unknown = factors.keys() - {one.name for one in all_components()}
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
    for component in (one for one in all_components() if one.name in factors):
        used = factors[component.name] if component.is_used(settings) else ()
        every = [component.contribute(settings, evidence, factor) for factor in used]
        experts = [one for one in every if one is not None]
        contributions[component.name] = experts
        if experts:
            is_found = experts[0].is_found
            features.append(component.features(evidence, unit).where(is_found[:, None], torch.nan))
        else:
            is_found = torch.zeros_like(like, dtype=torch.bool)
            features.append(like.new_full((len(like), component.width), torch.nan))
        found += [is_found] * len(factors[component.name])
    query = slice(2, 2 + evidence.keys.shape[1])
    return Experts(contributions, torch.cat(features, 1), torch.stack(found, 1), query)


def _weigh_by_gate(gate: JointGate, settings: KNNSettings, evidence: Evidence) -> dict[str, Contribution]:
    """Weigh each component in use over the earlier ones, as the gate says."""
    experts = experts_of(settings, evidence, gate.factors, gate.unit)
    shares = gate.shares(experts.features, experts.found)
    below, every = shares[:, 0], torch.split(shares[:, 1:], [len(of) for of in gate.factors.values()], 1)
    weighed = {}
    for (name, contributions), own in zip(experts.contributions.items(), every, strict=True):
        if contributions:
            weighed[name] = _merge_experts(contributions, own, below)
            below = below + own.sum(1)
    return weighed


def _merge_experts(experts: Sequence[Contribution], shares: Tensor, below: Tensor) -> Contribution:
    """Merge the experts of a component, which have the same places.

    Args:
        experts: e of them.
        shares: of each in the whole mixture, shape (n, e).
        below: share of all that lies below the component, shape (n,).
    """
    total = shares.sum(1)
    merged = experts[0]._replace(lam=total / (below + total))
    if len(experts) == 1:
        return merged
    inside = (shares / total[:, None]).where(total[:, None] > 0, 1 / len(experts))

    def mean(values: Sequence[PerQuery | None]) -> Tensor | None:
        known = [one for one in values if one is not None]
        return (inside * _in_columns(known, total)).sum(1) if known else None

    weights = torch.stack([one.weights for one in experts], 1)
    return merged._replace(
        weights=(inside[:, None] @ weights)[:, 0],
        rest=mean([one.rest for one in experts]),
        temperature=mean([one.temperature for one in experts]),
    )


def _in_columns(values: Sequence[PerQuery], like: Tensor) -> Tensor:
    """Put values, each for all rows or of shape (n,), in columns; shape (n, len(values))."""
    if not any(isinstance(one, Tensor) for one in values):
        return like.new_tensor(values)
    return torch.stack([torch.as_tensor(one, device=like.device).expand(len(like)) for one in values], 1)
