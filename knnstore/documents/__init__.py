"""Documents: what one is, and reading them from files, tables, data sets and any Python iterable."""

from knnstore.documents.document import (
    FIELDS,
    NOT_MEMBERS,
    Fields,
    OnBad,
    Origin,
    Reason,
    TextDocument,
    documents_of,
)
from knnstore.documents.files import UTF8
from knnstore.documents.places import HUB, STDIN, OnIgnored
from knnstore.documents.reading import check_paths, is_among, read_documents, size_of

__all__ = [
    "FIELDS", "HUB", "NOT_MEMBERS", "STDIN", "UTF8", "Fields", "OnBad", "OnIgnored", "Origin", "Reason",
    "TextDocument", "check_paths", "documents_of", "is_among", "read_documents", "size_of",
]  # fmt: skip
