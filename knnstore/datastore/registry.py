"""The registry of adapters. An adapter is a class that connects knnstore to a vector engine.

Every installed distribution (Python package with metadata) may offer adapters, by entry points. The adapters
of knnstore itself are declared in the same way, with one line for each adapter::

    [project.entry-points."knnstore.datastores"]
    milvus = "knnstore_milvus:MilvusDatastore"

`list_adapters` lists the adapters, `load_adapter` imports one adapter, and `describe_adapters` tries all
adapters. An adapter is imported only when `load_adapter` receives its name or `describe_adapters` tries it,
so a broken adapter affects no other.
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
"""Names of distributions (packages) that adapters require, but that are not vector engines."""
_PROBE_DIM = 8
"""Dimension of the temporary datastore that `describe_adapters` opens."""

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
    """Report on one adapter that an installed distribution offers."""

    name: str
    """The adapter's name, the argument of `load_adapter`."""

    distribution: str
    """Name of the distribution that offers the adapter."""

    version: str
    """Version of the distribution."""

    problem: str | None
    """Reason why the adapter cannot be loaded, with a remedy; None if it can be loaded."""

    libraries: Mapping[str, str | None] = field(default_factory=dict)
    """Version of each Python distribution that provides the vector engine, by the distribution's name.

    The version is None if the distribution is not installed.
    """

    capabilities: Capabilities | None = None
    """Features of a datastore that was opened in a local folder with default parameters.

    None if the adapter cannot be loaded, or cannot open a datastore in a folder, for example because it needs
    a server.
    """

    note: str | None = None
    """Reason why the loaded adapter cannot open a datastore in a local folder.

    None if the adapter can open such a datastore, or if the adapter cannot be loaded.
    """


@dataclass(frozen=True, slots=True)
class _Offer:
    """An entry point that names an adapter, and the distribution (installed package) that declares it."""

    entry_point: EntryPoint
    distribution: Distribution


def list_adapters() -> list[str]:
    """Return the names of all installed adapters, sorted, without importing an adapter.

    An adapter is a class that connects knnstore to a vector engine.
    """
    return sorted({offer.entry_point.name for offer in _list_offers()})


def load_adapter(name: str) -> type[Datastore]:
    """Import an adapter, which is a class that connects knnstore to a vector engine, and return the class.

    Args:
        name: name of the adapter, one of the names that `list_adapters` returns.

    Returns:
        The adapter's class; its `open` opens a datastore.

    Raises:
        AdapterNotFoundError: no distribution offers this name; the message lists the installed names.
        AdapterConflictError: several distributions offer this name; the message names them.
        AdapterLoadError: the adapter cannot be imported, or lacks a method of `Datastore`. If a package is
            missing, the message says how to install the package.
    """
    return _load_adapter(name, _list_offers())


def describe_adapters() -> list[AdapterInfo]:
    """Try all installed adapters, and return a report on each adapter.

    An adapter is a class that connects knnstore to a vector engine. The function imports each adapter, and
    opens an empty datastore with it in a temporary folder. If this fails, the report has the reason; no error
    is raised.

    Returns:
        The reports, sorted by the names of the adapters and of their distributions.
    """
    offers = _list_offers()
    return sorted(
        (_describe_adapter(offer, offers) for offer in offers), key=lambda row: (row.name, row.distribution)
    )


def _describe_adapter(offer: _Offer, offers: list[_Offer]) -> AdapterInfo:
    """Import one adapter, open an empty datastore with it, and return a report on the adapter.

    Errors of importing and opening are put into the report, not raised.

    Args:
        offer: the adapter.
        offers: all installed adapters; two adapters with the same name are reported as a problem.
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

    Args:
        adapter: class that connects knnstore to a vector engine.

    Returns:
        The capabilities (features) of the datastore, and None. If the adapter cannot open a datastore, None
        and the first line of the error's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with adapter.open(Path(folder) / "probe", dim=_PROBE_DIM, mode="x") as store:
                return store.capabilities, None
        except Exception as error:  # an adapter may raise anything; the other adapters are still listed
            return None, (str(error).splitlines() or [""])[0] or type(error).__name__


def _find_engine_versions(offer: _Offer) -> dict[str, str | None]:
    """Find the packages that provide an adapter's vector engine, and their installed versions.

    An extra is an optional group of requirements of a distribution (an installed package). An extra belongs
    to the adapter if its name is the adapter's name, or begins with this name and a hyphen. The packages are:

    1. the packages that the adapter's extras require on this machine;
    2. if the first list is empty: the packages that the adapter's distribution requires without an extra,
       except knnstore and numpy. For an adapter of knnstore itself, this second list is always empty.

    Args:
        offer: the adapter, and the distribution that declares it.

    Returns:
        Version of each package, by the package's name; the version is None if the package is not installed.
        The dict is empty if no package is found, or if a requirement of the distribution cannot be parsed.
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
    """Check whether a package's requirement applies on this machine.

    Args:
        requirement: a requirement, possibly with a condition (marker) on platform, Python version or extra.
        extra: name of the extra (optional group of requirements) that is installed; "" for no extra.

    Returns:
        True if the requirement has no condition or its condition is met, else False.
    """
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _list_extras(owner: Distribution) -> list[str]:
    """Return the names of a distribution's extras (optional groups of requirements)."""
    return owner.metadata.get_all("Provides-Extra") or []


def _find_version(distribution: str) -> str | None:
    """Return the version of the distribution (package) with a name; None if it is not installed."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def _list_offers() -> list[_Offer]:
    """Return all adapters that installed distributions (packages) offer, without importing the adapters.

    An adapter is a class that connects knnstore to a vector engine. The result is cached until `sys.path` or
    one of its folders changes.
    """
    return _read_offers(tuple((folder, _read_modification_time(folder)) for folder in sys.path))


def _read_modification_time(folder: str) -> int:
    """Return the modification time of a folder in ns; 0 if the time cannot be read.

    Args:
        folder: path of the folder; "" is the current folder.
    """
    try:
        return Path(folder or ".").stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _read_offers(folders: tuple[tuple[str, int], ...]) -> list[_Offer]:  # only to be told apart
    """Read the entry points of all installed distributions (packages), and return the adapters they name.

    If a distribution is installed twice, only the copy that Python imports counts. If the metadata of a
    distribution cannot be read, a warning is logged and the distribution is skipped. The last result is
    cached.

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
                raise ValueError("the metadata has no name of the distribution")
        except Exception as error:  # damaged metadata of one distribution must not hide the others
            _logger.warning("the entry points of %s cannot be read: %s", distribution, error)
            continue
        if entry_points and owner not in seen_owners:
            seen_owners.add(owner)
            offers += [_Offer(entry_point, distribution) for entry_point in entry_points]
    return offers


def _load_adapter(name: str, offers: list[_Offer]) -> type[Datastore]:
    """Import the adapter with a name and return its class.

    Args:
        name: the adapter's name.
        offers: all installed adapters.

    Raises:
        AdapterNotFoundError: no adapter has this name.
        AdapterConflictError: several adapters have this name.
        AdapterLoadError: the adapter cannot be imported, or lacks a method of `Datastore`.
    """
    matching = [offer for offer in offers if offer.entry_point.name == name]
    if not matching:
        raise AdapterNotFoundError(
            _make_not_found_message(name, sorted({offer.entry_point.name for offer in offers}))
        )
    if len(matching) > 1:
        owners = " and ".join(offer.distribution.name for offer in matching)
        raise AdapterConflictError(f"adapter {name!r} is offered by {owners}; uninstall all but one of them")
    offer = matching[0]
    try:
        adapter = offer.entry_point.load()
    except Exception as error:
        missing = _find_missing_package(error, offer.entry_point)
        if missing:
            hint = f"needs {missing!r}. Install it with: {_make_install_command(offer)}"
        else:
            reason = (str(error).splitlines() or [""])[0]
            hint = f"cannot be imported from {offer.distribution.name}: {type(error).__name__}: {reason}"
        raise AdapterLoadError(f"adapter {name!r} {hint}") from error
    missing_methods = [method for method in _METHODS if not callable(getattr(adapter, method, None))]
    if missing_methods:
        raise AdapterLoadError(
            f"adapter {name!r} of {offer.distribution.name} is not a Datastore: it lacks "
            f"{', '.join(missing_methods)}"
        )
    return cast(type[Datastore], adapter)


def _find_missing_package(error: Exception, entry_point: EntryPoint) -> str | None:
    """Return the name of the package whose absence made the import of an adapter fail.

    Args:
        error: the exception that the import raised.
        entry_point: the entry point of the adapter.

    Returns:
        Name of the top-level package of the missing module. None if the import failed for another reason, or
        if the missing module belongs to the adapter's own package.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return None if package == entry_point.module.partition(".")[0] else package


def _make_install_command(offer: _Offer) -> str:
    """Return the shell command that installs an adapter with its dependencies.

    The command is ``pip install`` with the name of the adapter's distribution. If the distribution has an
    extra (optional group of requirements) with the adapter's name, the command installs this extra too.

    Args:
        offer: the adapter, and the distribution that declares it.
    """
    owner, extra = offer.distribution.name, offer.entry_point.name
    has_extra = extra in _list_extras(offer.distribution)
    return f"pip install '{owner}[{extra}]'" if has_extra else f"pip install {owner}"


def _make_not_found_message(name: str, installed: list[str]) -> str:
    """Return the error message for an unknown adapter; it suggests a similar installed name if one exists.

    Args:
        name: the unknown name.
        installed: names of the installed adapters; if empty, the message says to install knnstore.
    """
    if not installed:
        return (
            f"no adapter {name!r}: no adapter is found, because knnstore itself is not installed; run "
            "`pip install -e .`"
        )
    close_names = difflib.get_close_matches(name, installed, n=1)
    guess = f"did you mean {close_names[0]!r}? " if close_names else ""
    return f"no adapter {name!r}; {guess}installed: {', '.join(installed)}"
