"""The interface to vector engines: the `Datastore` protocol, and what its implementations and users need.

Adapters import only from here and from `knnstore.errors`. Importing this package imports no engine, no torch
and no SQL. `registry` finds the engines.
"""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.datastore import registry
    from knnstore.datastore.arguments import validate_k, validate_keys, validate_params, validate_records
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
    from knnstore.datastore.distances import find_nearest_rows, paired_distances, pairwise_distances
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
        code_size,
        compare_rows,
        convert_to_stored_precision,
        read_owner,
        sample_size,
        validate_kind,
        write_owner,
    )
    from knnstore.datastore.keyless import KeylessDatastore
    from knnstore.datastore.memory import MemoryDatastore
    from knnstore.datastore.neighbors import Neighbors
    from knnstore.datastore.protocol import (
        BATCH_SIZE,
        Datastore,
        Mode,
        SupportsCells,
        SupportsCopyParams,
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
        find_whole_positions,
        id_ranges_from_positions,
        positions_from_ids,
        record_ids,
        tokens_from_ids,
    )
    from knnstore.datastore.visits import DeviceVisits, Visit, Visits, split_visits
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
    "SupportsCells",
    "SupportsCopyParams",
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
    "code_size",
    "compare_rows",
    "convert_to_stored_precision",
    "find_nearest_rows",
    "find_whole_positions",
    "free_space",
    "id_ranges_from_positions",
    "paired_distances",
    "pairwise_distances",
    "positions_from_ids",
    "read_keys",
    "read_owner",
    "read_secret",
    "record_ids",
    "registry",
    "sample_size",
    "split_visits",
    "tokens_from_ids",
    "validate_k",
    "validate_keys",
    "validate_kind",
    "validate_params",
    "validate_records",
    "write_owner",
]
