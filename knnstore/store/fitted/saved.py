"""Settings as they are saved for a set of domains: one JSON object, whose parts come and go apart."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from knnstore.catalog import Catalog, Snapshot
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store.fitted.lineage import Lineage

_CALIBRATION, _TRAINED = "calibration", "trained_substitute"


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """What is saved; JSON values, to which `knnstore.lm` gives their types."""

    query: Mapping[str, Any] = field(default_factory=dict)
    """The values of `KNNSettings`, but for the selection; empty where none were saved."""

    calibration: Mapping[str, Any] | None = None
    """How these values were found: a `CalibrationRecord`."""

    trained_substitute: Mapping[str, Any] | None = None
    """The substitute that was trained on these domains: a `TrainedSubstitute`. In use it is only as a part of
    `query`."""

    @classmethod
    def of_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Read what `payload` returned."""
        with settings_are_sound():
            query = {**payload}
            calibration, trained = query.pop(_CALIBRATION, None), query.pop(_TRAINED, None)
            return cls(query, calibration, trained)

    def payload(self) -> dict[str, Any]:
        """The one JSON object."""
        parts = {_CALIBRATION: self.calibration, _TRAINED: self.trained_substitute}
        return {**self.query, **{name: part for name, part in parts.items() if part is not None}}

    def files(self) -> dict[str, Lineage | None]:
        """The files of weights that are needed, each with the documents whose traces it holds, if any."""
        with settings_are_sound():
            trained = self.trained_substitute or {}
            parts = [self.query.get(name) for name in ("mixer", "skip", "substitute")]
            return {
                part["weights"]: Lineage.from_dict(part["traces"]) if "traces" in part else None
                for part in (*parts, trained.get("substitute"))
                if part and "weights" in part
            }


@contextmanager
def settings_are_sound() -> Iterator[None]:
    """Say in one line that saved settings are none, whatever that leads to."""
    try:
        yield
    except KnnstoreError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CatalogError(
            "settings that are saved in the catalog are damaged: restore it from a backup, or calibrate anew"
        ) from error


def all_saved(catalog: Catalog) -> list[SavedSettings]:
    """What is saved for every set of domains."""
    return [SavedSettings.of_payload(payload) for payload in catalog.all_settings()]


def files_in_use(catalog: Catalog, snapshot: Snapshot) -> set[str]:
    """The files of weights that are to be there: not those with traces of a document that is gone."""
    projection = catalog.identity.projection
    named: dict[str, Lineage | None] = {} if projection is None else {projection: None}
    for saved in all_saved(catalog):
        named |= saved.files()
    return {name for name, lineage in named.items() if lineage is None or not lineage.gone(snapshot)}
