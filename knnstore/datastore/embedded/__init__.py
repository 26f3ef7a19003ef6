"""Tools for engines that run in the process: durable segments of keys, exact search, indexes of segments."""

from knnstore.datastore.embedded.base import EmbeddedDatastore
from knnstore.datastore.embedded.codecs import (
    Codec,
    CodecFile,
    Coding,
    ProductCodec,
    RoundedCodec,
    checked_kind,
    code_size,
    sample_size,
)
from knnstore.datastore.embedded.directory import read_owner, write_owner
from knnstore.datastore.embedded.exact import compare_rows
from knnstore.datastore.embedded.group import GroupSearch
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.merging import stored_keys
from knnstore.datastore.embedded.segment import MappedColumns, Segment, StoredKeys

__all__ = [
    "Codec",
    "CodecFile",
    "Coding",
    "EmbeddedDatastore",
    "GroupSearch",
    "KeySegments",
    "MappedColumns",
    "MappedFile",
    "ProductCodec",
    "RoundedCodec",
    "Segment",
    "StoredKeys",
    "checked_kind",
    "code_size",
    "compare_rows",
    "read_owner",
    "sample_size",
    "stored_keys",
    "write_owner",
]
