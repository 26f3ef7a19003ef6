"""The registry of adapters: every installed distribution may offer adapters.

An adapter is one line in the metadata of its distribution; the adapters of knnstore are declared alike::

    [project.entry-points."knnstore.datastores"]
    milvus = "knnstore_milvus:MilvusDatastore"

`names` lists adapters, `load` imports one, `describe` tries all. An adapter is imported only when `load` gets
its name or `describe` tries it, so a broken plug-in affects no other.
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

_OURSELVES = "knnstore"  # its requirements are mostly not those of an adapter's engine
_NO_ENGINE = {_OURSELVES, "numpy"}
"""Requirements that never name the engine of an adapter."""
_PROBE_DIM = 8
"""Dimension of the temporary datastore that `describe` opens."""

_METHODS = [
    name
    for name, member in vars(Datastore).items()
    if not name.startswith("_") and not isinstance(member, property)
]
"""Methods that every adapter's class must have. Properties may be set by instances, so they are not checked.
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter that an installed distribution offers."""

    name: str
    """The adapter's name, the argument of `load`."""

    distribution: str
    """Name of the distribution that offers the adapter."""

    version: str
    """Version of the distribution."""

    problem: str | None
    """Reason why the adapter cannot be loaded, with a remedy; None if it can be loaded."""

    libraries: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each distribution that provides the engine; None for a distribution that is not installed.
    """

    capabilities: Capabilities | None = None
    """Features with default parameters in a local folder; None if no datastore can be opened in a folder."""

    note: str | None = None
    """Reason why no datastore can be opened in a folder, although the adapter can be loaded; else None."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """One entry point and the distribution that declares it."""

    entry_point: EntryPoint
    distribution: Distribution


def names() -> list[str]:
    """Return the names of all installed adapters, sorted, without importing any."""
    return sorted({offer.entry_point.name for offer in _list_offers()})


def load(name: str) -> type[Datastore]:
    """Import an adapter and return its class.

    Args:
        name: a name from `names`.

    Returns:
        The adapter's class; its `open` opens a datastore.

    Raises:
        AdapterNotFoundError: no distribution offers this name; the message lists the installed names.
        AdapterConflictError: several distributions offer this name; the message names them.
        AdapterLoadError: the adapter cannot be imported, or lacks a method of `Datastore`. For a missing
            dependency the message says how to install it.
    """
    return _load_adapter(name, _list_offers())


def describe() -> list[AdapterInfo]:
    """Try every adapter by opening an empty datastore in a temporary folder.

    Returns:
        A report on each adapter, sorted by name and distribution. A failing adapter affects no other.
    """
    offers = _list_offers()
    return sorted(
        (_describe_adapter(offer, offers) for offer in offers), key=lambda row: (row.name, row.distribution)
    )


def _describe_adapter(offer: _Offer, offers: list[_Offer]) -> AdapterInfo:
    """Return the report on one adapter; importing and opening the adapter raise no error here.

    Args:
        offer: the adapter.
        offers: all installed adapters, to find conflicts of names.
    """
    problem = capabilities = note = None
    name, owner = offer.entry_point.name, offer.distribution
    try:
        adapter = _load_adapter(name, offers)
    except AdapterError as error:
        problem = str(error)
    else:
        capabilities, note = _probe_capabilities(adapter)
    return AdapterInfo(
        name, owner.name, owner.version, problem, _find_engine_versions(offer), capabilities, note
    )


def _probe_capabilities(adapter: type[Datastore]) -> tuple[Capabilities | None, str | None]:
    """Open an empty datastore with default parameters in a temporary folder, and return its capabilities.

    Returns:
        (capabilities, None), or (None, first line of the error) if the adapter cannot open a datastore.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with adapter.open(Path(folder) / "probe", dim=_PROBE_DIM, mode="x") as store:
                return store.capabilities, None
        except Exception as error:  # an adapter may raise anything; the other adapters are still listed
            return None, (str(error).splitlines() or [""])[0] or type(error).__name__


def _find_engine_versions(offer: _Offer) -> dict[str, str | None]:
    """Return the version of each distribution that provides an adapter's engine; None if not installed.

    The engine consists of the requirements of the extras named ``ADAPTER`` or ``ADAPTER-...``. Without an
    extra, all requirements of the adapter's distribution count, except knnstore and numpy. For an adapter of
    knnstore itself without an extra, the result is empty.
    """
    adapter, owner = offer.entry_point.name, offer.distribution
    try:
        requirements = [Requirement(line) for line in owner.requires or ()]
    except InvalidRequirement:  # unreadable requirements must not hide the adapter
        return {}
    extras = [extra for extra in _list_extras(owner) if extra == adapter or extra.startswith(f"{adapter}-")]
    engine = [
        requirement
        for requirement in requirements
        if not _is_required(requirement) and any(_is_required(requirement, extra) for extra in extras)
    ]
    if not engine and owner.name != _OURSELVES:
        engine = [
            requirement
            for requirement in requirements
            if _is_required(requirement) and requirement.name not in _NO_ENGINE
        ]
    return {requirement.name: _find_version(requirement.name) for requirement in engine}


def _is_required(requirement: Requirement, extra: str = "") -> bool:
    """Check whether a requirement applies on this machine when `extra` is installed ("" for no extra)."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _list_extras(owner: Distribution) -> list[str]:
    """Return the names of a distribution's extras."""
    return owner.metadata.get_all("Provides-Extra") or []


def _find_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _list_offers() -> list[_Offer]:
    """Return all adapters that installed distributions offer.

    The result is cached until a folder of `sys.path` changes.
    """
    return _read_offers(tuple((folder, _read_modification_time(folder)) for folder in sys.path))


def _read_modification_time(folder: str) -> int:
    """Return the modification time of a folder in ns; 0 if it cannot be read."""
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read_offers(folders: tuple[tuple[str, int], ...]) -> list[_Offer]:  # only to be told apart
    """Read all adapters that installed distributions offer.

    If a distribution is installed twice, only the copy that Python imports counts. Unreadable distributions
    are logged and skipped.

    Args:
        folders: folders of `sys.path` and their modification times; used only as the key of the cache.
    """
    offers: list[_Offer] = []
    seen_owners: set[str] = set()
    for distribution in distributions():
        try:
            entry_points = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            owner = distribution.metadata["Name"] if entry_points else ""
            if owner is None:
                raise ValueError("the metadata names no distribution")
        except Exception as error:  # damaged metadata of one distribution must not hide the others
            _logger.warning("the entry points of %s cannot be read: %s", distribution, error)
            continue
        if entry_points and owner not in seen_owners:
            seen_owners.add(owner)
            offers += [_Offer(entry_point, distribution) for entry_point in entry_points]
    return offers


def _load_adapter(name: str, offers: list[_Offer]) -> type[Datastore]:
    """Import the adapter with a name and return its class; see `load`. `offers` are all adapters."""
    matching = [offer for offer in offers if offer.entry_point.name == name]
    if not matching:
        raise AdapterNotFoundError(
            _make_not_found_message(name, sorted({offer.entry_point.name for offer in offers}))
        )
    if len(matching) > 1:
        owners = " and ".join(offer.distribution.name for offer in matching)
        raise AdapterConflictError(f"adapter {name!r} is offered by {owners}; uninstall all but one of them")
    offer, owner = matching[0], matching[0].distribution.name
    try:
        adapter = offer.entry_point.load()
    except Exception as error:
        missing = _find_missing_package(error, offer.entry_point)
        if missing:
            hint = f"needs {missing!r}. Install it with: {_make_install_command(offer)}"
        else:
            reason = (str(error).splitlines() or [""])[0]
            hint = f"cannot be imported from {owner}: {type(error).__name__}: {reason}"
        raise AdapterLoadError(f"adapter {name!r} {hint}") from error
    missing_methods = [method for method in _METHODS if not callable(getattr(adapter, method, None))]
    if missing_methods:
        raise AdapterLoadError(
            f"adapter {name!r} of {owner} is no Datastore: it lacks {', '.join(missing_methods)}"
        )
    return cast(type[Datastore], adapter)


def _find_missing_package(error: Exception, entry_point: EntryPoint) -> str | None:
    """Return the name of the missing package because of which an import failed.

    Returns None if the error has another cause, or if the missing module is in the adapter's own package.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return None if package == entry_point.module.partition(".")[0] else package


def _make_install_command(offer: _Offer) -> str:
    """Return the shell command that installs an adapter's dependencies, by its extra if it has an extra."""
    owner, extra = offer.distribution.name, offer.entry_point.name
    has_extra = extra in _list_extras(offer.distribution)
    return f"pip install '{owner}[{extra}]'" if has_extra else f"pip install {owner}"


def _make_not_found_message(name: str, installed: list[str]) -> str:
    """Return the error message for an unknown adapter, with the most similar installed name if there is one.

    Args:
        name: the unknown name.
        installed: names of the installed adapters.
    """
    if not installed:
        return f"no adapter {name!r}, nor any other: knnstore itself is not installed; run `pip install -e .`"
    close_names = difflib.get_close_matches(name, installed, n=1)
    guess = f"did you mean {close_names[0]!r}? " if close_names else ""
    return f"no adapter {name!r}; {guess}installed: {', '.join(installed)}"
