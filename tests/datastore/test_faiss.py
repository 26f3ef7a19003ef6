"""The FAISS adapter: the conformance kit, and the traps of FAISS."""

from knnstore.testing import DatastoreTests
from knnstore_faiss import FaissDatastore


class TestExact(DatastoreTests):
    datastore_class = FaissDatastore
    params = {"index": "exact"}


class TestAuto(DatastoreTests):
    datastore_class = FaissDatastore


class TestInvertedFile(DatastoreTests):
    datastore_class = FaissDatastore
    params = {"index": "IVF8,SQ8"}
