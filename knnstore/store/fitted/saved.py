"""Retrieval settings that are saved for a set of domains, as one JSON object."""

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
"""Prefix of the names under which the entries of `SavedSettings.trained` are saved in the JSON object."""


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """Retrieval settings that are saved for a set of domains, as JSON values.

    `knnstore.lm` converts the values to its own types.
    """

    query: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `KNNSettings` by name, without the selection; empty if no settings were saved."""

    calibration: Mapping[str, Any] | None = None
    """The `CalibrationRecord` (text, results, date) of the calibration that gave the values in `query`; None
    if the values were not calibrated."""

    derived: Mapping[str, Any] | None = None
    """The `Lineage` of the stored documents from whose keys the values in `query` were derived as defaults;
    None if the user chose the values or a calibration fitted them."""

    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of each component that was trained on the stored documents, as ``{name: {name: settings}}``. A
    component is a source of predictions that another package adds. The settings are kept here when `query` is
    replaced; a component is used only if `query` contains its settings too."""

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Create settings from the JSON object that the method `to_payload` returned.

        Raises CatalogError if the object is damaged.
        """
        with convert_damage_errors():
            query = {**payload}
            calibration, derived = (query.pop(name, None) for name in (_CALIBRATION, _DERIVED))
            names = [name for name in query if name.startswith(_TRAINED)]
            trained = {name.removeprefix(_TRAINED): query.pop(name) for name in names}
            return cls(
                query, calibration, derived, {name: record for name, record in trained.items() if record}
            )

    def to_payload(self) -> dict[str, Any]:
        """Return the settings as one JSON object, which the catalog saves."""
        parts = {_CALIBRATION: self.calibration, _DERIVED: self.derived}
        trained = {f"{_TRAINED}{name}": record for name, record in self.trained.items()}
        return {**self.query, **{name: part for name, part in parts.items() if part is not None}, **trained}

    @property
    def fitted_on(self) -> frozenset[str]:
        """SHA-256 of the text of each held-out document on which the calibration was fitted.

        Empty if the settings were not calibrated.
        """
        with convert_damage_errors():
            return frozenset((self.calibration or {}).get("held_out", ()))

    def drop_if_outdated(self, snapshot: Snapshot, removed: Collection[str] = ()) -> Self:
        """Return these settings, or only their field `trained` if a removed document has influenced the rest.

        A document has influenced the settings if they were calibrated on its text, or derived from its keys.
        If the settings are returned unchanged, the result is this same object.

        Args:
            snapshot: the documents that the store has now.
            removed: SHA-256 of the texts of the removed documents.
        """
        with convert_damage_errors():
            derived = self.derived and Lineage.from_dict(self.derived)
            if self.fitted_on.isdisjoint(removed) and not (derived and derived.removed_share(snapshot)):
                return self
        return type(self)(trained=self.trained)

    def list_weight_files(self) -> dict[str, Lineage | None]:
        """Return the names of the files of weights that these settings need, with the weights' lineage.

        Returns:
            A dict from file name to lineage: the set of stored documents on which the weights were fitted, or
            None if the weights were not fitted on stored documents.
        """
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
        """Return a dict from name to settings, for each component in `query` that was trained on documents.

        A component is a source of predictions. Current versions save the settings of components in the field
        ``others`` of `query`; earlier versions saved them directly in `query`. Both are returned.
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
    """Convert errors that damaged settings cause in the ``with`` block to CatalogError.

    Damaged settings cause AttributeError, LookupError, TypeError or ValueError. All other exceptions, and
    every KnnstoreError, pass unchanged.
    """
    try:
        yield
    except KnnstoreError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CatalogError(
            "the settings saved in the catalog are damaged: restore the catalog from a backup, or "
            "calibrate again"
        ) from error


def load_all_settings(catalog: "Catalog") -> dict[tuple[str, ...], SavedSettings]:
    """Return a dict from set of domains to the settings that are saved for this set.

    A set is a sorted tuple of domain names; the empty tuple stands for the whole store. Raises CatalogError
    if saved settings are damaged.
    """
    payloads = catalog.all_settings().items()
    return {domains: SavedSettings.from_payload(payload) for domains, payload in payloads}


def find_files_in_use(catalog: "Catalog", snapshot: Snapshot) -> set[str]:
    """Return the names of the files of weights that may still be used.

    Saved settings name the files of their weights. A file is left out if its weights were fitted on a
    document that was removed since. If the store has a projection of its keys, the file of the projection is
    always included.

    Args:
        catalog: catalog of the store.
        snapshot: the documents that the store has now.

    Raises:
        CatalogError: saved settings are damaged.
    """
    projection = catalog.identity.projection
    files: dict[str, Lineage | None] = {} if projection is None else {projection: None}
    for saved in load_all_settings(catalog).values():
        files |= saved.list_weight_files()
    return {name for name, lineage in files.items() if lineage is None or not lineage.removed_share(snapshot)}


def drop_damaged_settings(writer: "CatalogWriter") -> None:
    """Delete saved settings that are damaged. Logs a warning if any were damaged."""
    damaged = writer.catalog.damaged_settings()
    if damaged:
        writer.drop_settings(damaged)
        _logger.warning("saved settings were damaged and have been deleted: calibrate again")


def drop_settings_of_removed(writer: "CatalogWriter") -> None:
    """Delete the saved settings that were fitted on a document that is being removed, or derived from it.

    Damaged settings are deleted too. A warning is logged for each deleted calibration.

    Args:
        writer: writer of the catalog. Documents in the state "deleting" are being removed.
    """
    catalog = writer.catalog
    drop_damaged_settings(writer)  # nobody can tell what they were fitted on
    all_settings, snapshot = load_all_settings(catalog), catalog.snapshot()
    fitted_on = {content for settings in all_settings.values() for content in settings.fitted_on}
    removed = catalog.retired_content_hashes() & fitted_on
    removed -= catalog.rows_by_content(removed).keys()  # a duplicate stays
    for domains, settings in all_settings.items():
        remaining = settings.drop_if_outdated(snapshot, removed)
        if remaining is not settings:
            writer.save_settings(domains, remaining.to_payload())
        if settings.calibration and not remaining.calibration:
            _logger.warning(
                "the settings calibrated for %s were deleted, because documents to which they were "
                "fitted were removed: calibrate again",
                ", ".join(domains) or "the whole store",
            )
