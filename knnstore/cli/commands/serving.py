"""Commands that serve a store and manage the API keys of its server."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.models import StoreRuntime, resolve_model_location, silence_transformers
from knnstore.cli.options import DEFAULT_HOME, HomeOption, JsonOption
from knnstore.cli.output import MessageHandler, format_table, print_message, print_result
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.catalog import AccessKey, Catalog
    from knnstore.lm import Kind

_REQUIRED_PACKAGES = ("fastapi", "httpx", "uvicorn", "prometheus_client")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_KEY_COLUMNS = ["id", "name", "rights", "domains", "created", "expires", "requests", "tokens"]


def serve(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="the last part of its path", help="The model's name for clients."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen at. Other addresses than this machine's loopback need API keys.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen at; 0 takes any free port.")
    ] = 8000,
    require_keys: Annotated[
        bool, typer.Option("--require-keys", help="Require API keys also at loopback addresses.")
    ] = False,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Only read the store, so that another process can write to it."),
    ] = False,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Base URL of a vLLM server with this store. It generates and scores all texts; this server "
            "checks keys and domains, changes documents and explains.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="16, with --upstream 256",
            help="Largest number of texts that are generated at once.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Largest number of waiting requests; further requests get status 429."
        ),
    ] = 64,
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Largest size of a request.")] = 4
    << 20,
    max_k: Annotated[
        int,
        typer.Option(
            min=1,
            max=65_536,
            metavar="N",
            help="Largest number of neighbors of each token that a request may ask for.",
        ),
    ] = 16_384,
    max_probes: Annotated[
        int,
        typer.Option(
            min=1,
            max=65_536,
            metavar="N",
            help="Largest number of cells of each token that a request may ask for.",
        ),
    ] = 128,
    max_answer: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Largest size of an answer that is not a stream.")
    ] = 32 << 20,
    drain: Annotated[
        int,
        typer.Option(
            min=1, metavar="SECONDS", help="Time that running requests may take to end after SIGTERM."
        ),
    ] = 30,
    public_metrics: Annotated[
        bool, typer.Option("--public-metrics", help="Show /metrics without a key.")
    ] = False,
    runtime: StoreRuntime,
) -> None:
    """Serve the store over HTTP with OpenAI's protocol.

    The model's name in a request selects the domains to retrieve from: MODEL is the model alone, MODEL+DOMAIN
    is the model with this domain, MODEL+DOMAIN+DOMAIN with both. After SIGTERM the server finishes the
    running requests, then exits.

    With --upstream the texts come from a vLLM server that was started with KNNSTORE_HOME set to this store.
    If it has an API key, set KNNSTORE_UPSTREAM_KEY, or KNNSTORE_UPSTREAM_KEY_FILE to a file with the key.
    Clients must reach vLLM only through this server, because vLLM itself lets them name every domain.

    Examples:
      knnstore serve --port 8000
      knnstore serve --host 0.0.0.0 --log-format json
      knnstore serve --upstream http://127.0.0.1:8001
    """
    from knnstore.store import Home, KNNStore

    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs {', '.join(missing)}: install it with pip install 'knnstore[server]'"
        )
    # 1) Check the store and the options before torch is loaded, to report errors early.
    upstream_url = None if upstream is None else _normalize_upstream_url(upstream)
    Home.open(runtime.home)
    mode: Literal["r", "a"] = "r" if read_only else "a"
    with KNNStore.open(runtime.home, mode) as store:
        name, store_id = model or Path(store.identity.model).name, store.id
        if upstream is not None and store.identity.is_paired:
            raise ConfigError(
                "--upstream needs a store of a causal model, and this store is for an encoder-decoder model"
            )
        kind: Kind | None = "causal" if store.is_keyless or upstream is not None else None
        model_location = resolve_model_location(store, runtime.model_at)
    # 2) Prepare loading the model, and check the vLLM server if there is one.
    _configure_logging()
    silence_transformers()
    from knnstore import KNNSettings, load
    from knnstore.lm import KNNLM
    from knnstore.secret_files import read_secret
    from knnstore.server import Config, Limits, UpstreamAddress, check_upstream
    from knnstore.server import serve as run_server

    def load_model() -> KNNLM:
        """Load the model with its store; the server calls this in a thread, while it listens already."""
        return load(
            runtime.home,
            mode,
            knn=KNNSettings(lam=0.0),
            model=model_location,
            device=runtime.device,
            dtype=runtime.dtype,
            kind=kind,
        )

    upstream_address = None
    if upstream_url is not None:
        upstream_address = UpstreamAddress(upstream_url, read_secret("KNNSTORE_UPSTREAM_KEY"))
        check_upstream(upstream_address, store_id)  # now, because the model takes time to load
    # 3) Run the server, which loads the model.
    config = Config(
        home=runtime.home,
        name=name,
        host=host,
        port=port,
        keys_required=require_keys,
        public_metrics=public_metrics,
        drain_seconds=drain,
        upstream=upstream_address,
        limits=Limits(
            rows=max_batch or 16,
            upstream_rows=max_batch or 256,
            waiting=max_queue,
            body_bytes=max_body,
            k=max_k,
            probes=max_probes,
            answer_bytes=max_answer,
        ),
    )
    run_server(config, load_model)


def key_add(
    rights: Annotated[
        list[str],
        typer.Option("--right", metavar="RIGHT", help="predict, read, write or admin; repeatable."),
    ],
    domains: Annotated[
        list[str] | None,
        typer.Option(
            "--domain",
            metavar="NAME",
            help="Domain that the key may see; repeatable. Without this option the key sees all domains.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="Name of the key, for your own use.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="30m, 12h, 90d or 4w from now; default is never.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Largest number of requests at once; default is no limit."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens a minute, of prompts and generated text; default is no limit."
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Make an API key for the servers of this store, and print it. It cannot be shown again.

    The right "predict" is needed to generate and score text, "read" to see documents and the sources of
    predictions, and "write" to add and remove documents. The right "admin" includes these three, and is
    needed to see the metrics. --domain hides all other domains from the key.

    Running servers accept the key at once. A request beyond --requests or --tokens is refused; the answer
    says when to try again. Each server counts on its own.

    Examples:
      knnstore key add --right predict --domain letters --expires 90d
      knnstore key add --right predict --requests 4 --tokens 60000
    """
    from knnstore.catalog import AccessKeys, Right

    try:
        parsed_rights = [Right(right) for right in rights]
    except ValueError as error:
        raise typer.BadParameter(
            f"a right must be one of {', '.join(Right)}", param_hint="'--right'"
        ) from error
    expires_at = None if expires is None else datetime.now(UTC) + _parse_duration(expires)
    with _open_catalog(home) as catalog:
        key, secret = AccessKeys(catalog).add(
            parsed_rights, name=name, domains=domains, expires_at=expires_at, requests=requests, tokens=tokens
        )
        missing = set(domains or ()) - {domain.name for domain in catalog.domains()}
    if missing:
        print_message(escape_unprintable(f"warning: there is no domain {', '.join(sorted(missing))} yet"))
    print_message("the key is printed only now, so keep it safe: anyone who has it has its rights")
    print_result({**_key_fields(key), "key": secret}, secret, as_json=as_json)


def key_list(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the API keys of this store, without their secrets.

    Examples:
      knnstore key list --json
    """
    from knnstore.catalog import AccessKeys

    with _open_catalog(home) as catalog:
        rows = [_key_fields(key) for key in AccessKeys(catalog).list_keys()]
    print_result(rows, format_table(rows, _KEY_COLUMNS), as_json=as_json)


def key_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `knnstore key list` shows it.")],
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Revoke an API key. Servers refuse it at once.

    Examples:
      knnstore key revoke 0a1b2c3d4e5f
    """
    from knnstore.catalog import AccessKeys

    with _open_catalog(home) as catalog:
        revoked = AccessKeys(catalog).revoke(id)
    print_result(
        {"revoked": _key_fields(revoked)},
        escape_unprintable(f"revoked {revoked.id} {revoked.name}".strip()),
        as_json=as_json,
    )


@contextmanager
def _open_catalog(home: Path) -> Iterator["Catalog"]:
    """Open the catalog of a store while the context is open. Other processes may use the store meanwhile."""
    from knnstore.catalog import Catalog
    from knnstore.store import Home

    catalog = Catalog.open(Home.open(home, writing=True).catalog_url)
    try:
        yield catalog
    finally:
        catalog.close()


def _normalize_upstream_url(url: str) -> str:
    """Return the base URL of a vLLM server, without ``/v1`` at the end.

    Raises typer.BadParameter if the text is no such URL, or has a password in it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise typer.BadParameter("expected a URL such as http://127.0.0.1:8001", param_hint="'--upstream'")
    if parts.username or parts.password:
        raise typer.BadParameter(
            "put the key into KNNSTORE_UPSTREAM_KEY, not into the URL", param_hint="'--upstream'"
        )
    return url.rstrip("/").removesuffix("/v1")


def _parse_duration(text: str) -> timedelta:
    """Parse a duration such as 30m, 12h, 90d or 4w.

    Raises:
        typer.BadParameter: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a time such as 30m, 12h, 90d or 4w", param_hint="'--expires'"
        )
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _key_fields(key: "AccessKey") -> dict[str, Any]:
    """Return the fields of an API key to print, as a dict; the key's secret is not among them."""
    return {
        "id": key.id,
        "name": key.name,
        "rights": sorted(key.rights),
        "domains": "all" if key.domains is None else list(key.domains),
        "created": key.created_at[:19],
        "expires": "expired" if key.has_expired else (key.expires_at or "never")[:19],
        "requests": key.requests or "any",
        "tokens": key.tokens or "any",
    }


def _configure_logging() -> None:
    """Print log records of knnstore (from level INFO) and of uvicorn (from WARNING) on stderr."""
    for name in ("knnstore", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [MessageHandler(timed=True)]
        logger.setLevel(logging.INFO if name == "knnstore" else logging.WARNING)
        logger.propagate = False
