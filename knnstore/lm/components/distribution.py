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
from knnstore.store import Reader


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

    component: "DistributionComponent"
    found: Places
    """At n tokens."""
    targets: Tensor
    """The tokens, int64, shape (n,)."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Return the settings that the component fits, see `DistributionComponent.fit`."""
        return self.component.fit(self.found, log_probs, self.targets, wanted)

    def mix(self, log_probs: Tensor, fitted: Mapping[str, Any]) -> Tensor:
        """Mix the distributions into log p of each token, shape (n,)."""
        weighed = self.component.weigh(self.found, fitted)
        return mix_gold(log_probs, weighed.probs(self.targets), weighed.lam.where(weighed.is_found, 0.0))

    def lam(self, fitted: Mapping[str, Any]) -> float:
        """Return λ."""
        return float(fitted["lam"])


class DistributionComponent(ABC):
    """A component that knows a distribution over a few tokens at some positions of a text.

    A package offers it as an entry point of the group `knnstore.components`. Settings that name it use it:
    ``KNNSettings(others={"title": {"lam": 0.2}})``. `calibrate` fits its λ and gives it to the gate over all
    components. It is saved, explained and served without further code.

    Example, in the package's ``pyproject.toml``::

        [project.entry-points."knnstore.components"]
        title = "my_package:TitleWords"
    """

    name: ClassVar[str]
    """Its name in settings, gates and explanations; unique."""
    factors: ClassVar[tuple[float, ...]] = (1.0,)
    width: ClassVar[int] = 1
    default_settings: ClassVar[Mapping[str, Any]] = {"lam": 0.1}
    """Values of JSON; `lam` is λ, its weight over the components before it, between 0 and 1."""

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

    def check_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings if they are valid.

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

    def look_up(self, question: Question[Mapping[str, Any]], form: Form) -> Places:
        """Look up the distributions; they are the same in all forms."""
        return Places(
            *self.distribution(question.reader, question.contexts, question.settings, question.vocabulary)
        )

    def contribute(self, settings: Mapping[str, Any], found: Places, factor: float = 1.0) -> Contribution:
        """Weigh the distributions by one λ."""
        return self.weigh(found, settings)

    def weigh(self, found: Places, settings: Mapping[str, Any]) -> Contribution:
        """Weigh distributions by the λ of the component's settings."""
        lam = torch.full((len(found.weights),), float(settings["lam"]), device=found.weights.device)
        return Contribution(found.weights, lam, found.tokens, name=self.name)

    def cite(
        self, question: Question[Mapping[str, Any]], found: Places, weights: Tensor, most: int
    ) -> Citations | None:
        """Return None: by default a component names no places. See `Component.cite`."""
        return None

    def features(self, found: Places, unit: float) -> Tensor:
        """Return the largest weight of each distribution."""
        return found.weights.amax(1, keepdim=True)

    def fit(self, found: Places, log_probs: Tensor, targets: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Fit its settings to text that was scored.

        Args:
            found: the distributions at n tokens.
            log_probs: log p of each token without this component, float32, shape (n,).
            targets: the tokens, int64, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).

        Returns:
            Its settings with the likeliest λ; with λ = 0 if it knows nothing at these tokens.
        """
        contribution = self.weigh(found, self.default_settings)
        rows = wanted & contribution.is_found
        if not rows.any():
            return {**self.default_settings, "lam": 0.0}
        below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        probs = contribution.probs(targets)[rows][:, None]
        lam, _ = fit_lambdas(below, probs, torch.zeros(len(below), dtype=torch.int64), 1)
        return {**self.default_settings, "lam": float(lam[0, 0])}
