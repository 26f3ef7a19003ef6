"""The settings of a query: how many neighbours, how far they count, how much retrieval is trusted."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing import (
    MIXERS,
    DomainWeights,
    FixedLambda,
    LoadWeights,
    Mixer,
    PerQuery,
    Recent,
    Retrieved,
    Skipping,
    gold_knn_probs,
    mix_gold,
    mixer_of,
    neighbor_weights,
    plain,
    with_weights,
)
from knnstore.lm.settings.parts import CacheSettings, PointerSettings, Substitute
from knnstore.store import EVERYTHING, Selection, Weights

_KHANDELWAL = FixedLambda(0.25)


class Weighed(NamedTuple):
    """The settings applied to n queries."""

    weights: Tensor
    """p_kNN of each neighbour, see `neighbor_weights`; shape (n, k), with a cache (n, k + m)."""

    lam: Tensor
    """λ of all neighbours together, shape (n,)."""

    temperature: PerQuery
    """T in force, for the neighbours from the store."""

    tokens: Tensor | None
    """Of the neighbours, int64, shape of `weights`: the store's first, then the cache's. None where
    those of the store are not known."""

    def knn_probs(self, gold: Tensor) -> Tensor:
        """Give p_kNN of one token for each query, float32, shape (n,); `gold` is int64 of that shape."""
        assert self.tokens is not None
        return gold_knn_probs(self.weights, self.tokens, gold)

    def mixed_gold(self, lm_log_probs: Tensor, knn_probs: Tensor) -> Tensor:
        """Mix log p_LM and p_kNN of one token for each query to log p; see `mix_gold`."""
        return mix_gold(lm_log_probs, knn_probs, self.weights.sum(1) > 0, self.lam)


@dataclass(frozen=True, slots=True)
class KNNSettings:
    """How a language model uses a store. The defaults are those of Khandelwal et al. 2020.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int = 1024
    """Neighbours of each query, >= 1."""

    temperature: float = 1.0
    """T > 0, in the unit of the distances; larger gives far neighbours more weight."""

    mixer: Mixer = _KHANDELWAL
    """Chooses λ for each query; some scale T as well."""

    selection: Selection = EVERYTHING
    """Which documents are retrieved from."""

    cache: CacheSettings | None = None
    """How far the text itself counts that is being read; None is not at all."""

    skip: Skipping | None = None
    """For which queries no search is made; None searches for all."""

    pointers: PointerSettings | None = None
    """When what was retrieved for the token before takes the place of a search; None is never."""

    substitute: Substitute | None = None
    """A trained substitute, mixed with the model before the store is; alone with ``lam=0``."""

    lam: InitVar[float | None] = None
    """Short for ``mixer=FixedLambda(lam)``; not kept as an attribute."""

    def __post_init__(self, lam: float | None) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ConfigError(f"k must be an integer of at least 1, got {self.k!r}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be above 0 and finite, got {self.temperature}")
        if self.substitute is not None and not self.substitute.traces.are_within(self.selection):
            raise ConfigError(
                "the selection leaves out documents that the substitute was trained on: train one on the "
                "domains selected, or use none"
            )
        if lam is not None:
            object.__setattr__(self, "mixer", FixedLambda(lam))
        if self.pointers is not None and isinstance(self.mixer, DomainWeights):
            raise ConfigError(
                "pointers do not go with weights of domains, which search in each: choose another mixer"
            )

    @property
    def retrieves(self) -> bool:
        """Whether a search can make any difference: False when λ is 0 everywhere."""
        return not (isinstance(self.mixer, FixedLambda) and self.mixer.lam == 0)

    def weigh(self, retrieved: Retrieved) -> "Weighed":
        """Apply the mixer.

        Args:
            retrieved: n queries with k neighbours each.
        """
        if isinstance(self.mixer, DomainWeights):
            weights, lam, temperature = self.mixer.weigh(retrieved, self.temperature)
        else:
            lam, temperature = self.mixer(retrieved, self.temperature)
            weights = neighbor_weights(retrieved.distances, temperature, retrieved.log_weights)
        weighed = Weighed(weights, lam, temperature, retrieved.tokens)
        if self.cache is None:
            return weighed
        assert retrieved.recent is not None
        return _joined(weighed, retrieved.recent, self.cache)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON.

        Raises:
            ConfigError: the mixer is none of `MIXERS`.
        """
        mixer: Any = self.mixer
        if mixer.name not in MIXERS:
            raise ConfigError(f"settings with the mixer {mixer.name!r} cannot be written as values")
        return {
            "k": self.k,
            "temperature": self.temperature,
            "mixer": {"name": mixer.name, **plain(mixer)},
            "selection": dataclasses.asdict(self.selection),
            "cache": None if self.cache is None else dataclasses.asdict(self.cache),
            "skip": None if self.skip is None else plain(self.skip),
            "pointers": None if self.pointers is None else dataclasses.asdict(self.pointers),
            "substitute": None if self.substitute is None else dataclasses.asdict(self.substitute),
        }

    @property
    def weights(self) -> list[Weights]:
        """What `to_dict` only names: to be saved before its values are."""
        parts = (getattr(part, "weights", None) for part in (self.mixer, self.skip))
        return [part for part in parts if isinstance(part, Weights)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], load: LoadWeights | None = None) -> Self:
        """Make settings from what `to_dict` returned; what is absent has its default.

        ``lambda`` is short for a fixed mixer.

        Args:
            values: the settings as plain values.
            load: reads the weights that they name, see `weights_for`; needed by a gate.

        Raises:
            ConfigError: a name is unknown or a value is out of range.
        """
        names = ("k", "temperature", "mixer", "selection", "cache", "skip", "pointers", "substitute")
        known = {name: name for name in names} | {"lambda": "lam"}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
        given = {known[name]: value for name, value in values.items()}
        if "mixer" in given:
            given["mixer"] = mixer_of(given["mixer"], load)
        if given.get("skip") is not None:
            given["skip"] = _skipping_of(given["skip"], load)
        if given.get("cache") is not None:
            given["cache"] = _cache_of(given["cache"])
        if given.get("pointers") is not None:
            given["pointers"] = _pointers_of(given["pointers"])
        if given.get("substitute") is not None:
            given["substitute"] = Substitute.from_dict(given["substitute"])
        if "selection" in given:
            parts = {field.name for field in dataclasses.fields(Selection)}
            if not set(given["selection"]) <= parts:
                raise ConfigError(
                    f"unknown part of a selection in {given['selection']}; known: {sorted(parts)}"
                )
            given["selection"] = Selection(
                **{
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in given["selection"].items()
                }
            )
        return cls(**given)


def _joined(weighed: Weighed, recent: Recent, cache: CacheSettings) -> Weighed:
    """Mix the cache with what was mixed before: (1 - λ_c) (λ p_kNN + (1 - λ) p_LM) + λ_c p_cache.

    All neighbours together then have λ' = 1 - (1 - λ_c) (1 - λ), and share it as their weights.
    """
    weights = neighbor_weights(recent.distances, cache.temperature)
    lam = weighed.lam * (weighed.weights.sum(1) > 0)
    lam_cache = cache.lam * (weights.sum(1) > 0)
    lam_store = lam * (1 - lam_cache)
    together = lam_store + lam_cache
    parts = torch.cat([weighed.weights * lam_store[:, None], weights * lam_cache[:, None]], 1)
    tokens = None if weighed.tokens is None else torch.cat([weighed.tokens, recent.tokens], 1)
    return Weighed(parts / together.where(together > 0, 1.0)[:, None], together, weighed.temperature, tokens)


def _cache_of(values: Mapping[str, Any]) -> CacheSettings:
    try:
        return CacheSettings(**values)
    except TypeError as error:
        raise ConfigError(f"the cache has other settings: {error}") from error


def _pointers_of(values: Mapping[str, Any]) -> PointerSettings:
    try:
        return PointerSettings(**values)
    except TypeError as error:
        raise ConfigError(f"pointers have other settings: {error}") from error


def _skipping_of(values: Mapping[str, Any], load: LoadWeights | None) -> Skipping:
    try:
        return Skipping(**with_weights(values, load))
    except TypeError as error:
        raise ConfigError(f"what is skipped has other settings: {error}") from error
