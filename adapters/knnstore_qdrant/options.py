"""The parameters of the adapter."""

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, get_type_hints

from knnstore.datastore import checked_params
from knnstore.errors import AdapterLoadError, ConfigError

_CHOICES = {
    "quantization": ("none", "scalar", "binary"),
    "datatype": ("float32", "float16"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a collection is made, reached and searched.

    What concerns making it, down to `full_scan_threshold` and from `shards` on, takes effect when it is made
    and is kept with it by Qdrant.

    Args:
        m: links of a point in the graph (HNSW, Malkov and Yashunin 2018), >= 2.
        ef_construct: candidates kept while a point is linked, >= 4.
        quantization: ``"none"``; ``"scalar"`` (8 bits a component) or ``"binary"`` (1 bit) codes are kept in
            memory and searched, and what they find is compared again with the vectors.
        datatype: how vectors are kept: ``"float32"`` or ``"float16"``.
        on_disk: leave the vectors on disk, cached by the operating system; sensible with `quantization`.
        graph_on_disk: leave the graph on disk too.
        indexing_threshold: kilobytes of vectors from which a segment gets a graph, >= 1.
        full_scan_threshold: kilobytes of vectors up to which those that match a filter are all compared,
            >= 1.
        ef: candidates kept while the graph is searched, >= 1; never fewer than k.
        exact: compare each query with every point.
        oversampling: how many times k points are taken from the codes to be compared again, >= 1.
        collection: the collection's name on a server; stores there need different ones.
        timeout: seconds within which a read is answered or the store said to be unavailable, >= 0.1; a
            write is tried for three times as long.
        api_key_file: of stores made by older versions; it is never read.
        prefer_grpc: use gRPC when the server answers there; REST otherwise.
        grpc_port: the server's port for gRPC.
        parallel: requests in flight while many records are added to a server, >= 1.
        shards: parts of the collection, spread over the nodes of a cluster; 0 lets the server decide.
        replicas: nodes that hold each part, >= 1.
        write_consistency: replicas that must have applied a write before it counts, 1 to `replicas`.
    """

    m: int = 16
    ef_construct: int = 100
    quantization: str = "none"
    datatype: str = "float32"
    on_disk: bool = False
    graph_on_disk: bool = False
    indexing_threshold: int = 20_000
    full_scan_threshold: int = 10_000

    ef: int = 128
    exact: bool = False
    oversampling: float = 2.0

    collection: str = "knnstore"
    timeout: float = 10.0
    api_key_file: str = ""
    prefer_grpc: bool = True
    grpc_port: int = 6334
    parallel: int = 4

    shards: int = 0
    replicas: int = 1
    write_consistency: int = 1

    @classmethod
    def of(cls, params: dict[str, Any]) -> Self:
        """Check what the user gave.

        Raises:
            ConfigError: a parameter is unknown or its value is not allowed.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        values = checked_params("qdrant", params, accepted=defaults)
        types = get_type_hints(cls)
        options = cls(**{name: _checked(name, value, types[name]) for name, value in values.items()})
        for name, least in _LEAST.items():
            if getattr(options, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(options, name)}")
        if options.write_consistency > options.replicas:
            raise ConfigError(
                f"write_consistency {options.write_consistency} is more than the {options.replicas} replicas"
            )
        return options

    def point_size(self, dim: int) -> int:
        """Bytes of a point on the disk: vector and codes, payload, links, its place in the log."""
        return (4 + 4 + 1) * dim + 16 * self.m + 512


_LEAST: dict[str, float] = {
    **dict.fromkeys(("ef", "parallel", "replicas", "write_consistency", "grpc_port"), 1),
    **dict.fromkeys(("indexing_threshold", "full_scan_threshold"), 1),
    "shards": 0,
    "m": 2,
    "ef_construct": 4,
    "oversampling": 1,
    "timeout": 0.1,
}


def _checked(name: str, value: Any, kind: type) -> Any:
    """Return a value of the wanted type, or say what is wrong with it."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        what = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ConfigError(f"{name} must be {what}, got {value!r}")
    choices = _CHOICES.get(name)
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def is_server(location: str | Path) -> bool:
    """Whether a location is the address of a server.

    Raises:
        AdapterLoadError: the package that this location needs is not installed.
    """
    place = str(location)
    is_server = "://" in place
    module, extra = ("qdrant_client", "qdrant") if is_server else ("qdrant_edge", "qdrant-edge")
    if find_spec(module) is None:
        raise AdapterLoadError(
            f"the location {place} needs {module!r}. Install it with: pip install 'knnstore[{extra}]'"
        )
    return is_server
