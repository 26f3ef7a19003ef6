"""All components: what they find for some positions, and the mixture that settings make of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.components.component import Component, Form, Found, TextComponent
from knnstore.lm.components.keys import Keys
from knnstore.lm.components.ngrams import NGrams
from knnstore.lm.components.own_ngrams import OwnNGrams
from knnstore.lm.components.recent import RecentText
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Contribution, JointGate, Mixture, PerQuery, Retrieved
from knnstore.lm.settings import KNNSettings, other_components
from knnstore.store import Reader

_TEXT_COMPONENTS: Sequence[TextComponent] = (NGrams(), RecentText(), OwnNGrams())
_BUILT_IN: Sequence[Component] = (Keys(), *_TEXT_COMPONENTS)
"""Order matters: by their own weights each component is mixed over the result of the earlier ones."""

Factors = Mapping[str, Sequence[float]]
"""By which the temperature of each component is multiplied, for each of its experts in a gate."""


class Experts(NamedTuple):
    """What a gate weighs at n tokens: e experts of all components, side by side."""

    said: Mapping[str, Sequence[Contribution]]
    """Of each component; of one that is not in use nothing."""

    features: Tensor
    """What is known before the token comes, nan where nothing is: float32, shape (n, f)."""

    found: Tensor
    """Which experts say something, bool, shape (n, e)."""

    query: slice
    """The features that are the query itself."""


def all_components() -> Sequence[Component]:
    """Return the built-in components, then those of other packages."""
    return (*_BUILT_IN, *other_components().values())


def look_up_texts(
    reader: Reader, settings: KNNSettings, contexts: Contexts, form: Form, vocabulary: int | None = None
) -> dict[str, Found]:
    """Look up what every component in use, but the keys, knows of some positions.

    Args:
        reader: the store.
        settings: in force.
        contexts: the positions.
        form: how much is kept of what is found.
        vocabulary: tokens that the model predicts; default is the store's.

    Returns:
        What was found, by the components' names.
    """
    vocabulary = vocabulary or reader.identity.vocab_size
    components: Sequence[TextComponent] = (*_TEXT_COMPONENTS, *other_components().values())
    return {
        component.name: component.look_up(reader, settings, contexts, form, vocabulary)
        for component in components
        if component.is_used(settings)
    }


def mixture_of(settings: KNNSettings, retrieved: Retrieved) -> Mixture:
    """Weigh what was retrieved for n queries.

    Args:
        settings: whose mixer chooses λ and T, unless a gate over all components does.
        retrieved: what was found by the mixer's searches, and what else the settings have in use.
    """
    weighed = {} if settings.gate is None else _weighed(settings.gate, settings, retrieved)
    every = [weighed.get(part.name) or part.contribute(settings, retrieved) for part in all_components()]
    components = [one for one in every if one is not None]
    temperature = components[0].temperature
    return Mixture(components, 1.0 if temperature is None else temperature)


def factors_in_use(settings: KNNSettings) -> Factors:
    """Those of the components that settings have in use."""
    return {part.name: part.factors for part in all_components() if part.is_used(settings)}


def experts_of(settings: KNNSettings, retrieved: Retrieved, factors: Factors, unit: float) -> Experts:
    """Hear what is to be weighed.

    Args:
        settings: what is in use; what is not, of the components named, says nothing and is not known.
        retrieved: for n queries, with their keys and the model's entropy.
        factors: which components, and at which temperatures.
        unit: of distances.

    Raises:
        ConfigError: a component is not known.
    """
    unknown = factors.keys() - {part.name for part in all_components()}
    if unknown:
        raise ConfigError(
            f"the gate weighs {min(unknown)!r}, which this version does not know; upgrade knnstore"
        )
    assert retrieved.keys is not None
    assert retrieved.lm_entropy is not None
    like = retrieved.lm_max
    said: dict[str, list[Contribution]] = {}
    features = [torch.stack([like, retrieved.lm_entropy], 1), retrieved.keys.float()]
    found = []
    for part in (one for one in all_components() if one.name in factors):
        asked = factors[part.name] if part.is_used(settings) else ()
        every = [part.contribute(settings, retrieved, factor) for factor in asked]
        said[part.name] = [one for one in every if one is not None]
        if said[part.name]:
            is_found = said[part.name][0].is_found
            features.append(part.features(retrieved, unit).where(is_found[:, None], torch.nan))
        else:
            is_found = torch.zeros_like(like, dtype=torch.bool)
            features.append(like.new_full((len(like), part.width), torch.nan))
        found += [is_found] * len(factors[part.name])
    query = slice(2, 2 + retrieved.keys.shape[1])
    return Experts(said, torch.cat(features, 1), torch.stack(found, 1), query)


def _weighed(gate: JointGate, settings: KNNSettings, retrieved: Retrieved) -> dict[str, Contribution]:
    """Each component that is in use, over those before it as the gate weighs them."""
    experts = experts_of(settings, retrieved, gate.factors, gate.unit)
    shares = gate.shares(experts.features, experts.found)
    below, every = shares[:, 0], torch.split(shares[:, 1:], [len(of) for of in gate.factors.values()], 1)
    weighed = {}
    for (name, said), own in zip(experts.said.items(), every, strict=True):
        if said:
            weighed[name] = _merged(said, own, below)
            below = below + own.sum(1)
    return weighed


def _merged(said: Sequence[Contribution], shares: Tensor, below: Tensor) -> Contribution:
    """One component of several, by their shares, shape (n, len(said)), over what has the share `below`."""
    total = shares.sum(1)
    merged = said[0]._replace(lam=total / (below + total))
    if len(said) == 1:
        return merged
    inside = (shares / total[:, None]).where(total[:, None] > 0, 1 / len(said))

    def mean(values: Sequence[PerQuery | None]) -> Tensor | None:
        known = [one for one in values if one is not None]
        return (inside * _side_by_side(known, total)).sum(1) if known else None

    weights = torch.stack([one.weights for one in said], 1)
    return merged._replace(
        weights=(inside[:, None] @ weights)[:, 0],
        rest=mean([one.rest for one in said]),
        temperature=mean([one.temperature for one in said]),
    )


def _side_by_side(values: Sequence[PerQuery], like: Tensor) -> Tensor:
    """Columns of one value for all, or of one for each row of a tensor; shape (n, len(values))."""
    if not any(isinstance(one, Tensor) for one in values):
        return like.new_tensor(values)
    return torch.stack([torch.as_tensor(one, device=like.device).expand(len(like)) for one in values], 1)
