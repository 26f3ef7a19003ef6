"""Settings saved for a set of domains, as one JSON object."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from knnstore.catalog import Snapshot
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store.fitted.lineage import Lineage

if TYPE_CHECKING:
    from knnstore.catalog import Catalog, CatalogWriter

_logger = logging.getLogger(__name__)

_CALIBRATION, _DERIVED = "calibration", "derived"
_TRAINED = "trained_"
"""Begins the name of a record in `SavedSettings.trained`, before the name of the component."""


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """Saved settings as JSON values; `knnstore.lm` converts them to its types."""

    query: Mapping[str, Any] = field(default_factory=dict)
    """The values of `KNNSettings` without the selection; empty if none were saved."""

    calibration: Mapping[str, Any] | None = None
    """The `CalibrationRecord` of these values; None if they were not calibrated."""

    derived: Mapping[str, Any] | None = None
    """The `Lineage` of the documents whose keys gave these default values; None if the values were chosen or
    fitted."""

    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Records of components of other packages that were trained on these domains, by the component's name.
    Each record has the component's settings under the same name. They are used only if `query` has them
    too."""

    @classmethod
    def of_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Convert a JSON object that `payload` returned to settings. Raises CatalogError if it is damaged."""
        with convert_damage_errors():
            query = {**payload}
            calibration, derived = (query.pop(name, None) for name in (_CALIBRATION, _DERIVED))
            names = [name for name in query if name.startswith(_TRAINED)]
            trained = {name.removeprefix(_TRAINED): query.pop(name) for name in names}
            return cls(
                query, calibration, derived, {name: record for name, record in trained.items() if record}
            )

    def payload(self) -> dict[str, Any]:
        """Convert the settings to one JSON object, as the catalog saves it."""
        parts = {_CALIBRATION: self.calibration, _DERIVED: self.derived}
        trained = {f"{_TRAINED}{name}": record for name, record in self.trained.items()}
        return {**self.query, **{name: part for name, part in parts.items() if part is not None}, **trained}

    @property
    def fitted_on(self) -> frozenset[str]:
        """Content hashes of the held-out documents that the calibration was fitted on; empty without one."""
        with convert_damage_errors():
            return frozenset((self.calibration or {}).get("held_out", ()))

    def drop_if_outdated(self, snapshot: Snapshot, removed: Collection[str] = ()) -> Self:
        """Return this same object unless a removed document has influenced it; else only `trained`.

        A document has influenced settings if they were calibrated on its text, or derived from its keys.
        `trained` is always kept.

        Args:
            snapshot: the present documents.
            removed: content hashes of the removed documents.
        """
        with convert_damage_errors():
            derived = self.derived and Lineage.from_dict(self.derived)
            if self.fitted_on.isdisjoint(removed) and not (derived and derived.gone(snapshot)):
                return self
        return type(self)(trained=self.trained)

    def files(self) -> dict[str, Lineage | None]:
        """Return the files of weights that these settings name, each with its lineage or None."""
        with convert_damage_errors():
            parts = [
                *(self.query.get(name) for name in ("mixer", "gate")),
                *self.trained_components().values(),
                *(self.query.get("others") or {}).values(),
                *(record.get(name) for name, record in self.trained.items()),
            ]
            return {
                part["weights"]: Lineage.from_dict(part["traces"]) if "traces" in part else None
                for part in parts
                if isinstance(part, Mapping) and "weights" in part
            }

    def trained_components(self) -> dict[str, Mapping[str, Any]]:
        """Return the settings of each component in `query` that was trained on documents, by its name.

        Earlier versions saved such a component as a setting of its own, and not in ``others``.
        """
        with convert_damage_errors():
            components = {**self.query, **(self.query.get("others") or {})}
            return {
                name: part
                for name, part in components.items()
                if isinstance(part, Mapping) and part.get("traces") is not None
            }


@contextmanager
def convert_damage_errors() -> Iterator[None]:
    """Convert errors that damaged settings cause in the context to CatalogError. Others are not changed."""
    try:
        yield
    except KnnstoreError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CatalogError(
            "settings that are saved in the catalog are damaged: restore it from a backup, or calibrate anew"
        ) from error


def load_all_settings(catalog: "Catalog") -> dict[tuple[str, ...], SavedSettings]:
    """Return the saved settings of every set of domains, by the sorted names; () is the whole store."""
    payloads = catalog.all_settings().items()
    return {domains: SavedSettings.of_payload(payload) for domains, payload in payloads}


def find_files_in_use(catalog: "Catalog", snapshot: Snapshot) -> set[str]:
    """Return the names of the files of weights that settings name and no removed document has influenced."""
    projection = catalog.identity.projection
    files: dict[str, Lineage | None] = {} if projection is None else {projection: None}
    for saved in load_all_settings(catalog).values():
        files |= saved.files()
    return {name for name, lineage in files.items() if lineage is None or not lineage.gone(snapshot)}


def drop_damaged_settings(writer: "CatalogWriter") -> None:
    """Delete saved settings that cannot be parsed, and log a warning if there are any."""
    damaged = writer.catalog.damaged_settings()
    if damaged:
        writer.drop_settings(damaged)
        _logger.warning("saved settings were damaged, and are dropped: calibrate again")


def drop_settings_of_removed(writer: "CatalogWriter") -> None:
    """Delete saved settings that were fitted on documents that are being removed, and log a warning.

    Damaged settings are deleted too.
    """
    catalog = writer.catalog
    drop_damaged_settings(writer)  # nobody can tell what they were fitted on
    all_settings, snapshot = load_all_settings(catalog), catalog.snapshot()
    fitted_on = {content for settings in all_settings.values() for content in settings.fitted_on}
    removed = catalog.retired_content() & fitted_on
    removed -= catalog.rows_by_content(removed).keys()  # a duplicate stays
    for domains, settings in all_settings.items():
        remaining = settings.drop_if_outdated(snapshot, removed)
        if remaining is not settings:
            writer.save_settings(domains, remaining.payload())
        if settings.calibration and not remaining.calibration:
            _logger.warning(
                "the settings calibrated for %s were fitted on text that is removed, and go with it: "
                "calibrate again",
                ", ".join(domains) or "the whole store",
            )
