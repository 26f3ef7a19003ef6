"""Commands that say what there is; none needs the model."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import knnstore
from knnstore.cli.models import load_tokenizer
from knnstore.cli.options import DEFAULT_HOME, HomeOption, InDomainOption, JsonOption
from knnstore.cli.output import note, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from knnstore.datastore import Capabilities


def domains(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the domains with their documents, tokens and records.

    A domain that was pruned has fewer records than tokens.

    Examples:
      knnstore domains
      knnstore domains --json
    """
    with knnstore.open(home) as store:
        rows = [asdict(domain) for domain in store.domains()]
    if as_json:
        print_json(rows)
    else:
        columns = ["domain", "documents", "tokens", "records"]
        print_table([{"domain": row["name"], **row} for row in rows], columns)


def documents(
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="Only those of this domain.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only those with this tag.")] = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """List the documents in the order in which they were added.

    Examples:
      knnstore documents
      knnstore documents --domain letters --tag draft --json
    """
    with knnstore.open(home) as store:
        if domain is not None:
            store.record_count(knnstore.Selection(domains=(domain,)))  # an unknown domain is an error
        rows = [asdict(document) for document in store.documents(domain=domain, tag=tag)]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ["id", "domain", "tokens", "tags", "added_at"])


def show(
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="The document's id.")],
    domain: InDomainOption = None,
    text: Annotated[
        bool, typer.Option("--text", help="The text as well, from its tokens; loads the model's tokenizer.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Show a document: domain, tokens, tags, metadata.

    Examples:
      knnstore show letters/first.txt --text
      knnstore show n-17 --domain news --json
    """
    with knnstore.open(home) as store:
        found = asdict(store.document(document, domain=domain))
        if text:
            tokens = store.tokens(document, domain=domain).tolist()
            found["text"] = load_tokenizer(store.identity.model).decode(tokens)
    if as_json:
        print_json(found)
        return
    print_pairs({name: value for name, value in found.items() if name != "text"})
    if text:
        typer.echo(f"\n{found['text']}")


def info(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Say what the store is made for and how full it is.

    Examples:
      knnstore info
      knnstore --home other.knn info --json
    """
    with knnstore.open(home) as store:
        found = store.info()
    if as_json:
        print_json(found)
    else:
        print_pairs(found)


def adapters(as_json: JsonOption = False) -> None:
    """List the vector engines that are installed.

    Says of each the version of its library and of the package that brings the adapter, what it can do
    with its default parameters, and, where it cannot be used, what to install.

    Examples:
      knnstore adapters
      knnstore adapters --json
    """
    from knnstore.datastore import registry

    found = registry.describe()
    if as_json:
        print_json([asdict(adapter) for adapter in found])
        return
    rows = [
        {
            "name": adapter.name,
            "engine": [f"{name} {version or '(missing)'}" for name, version in adapter.libraries.items()],
            "adapter": f"{adapter.distribution} {adapter.version}",
            "status": adapter.problem or ", ".join(["ready", *_abilities(adapter.capabilities)]),
        }
        for adapter in found
    ]
    print_table(rows, ["name", "engine", "adapter", "status"])
    for adapter in found:
        if adapter.note:
            note(f"{adapter.name} cannot be used in a folder: {adapter.note}")


def _abilities(capabilities: "Capabilities | None") -> list[str]:
    if capabilities is None:
        return []
    return [
        "exact" if capabilities.exact_search else "approximate",
        "float32 keys" if capabilities.exact_keys else "float16 keys",
        "durable" if capabilities.persistent else "gone with the process",
        "many writers" if capabilities.shared_writers else "one writer",
    ]
