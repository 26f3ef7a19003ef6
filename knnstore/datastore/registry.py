"""Finding adapters: every installed distribution may offer some.

An adapter is one line in the metadata of its distribution, ours like anybody's::

    [project.entry-points."knnstore.datastores"]
    milvus = "knnstore_milvus:MilvusDatastore"

Nothing is imported before `load` is called for that very name, so a broken plug-in harms no other.
"""

import difflib
import logging
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import cast

from knnstore.datastore.protocol import Datastore
from knnstore.errors import AdapterConflictError, AdapterError, AdapterLoadError, AdapterNotFoundError

ENTRY_POINT_GROUP = "knnstore.datastores"
"""The entry-point group in which distributions offer adapters."""

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
    """Try to import every adapter and report on each, sorted by name and distribution."""
    rows = []
    offers = _offers()
    for offer in offers:
        name, problem = offer.entry_point.name, None
        try:
            _load(name, offers)
        except AdapterError as error:
            problem = str(error)
        rows.append(AdapterInfo(name, offer.distribution.name, offer.distribution.version, problem))
    return sorted(rows, key=lambda row: (row.name, row.distribution))


def _offers() -> list[_Offer]:
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
    return _imported(named[0])


def _imported(offer: _Offer) -> type[Datastore]:
    name, owner = offer.entry_point.name, offer.distribution.name
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
    extras = offer.distribution.metadata.get_all("Provides-Extra") or []
    return f"pip install '{owner}[{extra}]'" if extra in extras else f"pip install {owner}"


def _not_found(name: str, installed: list[str]) -> str:
    if not installed:
        return f"no adapter {name!r}, nor any other: knnstore itself is not installed; run `pip install -e .`"
    close = difflib.get_close_matches(name, installed, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"no adapter {name!r}; {guess}installed: {', '.join(installed)}"
