"""Scopes: the documents and settings of retrieval, from a model's name and a request's field `knn`.

`MODEL` is the model alone, `MODEL+DOMAIN+DOMAIN` is the model with these domains. In the name of a domain,
``%`` and ``+`` are written as ``%25`` and ``%2B``.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm import KNNSettings, Overrides, resolve
from knnstore.server.access import Access
from knnstore.server.errors import ApiError, refused
from knnstore.server.protocol import Retrieval
from knnstore.store import KNNStore, Selection

_KEPT = 256
"""Number of settings that are cached, by revision of the store and scope."""
_MOST_FIRST = 8
"""Largest number of domains that the server warms up."""

_ALONE = KNNSettings(lam=0.0)


@dataclass(frozen=True, slots=True)
class Scope:
    """Documents to retrieve from, and the settings of a request. Without domains it is the model alone."""

    domains: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    where: str | None = None
    k: int | None = None
    probes: int | None = None
    temperature: float | None = None
    lam: float | None = None
    own: bool = False
    """True if the settings must not depend on other documents, because the client may not see them."""


def named(model: str, domains: tuple[str, ...] = ()) -> str:
    """Return the name of a model with domains, with ``%`` and ``+`` of the domains escaped."""
    return "+".join([model, *(domain.replace("%", "%25").replace("+", "%2B") for domain in domains)])


class Scopes:
    """Parses and resolves the scopes of one store. Threads may share the object.

    Args:
        store: the store.
        model: the name of the model alone.
        most_k: largest number of neighbors of a token that a request may ask for.
        most_probes: largest number of cells of a token that a request may ask for.
    """

    def __init__(self, store: KNNStore, model: str, most_k: int = 16_384, most_probes: int = 128) -> None:
        self.model = model
        self._most = {"k": most_k, "probes": most_probes}
        self._store = store
        self._settings: OrderedDict[tuple[int, Scope], KNNSettings] = OrderedDict()
        self._keeping = threading.Lock()
        self._names: tuple[int, frozenset[str]] = -1, frozenset()

    def first(self) -> list[Scope]:
        """Return the scopes that requests probably have: each single domain, and all domains together.

        At most `_MOST_FIRST` domains are returned alone. The scope of all domains is left out if the store
        has only one domain, or more than `_MOST_FIRST`.
        """
        domains = tuple(sorted(self._there()))
        each = [Scope((domain,)) for domain in domains[:_MOST_FIRST]]
        return [*each, Scope(domains)] if 1 < len(domains) <= _MOST_FIRST else each

    def forget(self) -> None:
        """Clear the cached settings, so that they are resolved again."""
        with self._keeping:
            self._settings.clear()

    def scope(self, name: str, knn: Retrieval | None, access: Access) -> Scope:
        """Return the scope of a model's name and a field `knn`.

        Args:
            name: the model's name, with domains.
            knn: the field of the request; None if it is missing.
            access: the permissions of the client.

        Raises:
            ApiError: 404 if the model or a domain does not exist or is not visible to the client, 400 if the
                field does not fit the model or exceeds a limit.
        """
        domains = self._domains_of(name, access)
        if knn is None:
            return Scope(domains, own=not access.sees_all_domains)
        if not domains and (knn.domains or knn.tags or knn.where):
            raise refused(
                f"`{name}` is the model alone and retrieves nothing; name domains as {self.model}+DOMAIN",
                next(f"knn.{part}" for part in ("domains", "tags", "where") if getattr(knn, part)),
            )
        for domain in knn.domains or ():
            if domain not in domains:
                raise refused(f"the domain {domain!r} is none of those of `{name}`", "knn.domains")
        for param, most in self._most.items():
            given = getattr(knn, param)
            if given is not None and given > most:
                raise refused(
                    f"knn.{param}: {given:,} is more than the {most:,} that this server takes "
                    f"(`--max-{param}`)",
                    f"knn.{param}",
                )
        scope = Scope(
            tuple(sorted(set(knn.domains))) if knn.domains else domains,
            tuple(sorted(set(knn.tags))) if knn.tags else None,
            knn.where,
            knn.k,
            knn.probes,
            knn.temperature,
            knn.lam,
            own=not access.sees_all_domains,
        )
        try:
            if knn.where is not None:
                Selection(where=knn.where)
            Overrides(k=knn.k, probes=knn.probes, temperature=knn.temperature, lam=knn.lam)
        except ConfigError as error:
            raise refused(str(error), "knn") from error
        return scope

    def settings(self, scope: Hashable) -> KNNSettings:
        """Return the settings of a scope for scoring, at the store's current revision.

        The result is cached: it is the same object until the revision changes. Domains that no longer exist
        are left out of the scope; if none is left, λ is 0.
        """
        assert isinstance(scope, Scope)
        name = self._store.revision(), scope
        found = self._settings.get(name)
        return self._keep(name, self._resolve(scope)) if found is None else found

    def prepare(self, scope: Scope) -> None:
        """Fill the caches for a scope in the caller's thread, so that the engine does not have to.

        Resolves the settings and the condition on metadata, and counts n-grams. Errors are ignored: the
        engine raises them again for the request.
        """
        name = self._store.revision(), scope
        if name in self._settings:
            return
        with suppress(KnnstoreError):
            settings = self._keep(name, self._resolve(scope))
            if settings.retrieves:
                self._store.record_count(settings.selection)
            if settings.ngrams is not None:
                self._store.ngrams(settings.selection)

    def _keep(self, name: tuple[int, Scope], settings: KNNSettings) -> KNNSettings:
        """Cache settings. Returns the settings that another thread has cached meanwhile, if any."""
        with self._keeping:
            kept = self._settings.setdefault(name, settings)
            if len(self._settings) > _KEPT:
                self._settings.popitem(last=False)
        return kept

    def _resolve(self, scope: Scope) -> KNNSettings:
        """Resolve the settings of a scope at the store's current revision."""
        there = self._there()
        domains = tuple(domain for domain in scope.domains if domain in there)
        if not domains:
            return _ALONE
        asked = Overrides(
            selection=Selection(domains=domains, tags=scope.tags, where=scope.where),
            k=scope.k,
            probes=scope.probes,
            temperature=scope.temperature,
            lam=scope.lam,
        )
        return resolve(self._store, asked, only_selected=scope.own)

    def _there(self) -> frozenset[str]:
        """Return the names of all domains at the current revision, cached. Any thread may call it."""
        revision = self._store.revision()
        if self._names[0] != revision:
            self._names = revision, frozenset(domain.name for domain in self._store.domains())
        return self._names[1]

    def _domains_of(self, name: str, access: Access) -> tuple[str, ...]:
        """Return the domains in a model's name, sorted; empty for the model alone.

        Raises:
            ApiError: 404 if the model or a domain does not exist or is not visible.
        """
        model, *parts = name.removeprefix(self.model).split("+")
        domains = tuple(sorted({part.replace("%2B", "+").replace("%25", "%") for part in parts}))
        there = self._there() if domains else frozenset()
        if (
            not name.startswith(self.model)
            or model
            or not all(domain in there and access.sees(domain) for domain in domains)
        ):
            raise ApiError(404, f"the model `{name}` does not exist", param="model", code="model_not_found")
        return domains
