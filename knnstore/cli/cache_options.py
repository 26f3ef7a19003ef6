"""The options for the continuous cache, and what they make of the settings that are saved."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from knnstore import KNNSettings
    from knnstore.lm.continuous_cache import CacheSettings

CacheOption = Annotated[
    int | None,
    typer.Option(
        "--cache", min=0, metavar="M", help="Look back M tokens in the text itself; 0 is not at all."
    ),
]
CacheTemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--cache-temperature", metavar="T", help="Divides the distances to tokens of the text itself."
    ),
]
CacheLambdaOption = Annotated[
    float | None,
    typer.Option("--cache-lambda", min=0, max=1, metavar="L", help="Weight of the text itself."),
]


def cache_of(
    settings: "KNNSettings",
    size: int | None,
    temperature: float | None,
    lam: float | None,
    *,
    only_store: bool,
) -> "CacheSettings | None":
    """The continuous cache of this call: what was given, else what is saved.

    Args:
        settings: what is saved, or given for the store.
        size: of ``--cache``; 0 is none.
        temperature: of ``--cache-temperature``.
        lam: of ``--cache-lambda``.
        only_store: whether nothing given is none: a λ for the store is that of all retrieval.
    """
    from knnstore.lm.continuous_cache import CacheSettings

    given = {"size": size, "temperature": temperature, "lam": lam}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if size == 0 or (only_store and not changes):
        return None
    if not changes:
        return settings.cache
    return replace(settings.cache or CacheSettings(temperature=settings.temperature), **changes)
