"""Keys and ids in few bytes."""

from knnstore.datastore.embedded.packing.codecs import (
    Codec,
    Codes,
    ProductCodec,
    RoundedCodec,
    checked_kind,
    code_size,
    fit_codec,
    sample_size,
)
from knnstore.datastore.embedded.packing.ids import IdsPacker, PackedIds, is_worth_packing, packed_size
from knnstore.datastore.embedded.packing.stored import CodecFile, CodesEntry, Coding

__all__ = [
    "Codec", "CodecFile", "Codes", "CodesEntry", "Coding", "IdsPacker", "PackedIds", "ProductCodec",
    "RoundedCodec", "checked_kind", "code_size", "fit_codec", "is_worth_packing", "packed_size",
    "sample_size",
]  # fmt: skip
