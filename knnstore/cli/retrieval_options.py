"""Options of commands that retrieve: `SelectionOptions`, `Query` and `ScoringQuery`."""

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.options import DomainsOption, WhereOption
from knnstore.cli.output import print_message
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore import KNNSettings, KNNStore, Selection
    from knnstore.lm import Overrides


_TEMPERATURE = (
    "Temperature of retrieval: divides the distances, so a larger one gives far neighbors more weight."
)


def _check_above_zero(value: float | None) -> float | None:
    """Return the value of an option unchanged, after a check that it is above 0.

    Raises:
        typer.BadParameter: the value is not None, and is not a finite number above 0.
    """
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be above 0, got {value}")
    return value


@dataclass(frozen=True)
class SelectionOptions:
    """Options that select the documents to retrieve from."""

    domains: DomainsOption = None
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Retrieve from documents with this tag only; repeatable."),
    ] = None

    where: WhereOption = None

    def make_selection(self) -> "Selection":
        """Return the selection of documents that the options describe; without options all documents."""
        from knnstore import Selection

        domains, tags = tuple(self.domains or ()) or None, tuple(self.tags or ()) or None
        return Selection(domains=domains, tags=tags, where=self.where)


@dataclass(frozen=True)
class Query:
    """Options for retrieval settings; an option that was not given is None."""

    k: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of neighbors retrieved for each token.")
    ] = None
    probes: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With cells: read the N nearest cells for each token. All records of these cells count, "
            "not only the k nearest. 0 searches for the k nearest instead.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option("--knn-temperature", metavar="T", callback=_check_above_zero, help=_TEMPERATURE),
    ] = None
    lam: Annotated[
        float | None,
        typer.Option(
            "--lambda",
            min=0,
            max=1,
            metavar="L",
            help="Weight of retrieval in the mixture; 0 is the model alone.",
        ),
    ] = None
    cache: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="M",
            help="Also retrieve from the last M tokens of the text itself (continuous cache); 0 does not.",
        ),
    ] = None
    cache_temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            callback=_check_above_zero,
            help="Temperature of --cache: divides the distances to tokens of the text itself.",
        ),
    ] = None
    cache_lambda: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="L", help="Weight of --cache: of retrieval from the text itself."),
    ] = None
    ngrams: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=8,
            metavar="N",
            help="Mix in counts of the n-grams of the stored text, of up to N tokens (2 to 8); 0 is none.",
        ),
    ] = None
    ngram_lambda: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="L", help="Weight of the n-grams in the mixture."),
    ] = None
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            metavar="NAME=JSON",
            help="Settings of a component of another package, e.g. title='{\"lam\": 0.2}'; NAME=null leaves "
            "the component out. Repeatable.",
        ),
    ] = None

    def resolve_settings(self, store: "KNNStore", selection: "Selection") -> "KNNSettings":
        """Return the retrieval settings of this call: options first, then saved settings, then defaults.

        Also prints messages on stderr if calibrated settings are used, if they are stale, if a component is
        outdated, and if nothing is retrieved.

        Raises:
            ConfigError: if a value is out of range, or k is given with probes.
        """
        from knnstore.lm import find_outdated_components, resolve

        settings = resolve(store, self._build_overrides(selection))
        for name in find_outdated_components(store, selection) if self.lam is None else ():
            print_message(
                f"warning: the component {escape_unprintable(name)} in these settings was trained on "
                "documents that were removed or replaced since, and is left out: train it again"
            )
        if None in (self.k, self.temperature, self.lam):
            self._print_calibration(store, settings)
        if not _can_retrieve(store, settings):
            why = explain_empty_selection(store, settings.selection)
            alone = "" if settings.cache else ", so the model is used alone"
            print_message(f"warning: nothing is retrieved{alone}: {why}")
        return settings

    def _build_overrides(self, selection: "Selection") -> "Overrides":
        """Convert the options to `Overrides`: values that replace values of the saved settings.

        Raises:
            ConfigError: if k is given with probes, or a component's JSON is wrong.
        """
        from knnstore.lm import Overrides

        if self.probes and self.k is not None:
            raise ConfigError(
                "give --k or --probes, not both: with --probes, every record of the searched cells is used"
            )
        return Overrides(
            selection=selection,
            k=self.k,
            probes=self.probes,
            temperature=self.temperature,
            lam=self.lam,
            cache_size=self.cache,
            cache_temperature=self.cache_temperature,
            cache_lam=self.cache_lambda,
            ngram_order=self.ngrams,
            ngram_lam=self.ngram_lambda,
            others=self._parse_others(),
        )

    def _parse_others(self) -> dict[str, Any]:
        """Parse the options ``--component NAME=JSON``, settings of components that other packages add.

        A component is a source of predictions.

        Returns:
            The settings of each component by its name. None stands for ``NAME=null``, which leaves the
            component out. Empty if no such option was given.

        Raises:
            ConfigError: if a value is not a JSON object or null.
        """
        others: dict[str, Any] = {}
        for option in self.others or ():
            name, _, values = option.partition("=")
            try:
                others[name] = json.loads(values)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--component {option}: what follows the = is not JSON: {error}") from error
            if others[name] is not None and not isinstance(others[name], dict):
                raise ConfigError(f"--component {option}: give an object of JSON, as in {name}='{{}}'")
        return others

    def is_default(self, store: "KNNStore", selection: "Selection") -> bool:
        """Check whether retrieval uses default settings: no option was given, and nothing was calibrated.

        Returns False if the selection has no records, because nothing is retrieved then.

        Args:
            store: the store, which may have calibrated settings for the selection.
            selection: documents to retrieve from.
        """
        from knnstore.lm import CalibrationRecord

        has_option = any(value is not None for value in vars(self).values())
        return (
            not has_option
            and CalibrationRecord.for_selection(store, selection) is None
            and store.record_count(selection) > 0
        )

    def _print_calibration(self, store: "KNNStore", settings: "KNNSettings") -> None:
        """Print on stderr which calibrated settings are in use, and a warning if they are stale.

        Prints nothing if the settings were not calibrated.
        """
        from knnstore.lm import CalibrationRecord

        record = CalibrationRecord.for_selection(store, settings.selection)
        if record is None:
            return
        scope = escape_unprintable(", ".join(record.domains)) or "the whole store"
        mixer = record.mixer if self.lam is None else f"lambda={self.lam:g} in place of the fitted weights"
        scoring_only = (
            ", ".join(settings.scoring_only) if self.lam is None else ""
        )  # else nothing of it counts
        search_setting = f"k={settings.k:,}" if settings.probes is None else f"{settings.probes:,} probes"
        print_message(
            f"settings calibrated for {scope} on {record.date[:10]} with {record.tokens:,} tokens: {mixer}, "
            f"{search_setting}, T={settings.temperature:.4g}"
            + (f"; in scoring only: {scoring_only}" if scoring_only else "")
            + ("; so the model generates alone" if settings.model_generates_alone else "")
        )
        if record.is_stale(store):
            print_message(
                f"warning: these settings are stale: the store has {record.record_growth(store):.2f} times "
                f"as many records as when they were fitted, and {record.removed_share(store):.0%} of the "
                "documents were removed; run knnstore calibrate again"
            )


@dataclass(frozen=True)
class ScoringQuery(Query):
    """Options for retrieval settings of commands that do not sample.

    They also accept ``--temperature``, the older name of ``--knn-temperature``: without sampling, this name
    has only one meaning.
    """

    temperature: Annotated[
        float | None,
        typer.Option(
            "--knn-temperature", "--temperature", metavar="T", callback=_check_above_zero, help=_TEMPERATURE
        ),
    ] = None


def print_if_empty(store: "KNNStore", selection: "Selection") -> None:
    """Print on stderr why a selection has no documents; print nothing if it has documents."""
    if not store.lengths(selection):
        print_message(f"nothing was found: {explain_empty_selection(store, selection)}")


def explain_empty_selection(store: "KNNStore", selection: "Selection") -> str:
    """Return the reason why a selection has no documents, as text for a message.

    The first of these reasons that fits is returned:

    - No document meets the condition on metadata. Fields of the condition that no document has are named.
    - No document has one of the tags.
    - No document is stored. (A domain without documents does not exist.)

    Args:
        store: the store.
        selection: a selection without documents.
    """
    if selection.where is not None:
        from knnstore.catalog import list_condition_fields

        selections_by_field = {
            field: replace(selection, where=f"{field} exists")
            for field in list_condition_fields(selection.where)
        }
        unknown = ", ".join(
            field for field, with_field in selections_by_field.items() if not store.lengths(with_field)
        )
        missing_fields = f", no document has {unknown}" if unknown else ""
        return f"no selected document meets {selection.where!r}{missing_fields}"
    tags = ", ".join(map(repr, selection.tags or ()))
    return f"no selected document has the tag {tags}" if tags else "no document is stored"


def _can_retrieve(store: "KNNStore", settings: "KNNSettings") -> bool:
    """Check whether the selected documents have anything that the settings could retrieve.

    Settings that search keys need a record, and settings with only n-grams need a token. For settings that
    use neither keys nor n-grams, the result is True.
    """
    if settings.retrieves and not store.is_keyless:
        return store.record_count(settings.selection) > 0
    return not settings.ngrams or any(store.lengths(settings.selection).values())
