"""Options of one request in a program that runs the model: which domains, which λ, or the model alone.

The options are flat values, because programs such as vLLM pass on strings, numbers and lists only
(``SamplingParams.extra_args`` in Python; ``vllm_xargs`` over HTTP).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from knnstore.errors import ConfigError
from knnstore.lm.settings import Overrides
from knnstore.store import Selection

FELL_BACK = "knnstore_fallback"
"""Stop reason of an answer that the model continued without the store, because the retrieval failed."""

PREFIX = "knn_"
"""First letters of the names of all options."""

_FIELDS = {
    "knn_domains": "domains",
    "knn_tags": "tags",
    "knn_where": "where",
    "knn_lambda": "lam",
    "knn_temperature": "temperature",
    "knn_k": "k",
    "knn_probes": "probes",
    "knn_off": "is_off",
    "knn_only_selected": "only_selected",
    "knn_store": "store",
}
"""Fields of `RequestOptions` by the names of the options."""

NAMES = tuple(_FIELDS)
"""Names of all options."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request: which documents it retrieves from, and with which settings.

    None means the value that is saved in the store.
    """

    domains: tuple[str, ...] | None = None
    """Names of the domains to retrieve from, sorted; None for all documents."""
    tags: tuple[str, ...] | None = None
    """Tags; only documents with at least one of them are retrieved from. None for all documents."""
    where: str | None = None
    """Condition on the metadata of documents, see `Selection`; None for all documents."""
    lam: float | None = None
    """λ, the weight of the records that are found by their keys, 0 <= λ <= 1. If it is set, only the keys are
    used, with this one weight. None means the saved weights of all components."""
    temperature: float | None = None
    """T, the divisor of the distances of neighbors, > 0; None means the saved value."""
    k: int | None = None
    """Number of neighbors (retrieved records) for each token, >= 1; None means the saved number."""
    probes: int | None = None
    """Number of cells (groups of near records) that are searched for each token, >= 1. 0 searches for the k
    nearest records instead. None means the saved number."""
    is_off: bool = False
    """True if the model predicts alone, without the store."""
    only_selected: bool = False
    """True if no setting may be computed from documents outside the domains, because the client may not see
    those documents."""
    store: str | None = None
    """Id of the store that the program must have opened; None accepts any store."""

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None) -> Self:
        """Return the options that stand among the extra values of a request.

        Args:
            values: names and values; names that do not begin with ``knn_`` are ignored. None and an empty
                mapping give the default options. ``knn_domains`` and ``knn_tags`` are lists of names, or one
                string with ``+`` between the names; in this string ``%2B`` stands for ``+`` and ``%25`` for
                ``%``.

        Raises:
            ConfigError: an option is unknown, or its value is of a wrong type or out of range. The message
                begins with the name of the option.
        """
        options = {name: value for name, value in (values or {}).items() if name.startswith(PREFIX)}
        for name in options:
            if name not in NAMES:
                raise ConfigError(f"{name}: there is no such option; known: {', '.join(NAMES)}")
        parsed = cls(
            domains=_parse_names("knn_domains", options.get("knn_domains")),
            tags=_parse_names("knn_tags", options.get("knn_tags")),
            where=_parse_condition(options.get("knn_where")),
            lam=_parse_number("knn_lambda", options.get("knn_lambda"), 0.0, 1.0),
            temperature=_parse_number("knn_temperature", options.get("knn_temperature"), 0.0, math.inf),
            k=_parse_count("knn_k", options.get("knn_k"), 1),
            probes=_parse_count("knn_probes", options.get("knn_probes"), 0),
            is_off=_parse_switch("knn_off", options.get("knn_off")),
            only_selected=_parse_switch("knn_only_selected", options.get("knn_only_selected")),
            store=_parse_text("knn_store", options.get("knn_store")),
        )
        if parsed.probes and parsed.k is not None:
            raise ConfigError(
                "knn_k: give knn_k or knn_probes, not both: with knn_probes, every record of the searched "
                "cells is used"
            )
        parsed.overrides(parsed.domains)  # checks the ranges that only the settings know
        return parsed

    def to_values(self) -> dict[str, Any]:
        """Return the options as names and values from which `parse` makes the same options.

        Options that are None or False are left out. Tuples become lists, and True becomes 1.
        """
        values = {name: getattr(self, field) for name, field in _FIELDS.items()}
        return {
            name: list(value) if isinstance(value, tuple) else int(value) if value is True else value
            for name, value in values.items()
            if value is not None and value is not False
        }

    def overrides(self, domains: tuple[str, ...] | None) -> Overrides:
        """Return the values of these options that replace the settings saved in the store.

        Args:
            domains: names of the domains to retrieve from, all of which exist; None means all documents. Used
                in place of the options' own domains.

        Raises:
            ConfigError: a value is out of range.
        """
        return Overrides(
            selection=Selection(domains=domains, tags=self.tags, where=self.where),
            k=self.k,
            probes=self.probes,
            temperature=self.temperature,
            lam=self.lam,
        )


def _parse_names(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the names of an option that lists names, sorted and without duplicates; None if it is not set.

    Args:
        name: the name of the option, for messages.
        value: a list of names, or one string with ``+`` between the names; None if the option is not set.

    Raises:
        ConfigError: the value has a wrong type, or a name is empty.
    """
    if value is None:
        return None
    if isinstance(value, str):
        names = [part.replace("%2B", "+").replace("%25", "%") for part in value.split("+")]
    elif isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        names = list(value)
    else:
        raise ConfigError(f"{name}: expected a list of names, or names with + between them, got {value!r}")
    if not names or not all(names):
        raise ConfigError(
            f"{name}: {value!r} contains an empty name; leave the option out to use all documents"
        )
    return tuple(sorted(set(names)))


def _parse_text(name: str, value: Any) -> str | None:
    """Return the value of an option that must be a string; None if the option is not set.

    Args:
        name: the name of the option, for messages.
        value: the value; None if the option is not set.

    Raises:
        ConfigError: the value is not a string.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}: expected a string, got {value!r}")
    return value


def _parse_condition(value: Any) -> str | None:
    """Return the condition of the option ``knn_where``; None if it is not set.

    Raises:
        ConfigError: the value is not a string, or not a condition.
    """
    condition = _parse_text("knn_where", value)
    try:
        Selection(where=condition)
    except ConfigError as error:
        raise ConfigError(f"knn_where: {error}") from error
    return condition


def _parse_number(name: str, value: Any, least: float, most: float) -> float | None:
    """Return the value of an option that must be a finite number; None if it is not set.

    Args:
        name: the name of the option, for messages.
        value: the value; None if the option is not set.
        least: smallest allowed number.
        most: largest allowed number.

    Raises:
        ConfigError: the value is not a number, or out of range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"a number of at least {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
        raise ConfigError(f"{name}: expected {limits}, got {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _parse_count(name: str, value: Any, least: int) -> int | None:
    """Return the value of an option that must be an integer; None if it is not set.

    A float like 16.0 counts too.

    Args:
        name: the name of the option, for messages.
        value: the value; None if the option is not set.
        least: smallest allowed integer.

    Raises:
        ConfigError: the value is not an integer, or too small.
    """
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # JSON clients may send 16.0
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value


def _parse_switch(name: str, value: Any) -> bool:
    """Return the value of an option that is on or off, as a bool; False if the option is not set.

    Args:
        name: the name of the option, for messages.
        value: True, False, 1 or 0; None if the option is not set.

    Raises:
        ConfigError: the value is something else.
    """
    if value is None:
        return False
    if value not in (0, 1):  # True and False are equal to 1 and 0
        raise ConfigError(f"{name}: expected true or false, got {value!r}")
    return bool(value)
