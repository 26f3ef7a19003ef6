"""The parameters of the Qdrant adapter."""

from dataclasses import dataclass, fields
from typing import Any, Self, get_type_hints

from knnstore.datastore import validate_params
from knnstore.errors import ConfigError

_CHOICES = {
    "quantization": ("none", "scalar", "binary"),
    "datatype": ("float32", "float16"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the Qdrant adapter, for creating, reaching and searching a collection.

    A collection is a named set of points (vectors) on a server. The parameters up to `full_scan_threshold`
    and from `shards` on apply only when the collection is created. Qdrant saves these parameters with the
    collection.

    Args:
        m: number of links of a point in the graph (HNSW, Malkov and Yashunin 2018), >= 2.
        ef_construct: number of candidates for the links of a point when the graph is built, >= 4.
        quantization: compressed form (codes) of the vectors that is kept in memory and searched: ``"none"``,
            ``"scalar"`` (8 bits for each component) or ``"binary"`` (1 bit for each component). The points
            that are found are compared again by their vectors.
        datatype: datatype of the stored vectors, ``"float32"`` or ``"float16"``.
        on_disk: True keeps the vectors on disk, cached by the operating system; sensible with `quantization`.
        graph_on_disk: True keeps the graph on disk too.
        indexing_threshold: size of the vectors in kilobytes from which a part of the collection gets a graph,
            >= 1.
        full_scan_threshold: size of the vectors in kilobytes up to which all points that match a filter are
            compared without the graph, >= 1.
        ef: number of candidates of a search of the graph, >= 1; at least k candidates are used.
        exact: True compares each query with every point; False searches the graph, approximately.
        oversampling: factor of the candidates that are found by codes, >= 1. A search for k neighbors finds
            k times this number of points by codes, and then compares the found points by their vectors.
        collection: name of the collection; each store on a server needs another name.
        timeout: time in seconds after which an unanswered reading call raises StoreUnavailableError, >= 0.1;
            a writing call may take three times as long.
        api_key_file: only present in stores of older versions; the file is never read.
        prefer_grpc: True uses gRPC if the server answers over gRPC, else REST; False always uses REST.
        grpc_port: port of the server for gRPC.
        parallel: number of requests that are sent at the same time when many records are added, >= 1.
        shards: number of shards (parts on different nodes) of the collection in a cluster; 0 lets the server
            decide.
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
        """Check the parameters that a user gave, and return the options.

        Args:
            params: parameters by name; omitted parameters have their defaults.

        Raises:
            ConfigError: a parameter is unknown, or its value is not allowed.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        values = validate_params("qdrant", params, accepted=defaults)
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

    def estimate_point_size(self, dim: int) -> int:
        """Return an estimate of the bytes that a record takes on the server's disk.

        The estimate includes vector, codes (compressed keys), payload, links in the graph, and log entry.

        Args:
            dim: number of components of a vector.
        """
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
    """Check the type and value of a parameter, and return the value.

    An integer is converted to float if a float is expected.

    Args:
        name: name of the parameter.
        value: value from the user.
        kind: expected type: int, float, bool or str.

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
