"""Tools for engines that run in the process: durable segments of keys, exact search, indexes of segments."""

from knnstore.datastore.embedded.base import EmbeddedDatastore
from knnstore.datastore.embedded.codecs import (
    Codec,
    CodecFile,
    Coding,
    ProductCodec,
    RoundedCodec,
    code_size,
    sample_size,
    validate_kind,
)
from knnstore.datastore.embedded.directory import read_owner, write_owner
from knnstore.datastore.embedded.exact import compare_rows
from knnstore.datastore.embedded.group import GroupSearch
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.merging import convert_to_stored_precision
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
    "code_size",
    "compare_rows",
    "convert_to_stored_precision",
    "read_owner",
    "sample_size",
    "validate_kind",
    "write_owner",
]
