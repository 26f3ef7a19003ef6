"""Uploads: workers write the records of a plan to a store's vector engine, without the store's catalog.

A plan is a list of documents that will be added to a store, whose keys the workers compute.
"""

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
    """A datastore that accepts uploads of records."""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """The engine to which workers upload the records of a plan, saved in the folder of the plan.

    The values contain no secret: adapters read passwords and API keys from the environment.
    """

    adapter: str
    """Name of the adapter."""
    location: str
    """URL of the engine."""
    params: Mapping[str, Any]
    """Parameters of the adapter, by name."""
    group: int
    """Group number that the records of the plan's domain get in the engine."""

    def open(self, identity: Identity, store: str) -> UploadStore:
        """Open the existing datastore for uploads.

        Args:
            identity: identity of the store to which the keys belong; dimension and metric are used.
            store: id of the store to which the keys belong.

        Raises:
            DatastoreNotFoundError: the location has no keys any more.
            NotOwnerError: the keys at the location belong to another store.
            StoreUnavailableError: the engine cannot be reached.
            ConfigError: the engine accepts no uploads.
        """
        adapter = registry.load_adapter(self.adapter)
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
                raise ConfigError(f"the engine {self.adapter} at {self.location} accepts no uploads")
            failed.pop_all()
        opened: UploadStore = datastore
        return opened


def takes_uploads(location: str, datastore: Datastore) -> bool:
    """Check whether workers can upload records to a datastore.

    The datastore must accept uploads. Its location is saved in the folder of a plan, so it must be a URL
    without a user name, a password or a query, which may be secrets.

    Args:
        location: URL or folder of the datastore.
        datastore: the open datastore.
    """
    parts = urlsplit(location)
    has_secret = "@" in parts.netloc or bool(parts.query)
    is_server = "://" in location and not has_secret
    return is_server and isinstance(datastore, SupportsUploads) and datastore.takes_uploads
