"""Finding adapters: every installed distribution may offer some.

An adapter is one line in the metadata of its distribution, ours like anybody's::

    [project.entry-points."knnstore.datastores"]
    milvus = "knnstore_milvus:MilvusDatastore"

Nothing is imported before `load` is called for that very name, so a broken plug-in harms no other.
"""

import difflib
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions
from importlib.metadata import version as version_of
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement

from knnstore.datastore.arrays import Capabilities
from knnstore.datastore.protocol import Datastore
from knnstore.errors import AdapterConflictError, AdapterError, AdapterLoadError, AdapterNotFoundError

ENTRY_POINT_GROUP = "knnstore.datastores"
"""The entry-point group in which distributions offer adapters."""

_OURSELVES = "knnstore"  # requires much that is not the engine of an adapter
_NO_ENGINE = {_OURSELVES, "numpy"}
_PROBE_DIM = 8

_METHODS = [
    name
    for name, member in vars(Datastore).items()
    if not name.startswith("_") and not isinstance(member, property)
]
"""What every adapter's class must have; properties may be set by its instances."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter that some installed distribution offers."""

    name: str
    """The name that `load` takes."""

    distribution: str
    """The distribution that offers it."""

    version: str
    """That distribution's version."""

    problem: str | None
    """Why it cannot be loaded and what to do about it; None if it can."""

    libraries: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each distribution that the engine is in; None for one that is not installed."""

    capabilities: Capabilities | None = None
    """What it can do with its default parameters, in a folder; None where that cannot be opened."""

    note: str | None = None
    """Why no datastore can be opened in a folder, where the adapter itself can be loaded."""


@dataclass(frozen=True, slots=True)
class _Offer:
    entry_point: EntryPoint
    distribution: Distribution


def names() -> list[str]:
    """List the names of all installed adapters, sorted, without importing any."""
    return sorted({offer.entry_point.name for offer in _offers()})


def load(name: str) -> type[Datastore]:
    """Import an adapter.

    Args:
        name: as in `names`.

    Returns:
        The adapter's class; open a datastore with its `open`.

    Raises:
        AdapterNotFoundError: no distribution offers this name; says which names there are.
        AdapterConflictError: several distributions offer it; names them.
        AdapterLoadError: it cannot be imported; says what to install, if that is the reason.
    """
    return _load(name, _offers())


def describe() -> list[AdapterInfo]:
    """Try every adapter, on an empty datastore in a temporary folder.

    Returns:
        A report on each, sorted by name and distribution; one that fails harms no other.
    """
    offers = _offers()
    return sorted(
        (_describe(offer, offers) for offer in offers), key=lambda row: (row.name, row.distribution)
    )


def _describe(offer: _Offer, offers: list[_Offer]) -> AdapterInfo:
    problem = capabilities = note = None
    name, owner = offer.entry_point.name, offer.distribution
    try:
        adapter = _load(name, offers)
    except AdapterError as error:
        problem = str(error)
    else:
        capabilities, note = _probe(adapter)
    return AdapterInfo(name, owner.name, owner.version, problem, _libraries(offer), capabilities, note)


def _probe(adapter: type[Datastore]) -> tuple[Capabilities | None, str | None]:
    """What an adapter says that it can do, or why it does not say so."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with adapter.open(Path(folder) / "probe", dim=_PROBE_DIM, mode="x") as store:
                return store.capabilities, None
        except Exception as error:  # whatever an adapter does, the others are to be listed
            return None, (str(error).splitlines() or [""])[0] or type(error).__name__


def _libraries(offer: _Offer) -> dict[str, str | None]:
    """What an adapter's engine comes in: the extra of its name, else all that its distribution requires."""
    adapter, owner = offer.entry_point.name, offer.distribution
    try:
        requirements = [Requirement(line) for line in owner.requires or ()]
    except InvalidRequirement:  # no reason to list no adapter
        return {}
    extras = [extra for extra in _extras(owner) if extra == adapter or extra.startswith(f"{adapter}-")]
    engine = [
        each for each in requirements if not _holds(each) and any(_holds(each, extra) for extra in extras)
    ]
    if not engine and owner.name != _OURSELVES:
        engine = [each for each in requirements if _holds(each) and each.name not in _NO_ENGINE]
    return {each.name: _version(each.name) for each in engine}


def _holds(requirement: Requirement, extra: str = "") -> bool:
    """Whether something is required here, with an extra or with none."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extras(owner: Distribution) -> list[str]:
    return owner.metadata.get_all("Provides-Extra") or []


def _version(distribution: str) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _offers() -> list[_Offer]:
    """All offers; what is installed is read again where a folder of Python's path has changed."""
    return _offers_in(tuple((folder, _time_of(folder)) for folder in sys.path))


def _time_of(folder: str) -> int:
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _offers_in(folders: tuple[tuple[str, int], ...]) -> list[_Offer]:  # only to be told apart
    """All offers; of a distribution that is installed twice, those of the copy that Python imports."""
    found: list[_Offer] = []
    seen: set[str] = set()
    for distribution in distributions():
        try:
            ours = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            owner = distribution.metadata["Name"] if ours else ""
            if owner is None:
                raise ValueError("the metadata names no distribution")
        except Exception as error:  # damaged metadata of one distribution is no reason to lose the others
            _logger.warning("the entry points of %s cannot be read: %s", distribution, error)
            continue
        if ours and owner not in seen:
            seen.add(owner)
            found += [_Offer(entry_point, distribution) for entry_point in ours]
    return found


def _load(name: str, offers: list[_Offer]) -> type[Datastore]:
    named = [offer for offer in offers if offer.entry_point.name == name]
    if not named:
        raise AdapterNotFoundError(_not_found(name, sorted({offer.entry_point.name for offer in offers})))
    if len(named) > 1:
        owners = " and ".join(offer.distribution.name for offer in named)
        raise AdapterConflictError(f"adapter {name!r} is offered by {owners}; uninstall all but one of them")
    offer, owner = named[0], named[0].distribution.name
    try:
        adapter = offer.entry_point.load()
    except Exception as error:
        missing = _missing_dependency(error, offer.entry_point)
        if missing:
            hint = f"needs {missing!r}. Install it with: {_install_command(offer)}"
        else:
            reason = (str(error).splitlines() or [""])[0]
            hint = f"cannot be imported from {owner}: {type(error).__name__}: {reason}"
        raise AdapterLoadError(f"adapter {name!r} {hint}") from error
    lacking = [method for method in _METHODS if not callable(getattr(adapter, method, None))]
    if lacking:
        raise AdapterLoadError(f"adapter {name!r} of {owner} is no Datastore: it lacks {', '.join(lacking)}")
    return cast(type[Datastore], adapter)


def _missing_dependency(error: Exception, entry_point: EntryPoint) -> str | None:
    """The package, other than the adapter's own, for want of which an import failed."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return None if package == entry_point.module.partition(".")[0] else package


def _install_command(offer: _Offer) -> str:
    """How to get what an adapter needs: its distribution's extra of the same name, if there is one."""
    owner, extra = offer.distribution.name, offer.entry_point.name
    known = extra in _extras(offer.distribution)
    return f"pip install '{owner}[{extra}]'" if known else f"pip install {owner}"


def _not_found(name: str, installed: list[str]) -> str:
    if not installed:
        return f"no adapter {name!r}, nor any other: knnstore itself is not installed; run `pip install -e .`"
    close = difflib.get_close_matches(name, installed, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"no adapter {name!r}; {guess}installed: {', '.join(installed)}"
