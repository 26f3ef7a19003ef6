"""Scopes: which documents a request retrieves from, and with which settings.

A scope is made from the model's name and the field `knn` of a request. The name `MODEL` is the model alone,
which retrieves nothing. `MODEL+DOMAIN+DOMAIN` is the model that retrieves from these domains (named sets of
documents). In the name of a domain, ``%`` and ``+`` are written as ``%25`` and ``%2B``.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm import KNNSettings, Overrides, RequestOptions, resolve
from knnstore.server.access import Access
from knnstore.server.errors import ApiError, bad_request_error
from knnstore.server.protocol import Retrieval
from knnstore.store import KNNStore, Selection

_MAX_CACHED = 256
"""Largest number of cached settings. One scope has one entry for each revision of the store at which it was
resolved."""
_MAX_WARM_UP_DOMAINS = 8
"""Largest number of domains that the server warms up."""

_MODEL_ONLY = KNNSettings(lam=0.0)
"""Settings with which nothing is retrieved: λ is 0, so the model predicts alone."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The documents that a request retrieves from, and the retrieval settings that the request overrides.

    Without domains nothing is retrieved, and the model predicts alone. A setting that is None has the value
    that is saved in the store.
    """

    domains: tuple[str, ...] = ()
    """Names of the domains (named sets of documents) to retrieve from; empty for the model alone."""
    tags: tuple[str, ...] | None = None
    """Tags; only documents with at least one of these tags are retrieved from. None means all documents of
    the domains."""
    where: str | None = None
    """Condition on the metadata of documents, for example ``year >= 2020``; only documents that meet it are
    retrieved from. None means no condition."""
    k: int | None = None
    """Number of neighbors that are retrieved for each token; None means the saved number."""
    probes: int | None = None
    """Number of cells (groups of near records) that are searched for each token; None means the saved
    number."""
    temperature: float | None = None
    """Divisor of the distances of the neighbors, > 0; None means the saved value. It is not the sampling
    temperature."""
    lam: float | None = None
    """λ, the weight of retrieval in the mixture, from 0 to 1; None means the saved weights."""
    only_selected: bool = False
    """True if settings must be computed from the documents of this scope alone, because the client may not
    see other documents."""


def format_model_name(model: str, domains: tuple[str, ...] = ()) -> str:
    """Return the name by which a request asks for a model with domains: ``MODEL+DOMAIN+DOMAIN``.

    Args:
        model: name of the model alone, which is returned if there are no domains.
        domains: names of the domains (named sets of documents) to retrieve from. ``%`` and ``+`` in them
            become ``%25`` and ``%2B``.
    """
    return "+".join([model, *(domain.replace("%", "%25").replace("+", "%2B") for domain in domains)])


class Scopes:
    """Makes the scopes of requests, and resolves scopes to retrieval settings. Threads may share the object.

    A scope (`Scope`) says which documents a request retrieves from, and which settings it overrides.

    Args:
        store: the store that requests retrieve from.
        model: the name of the model alone.
        most_k: largest number of neighbors (retrieved records) for each token that a request may ask for.
        most_probes: largest number of searched cells (groups of near records) for each token that a request
            may ask for.
    """

    def __init__(self, store: KNNStore, model: str, most_k: int = 16_384, most_probes: int = 128) -> None:
        self.model = model
        self._limits = {"k": most_k, "probes": most_probes}
        self._store = store
        self._settings: OrderedDict[tuple[int, Scope], KNNSettings] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._cached_domains: tuple[int, frozenset[str]] = -1, frozenset()

    def list_warm_up_scopes(self) -> list[Scope]:
        """Return the scopes that requests probably use: each domain alone, and all domains together.

        A domain is a named set of documents. If the store has more than `_MAX_WARM_UP_DOMAINS` domains, only
        the first domains by name are returned, and no scope of all domains. A store without domains gives an
        empty list.
        """
        domains = tuple(sorted(self._list_domains()))
        single_domains = [Scope((domain,)) for domain in domains[:_MAX_WARM_UP_DOMAINS]]
        return (
            [*single_domains, Scope(domains)] if 1 < len(domains) <= _MAX_WARM_UP_DOMAINS else single_domains
        )

    def name_visible(self, access: Access) -> str:
        """Return the model's name with all domains that a client may see, such as ``MODEL+DOMAIN+DOMAIN``.

        Reads the names of the domains from the store.

        Args:
            access: the permissions of the client.
        """
        return format_model_name(self.model, tuple(sorted(access.filter_visible(self._list_domains()))))

    def clear_cache(self) -> None:
        """Forget all cached retrieval settings, so that they are resolved again at the next request."""
        with self._cache_lock:
            self._settings.clear()

    def parse_scope(self, name: str, knn: Retrieval | None, access: Access) -> Scope:
        """Return the `Scope` of a request: the documents to retrieve from, and the overridden settings.

        Args:
            name: the model's name in the request, with domains: ``MODEL+DOMAIN+DOMAIN``.
            knn: the field `knn` of the request; None if the field is missing.
            access: the permissions of the client.

        Raises:
            ApiError: 404 if the model or a domain of its name does not exist, or the client may not see the
                domain; 400 if the field does not fit the model's name, has a wrong value, or exceeds a limit.
        """
        domains = self._parse_domains(name, access)
        if knn is None:
            return Scope(domains, only_selected=not access.sees_all_domains)
        if not domains and (knn.domains or knn.tags or knn.where):
            raise bad_request_error(
                f"`{name}` is the model alone and retrieves nothing: name domains as {self.model}+DOMAIN",
                next(f"knn.{part}" for part in ("domains", "tags", "where") if getattr(knn, part)),
            )
        for domain in knn.domains or ():
            if domain not in domains:
                raise bad_request_error(
                    f"the domain {domain!r} is not one of the domains of `{name}`", "knn.domains"
                )
        for param, limit in self._limits.items():
            value = getattr(knn, param)
            if value is not None and value > limit:
                raise bad_request_error(
                    f"knn.{param}: {value:,} is more than this server's limit of {limit:,} (`--max-{param}`)",
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
            raise bad_request_error(str(error), "knn") from error
        return scope

    def resolve_settings(self, scope: Hashable) -> KNNSettings:
        """Return the retrieval settings of a scope for the newest state of the store.

        They contain all components (sources of predictions, such as keys and n-grams), also components that
        are used for scoring only. The settings are cached: the same object is returned until the store
        changes. Domains of the scope that no longer exist are ignored; if none is left, λ is 0 and the model
        predicts alone.

        Args:
            scope: a `Scope`: the documents that a request retrieves from, and the settings that it overrides.
                Its type is Hashable because the engine does not know this class.
        """
        assert isinstance(scope, Scope)
        key = self._store.revision(), scope
        cached = self._settings.get(key)
        return self._cache_settings(key, self._resolve_settings(scope)) if cached is None else cached

    def build_options(self, scope: Hashable) -> RequestOptions:
        """Convert a scope to request options for another server with the same store, such as vLLM.

        Domains of the scope that no longer exist are left out; if none is left, the options switch retrieval
        off.

        Args:
            scope: a `Scope`: the documents that a request retrieves from, and the settings that it overrides.
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
        """Compute and cache what the engine needs for a scope, in the caller's thread.

        So the engine's thread, which all requests share, does not have to do it. This method resolves the
        scope's settings, finds the documents that meet its conditions, and counts their n-grams. Nothing is
        done if the settings are cached already. Errors of the store are ignored here; the engine gets the
        same errors and reports them.

        Args:
            scope: the documents that a request retrieves from, and the settings that it overrides.
        """
        key = self._store.revision(), scope
        if key in self._settings:
            return
        with suppress(KnnstoreError):
            settings = self._cache_settings(key, self._resolve_settings(scope))
            if settings.retrieves:
                self._store.record_count(settings.selection)
            if settings.ngrams is not None:
                self._store.ngrams(settings.selection)

    def _cache_settings(self, key: tuple[int, Scope], settings: KNNSettings) -> KNNSettings:
        """Cache the retrieval settings of a scope, and return the cached object.

        If another thread has cached settings for the same key meanwhile, these are returned instead. If more
        than `_MAX_CACHED` settings are cached, the oldest are dropped.

        Args:
            key: the store's revision (a number that changes with every change of the store), and the scope.
            settings: the settings to cache.
        """
        with self._cache_lock:
            cached = self._settings.setdefault(key, settings)
            if len(self._settings) > _MAX_CACHED:
                self._settings.popitem(last=False)
        return cached

    def _resolve_settings(self, scope: Scope) -> KNNSettings:
        """Return the retrieval settings of a scope for the newest state of the store, without the cache.

        Domains of the scope that no longer exist are ignored; if none is left, λ is 0.

        Args:
            scope: the documents that a request retrieves from, and the settings that it overrides.
        """
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
        """Return the names of all domains of the store, cached until the store changes.

        Any thread may call it.
        """
        revision = self._store.revision()
        if self._cached_domains[0] != revision:
            self._cached_domains = revision, frozenset(domain.name for domain in self._store.domains())
        return self._cached_domains[1]

    def _parse_domains(self, name: str, access: Access) -> tuple[str, ...]:
        """Return the domains in a model's name, sorted and unescaped; empty for the model alone.

        Raises:
            ApiError: 404 if the model or a domain does not exist, or the client may not see the domain.
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
            or not all(domain in existing and access.may_see_domain(domain) for domain in domains)
        ):
            raise ApiError(404, f"the model `{name}` does not exist", param="model", code="model_not_found")
        return domains
