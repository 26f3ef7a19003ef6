"""The retrieval flow: `look_up` collects the evidence of all components, and `build_mixture` mixes it.

A program that runs the model makes a `Batch` of the positions to predict, calls `look_up` once, and mixes::

    evidence = look_up(reader, settings, batch, Form.DISTRIBUTION)
    log_probs = build_mixture(settings, evidence).compute_log_probs(ModelDistribution(logits))
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from knnstore.lm.batch import Batch
from knnstore.lm.components import (
    Citations,
    Component,
    Form,
    Keys,
    NGrams,
    OwnNGrams,
    Question,
    RecentText,
    TextComponent,
    find_by_name,
    load_plugin_components,
    weigh_by_gate,
)
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Evidence, Mixture
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader

_KEYS = Keys()
_TEXT_COMPONENTS: Sequence[TextComponent] = (NGrams(), RecentText(), OwnNGrams())
_BUILT_IN: Sequence[Component] = (_KEYS, *_TEXT_COMPONENTS)
"""Order matters: without a gate, each component is mixed over the result of the earlier ones."""


def list_components() -> Sequence[Component]:
    """Return the built-in components, then those of other packages, in the order in which they are mixed.

    A component is one kind of memory whose predictions are mixed with the model's, such as keys or n-grams.
    """
    return (*_BUILT_IN, *load_plugin_components().values())


def look_up(reader: Reader, settings: KNNSettings, batch: Batch, form: Form) -> Evidence:
    """Look up the predictions of every component in use at n positions, and return all results.

    A component is a memory that is mixed with the model, such as the keys or n-grams.

    Args:
        reader: the store.
        settings: the settings in force; they say which components are in use.
        batch: the positions. It must have contexts if `settings.needs_text`, and targets unless `form` is
            `Form.DISTRIBUTION`.
        form: which probabilities each result contains, e.g. of all tokens or of the target token only.

    Returns:
        The result of each component, and the model's own confidence (`lm_max` and `lm_entropy`), on the
        device of the batch.

    Raises:
        ConfigError: the store contains a token that the model does not predict.
    """
    searches = _KEYS.look_up(reader, settings, batch, form)
    found: dict[str, Any] = {}
    if settings.needs_text:
        assert batch.contexts is not None
        parts = settings.parts
        components: Sequence[TextComponent] = (*_TEXT_COMPONENTS, *load_plugin_components().values())
        for component in components:
            if component.name in parts:
                part = parts[component.name]
                question = _create_question(
                    component, part, reader, settings, batch.contexts, batch.keys, batch.vocabulary
                )
                found[component.name] = component.look_up(question, form).to(batch.lm_max.device)
    return Evidence(batch.lm_max, searches, batch.keys, batch.lm_entropy, found)


def build_mixture(settings: KNNSettings, evidence: Evidence) -> Mixture:
    """Choose each component's weight at n positions, and return the mixture of all components with the model.

    Args:
        settings: the settings in force. If they have a gate (a network), it chooses all weights. Without a
            gate, the settings' mixer chooses the weight λ and the temperature T of the keys. Every other
            component then has the λ of its own settings.
        evidence: the results of the components' look-ups at the n positions.
    """
    components, parts = list_components(), settings.parts
    weighed = {} if settings.gate is None else weigh_by_gate(settings.gate, components, parts, evidence)
    parts = {_KEYS.name: settings, **parts}  # keys are reported even if their weight is 0
    contributions = [
        weighed.get(component.name)
        or component.contribute(parts[component.name], find_by_name(evidence, component.name))
        for component in components
        if component.name in parts
    ]
    temperature = contributions[0].temperature
    return Mixture(contributions, 1.0 if temperature is None else temperature)


def cite_places(
    reader: Reader, settings: KNNSettings, contexts: Contexts, evidence: Evidence, mixture: Mixture, most: int
) -> dict[str, Citations]:
    """List the sources of each component's predictions of n tokens.

    A component is a memory that is mixed with the model, such as the keys or n-grams. A source is a place: a
    stored record, or an earlier token of the text.

    Args:
        reader: the store.
        settings: the settings of the mixture.
        contexts: the positions of the tokens; the texts contain the tokens.
        evidence: the look-up results for the tokens, made with `Form.SOURCES`.
        mixture: the mixture of this evidence.
        most: for each token, the largest number of nearest places, and also of causes, which are the places
            that add most to the token's probability. A component may return more causes.

    Returns:
        The places of each component in use, by its name. Components that list no places are left out.
    """
    components, parts = {component.name: component for component in list_components()}, settings.parts
    cited = {}
    for number, contribution in enumerate(mixture.components):
        name = contribution.name
        component, part = components[name], parts.get(name, settings)
        question = _create_question(component, part, reader, settings, contexts, evidence.keys)
        places = component.cite(
            question, find_by_name(evidence, name), mixture.component_weights(number), most
        )
        if places is not None:
            cited[name] = places
    return cited


def _create_question(
    component: Component,
    part: Any,
    reader: Reader,
    settings: KNNSettings,
    contexts: Contexts,
    keys: Tensor | None,
    vocabulary: int = 0,
) -> Question[Any]:
    """Create the input that a component's `look_up` and `cite` take.

    Args:
        component: the component.
        part: the component's own settings.
        reader: the store.
        settings: all settings. The question gets their selection. If they have a gate, it also gets the
            gate's temperature factors and number of features for this component.
        contexts: the positions with their texts.
        keys: query vector of each position, shape (n, d); None if they are not known.
        vocabulary: number of tokens that the model predicts; `cite` does not need it.
    """
    gate, name = settings.gate, component.name
    factors = () if gate is None else gate.factors.get(name, ())
    features = None if gate is None else gate.widths.get(name, component.width)
    return Question(reader, settings.selection, part, contexts, vocabulary, (1.0, *factors), features, keys)
