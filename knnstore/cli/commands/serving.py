"""Commands that serve a store and manage the API keys of its server."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from knnstore.checks import printable
from knnstore.cli.models import StoreRuntime, place_of_model, quiet_transformers
from knnstore.cli.options import DEFAULT_HOME, HomeOption, JsonOption
from knnstore.cli.output import Lines, note, print_result, table
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore.catalog import AccessKey, Catalog

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_COLUMNS = ["id", "name", "rights", "domains", "created", "expires", "requests", "tokens"]


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
            metavar="ADDRESS", help="Where to listen. Any address but this machine's own needs keys."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="0 takes any that is free.")
    ] = 8000,
    require_keys: Annotated[
        bool, typer.Option("--require-keys", help="Ask for keys on this machine's own addresses too.")
    ] = False,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Only read the store, beside whoever writes to it."),
    ] = False,
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Texts that are written at once.")] = 16,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that may wait; more are told to come back.")
    ] = 64,
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Of a request.")] = 4 << 20,
    max_k: Annotated[
        int,
        typer.Option(
            min=1,
            max=65_536,
            metavar="N",
            help="Neighbors of each token that a request may ask for.",
        ),
    ] = 16_384,
    max_probes: Annotated[
        int,
        typer.Option(
            min=1,
            max=65_536,
            metavar="N",
            help="Cells of each token that a request may ask for.",
        ),
    ] = 128,
    max_answer: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Size of an answer that is not a stream.")
    ] = 32 << 20,
    drain: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="What runs may take to end after SIGTERM.")
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

    Examples:
      knnstore serve --port 8000
      knnstore serve --host 0.0.0.0 --log-format json
    """
    from knnstore.store import Home, KNNStore

    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"serving needs {', '.join(lacking)}: install it with pip install 'knnstore[server]'"
        )
    Home.open(runtime.home)
    mode: Literal["r", "a"] = "r" if read_only else "a"
    with KNNStore.open(runtime.home, mode) as store:  # before torch is loaded, to report errors early
        name = model or Path(store.identity.model).name
        place = place_of_model(store, runtime.model_at)
    _log()
    quiet_transformers()
    from knnstore import KNNLMForCausalLM, KNNSettings, load
    from knnstore.server import Config, Limits
    from knnstore.server import serve as run

    def opened() -> KNNLMForCausalLM:
        return load(
            runtime.home,
            mode,
            knn=KNNSettings(lam=0.0),
            model=place,
            device=runtime.device,
            dtype=runtime.dtype,
        )

    config = Config(
        home=runtime.home,
        name=name,
        host=host,
        port=port,
        keys_required=require_keys,
        public_metrics=public_metrics,
        drain_seconds=drain,
        limits=Limits(
            rows=max_batch,
            waiting=max_queue,
            body_bytes=max_body,
            k=max_k,
            probes=max_probes,
            answer_bytes=max_answer,
        ),
    )
    run(config, opened)


def key_add(
    rights: Annotated[
        list[str],
        typer.Option("--right", metavar="RIGHT", help="predict, read, write or admin; repeatable."),
    ],
    domains: Annotated[
        list[str] | None,
        typer.Option("--domain", metavar="NAME", help="The only domain that there is for it; repeatable."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="What to know it by.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="30m, 12h, 90d or 4w from now; default is never.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests at once; default is any number.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens a minute, read and written; default is any number."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Make an API key for the servers of this store, and print it. It cannot be shown again.

    The right predict allows to generate and score text, read to see documents and the sources of predictions,
    write to add and remove documents, admin all of these and the metrics. --domain hides all other domains
    from the key. Running servers accept the key at once. A request beyond --requests or --tokens is refused,
    and told when to try again; each server counts on its own.

    Examples:
      knnstore key add --right predict --domain letters --expires 90d
      knnstore key add --right predict --requests 4 --tokens 60000
    """
    from knnstore.catalog import AccessKeys, Right

    try:
        given = [Right(right) for right in rights]
    except ValueError as error:
        raise typer.BadParameter(f"a right is one of {', '.join(Right)}", param_hint="'--right'") from error
    ends = None if expires is None else datetime.now(UTC) + _duration(expires)
    with _catalog(home) as catalog:
        made, secret = AccessKeys(catalog).add(
            given, name=name, domains=domains, expires_at=ends, requests=requests, tokens=tokens
        )
        missing = set(domains or ()) - {domain.name for domain in catalog.domains()}
    if missing:
        note(printable(f"warning: there is no domain {', '.join(sorted(missing))} yet"))
    note("the key is printed only now; whoever has it has its rights")
    print_result({**_row(made), "key": secret}, secret, as_json=as_json)


def key_list(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the API keys of this store, without their secrets.

    Examples:
      knnstore key list --json
    """
    from knnstore.catalog import AccessKeys

    with _catalog(home) as catalog:
        rows = [_row(key) for key in AccessKeys(catalog).all()]
    print_result(rows, table(rows, _COLUMNS), as_json=as_json)


def key_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="As `knnstore key list` shows it.")],
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Revoke an API key. Servers refuse it at once.

    Examples:
      knnstore key revoke 0a1b2c3d4e5f
    """
    from knnstore.catalog import AccessKeys

    with _catalog(home) as catalog:
        gone = AccessKeys(catalog).revoke(id)
    print_result(
        {"revoked": _row(gone)}, printable(f"revoked {gone.id} {gone.name}".strip()), as_json=as_json
    )


@contextmanager
def _catalog(home: Path) -> Iterator["Catalog"]:
    """Open the catalog of a store while the context is open. Other processes may use the store meanwhile."""
    from knnstore.catalog import Catalog
    from knnstore.store import Home

    catalog = Catalog.open(Home.open(home, writing=True).catalog_url)
    try:
        yield catalog
    finally:
        catalog.close()


def _duration(given: str) -> timedelta:
    """Parse a duration such as 30m, 12h, 90d or 4w. Raises typer.BadParameter for any other text."""
    found = re.fullmatch(r"(\d{1,6})([mhdw])", given)
    if found is None:
        raise typer.BadParameter(
            f"{given!r} is not a time such as 30m, 12h, 90d or 4w", param_hint="'--expires'"
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _row(key: "AccessKey") -> dict[str, Any]:
    """Return the printed fields of an API key."""
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


def _log() -> None:
    """Print the log records of knnstore, from INFO, and of uvicorn, from WARNING, as the server's log."""
    for name in ("knnstore", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [Lines(timed=True)]
        logger.setLevel(logging.INFO if name == "knnstore" else logging.WARNING)
        logger.propagate = False
