"""The parameters of the Qdrant adapter."""

from dataclasses import dataclass, fields
from typing import Any, Self, get_type_hints

from knnstore.datastore import checked_params
from knnstore.errors import ConfigError

_CHOICES = {
    "quantization": ("none", "scalar", "binary"),
    "datatype": ("float32", "float16"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters for creating, reaching and searching a collection.

    The parameters up to `full_scan_threshold` and from `shards` on apply when the collection is created;
    Qdrant keeps them with the collection.

    Args:
        m: number of links of a point in the graph (HNSW, Malkov and Yashunin 2018), >= 2.
        ef_construct: number of candidates while a point is linked, >= 4.
        quantization: ``"none"``, ``"scalar"`` (8 bits a component) or ``"binary"`` (1 bit). Codes are kept in
            memory and searched; the points found are compared again by their vectors.
        datatype: datatype of the stored vectors, ``"float32"`` or ``"float16"``.
        on_disk: keep the vectors on disk, cached by the operating system; sensible with `quantization`.
        graph_on_disk: keep the graph on disk too.
        indexing_threshold: size of the vectors in kilobytes from which a segment gets a graph, >= 1.
        full_scan_threshold: size of the vectors in kilobytes up to which all points that match a filter are
            compared without the graph, >= 1.
        ef: number of candidates while the graph is searched, >= 1; at least k are used.
        exact: compare each query with every point.
        oversampling: number of points found by codes and compared again, as a multiple of k, >= 1.
        collection: name of the collection; each store on a server needs another name.
        timeout: time in seconds after which an unanswered read raises StoreUnavailableError, >= 0.1; a write
            may take three times as long.
        api_key_file: only present in stores of older versions; the file is never read.
        prefer_grpc: use gRPC if the server answers there; otherwise REST.
        grpc_port: port of the server for gRPC.
        parallel: number of requests in flight while many records are added, >= 1.
        shards: number of shards of the collection in a cluster; 0 lets the server decide.
        replicas: number of nodes that keep each shard, >= 1.
        write_consistency: number of replicas that must apply a write before it succeeds, 1 to `replicas`.
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
    def from_params(cls, params: dict[str, Any]) -> Self:
        """Return the options for the parameters that a user gave; omitted options have their defaults.

        Raises:
            ConfigError: a parameter is unknown, or its value is not allowed.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        values = checked_params("qdrant", params, accepted=defaults)
        types = get_type_hints(cls)
        options = cls(**{name: _check_option(name, value, types[name]) for name, value in values.items()})
        for name, minimum in _MINIMA.items():
            if getattr(options, name) < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {getattr(options, name)}")
        if options.write_consistency > options.replicas:
            raise ConfigError(
                f"write_consistency {options.write_consistency} is more than the {options.replicas} replicas"
            )
        return options

    def point_size(self, dim: int) -> int:
        """Return the size of a point on the disk in bytes: vector, codes, payload, links and log entry."""
        return (4 + 4 + 1) * dim + 16 * self.m + 512


_MINIMA: dict[str, float] = {
    **dict.fromkeys(("ef", "parallel", "replicas", "write_consistency", "grpc_port"), 1),
    **dict.fromkeys(("indexing_threshold", "full_scan_threshold"), 1),
    "shards": 0,
    "m": 2,
    "ef_construct": 4,
    "oversampling": 1,
    "timeout": 0.1,
}


def _check_option(name: str, value: Any, kind: type) -> Any:
    """Return the value of a parameter; an integer is converted to float where a float is expected.

    Raises:
        ConfigError: the type or the value is not allowed.
    """
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        type_name = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ConfigError(f"{name} must be {type_name}, got {value!r}")
    choices = _CHOICES.get(name)
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value
