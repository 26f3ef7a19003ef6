"""Every error that knnstore raises on purpose.

All derive from `KnnstoreError`; where Python has a fitting built-in class, the error derives
from that too, so ``except ValueError`` and ``except FileNotFoundError`` keep working. A message
says what is wrong, where, and what to do, in one line.
"""


class KnnstoreError(Exception):
    """The root of all errors of knnstore."""


class ConfigError(KnnstoreError, ValueError):
    """A parameter is unknown or has a value that is not allowed."""


class InputError(KnnstoreError, ValueError):
    """A document or a file given by the user cannot be used."""


class UnusableDocumentError(InputError):
    """A document among others cannot be used.

    Attributes:
        in_folder: True if its file was found in a folder and not named by the user.
        id: its id, where that is known.
        where: its file and row, or its number in a list.
        reason: why, in few words, such as ``empty`` or ``not UTF-8``.
    """

    def __init__(
        self,
        message: str,
        *,
        in_folder: bool = False,
        id: str | None = None,
        where: str = "",
        reason: str = "unusable",
    ) -> None:
        super().__init__(message)
        self.in_folder = in_folder
        self.id = id
        self.where = where
        self.reason = reason


# -- adapters: finding and loading them


class AdapterError(KnnstoreError):
    """An adapter cannot be used."""


class AdapterNotFoundError(AdapterError, LookupError):
    """No installed distribution offers an adapter of this name."""


class AdapterLoadError(AdapterError, ImportError):
    """The adapter is registered but cannot be imported."""


class AdapterConflictError(AdapterError):
    """Two distributions offer an adapter of the same name."""


# -- datastores: the vector side


class DatastoreError(KnnstoreError):
    """A datastore operation failed."""


class DimensionMismatchError(DatastoreError, ValueError):
    """Vectors have another dimension than the datastore."""


class InvalidVectorError(DatastoreError, ValueError):
    """A vector holds NaN, an infinity, or a number beyond what the engine keeps."""


class DatastoreMismatchError(DatastoreError):
    """An existing datastore was made with another dimension, metric or adapter."""


class DatastoreExistsError(DatastoreError, FileExistsError):
    """A datastore is already at the location."""


class DatastoreNotFoundError(DatastoreError, FileNotFoundError):
    """There is no datastore at the location."""


class NotOwnerError(DatastoreError):
    """The keys are another store's, or those of a home that this one is a copy of."""


class RecordNotFoundError(DatastoreError, LookupError):
    """The datastore has no record with this id."""


class ReadOnlyError(DatastoreError):
    """The handle was opened for reading only, or the medium can only be read."""


class DatastoreClosedError(DatastoreError):
    """The handle was closed."""


class DiskFullError(DatastoreError):
    """The disk is full, or what was to be written would fill it."""


class LockedError(DatastoreError):
    """Another process holds the writer's lock."""


class UnsupportedOperationError(DatastoreError):
    """The engine cannot do this; its capabilities say so."""


class CorruptDatastoreError(DatastoreError):
    """Stored bytes are damaged: a size or a checksum is wrong."""


class StoreUnavailableError(DatastoreError, ConnectionError):
    """The engine cannot be reached; trying again is safe."""


# -- the catalog: the SQL side


class CatalogError(KnnstoreError):
    """The catalog cannot do what was asked."""


class SchemaOutdatedError(CatalogError):
    """The database is of an older schema than this package: ``knnstore db upgrade``."""


class SchemaTooNewError(CatalogError):
    """The database is of a newer schema than this package: upgrade the package."""


class StoreNotFoundError(CatalogError, FileNotFoundError):
    """There is no knnstore at the place named."""


class StoreExistsError(CatalogError, FileExistsError):
    """A knnstore is already at the place named."""


class DocumentNotFoundError(CatalogError, LookupError):
    """No live document has this id."""


class KeyNotFoundError(CatalogError, LookupError):
    """No key of a server has this id."""


class DomainNotFoundError(CatalogError, LookupError):
    """No domain has this name."""


class AmbiguousDocumentError(CatalogError, LookupError):
    """Documents of several domains have this id; name the domain."""


class FencedError(CatalogError):
    """Another writer took over; this one must not commit any more."""


class CorruptWeightsError(KnnstoreError):
    """A file of fitted weights is missing or damaged."""


class OutdatedWeightsError(KnnstoreError):
    """Fitted weights hold traces of a document that was removed or replaced since; they are not used."""


class ModelOutputError(KnnstoreError, ArithmeticError):
    """The model's output is NaN or infinite, so that nothing can be predicted from it."""


class FingerprintMismatchError(KnnstoreError):
    """The model, tokenizer or key location differs from the store's."""
