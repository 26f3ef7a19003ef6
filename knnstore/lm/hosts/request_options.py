"""Options of one request in a program that serves a model: which domains, which λ, or the model alone.

The options are flat values, because programs such as vLLM pass on strings, numbers and lists only
(``SamplingParams.extra_args``; ``vllm_xargs`` over HTTP).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from knnstore.errors import ConfigError
from knnstore.lm.settings import Overrides
from knnstore.store import Selection

PREFIX = "knn_"
"""First letters of the names of all options."""

NAMES = ("knn_domains", "knn_lambda", "knn_temperature", "knn_k", "knn_probes", "knn_off")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request. None means the value that is saved in the store."""

    domains: tuple[str, ...] | None = None
    """Names of the domains to retrieve from, sorted; None for all documents."""
    lam: float | None = None
    """λ of the keys, 0 <= λ <= 1. It is then the only weight in force."""
    temperature: float | None = None
    """T > 0, in the unit of the distances."""
    k: int | None = None
    """Number of neighbors, >= 1."""
    probes: int | None = None
    """Number of cells of each query, >= 1; 0 searches for the k nearest."""
    is_off: bool = False
    """True if the model predicts alone."""

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None) -> Self:
        """Parse the options among the extra values of a request.

        Args:
            values: names and values; names that do not begin with ``knn_`` are ignored. None and an empty
                mapping give the default options. ``knn_domains`` is a list of names, or one string with ``+``
                between the names; in this string ``%2B`` stands for ``+`` and ``%25`` for ``%``.

        Raises:
            ConfigError: an option is unknown, or its value is of a wrong type or out of range. The message
                begins with the name of the option.
        """
        options = {name: value for name, value in (values or {}).items() if name.startswith(PREFIX)}
        for name in options:
            if name not in NAMES:
                raise ConfigError(f"{name}: there is no such option; known: {', '.join(NAMES)}")
        parsed = cls(
            _parse_domains(options.get("knn_domains")),
            _parse_number("knn_lambda", options.get("knn_lambda"), 0.0, 1.0),
            _parse_number("knn_temperature", options.get("knn_temperature"), 0.0, math.inf),
            _parse_count("knn_k", options.get("knn_k"), 1),
            _parse_count("knn_probes", options.get("knn_probes"), 0),
            _parse_switch("knn_off", options.get("knn_off")),
        )
        if parsed.probes and parsed.k is not None:
            raise ConfigError("knn_k: give knn_k or knn_probes, not both: all records of the cells count")
        parsed.overrides(parsed.domains)  # checks the ranges that only the settings know
        return parsed

    def overrides(self, domains: tuple[str, ...] | None) -> Overrides:
        """Return the values that replace the store's settings.

        Args:
            domains: names of the domains to retrieve from, all of which exist; None for all documents.

        Raises:
            ConfigError: a value is out of range.
        """
        return Overrides(
            selection=Selection(domains=domains),
            k=self.k,
            probes=self.probes,
            temperature=self.temperature,
            lam=self.lam,
        )


def _parse_domains(value: Any) -> tuple[str, ...] | None:
    """Parse ``knn_domains``; None if it is not set."""
    if value is None:
        return None
    if isinstance(value, str):
        names = [name.replace("%2B", "+").replace("%25", "%") for name in value.split("+")]
    elif isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        names = list(value)
    else:
        raise ConfigError(
            f"knn_domains: expected a list of names, or names with + between them, got {value!r}"
        )
    if not names or not all(names):
        raise ConfigError(f"knn_domains: a name is empty in {value!r}; leave the option out for all domains")
    return tuple(sorted(set(names)))


def _parse_number(name: str, value: Any, least: float, most: float) -> float | None:
    """Parse an option that is a number between two bounds; None if it is not set."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"a number of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
        raise ConfigError(f"{name}: expected {limits}, got {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _parse_count(name: str, value: Any, least: int) -> int | None:
    """Parse an option that is an integer with a lower bound; None if it is not set."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # JSON clients may send 16.0
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value


def _parse_switch(name: str, value: Any) -> bool:
    """Parse an option that is on or off: a bool, 0 or 1; False if it is not set."""
    if value is None:
        return False
    if value not in (0, 1):  # True and False are equal to 1 and 0
        raise ConfigError(f"{name}: expected true or false, got {value!r}")
    return bool(value)
