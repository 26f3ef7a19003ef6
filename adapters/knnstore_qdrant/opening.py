"""From a location to the points there."""

from importlib.util import find_spec
from pathlib import Path

from knnstore.datastore import Metric, Mode
from knnstore.errors import AdapterLoadError
from knnstore_qdrant.options import Options
from knnstore_qdrant.points import Points


def open_points(location: str | Path, dim: int, metric: Metric, mode: Mode, options: Options) -> Points:
    """Open or create a collection; see `QdrantDatastore.open`."""
    place = str(location)
    if "://" in place:
        _need("qdrant_client", "qdrant", place)
        from knnstore_qdrant.connecting import open_server

        return open_server(place, dim, metric, mode, options)
    _need("qdrant_edge", "qdrant-edge", place)
    from knnstore_qdrant.embedded import EmbeddedPoints

    return EmbeddedPoints(Path(place), dim, metric, mode, options)


def erase_points(location: str | Path, options: Options) -> None:
    """Remove everything at a location; see `SupportsErase.erase`."""
    if "://" in str(location):
        _need("qdrant_client", "qdrant", str(location))
        from knnstore_qdrant.connecting import erase_server

        erase_server(str(location), options)
    else:
        _need("qdrant_edge", "qdrant-edge", str(location))
        from knnstore_qdrant.embedded import erase_directory

        erase_directory(Path(location))


def _need(module: str, extra: str, place: str) -> None:
    if find_spec(module) is None:
        raise AdapterLoadError(
            f"the location {place} needs {module!r}. Install it with: pip install 'knnstore[{extra}]'"
        )
