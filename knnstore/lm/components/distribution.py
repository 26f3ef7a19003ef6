"""Base of components of other packages: each gives a distribution over a few tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.errors import ConfigError
from knnstore.lm.components.component import Citations, Form, Question
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import LEAST_PROBABILITY, Contribution, fit_lambdas, mix_gold
from knnstore.store import Reader, Selection


class Places(NamedTuple):
    """Distributions over k tokens each, at n positions."""

    weights: Tensor
    """Probabilities, float32, shape (n, k); rows sum to 1, or to 0 where the component knows nothing."""
    tokens: Tensor
    """int64, shape (n, k); arbitrary where the weight is zero."""

    @property
    def width(self) -> int:
        """Tokens of each position."""
        return self.weights.shape[1]

    def rows(self, rows: slice | Tensor) -> "Places":
        """Return the distributions at some of the positions."""
        return Places(self.weights[rows], self.tokens[rows])

    def to(self, device: torch.device) -> "Places":
        """Return the same on a device."""
        return Places(self.weights.to(device), self.tokens.to(device))

    @classmethod
    def joined(cls, parts: Sequence["Places"]) -> "Places":
        """Put the distributions at several groups of positions one after another."""
        width = max(part.width for part in parts)
        columns = (torch.cat([pad(part[at], (0, width - part.width)) for part in parts]) for at in (0, 1))
        return cls(*columns)


class DistributionFitting(NamedTuple):
    """Fits the settings of a component to its distributions; see `Fitting`."""

    component: "OneWeightComponent"
    found: Any
    """Result of the component's `look_up` at n tokens, in target form."""
    targets: Tensor
    """The tokens, int64, shape (n,)."""
    settings: Mapping[str, Any]
    """The settings with which it was found; see `OneWeightComponent.settings_to_fit`."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Return `settings` with the values that the component fits, see `OneWeightComponent.fit`."""
        return {**self.settings, **self.component.fit(self.found, log_probs, self.targets, wanted)}

    def mix(self, log_probs: Tensor, fitted: Mapping[str, Any]) -> Tensor:
        """Mix the distributions into log p of each token, shape (n,)."""
        weighed = self.component.weigh(self.found, fitted)
        return mix_gold(log_probs, weighed.probs(self.targets), weighed.lam.where(weighed.is_found, 0.0))

    def lam(self, fitted: Mapping[str, Any]) -> float:
        """Return λ."""
        return float(fitted["lam"])


class OneWeightComponent(ABC):
    """Base of components of other packages that have one λ, with findings of any type.

    `DistributionComponent` is simpler: it needs one method. Use this class for a component that uses the
    query (`Question.keys`), or whose distributions have too many tokens to keep for a whole text: `look_up`
    may return findings of another type for each `Form`.
    """

    name: ClassVar[str]
    """Its name in settings, gates and explanations; unique."""
    factors: ClassVar[tuple[float, ...]] = (1.0,)
    width: ClassVar[int] = 1
    default_settings: ClassVar[Mapping[str, Any]] = {"lam": 0.1}
    """Values of JSON; `lam` is λ, its weight over the components before it, between 0 and 1."""

    @abstractmethod
    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Any:
        """Look up the next tokens at some positions; see `TextComponent.look_up`."""

    @abstractmethod
    def weigh(self, found: Any, settings: Mapping[str, Any]) -> Contribution:
        """Weigh findings by the λ of the settings."""

    @abstractmethod
    def features(self, found: Any, unit: float) -> Tensor:
        """Compute the component's features for a gate; see `Component.features`."""

    def contribute(self, settings: Mapping[str, Any], found: Any, factor: float = 1.0) -> Contribution:
        """Weigh findings by one λ; there is no temperature."""
        return self.weigh(found, settings)

    def settings_to_fit(self, reader: Reader, selection: Selection) -> Mapping[str, Any] | None:
        """Return the settings with which `calibrate` looks up findings to fit λ to.

        The default is `default_settings`. A component that must be trained first returns its trained
        settings; see `knnstore.lm.settings.find_trained_settings`.

        Args:
            reader: the store.
            selection: the documents that are retrieved from.

        Returns:
            The settings; None if `calibrate` shall leave the component out.
        """
        return self.default_settings

    def check_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings if they are valid.

        Settings may name a file of weights under ``weights``, and the documents that it was trained on under
        ``traces``, a `Lineage` as a dict. The store keeps the file while saved settings name it, and deletes
        it when one of the documents is removed or replaced. Settings then go on without the component. A
        selection that leaves out one of the documents refuses it.

        Raises:
            ConfigError: a name is unknown or a value is out of range.
        """
        unknown = sorted(set(settings) - set(self.default_settings))
        if unknown:
            known = ", ".join(self.default_settings)
            raise ConfigError(f"the component {self.name!r} has no setting {unknown[0]!r}; known: {known}")
        lam = settings["lam"]
        if isinstance(lam, bool) or not isinstance(lam, int | float) or not 0 <= lam <= 1:
            raise ConfigError(f"lambda of the component {self.name!r} must be between 0 and 1, got {lam!r}")
        return dict(settings)

    def cite(
        self, question: Question[Mapping[str, Any]], found: Any, weights: Tensor, most: int
    ) -> Citations | None:
        """Return None: by default a component names no places. See `Component.cite`."""
        return None

    def fit(self, found: Any, log_probs: Tensor, targets: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Fit its settings to text that was scored.

        Args:
            found: result of `look_up` at n tokens, in target form.
            log_probs: log p of each token without this component, float32, shape (n,).
            targets: the tokens, int64, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).

        Returns:
            The fitted values: by default the likeliest λ as ``lam``, 0 if nothing was found.
        """
        contribution = self.weigh(found, self.default_settings)
        rows = wanted & contribution.is_found
        if not rows.any():
            return {"lam": 0.0}
        below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        probs = contribution.probs(targets)[rows][:, None]
        lam, _ = fit_lambdas(below, probs, torch.zeros(len(below), dtype=torch.int64), 1)
        return {"lam": float(lam[0, 0])}


class DistributionComponent(OneWeightComponent):
    """A component that knows a distribution over a few tokens at some positions of a text.

    A package offers it as an entry point of the group `knnstore.components`. Settings that name it use it:
    ``KNNSettings(others={"title": {"lam": 0.2}})``. `calibrate` fits its λ and gives it to the gate over all
    components. It is saved, explained and served without further code.

    Example, in the package's ``pyproject.toml``::

        [project.entry-points."knnstore.components"]
        title = "my_package:TitleWords"
    """

    @abstractmethod
    def distribution(
        self, reader: Reader, contexts: Contexts, settings: Mapping[str, Any], vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Predict the next token at n positions.

        Args:
            reader: the store.
            contexts: the positions. Only the tokens before a position may be used. Positions with the text
                -1 are padding: their weights must be 0.
            settings: the settings of this component.
            vocabulary: number of tokens of the model.

        Returns:
            Weights and tokens, see `Places`.
        """

    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Places:
        """Look up the distributions; they are the same in all forms."""
        return Places(
            *self.distribution(question.reader, question.contexts, question.settings, question.vocabulary)
        )

    def weigh(self, found: Places, settings: Mapping[str, Any]) -> Contribution:
        """Weigh distributions by the λ of the component's settings."""
        lam = torch.full((len(found.weights),), float(settings["lam"]), device=found.weights.device)
        return Contribution(found.weights, lam, found.tokens, name=self.name)

    def features(self, found: Places, unit: float) -> Tensor:
        """Return the largest weight of each distribution."""
        return found.weights.amax(1, keepdim=True)
