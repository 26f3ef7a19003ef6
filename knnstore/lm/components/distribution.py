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
    """Distributions over the next token at n positions; each distribution has at most k tokens."""

    weights: Tensor
    """Probabilities, float32, shape (n, k). A row sums to 1, or is 0 where the component predicts nothing."""
    tokens: Tensor
    """Tokens of these probabilities, int64, shape (n, k); arbitrary where the probability is 0."""

    @property
    def width(self) -> int:
        """Number of tokens of each position, k."""
        return self.weights.shape[1]

    def select_rows(self, rows: slice | Tensor) -> "Places":
        """Return the distributions at some of the positions; `rows` is a slice, indices or a mask."""
        return Places(self.weights[rows], self.tokens[rows])

    def to(self, device: torch.device) -> "Places":
        """Return the distributions with both tensors on a device."""
        return Places(self.weights.to(device), self.tokens.to(device))

    @classmethod
    def concatenate(cls, parts: Sequence["Places"]) -> "Places":
        """Concatenate the distributions of several groups of positions, padded with zeros to the same k."""
        width = max(part.width for part in parts)
        columns = (
            torch.cat([pad(part[field], (0, width - part.width)) for part in parts]) for field in (0, 1)
        )
        return cls(*columns)


class DistributionFitting(NamedTuple):
    """Fits the settings of one component to scored tokens, from the component's predictions of the tokens."""

    component: "OneWeightComponent"
    found: Any
    """Result of the component's `look_up` at the n tokens with `Form.TARGET`."""
    targets: Tensor
    """The n scored tokens, int64, shape (n,)."""
    settings: Mapping[str, Any]
    """The component's settings with which `look_up` was called."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Return a copy of `settings` with the values (e.g. ``lam``) that fit the tokens best.

        Args:
            log_probs: log p of each token in the mixture without the component, float32, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).
        """
        fitted = self.component.fit(self.found, self.settings, log_probs, self.targets, wanted)
        return {**self.settings, **fitted}

    def mix(self, log_probs: Tensor, fitted: Mapping[str, Any]) -> Tensor:
        """Return log p of each token in the mixture with the component, float32, shape (n,).

        Args:
            log_probs: log p of each token in the mixture without the component, float32, shape (n,).
            fitted: the component's settings, from `fit`.
        """
        weighed = self.component.weigh(self.found, fitted)
        return mix_target_log_probs(
            log_probs, weighed.token_probs(self.targets), weighed.lam.where(weighed.is_found, 0.0)
        )

    def lam(self, fitted: Mapping[str, Any]) -> float:
        """Return the weight λ of settings that `fit` returned."""
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
    """Factors by which a gate multiplies the component's temperature. The gate gives the component a weight
    of its own at each temperature. The default is one temperature only."""
    width: ClassVar[int] = 1
    """Number of values that `features` returns for each position."""
    default_settings: ClassVar[Mapping[str, Any]] = {"lam": 0.1}
    """Default value of each setting, by name. Values must be JSON values. `lam` is λ, the weight of the
    component in the mixture with the model and all earlier components, between 0 and 1."""

    @abstractmethod
    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Any:
        """Look up the component's predictions of the next token at n positions.

        Args:
            question: the positions, the store and the component's settings.
            form: the part of the result that is kept: probabilities of all tokens, or of the target token
                only.

        Returns:
            The result for all n positions, including padding and positions without a prediction. Its type has
            the methods of `Found`.
        """

    @abstractmethod
    def weigh(self, found: Any, settings: Mapping[str, Any]) -> Contribution:
        """Convert the result of a look-up to a distribution over tokens at each position, with one weight λ.

        Args:
            found: the result of `look_up` at n positions.
            settings: the component's settings, which contain λ as ``lam``.

        Returns:
            The distributions and λ.
        """

    @abstractmethod
    def features(self, found: Any, unit: float) -> Tensor:
        """Compute the component's inputs for a gate, the network that chooses all components' weights.

        Args:
            found: the result of `look_up` at n positions.
            unit: a typical distance. Features that are distances should be divided by it, so that they do not
                depend on the scale of the model's keys.

        Returns:
            Float32, shape (n, width); arbitrary where nothing was found.
        """

    def contribute(self, settings: Mapping[str, Any], found: Any, factor: float = 1.0) -> Contribution:
        """Return the distributions and weights from `weigh`.

        `factor` is ignored, because there is no temperature.
        """
        return self.weigh(found, settings)

    def settings_to_fit(self, reader: Reader, selection: Selection) -> Mapping[str, Any] | None:
        """Return the settings with which `calibrate` looks up predictions to fit the weight λ.

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

        A component with trained weights may have two more settings: ``weights`` is the name of a file of
        weights, and ``traces`` says which documents the weights were trained on (a `Lineage` as a dict). The
        store keeps the file while saved settings name it. When one of these documents is removed or replaced,
        the store deletes the file; the saved settings then stay in force without the component. If settings
        select documents, they must select all documents that the weights were trained on; otherwise the
        store raises an error.

        Args:
            settings: all settings of the component, by name.

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
        """Return None: this base class cannot name the places that a prediction comes from.

        A subclass may override this method. It then lists, for each token, places in the store or in the
        text, as `Component.cite` describes.
        """
        return None

    def fit(
        self, found: Any, settings: Mapping[str, Any], log_probs: Tensor, targets: Tensor, wanted: Tensor
    ) -> dict[str, Any]:
        """Fit the component's settings to n scored tokens.

        Args:
            found: result of `look_up` at the tokens with `Form.TARGET`.
            settings: the settings with which `look_up` was called.
            log_probs: log p of each token in the mixture without this component, float32, shape (n,).
            targets: the tokens, int64, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).

        Returns:
            The fitted values. This implementation returns ``lam``, the weight λ with the largest likelihood,
            or 0 if nothing was found.
        """
        contribution = self.weigh(found, settings)
        rows = wanted & contribution.is_found
        if not rows.any():
            return {"lam": 0.0}
        below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        probs = contribution.token_probs(targets)[rows][:, None]
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
            Two tensors. First the probabilities of k tokens at each position, float32, shape (n, k); a
            position without a prediction has zeros. Then the k tokens, int64, shape (n, k).
        """

    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Places:
        """Return the distributions that `distribution` predicts at the positions; `form` is ignored."""
        return Places(
            *self.distribution(question.reader, question.contexts, question.settings, question.vocabulary)
        )

    def weigh(self, found: Places, settings: Mapping[str, Any]) -> Contribution:
        """Return the distributions as a contribution to the mixture, with one weight λ for all positions.

        Args:
            found: the result of `look_up` at n positions.
            settings: the component's settings, which contain λ as ``lam``.
        """
        lam = torch.full((len(found.weights),), float(settings["lam"]), device=found.weights.device)
        return Contribution(found.weights, lam, found.tokens, name=self.name)

    def features(self, found: Places, unit: float) -> Tensor:
        """Return the largest probability of each distribution, shape (n, 1), as input of a gate.

        A gate is a network that weighs all components. `unit` is ignored.
        """
        return found.weights.amax(1, keepdim=True)
