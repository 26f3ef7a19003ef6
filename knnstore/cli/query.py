"""The settings of commands that retrieve: what was given to them, else what is saved."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.cli.output import note, printable

if TYPE_CHECKING:
    from knnstore import KNNLMForCausalLM, KNNSettings, KNNStore, Selection
    from knnstore.lm import CacheSettings

KNNTemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", help="Divides the distances: larger gives far neighbours more weight."
    ),
]


def settings_of(
    lm: "KNNLMForCausalLM",
    k: int | None,
    temperature: float | None,
    lam: float | None,
    domains: list[str] | None,
    tags: list[str] | None,
    cache: tuple[int | None, float | None, float | None],
    pointers: tuple[int | None, int | None],
) -> "KNNSettings":
    """The settings of this call: what was given, else what is saved for these domains.

    Says so where calibrated settings are used, where they are stale, and where there is nothing to retrieve.
    The cache is given as its size, temperature and λ, pointers as how many suffice and the size of clusters.
    """
    from knnstore import Selection
    from knnstore.errors import ConfigError
    from knnstore.lm import (
        CalibrationRecord,
        PointerSettings,
        default_settings,
        settings_for,
        usable_settings_for,
    )

    selection = Selection(domains=tuple(domains) if domains else None, tags=tuple(tags) if tags else None)
    given = {"k": k, "temperature": temperature, "lam": lam}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if lam is None:
        saved = settings_for(lm.store, selection)
    else:  # the only one that is in force, and everywhere
        saved = usable_settings_for(lm.store, selection) or default_settings(lm.store)
        changes |= {"skip": None, "substitute": None, "selection": selection}
    settings = replace(saved, **changes)
    settings = replace(settings, cache=cache_of(settings, *cache, only_store=lam is not None))
    least, cluster_size = pointers
    if least is not None:
        chosen = PointerSettings(least, cluster_size=cluster_size) if least else None
        settings = replace(settings, pointers=chosen)
    elif cluster_size is not None:
        raise ConfigError("--clusters says where pointers lead to: give --pointers N as well")
    if lam is None:
        warn_of_outdated(lm.store, selection)
    record = CalibrationRecord.of(lm.store, selection)
    if record is not None and None in (k, temperature, lam):
        of = printable(", ".join(record.domains)) or "the whole store"
        mixer = record.mixer if lam is None else f"lambda={lam:g}, without what else was found"
        note(
            f"settings calibrated for {of} on {record.date[:10]} with {record.tokens:,} tokens: {mixer}, "
            f"k={settings.k:,}, T={settings.temperature:.4g}"
        )
        if record.is_stale(lm.store):
            note(
                f"warning: these settings are stale, there are {record.growth(lm.store):.2f} times as many "
                f"records as they were found for, and {record.gone(lm.store):.0%} of the documents are gone; "
                "run knnstore calibrate again"
            )
    _warn_of_nothing_selected(lm.store, settings)
    return settings


def _warn_of_nothing_selected(store: "KNNStore", settings: "KNNSettings") -> None:
    """Say so where retrieval is asked for and there is no record to retrieve."""
    if settings.retrieves and not store.record_count(settings.selection):
        tags = ", ".join(map(repr, settings.selection.tags or ()))
        why = f"no document selected has the tag {tags}" if tags else "no document is stored"
        note(f"warning: nothing is retrieved, the model is alone: {why}")


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
    from knnstore.lm import CacheSettings

    given = {"size": size, "temperature": temperature, "lam": lam}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if size == 0 or (only_store and not changes):
        return None
    if not changes:
        return settings.cache
    return replace(settings.cache or CacheSettings(temperature=settings.temperature), **changes)


def warn_of_outdated(store: "KNNStore", selection: "Selection") -> None:
    """Say that the settings saved for a selection name a substitute that is used no more."""
    from knnstore.lm import is_substitute_outdated

    if is_substitute_outdated(store, selection):
        note(
            "warning: the substitute in these settings was trained on documents that were removed or "
            "replaced since, and is left out: run knnstore substitute again"
        )
