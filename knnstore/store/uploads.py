"""Uploads: how the workers of a plan reach the engine of a store, without the store and its catalog."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from knnstore.catalog import Identity
from knnstore.datastore import Datastore, Metric, SupportsOwner, SupportsUploads, registry
from knnstore.errors import ConfigError, DatastoreNotFoundError, NotOwnerError
from knnstore.store.home import Owner


class UploadStore(Datastore, SupportsUploads, Protocol):
    """A datastore that takes uploads."""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """Where the records of a plan are uploaded to, as the folder of the plan says it.

    It contains no secret: adapters read passwords and keys from the environment.
    """

    adapter: str
    """Name of the adapter."""
    location: str
    """URL of the engine."""
    params: Mapping[str, Any]
    """Parameters of the adapter, by name."""
    group: int
    """Group number of the plan's domain."""

    def open(self, identity: Identity, store: str) -> UploadStore:
        """Open the datastore for uploads. It is not created if it does not exist.

        Args:
            identity: identity of the store to which the keys belong.
            store: id of this store.

        Raises:
            DatastoreNotFoundError: the store's keys are no longer there.
            NotOwnerError: the keys there belong to another store.
            StoreUnavailableError: the engine cannot be reached.
            ConfigError: the engine takes no uploads.
        """
        adapter = registry.load(self.adapter)
        arguments = {"dim": identity.dim, "metric": Metric(identity.metric), **self.params}
        try:
            adapter.open(self.location, mode="r", **arguments).close()  # mode "a" would create a new one
        except DatastoreNotFoundError as error:
            raise DatastoreNotFoundError(
                f"{error}: if the keys of the store were moved or erased, encode without uploading"
            ) from error
        claim = adapter.owner(self.location, **self.params) if issubclass(adapter, SupportsOwner) else store
        if claim is None or Owner.parse(claim).store_id != store:
            raise NotOwnerError(f"the keys at {self.location} belong to another store than the plan")
        with ExitStack() as failed:
            datastore: Any = failed.enter_context(adapter.open(self.location, mode="a", **arguments))
            if not takes_uploads(self.location, datastore):
                raise ConfigError(f"the engine {self.adapter} at {self.location} takes no uploads")
            failed.pop_all()
        opened: UploadStore = datastore
        return opened


def takes_uploads(location: str, datastore: Datastore) -> bool:
    """Check whether workers can upload to a datastore, and its location may stand in the folder of a plan.

    Args:
        location: location of the datastore. A folder, and a URL with a user name, a password or a query,
            are not accepted.
        datastore: the open datastore.
    """
    parts = urlsplit(location)
    has_secret = "@" in parts.netloc or bool(parts.query)
    is_server = "://" in location and not has_secret
    return is_server and isinstance(datastore, SupportsUploads) and datastore.takes_uploads
