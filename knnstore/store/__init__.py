"""The store: documents in SQL and their keys in a vector engine, kept as one thing."""

from knnstore.catalog import Document, Domain, Engine, Identity, NewDocument, StoredVersion
from knnstore.store.choosing import Choice, drop_highest
from knnstore.store.moving import Moved
from knnstore.store.provenance import Provenance
from knnstore.store.pruning import Chooser, DomainRecords, Pruned, PrunedDomain, merge_chooser, random_chooser
from knnstore.store.records import TOKEN_LIMIT, positions_of, record_ids, tokens_of
from knnstore.store.selection import EVERYTHING, Selection
from knnstore.store.store import CALIBRATION, KNNStore
from knnstore.store.traces import Traces
from knnstore.store.weights import Weights
from knnstore.store.writing import Ingest

__all__ = [
    "CALIBRATION",
    "EVERYTHING",
    "TOKEN_LIMIT",
    "Choice",
    "Chooser",
    "Document",
    "Domain",
    "DomainRecords",
    "Engine",
    "Identity",
    "Ingest",
    "KNNStore",
    "Moved",
    "NewDocument",
    "Provenance",
    "Pruned",
    "PrunedDomain",
    "Selection",
    "StoredVersion",
    "Traces",
    "Weights",
    "drop_highest",
    "merge_chooser",
    "positions_of",
    "random_chooser",
    "record_ids",
    "tokens_of",
]
