"""`KNNSettings`: k or probes, temperature, mixer and the settings of all components."""

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from knnstore.checks import check_numbers, convert_scalars
from knnstore.errors import ConfigError
from knnstore.lm.components import KEYS, CacheSettings, NGramSettings, check_others, load_plugin_components
from knnstore.lm.mixing import LEAST_TEMPERATURE, FixedLambda, GateLambda, JointGate, Mixer
from knnstore.store import EVERYTHING, Lineage, Selection

_COMPONENTS: dict[str, dict[str, Any]] = {
    "cache": {"cache": None},
    "n-grams": {"ngrams": None},
    "keys": {"mixer": FixedLambda(0.0)},
}
"""For each built-in component the fields of `KNNSettings`, with the values that switch the component off."""


_TEXT_FIELDS = {"cache": "cache", "n-grams": "ngrams"}
"""The field of `KNNSettings` for each built-in component that uses the text."""


class _Unset(Enum):
    UNSET = "unset"


_UNSET: Any = _Unset.UNSET
_DEFAULTS: dict[str, Any] = {
    "k": 1024,
    "temperature": 1.0,
    "mixer": FixedLambda(0.25),
    "cache": None,
    "ngrams": None,
    "gate": None,
    "probes": None,
    "scoring_only": (),
    "others": {},
}
"""Values of unset fields until `resolve` fills them: the values of Khandelwal et al. 2020."""
_SET_WITH_MIXER = frozenset({"cache", "ngrams", "gate", "scoring_only", "others"})


@dataclass(frozen=True, slots=True, repr=False)
class KNNSettings:
    """Settings of retrieval: how a language model uses a store.

    Omitted fields are *unset*: `resolve` fills them with the store's values for the selection. If a mixer or
    λ is set, it is the only weight in force: cache, n-grams, gate and components of other packages are off
    unless they are set too. If a cache or n-grams are set, the saved gate is not used. If `k` is set, the k
    nearest records are searched, even in a store with cells. `dataclasses.replace` keeps unset fields unset.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int = _UNSET
    """Number of neighbors that are retrieved for each query, >= 1."""

    temperature: float = _UNSET
    """T > 0, in the unit of the distances; a larger T gives far neighbors more weight."""

    mixer: Mixer = _UNSET
    """The rule that chooses the weight λ of the keys for each query; some mixers scale T too."""

    selection: Selection = EVERYTHING
    """The stored documents to search."""

    cache: CacheSettings | None = _UNSET
    """Settings of the continuous cache; None switches it off."""

    ngrams: NGramSettings | None = _UNSET
    """Settings of the n-grams of the selected documents; None switches n-grams off."""

    gate: JointGate | None = _UNSET
    """Network that chooses the weights of all components for each token. None uses the λ of each component's
    own settings."""

    probes: int | None = _UNSET
    """Number of cells that are searched for each query, >= 1, in a store with cells (groups of records with
    near keys). All records of these cells count, and `k` is not used. None searches for the k nearest
    records."""

    scoring_only: tuple[str, ...] = _UNSET
    """Names of components that are used in scoring but not in generation; `components` has the possible
    names."""

    others: Mapping[str, Mapping[str, Any]] = field(default=_UNSET, hash=False)
    """Settings of components of other packages, by the component's name."""

    lam: InitVar[float | None] = None
    """Short for ``mixer=FixedLambda(lam)``; not kept as an attribute."""

    unset: frozenset[str] = frozenset()
    """Names of the fields that `resolve` fills with the store's values."""

    def __post_init__(self, lam: float | None) -> None:
        # 1) Replace omitted fields by defaults, and remember their names.
        unset = {name for name in self.unset if getattr(self, name) == _DEFAULTS[name]}
        for name, value in _DEFAULTS.items():
            if getattr(self, name) is _UNSET:
                unset.add(name)
                object.__setattr__(self, name, value)
        if lam is not None:
            object.__setattr__(self, "mixer", FixedLambda(lam))
            unset.discard("mixer")
        # 2) Check the values.
        convert_scalars(self, "k", "probes", "temperature")
        check_numbers(self, "temperature")
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ConfigError(f"k must be an integer of at least 1, got {self.k!r}")
        if self.probes is not None and not (type(self.probes) is int and self.probes >= 1):
            raise ConfigError(f"probes must be an integer of at least 1, or none, got {self.probes!r}")
        if not (self.temperature >= LEAST_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature must be above 0 (at least {LEAST_TEMPERATURE}) and finite, "
                f"got {self.temperature}"
            )
        object.__setattr__(self, "others", check_others(self.others))
        for name in self.trained_components:
            lineage = find_traces(self.others[name])
            if lineage is not None and not lineage.is_within_selection(self.selection):
                raise ConfigError(
                    f"the selection leaves out documents that the component {name!r} was trained on: train "
                    "it on the selected domains, or leave it out"
                )
        object.__setattr__(self, "scoring_only", tuple(self.scoring_only))
        for name in self.scoring_only:
            if name not in _COMPONENTS and name not in load_plugin_components():
                known = ", ".join((*_COMPONENTS, *load_plugin_components()))
                raise ConfigError(f"no component {name!r}; known: {known}")
        searches = self.mixer.searches(self.selection)
        if self.gate is not None and any(one is not self.selection for one in searches):
            raise ConfigError(
                f"a gate over all components does not work with the mixer {self.mixer.name!r}, which runs "
                "searches of its own: choose another mixer"
            )
        # 3) A field is no longer unset if another field decides it.
        object.__setattr__(self, "unset", frozenset(self._choose_unset_fields(unset)))

    def _choose_unset_fields(self, unset: set[str]) -> set[str]:
        """Return the names of the fields that stay unset, given the fields that the caller set.

        A field is no longer unset if a set field decides it: for example the cache is off if a mixer (rule
        that chooses λ) is set.

        Args:
            unset: names of the fields that the caller omitted; the set is changed.
        """
        if "mixer" not in unset:
            unset -= _SET_WITH_MIXER
            if not self.retrieves:
                return set()
        if not {"cache", "ngrams"} <= unset:  # the weights of the set components are used, not the gate
            unset -= {"gate"}
        if "k" not in unset:
            unset -= {"probes"}
        elif "probes" not in unset and self.probes is not None:
            unset -= {"k"}
        return unset

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unset"}
        shown = [
            f"{name}={value!r}"
            for name, value in values.items()
            if name not in self.unset and value not in (None, (), {}, EVERYTHING)
        ]
        return f"KNNSettings({', '.join(shown)})"

    @property
    def needs_nearest_only(self) -> bool:
        """True if the nearest distance and the model's confidence are enough to choose all weights.

        False if a gate or the mixer (rule that chooses λ) also uses other neighbors.
        """
        return self.mixer.needs_nearest_only and self.gate is None

    @property
    def chooses_temperature(self) -> bool:
        """True if a network chooses each token's temperature, starting from the value of `temperature`."""
        return self.gate is not None or isinstance(self.mixer, GateLambda)

    @property
    def retrieves(self) -> bool:
        """True if the weight λ of the keys can be above 0, so that a search can change a prediction.

        False if λ is always 0; then no search is needed.
        """
        return bool(self.mixer.searches(self.selection))

    @property
    def is_model_alone(self) -> bool:
        """True if no component is mixed with the model; False if at least one component is in use."""
        return not self.components

    @property
    def parts(self) -> dict[str, Any]:
        """Settings of each component in use, by the component's name.

        The value for the component ``keys`` is this whole `KNNSettings` object, which has the fields of keys.
        """
        parts: dict[str, Any] = dict(self.others)
        if self.retrieves:
            parts[KEYS] = self
        if self.ngrams is not None:
            parts["n-grams"] = self.ngrams
        if self.cache is not None:
            parts["cache"] = self.cache
            if self.cache.ngrams is not None:
                parts["own n-grams"] = self.cache.ngrams
        return parts

    def with_part(self, name: str, part: Any) -> "KNNSettings":
        """Return a copy of the settings in which one component has the given settings.

        Args:
            name: name of the component: ``cache``, ``n-grams``, or a component of another package.
            part: settings of the component.
        """
        if name in _TEXT_FIELDS:
            return replace(self, **{_TEXT_FIELDS[name]: part})
        return replace(self, others={**self.others, name: part})

    @property
    def needs_text(self) -> bool:
        """True if a component needs the earlier tokens or keys of a text, and not only the query."""
        return self.cache is not None or self.ngrams is not None or bool(self.others)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components in use: "cache", "n-grams", "keys", then components of other packages."""
        in_use = {
            "cache": self.cache is not None,
            "n-grams": self.ngrams is not None,
            "keys": self.retrieves,
        }
        return (*(name for name, is_used in in_use.items() if is_used), *self.others)

    @property
    def trained_components(self) -> tuple[str, ...]:
        """Names of the components in use that were trained on stored documents."""
        return tuple(name for name, values in self.others.items() if find_traces(values) is not None)

    @property
    def for_writing(self) -> "KNNSettings":
        """Settings for generation, without the components in `scoring_only`.

        This is a former name; use `resolve` instead.
        """
        return self.without_components(*self.scoring_only)

    @property
    def writes_alone(self) -> bool:
        """Former name of `model_generates_alone`."""
        return self.model_generates_alone

    @property
    def model_generates_alone(self) -> bool:
        """True if the model generates alone, because all components in use are used in scoring only.

        False if no component is in use at all. A component is a source of predictions besides the model:
        keys, n-grams or a cache, for example.
        """
        return bool(self.components) and set(self.components) <= set(self.scoring_only)

    def without_components(self, *components: str) -> "KNNSettings":
        """Return settings in which the named components are switched off; names not in use are ignored.

        Without names the same object is returned.
        """
        if not components:
            return self
        scoring_only = tuple(name for name in self.scoring_only if name not in components)
        switched_off = {
            name: value for component in components for name, value in _COMPONENTS.get(component, {}).items()
        }
        others = {name: values for name, values in self.others.items() if name not in components}
        return replace(self, **switched_off, others=others, scoring_only=scoring_only)


def find_traces(settings: Mapping[str, Any]) -> Lineage | None:
    """Return the stored documents that a component was trained on, from ``traces`` in its settings.

    Returns None if the settings have no ``traces``: the component was not trained on stored documents.

    Raises:
        ConfigError: ``traces`` in the settings is not a `Lineage`.
    """
    traces = settings.get("traces")
    if traces is None:
        return None
    try:
        return Lineage.from_dict(traces)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the list of documents that a component was trained on is invalid: {error}"
        ) from error
