"""The interface to vector engines: the `Datastore` protocol, and what its implementations and users need.

Adapters import only from here and from `knnstore.errors`. Importing this package imports no engine, no torch
and no SQL. `registry` finds the engines.
"""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.datastore import registry
    from knnstore.datastore.arguments import checked_k, checked_keys, checked_params, checked_records
    from knnstore.datastore.arrays import (
        Capabilities,
        DamagedPart,
        Distances,
        Filter,
        Groups,
        Ids,
        Keys,
        Metric,
    )
    from knnstore.datastore.distances import nearest_rows, paired, pairwise
    from knnstore.datastore.embedded import (
        Codec,
        CodecFile,
        Coding,
        EmbeddedDatastore,
        GroupSearch,
        KeySegments,
        MappedColumns,
        MappedFile,
        ProductCodec,
        RoundedCodec,
        Segment,
        StoredKeys,
        checked_kind,
        code_size,
        compare_rows,
        read_owner,
        sample_size,
        stored_keys,
        write_owner,
    )
    from knnstore.datastore.keyless import KeylessDatastore
    from knnstore.datastore.memory import MemoryDatastore
    from knnstore.datastore.neighbors import Neighbors
    from knnstore.datastore.protocol import (
        BATCH_SIZE,
        Datastore,
        Mode,
        SupportsBeside,
        SupportsCells,
        SupportsDamage,
        SupportsDeviceVisits,
        SupportsErase,
        SupportsGet,
        SupportsOptimize,
        SupportsOwner,
        SupportsSize,
        SupportsUploads,
        SupportsVacuum,
        SupportsVerify,
        read_keys,
    )
    from knnstore.datastore.ranges import IdRanges
    from knnstore.datastore.records import (
        ID_LIMIT,
        POSITION_LIMIT,
        TOKEN_LIMIT,
        positions_of,
        ranges_of,
        record_ids,
        tokens_of,
        whole_positions,
    )
    from knnstore.datastore.visits import DeviceVisits, Visit, Visits, apart
    from knnstore.durable import BLOCK, StoredFile
    from knnstore.secret_files import read_secret
    from knnstore.space import free_space
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "BATCH_SIZE",
    "BLOCK",
    "ID_LIMIT",
    "POSITION_LIMIT",
    "TOKEN_LIMIT",
    "Capabilities",
    "Codec",
    "CodecFile",
    "Coding",
    "DamagedPart",
    "Datastore",
    "DeviceVisits",
    "Distances",
    "EmbeddedDatastore",
    "Filter",
    "GroupSearch",
    "Groups",
    "IdRanges",
    "Ids",
    "KeySegments",
    "KeylessDatastore",
    "Keys",
    "MappedColumns",
    "MappedFile",
    "MemoryDatastore",
    "Metric",
    "Mode",
    "Neighbors",
    "ProductCodec",
    "RoundedCodec",
    "Segment",
    "StoredFile",
    "StoredKeys",
    "SupportsBeside",
    "SupportsCells",
    "SupportsDamage",
    "SupportsDeviceVisits",
    "SupportsErase",
    "SupportsGet",
    "SupportsOptimize",
    "SupportsOwner",
    "SupportsSize",
    "SupportsUploads",
    "SupportsVacuum",
    "SupportsVerify",
    "Visit",
    "Visits",
    "apart",
    "checked_k",
    "checked_keys",
    "checked_kind",
    "checked_params",
    "checked_records",
    "code_size",
    "compare_rows",
    "free_space",
    "nearest_rows",
    "paired",
    "pairwise",
    "positions_of",
    "ranges_of",
    "read_keys",
    "read_owner",
    "read_secret",
    "record_ids",
    "registry",
    "sample_size",
    "stored_keys",
    "tokens_of",
    "whole_positions",
    "write_owner",
]
