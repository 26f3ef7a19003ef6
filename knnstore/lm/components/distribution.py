"""Base classes of components of other packages (`DistributionComponent`, `OneWeightComponent`)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.errors import ConfigError
from knnstore.lm.components.component import Citations, Form, Question
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import LEAST_PROBABILITY, Contribution, fit_lambdas, mix_target_log_probs
from knnstore.store import Reader, Selection


class Places(NamedTuple):
    """Distributions over k tokens each, at n positions."""

    weights: Tensor
    """Probabilities, float32, shape (n, k); rows sum to 1, or are 0 where the component predicts nothing."""
    tokens: Tensor
    """Tokens of these probabilities, int64, shape (n, k); arbitrary where the probability is 0."""

    @property
    def width(self) -> int:
        """Number of tokens of each position, k."""
        return self.weights.shape[1]

    def rows(self, rows: slice | Tensor) -> "Places":
        """Return the distributions at the selected positions; `rows` is a slice, indices or a mask."""
        return Places(self.weights[rows], self.tokens[rows])

    def to(self, device: torch.device) -> "Places":
        """Return the distributions with both tensors on a device."""
        return Places(self.weights.to(device), self.tokens.to(device))

    @classmethod
    def joined(cls, parts: Sequence["Places"]) -> "Places":
        """Concatenate the distributions at several groups of positions, padded with zeros to one width."""
        width = max(part.width for part in parts)
        columns = (
            torch.cat([pad(part[field], (0, width - part.width)) for part in parts]) for field in (0, 1)
        )
        return cls(*columns)


class DistributionFitting(NamedTuple):
    """Fits the settings of a component to its distributions; see `Fitting`."""

    component: "OneWeightComponent"
    found: Any
    """Result of the component's `look_up` at n tokens, in target form."""
    targets: Tensor
    """The n tokens, int64, shape (n,)."""
    settings: Mapping[str, Any]
    """The settings of this look-up; see `OneWeightComponent.settings_to_fit`."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Return a copy of `settings` with the fitted values; see `OneWeightComponent.fit`."""
        return {**self.settings, **self.component.fit(self.found, log_probs, self.targets, wanted)}

    def mix(self, log_probs: Tensor, fitted: Mapping[str, Any]) -> Tensor:
        """Return log p of each token with the component mixed in, shape (n,); see `Fitting.mix`."""
        weighed = self.component.weigh(self.found, fitted)
        return mix_target_log_probs(
            log_probs, weighed.probs(self.targets), weighed.lam.where(weighed.is_found, 0.0)
        )

    def lam(self, fitted: Mapping[str, Any]) -> float:
        """Return λ of fitted settings."""
        return float(fitted["lam"])


class OneWeightComponent(ABC):
    """Base of components of other packages that have one λ, and results of any type (see `Found`).

    `DistributionComponent` is simpler: it needs one method. Use this class for a component that uses the
    query (`Question.keys`), or whose distributions have too many tokens to keep for a whole text: `look_up`
    may return another type of result for each `Form`.
    """

    name: ClassVar[str]
    """Unique name of the component in settings, gates and explanations."""
    factors: ClassVar[tuple[float, ...]] = (1.0,)
    """See `Component.factors`."""
    width: ClassVar[int] = 1
    """See `Component.width`."""
    default_settings: ClassVar[Mapping[str, Any]] = {"lam": 0.1}
    """Default of each setting, a value of JSON. `lam` is λ, the weight of the component in the mixture with
    the model and all earlier components, between 0 and 1."""

    @abstractmethod
    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Any:
        """Look up predictions of the next token at n positions; see `TextComponent.look_up`."""

    @abstractmethod
    def weigh(self, found: Any, settings: Mapping[str, Any]) -> Contribution:
        """Convert the result of a look-up to distributions, with λ of the settings.

        Args:
            found: the result of `look_up` at n positions.
            settings: the component's settings.
        """

    @abstractmethod
    def features(self, found: Any, unit: float) -> Tensor:
        """Compute the component's features for a gate; see `Component.features`."""

    def contribute(self, settings: Mapping[str, Any], found: Any, factor: float = 1.0) -> Contribution:
        """Return the result of `weigh`; `factor` is ignored, because there is no temperature."""
        return self.weigh(found, settings)

    def settings_to_fit(self, reader: Reader, selection: Selection) -> Mapping[str, Any] | None:
        """Return the settings of the look-up on whose result `calibrate` fits λ.

        This implementation returns `default_settings`. A component that must be trained first returns its
        trained settings; see `knnstore.lm.settings.find_trained_settings`.

        Args:
            reader: the store.
            selection: the stored documents that may be used.

        Returns:
            The settings; None if `calibrate` must leave the component out, e.g. because it is not trained.
        """
        return self.default_settings

    def check_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings, and return a copy. An override may convert values.

        Settings may name a file of weights under ``weights``, and the documents that the weights were trained
        on under ``traces``, a `Lineage` as a dict. The store keeps the file while saved settings name it.
        When one of the documents is removed or replaced, the store deletes the file, and the settings stay in
        force without the component. A selection that excludes one of the documents is refused with an error.

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
        """Return None: this implementation lists no places. See `Component.cite`."""
        return None

    def fit(self, found: Any, log_probs: Tensor, targets: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Fit the component's settings to n scored tokens.

        Args:
            found: result of `look_up` at the tokens, in target form.
            log_probs: log p of each token in the mixture without this component, float32, shape (n,).
            targets: the tokens, int64, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).

        Returns:
            The fitted values. This implementation returns ``lam``, the λ with the largest likelihood, or 0 if
            nothing was found.
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
    """Base of a component that predicts the next token by a distribution over a few tokens.

    A package offers the component as an entry point of the group `knnstore.components`. The component is used
    if settings name it: ``KNNSettings(others={"title": {"lam": 0.2}})``. `calibrate` fits λ, and includes the
    component in the gate over all components. Saving, explaining and serving need no further code.

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
            contexts: the positions. Only the tokens before a position may be used. Positions with owner -1
                are padding: their weights must be 0.
            settings: the settings of this component.
            vocabulary: number of tokens that the model predicts.

        Returns:
            Weights and tokens, see the fields of `Places`.
        """

    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Places:
        """Return the result of `distribution`; `form` is ignored."""
        return Places(
            *self.distribution(question.reader, question.contexts, question.settings, question.vocabulary)
        )

    def weigh(self, found: Places, settings: Mapping[str, Any]) -> Contribution:
        """Return the distributions with λ of the settings, the same for all positions."""
        lam = torch.full((len(found.weights),), float(settings["lam"]), device=found.weights.device)
        return Contribution(found.weights, lam, found.tokens, name=self.name)

    def features(self, found: Places, unit: float) -> Tensor:
        """Return the largest probability of each distribution, shape (n, 1)."""
        return found.weights.amax(1, keepdim=True)
