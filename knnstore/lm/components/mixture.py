"""All components: the evidence that they find for some positions, and the mixture that settings make of it.

A host of the mixture makes a `Batch` of the positions that it predicts, calls `look_up` once, and mixes::

    evidence = look_up(reader, settings, batch, Form.DISTRIBUTION)
    log_probs = mixture_of(settings, evidence).distribution(lm_log_probs)
"""

from collections.abc import Sequence

from knnstore.lm.batch import Batch
from knnstore.lm.components.component import Component, Form, TextComponent
from knnstore.lm.components.gate import weigh_by_gate
from knnstore.lm.components.keys import Keys
from knnstore.lm.components.ngrams import NGrams
from knnstore.lm.components.own_ngrams import OwnNGrams
from knnstore.lm.components.recent import RecentText
from knnstore.lm.mixing import Evidence, Mixture
from knnstore.lm.settings import KNNSettings, other_components
from knnstore.store import Reader

_KEYS = Keys()
_TEXT_COMPONENTS: Sequence[TextComponent] = (NGrams(), RecentText(), OwnNGrams())
_BUILT_IN: Sequence[Component] = (_KEYS, *_TEXT_COMPONENTS)
"""Order matters: by their own weights each component is mixed over the result of the earlier ones."""


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
    components = all_components()
    weighed = {} if settings.gate is None else weigh_by_gate(settings.gate, components, settings, evidence)
    every = [weighed.get(one.name) or one.contribute(settings, evidence) for one in components]
    contributions = [one for one in every if one is not None]
    temperature = contributions[0].temperature
    return Mixture(contributions, 1.0 if temperature is None else temperature)
