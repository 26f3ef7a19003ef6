"""Commands that list domains, documents, properties of the store, and engines. They need no model."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import knnstore
from knnstore.cli.models import load_tokenizer, resolve_model_location
from knnstore.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    InDomainOption,
    JsonOption,
    ModelAtOption,
    WhereOption,
)
from knnstore.cli.output import Verbatim, format_pairs, format_table, get_fields, print_message, print_result
from knnstore.cli.retrieval_options import print_if_empty

if TYPE_CHECKING:
    from knnstore.datastore import Capabilities


def domains(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the domains with their numbers of documents, tokens and records.

    Examples:
      knnstore domains
      knnstore domains --json
    """
    with knnstore.open(home) as store:
        rows = [asdict(domain) for domain in store.domains()]
    printed_rows = [{"domain": row["name"], **row} for row in rows]
    print_result(
        rows, format_table(printed_rows, ["domain", "documents", "tokens", "records"]), as_json=as_json
    )


def documents(
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="Only documents of this domain.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only documents with this tag.")] = None,
    where: WhereOption = None,
    count: Annotated[
        bool, typer.Option("--count", help="Only print the number of documents and tokens.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """List the documents in the order in which they were added.

    Examples:
      knnstore documents
      knnstore documents --domain letters --tag draft --json
      knnstore documents --where "year >= 2020 and author = 'Ida'" --count
    """
    domains, tags = (None if value is None else (value,) for value in (domain, tag))
    selection = knnstore.Selection(domains, tags, where=where)
    with knnstore.open(home) as store:
        print_if_empty(store, selection)
        if count:
            lengths = store.lengths(selection).values()
            counts = {"documents": len(lengths), "tokens": sum(lengths)}
            print_result(counts, f"{len(lengths):,} documents, {sum(lengths):,} tokens", as_json=as_json)
            return
        rows = [get_fields(document) for document in store.select(selection)]
    printed_rows = [{**row, "added": row["added_at"][:16].replace("T", " ")} for row in rows]
    print_result(
        rows, format_table(printed_rows, ["id", "domain", "tokens", "tags", "added"]), as_json=as_json
    )


def show(
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="The document's id.")],
    domain: InDomainOption = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text", help="Also show the text, decoded from its tokens; loads the model's tokenizer."
        ),
    ] = False,
    model_at: ModelAtOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Show a document: domain, tokens, tags, metadata.

    Examples:
      knnstore show first.txt --text
      knnstore show n-17 --domain news --json
    """
    with knnstore.open(home) as store:
        fields = get_fields(store.document(document, domain=domain))
        if text:
            tokens = store.tokens(document, domain=domain).tolist()
            if store.identity.is_paired:
                tokens.pop()  # the EOS token
            tokenizer = load_tokenizer(resolve_model_location(store, model_at))
            from knnstore.lm import decode_tokens

            fields["text"] = decode_tokens(tokenizer, tokens)
    printed_fields = format_pairs({name: value for name, value in fields.items() if name != "text"})
    if text:
        printed_fields += "\n\n"
    print_result(fields, [printed_fields, Verbatim(fields.get("text", ""))], as_json=as_json)


def info(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Show the properties of the store: its model, keys, engine, and numbers of documents and records.

    Examples:
      knnstore info
      knnstore --home other.knn info --json
    """
    with knnstore.open(home) as store:
        store_info = store.info()
    print_result(store_info, format_pairs(store_info), as_json=as_json)


def adapters(as_json: JsonOption = False) -> None:
    """List the vector engines that are installed.

    Shows for each engine the version of its library, the version of its adapter's package, and what it can do
    with default parameters. For an engine that cannot be used, shows the package to install.

    Examples:
      knnstore adapters
      knnstore adapters --json
    """
    from knnstore.datastore import registry

    descriptions = registry.describe_adapters()
    rows = [
        {
            "name": adapter.name,
            "engine": [f"{name} {version or '(missing)'}" for name, version in adapter.libraries.items()],
            "adapter": f"{adapter.distribution} {adapter.version}",
            "status": adapter.problem or ", ".join(["ready", *_describe_capabilities(adapter.capabilities)]),
        }
        for adapter in descriptions
    ]
    shown = format_table(rows, ["name", "engine", "adapter", "status"])
    print_result([asdict(adapter) for adapter in descriptions], shown, as_json=as_json)
    for adapter in descriptions:
        if adapter.note and not as_json:
            print_message(f"{adapter.name} cannot be used in a folder: {adapter.note}")


def _describe_capabilities(capabilities: "Capabilities | None") -> list[str]:
    """Describe a vector engine in four terms, for example "exact" or "approximate" for its search.

    Args:
        capabilities: the capabilities of the engine; None if the engine cannot be used.

    Returns:
        The terms; an empty list for None.
    """
    if capabilities is None:
        return []
    return [
        "exact" if capabilities.exact_search else "approximate",
        "float32 keys" if capabilities.exact_keys else "float16 keys",
        "durable" if capabilities.persistent else "lost when the process ends",
        "many writers" if capabilities.shared_writers else "one writer",
    ]
