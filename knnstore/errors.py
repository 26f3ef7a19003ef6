"""All errors that knnstore raises on purpose.

All derive from `KnnstoreError`. An error also derives from the built-in class that fits, so that for example
``except ValueError`` and ``except FileNotFoundError`` work. A message names in one line the problem, its
place and the remedy.
"""


class KnnstoreError(Exception):
    """Base class of all errors of knnstore."""


class ConfigError(KnnstoreError, ValueError):
    """A parameter is unknown or has a value that is not allowed."""


class InputError(KnnstoreError, ValueError):
    """A document, a file or a name from the user cannot be used."""


class GitError(KnnstoreError):
    """The program `git` is missing, or cannot read a repository."""


class UnusableDocumentError(InputError):
    """One of several documents cannot be used.

    Attributes:
        in_folder: True if the document's file was found in a folder, False if the user named the file.
        id: the document's id; None if it is not known.
        where: file and row of the document, or its number in a list; empty if neither is known.
        reason: kind of the problem in few words, such as ``empty`` or ``not UTF-8``.
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
    """An adapter (the class that makes a vector engine a datastore) cannot be used."""


class AdapterNotFoundError(AdapterError, LookupError):
    """No installed package offers an adapter with this name."""


class AdapterLoadError(AdapterError, ImportError):
    """The adapter is installed, but cannot be imported or lacks methods."""


class AdapterConflictError(AdapterError):
    """Several installed packages offer an adapter with the same name."""


# -- datastores: the vector side


class DatastoreError(KnnstoreError):
    """An operation of a datastore (the vector engine with the keys) failed."""


class DimensionMismatchError(DatastoreError, ValueError):
    """The dimension of vectors differs from the dimension of the datastore."""


class InvalidVectorError(DatastoreError, ValueError):
    """A vector holds NaN, an infinity, or a number beyond the range of the engine."""


class DatastoreMismatchError(DatastoreError):
    """An existing datastore was created with another dimension, metric or adapter."""


class DatastoreExistsError(DatastoreError, FileExistsError):
    """The location already holds a datastore."""


class DatastoreNotFoundError(DatastoreError, FileNotFoundError):
    """The location holds no datastore."""


class NotOwnerError(DatastoreError):
    """The keys belong to another store, for example to the original of this store, which is a copy."""


class RecordNotFoundError(DatastoreError, LookupError):
    """The datastore has no record with this id."""


class ReadOnlyError(DatastoreError):
    """The handle was opened for reading only, or the disk or folder cannot be written."""


class DatastoreClosedError(DatastoreError):
    """The handle of the datastore was closed before the operation."""


class DiskFullError(DatastoreError):
    """The disk is full, or has too little free space for the operation."""


class LockedError(DatastoreError):
    """Another process or handle holds the writer's lock, so the store cannot be opened for writing."""


class CorruptDatastoreError(DatastoreError):
    """Stored bytes are damaged: a size or a checksum is wrong."""


class StoreUnavailableError(DatastoreError, ConnectionError):
    """The engine or the database cannot be reached; trying again is safe."""


# -- the catalog: the SQL side


class CatalogError(KnnstoreError):
    """The catalog, the store's SQL database, is damaged or refused an operation."""


class SchemaOutdatedError(CatalogError):
    """The database's schema is older than this package; ``knnstore db upgrade`` upgrades it."""


class SchemaTooNewError(CatalogError):
    """The database's schema is newer than this package; the package must be upgraded."""


class StoreNotFoundError(CatalogError, FileNotFoundError):
    """The folder or database holds no store."""


class StoreExistsError(CatalogError, FileExistsError):
    """The folder or database already holds a store."""


class DocumentNotFoundError(CatalogError, LookupError):
    """No stored document has this id; removed documents do not count."""


class KeyNotFoundError(CatalogError, LookupError):
    """No API key of the server has this id."""


class DomainNotFoundError(CatalogError, LookupError):
    """No domain has this name."""


class AmbiguousDocumentError(CatalogError, LookupError):
    """Documents of several domains have this id, so the domain must be named."""


class FencedError(CatalogError):
    """Another writer has taken over the store, so this writer cannot commit any more."""


class PlanError(KnnstoreError):
    """The folder of a plan cannot be used; see `knnstore.distributed`."""


class CorruptWeightsError(KnnstoreError):
    """A file of fitted weights is missing or damaged."""


class OutdatedWeightsError(KnnstoreError):
    """Fitted weights were trained on a document that was removed or replaced since; they are not used."""


class ModelOutputError(KnnstoreError, ArithmeticError):
    """The model's output is NaN or infinite, so it gives no prediction."""


class FingerprintMismatchError(KnnstoreError):
    """The model, tokenizer or key location is not the one that the store was created for."""
