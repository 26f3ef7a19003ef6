"""`TextDocument`, and reading documents from files, tables, data sets and any Python iterable."""

from knnstore.documents.document import (
    FIELDS,
    NOT_MEMBERS,
    PAIR_FIELDS,
    SOURCE,
    Fields,
    OnBad,
    Origin,
    Reason,
    TextDocument,
    convert_rows_to_documents,
)
from knnstore.documents.git_tree import GitTree
from knnstore.documents.paths import (
    HUB,
    STDIN,
    OnIgnored,
    check_paths,
    estimate_size,
    is_file_in_paths,
    read_documents,
)
from knnstore.documents.source_files import UTF8, decode_text

__all__ = [
    "FIELDS",
    "HUB",
    "NOT_MEMBERS",
    "PAIR_FIELDS",
    "SOURCE",
    "STDIN",
    "UTF8",
    "Fields",
    "GitTree",
    "OnBad",
    "OnIgnored",
    "Origin",
    "Reason",
    "TextDocument",
    "check_paths",
    "convert_rows_to_documents",
    "decode_text",
    "estimate_size",
    "is_file_in_paths",
    "read_documents",
]
