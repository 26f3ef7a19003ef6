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
from knnstore.lm import KNNSettings, Overrides, RequestOptions, resolve
from knnstore.server.access import Access
from knnstore.server.errors import ApiError, refused
from knnstore.server.protocol import Retrieval
from knnstore.store import KNNStore, Selection

_MAX_CACHED = 256
"""Number of settings that are cached, by revision of the store and scope."""
_MAX_WARM_UP_DOMAINS = 8
"""Largest number of domains that the server warms up."""

_MODEL_ONLY = KNNSettings(lam=0.0)


@dataclass(frozen=True, slots=True)
class Scope:
    """Documents that a request retrieves from, and the retrieval settings that it overrides.

    Without domains nothing is retrieved: the model predicts alone. None means the store's saved setting.
    """

    domains: tuple[str, ...] = ()
    tags: tuple[str, ...] | None = None
    where: str | None = None
    k: int | None = None
    probes: int | None = None
    temperature: float | None = None
    lam: float | None = None
    only_selected: bool = False
    """True if no setting may depend on other documents than these, because the client may not see them."""


def format_model_name(model: str, domains: tuple[str, ...] = ()) -> str:
    """Return the name of a model with domains, as ``MODEL+DOMAIN+DOMAIN`` with escaped domains."""
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
        self._limits = {"k": most_k, "probes": most_probes}
        self._store = store
        self._settings: OrderedDict[tuple[int, Scope], KNNSettings] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._cached_domains: tuple[int, frozenset[str]] = -1, frozenset()

    def list_warm_up_scopes(self) -> list[Scope]:
        """Return the scopes that requests probably use: each domain on its own, and all domains together.

        Only the first `_MAX_WARM_UP_DOMAINS` domains by name are returned on their own. The scope of all
        domains is left out if the store has only one domain, or more than `_MAX_WARM_UP_DOMAINS`.
        """
        domains = tuple(sorted(self._list_domains()))
        single_domains = [Scope((domain,)) for domain in domains[:_MAX_WARM_UP_DOMAINS]]
        return (
            [*single_domains, Scope(domains)] if 1 < len(domains) <= _MAX_WARM_UP_DOMAINS else single_domains
        )

    def clear_cache(self) -> None:
        """Clear the cached settings, so that they are resolved again."""
        with self._cache_lock:
            self._settings.clear()

    def parse_scope(self, name: str, knn: Retrieval | None, access: Access) -> Scope:
        """Return the scope that a model's name and a request's field `knn` describe.

        Args:
            name: the model's name, with domains.
            knn: the field of the request; None if it is missing.
            access: the permissions of the client.

        Raises:
            ApiError: 404 if the model or a domain does not exist or is not visible to the client, 400 if the
                field does not fit the model or exceeds a limit.
        """
        domains = self._parse_domains(name, access)
        if knn is None:
            return Scope(domains, only_selected=not access.sees_all_domains)
        if not domains and (knn.domains or knn.tags or knn.where):
            raise refused(
                f"`{name}` is the model alone and retrieves nothing; name domains as {self.model}+DOMAIN",
                next(f"knn.{part}" for part in ("domains", "tags", "where") if getattr(knn, part)),
            )
        for domain in knn.domains or ():
            if domain not in domains:
                raise refused(f"the domain {domain!r} is none of those of `{name}`", "knn.domains")
        for param, limit in self._limits.items():
            value = getattr(knn, param)
            if value is not None and value > limit:
                raise refused(
                    f"knn.{param}: {value:,} is more than the {limit:,} that this server takes "
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
            only_selected=not access.sees_all_domains,
        )
        try:
            if knn.where is not None:
                Selection(where=knn.where)
            Overrides(k=knn.k, probes=knn.probes, temperature=knn.temperature, lam=knn.lam)
        except ConfigError as error:
            raise refused(str(error), "knn") from error
        return scope

    def resolve_settings(self, scope: Hashable) -> KNNSettings:
        """Return the retrieval settings of a scope for scoring, at the store's current revision.

        The result is cached: it is the same object until the revision changes. Domains that no longer exist
        are left out of the scope; if none is left, λ is 0.
        """
        assert isinstance(scope, Scope)
        key = self._store.revision(), scope
        cached = self._settings.get(key)
        return self._cache_settings(key, self._resolve_uncached(scope)) if cached is None else cached

    def build_options(self, scope: Hashable) -> RequestOptions:
        """Return the options of a scope for another engine with the same store, such as vLLM.

        Domains that no longer exist are left out of the scope; if none is left, retrieval is off.
        """
        assert isinstance(scope, Scope)
        existing = self._list_domains()
        domains = tuple(domain for domain in scope.domains if domain in existing)
        if not domains:
            return RequestOptions(is_off=True)
        return RequestOptions(
            domains=domains,
            tags=scope.tags,
            where=scope.where,
            lam=scope.lam,
            temperature=scope.temperature,
            k=scope.k,
            probes=scope.probes,
            only_selected=scope.only_selected,
        )

    def fill_caches(self, scope: Scope) -> None:
        """Fill the caches for a scope in the caller's thread, so that the engine does not have to.

        Resolves the settings and the condition on metadata, and counts n-grams. Errors are ignored: the
        engine raises them again for the request.
        """
        key = self._store.revision(), scope
        if key in self._settings:
            return
        with suppress(KnnstoreError):
            settings = self._cache_settings(key, self._resolve_uncached(scope))
            if settings.retrieves:
                self._store.record_count(settings.selection)
            if settings.ngrams is not None:
                self._store.ngrams(settings.selection)

    def _cache_settings(self, key: tuple[int, Scope], settings: KNNSettings) -> KNNSettings:
        """Cache the settings of a scope and return them, or those that another thread has cached meanwhile.

        If more than `_MAX_CACHED` are cached, the oldest is dropped.
        """
        with self._cache_lock:
            cached = self._settings.setdefault(key, settings)
            if len(self._settings) > _MAX_CACHED:
                self._settings.popitem(last=False)
        return cached

    def _resolve_uncached(self, scope: Scope) -> KNNSettings:
        """Resolve the settings of a scope at the store's current revision."""
        existing = self._list_domains()
        domains = tuple(domain for domain in scope.domains if domain in existing)
        if not domains:
            return _MODEL_ONLY
        overrides = Overrides(
            selection=Selection(domains=domains, tags=scope.tags, where=scope.where),
            k=scope.k,
            probes=scope.probes,
            temperature=scope.temperature,
            lam=scope.lam,
        )
        return resolve(self._store, overrides, only_selected=scope.only_selected)

    def _list_domains(self) -> frozenset[str]:
        """Return the names of all domains at the current revision, cached. Any thread may call it."""
        revision = self._store.revision()
        if self._cached_domains[0] != revision:
            self._cached_domains = revision, frozenset(domain.name for domain in self._store.domains())
        return self._cached_domains[1]

    def _parse_domains(self, name: str, access: Access) -> tuple[str, ...]:
        """Return the domains in a model's name, sorted and unescaped; empty for the model alone.

        Raises:
            ApiError: 404 if the model or a domain does not exist or is not visible to the client.
        """
        model, *escaped_domains = name.removeprefix(self.model).split("+")
        domains = tuple(
            sorted(
                {escaped_domain.replace("%2B", "+").replace("%25", "%") for escaped_domain in escaped_domains}
            )
        )
        existing = self._list_domains() if domains else frozenset()
        if (
            not name.startswith(self.model)
            or model
            or not all(domain in existing and access.sees(domain) for domain in domains)
        ):
            raise ApiError(404, f"the model `{name}` does not exist", param="model", code="model_not_found")
        return domains
