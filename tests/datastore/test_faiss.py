"""The FAISS adapter: the conformance kit, and the traps of FAISS."""

from knnstore.testing import DatastoreTests
from knnstore_faiss import FaissDatastore


class TestExact(DatastoreTests):
    datastore_class = FaissDatastore
