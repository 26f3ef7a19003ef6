"""Commands that change, move, check or repair a store. They need no model."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import knnstore
from knnstore.checks import escape_unprintable
from knnstore.cli.inputs import ParamsOption, read_params
from knnstore.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    InDomainOption,
    JsonOption,
    LocationOption,
    WhereOption,
    YesOption,
    confirm,
)
from knnstore.cli.output import Bar, get_fields, print_message, print_result
from knnstore.cli.retrieval_options import explain_empty_selection, print_if_empty
from knnstore.errors import DocumentNotFoundError, KnnstoreError

if TYPE_CHECKING:
    from knnstore import KNNStore, Selection


def tag(
    document: Annotated[
        str | None, typer.Argument(metavar="DOCUMENT", help="The document's id.", show_default=False)
    ] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Add this tag; repeatable.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Remove this tag; repeatable.")
    ] = None,
    domain: InDomainOption = None,
    where: WhereOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Change the tags of one document, or of all documents whose metadata meet a condition.

    Examples:
      knnstore tag first.txt --add draft --remove final
      knnstore tag --where "year < 2020" --domain news --add old
    """
    if not add and not remove:
        raise typer.BadParameter("give --add TAG or --remove TAG")
    if (document is None) == (where is None):
        raise typer.BadParameter("give one of DOCUMENT and --where CONDITION")
    if document is None:
        selection = knnstore.Selection(None if domain is None else (domain,), where=where)
        with knnstore.open(home, "a") as store:
            changed = store.retag_selected(selection, add=add or (), remove=remove or ())
            print_if_empty(store, selection)
        print_result({"documents": changed}, f"tags of {changed:,} documents changed", as_json=as_json)
        return
    with knnstore.open(home, "a") as store:
        store.retag(document, domain=domain, add=add or (), remove=remove or ())
        document_after = store.document(document, domain=domain)
    sentence = (
        f"tags of {document_after.id} in {document_after.domain}: {', '.join(document_after.tags) or 'none'}"
    )
    print_result(get_fields(document_after), escape_unprintable(sentence), as_json=as_json)


def remove(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Documents to remove.")] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Domain of the documents; without IDs, tag and condition the whole domain is removed.",
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Remove documents with this tag.")] = None,
    where: WhereOption = None,
    document: Annotated[str | None, typer.Option(hidden=True)] = None,
    within: Annotated[str | None, typer.Option("--in", hidden=True)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    yes: YesOption = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Erase the bytes too, as `knnstore erase` does.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove documents: by id, by tag, by a condition on metadata, or a whole domain.

    When the command ends, no process retrieves the removed documents any more. Their tokens and keys stay
    readable in the files of the engine and the database until `knnstore erase`. Removing a whole domain asks
    for confirmation at a terminal; without a terminal it needs --yes.

    Examples:
      knnstore remove second.txt
      knnstore remove n-17 n-18 --domain news --dry-run
      knnstore remove --tag draft --dry-run --json
      knnstore remove --where "year < 2020" --domain news
      knnstore remove --domain news --yes
    """
    ids, domain = [*(ids or ()), *([document] if document else ())], within or domain
    by_kind = tag is not None or where is not None
    if (ids and by_kind) or not (ids or by_kind or domain):
        raise typer.BadParameter("give IDs, --tag TAG, --where CONDITION or --domain NAME")
    with knnstore.open(home, "r" if dry_run else "a") as store:
        # 1) Select the documents, and describe them.
        selection = _select_for_removal(store, ids, domain, tag, where)
        removed = store.select(selection) if ids or by_kind else []
        if ids or by_kind:
            tokens = sum(match.tokens for match in removed)
            result = {"documents": len(removed), "tokens": tokens, "ids": [match.id for match in removed]}
            subject = (
                f"{removed[0].id} of {removed[0].domain}"
                if len(removed) == 1
                else f"{len(removed):,} documents"
            )
            sentence = f"{subject}: {tokens:,} tokens"
            if document and len(removed) == 1:
                result = get_fields(removed[0])
        else:
            result = asdict(next(match for match in store.domains() if match.name == domain))
            sentence = f"{domain}: {result['documents']:,} documents, {result['tokens']:,} tokens"
        # 2) With --dry-run print them and stop; otherwise remove them, and erase their bytes if requested.
        if dry_run:
            lines = [f"{match.id} of {match.domain}" for match in removed if len(removed) > 1]
            text = "\n".join(map(escape_unprintable, [*lines, f"would remove {sentence}"]))
            print_result({"would_remove": result}, text, as_json=as_json)
            return
        if ids or by_kind:
            store.remove_selected(selection)
        else:
            confirm(f"all {result['documents']:,} documents of {domain} will be removed", yes)
            store.remove_domain(str(domain))
        sentence = f"removed {sentence}"
        try:
            erased = store.erase() if erase else None
        except KnnstoreError:
            print_message(escape_unprintable(f"{sentence}; `knnstore erase` also erases the bytes"))
            raise
    for line in erased.unreached if erased else ():
        print_message(escape_unprintable(f"not reached: {line}"))
    output = {"removed": result} if erased is None else {"removed": result, "erased": asdict(erased)}
    print_result(output, escape_unprintable(sentence) + (", and erased" if erased else ""), as_json=as_json)


def _select_for_removal(
    store: "KNNStore", ids: Sequence[str], domain: str | None, tag: str | None, where: str | None
) -> "Selection":
    """Return the selection of documents to remove, from the options of the command.

    If no document meets the condition `where`, a note is printed.

    Args:
        store: the store.
        ids: ids of documents; if there are any, `tag` and `where` are ignored.
        domain: name of the domain; None for all domains.
        tag: tag of the documents; None for any.
        where: condition on the metadata; None for any.

    Raises:
        DocumentNotFoundError, DomainNotFoundError: if an id, a tag or a domain does not exist.
    """
    if ids:
        documents = [store.document(id, domain=domain) for id in ids]
        return knnstore.Selection(tuple({document.domain for document in documents}), documents=tuple(ids))
    domains, tags = (None if document is None else (document,) for document in (domain, tag))
    selection = knnstore.Selection(domains, tags=tags, where=where)
    if where is not None:
        print_if_empty(store, selection)  # no error: a condition on dates may often meet no document
    elif not store.lengths(selection):
        raise DocumentNotFoundError(explain_empty_selection(store, selection))
    return selection


def erase(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Rewrite all files that still hold text or keys of removed documents.

    `remove` hides documents from every reader at once, but leaves their bytes: in the files of the engine,
    where the ids of the records reveal the text, and in free pages and the log of the database. When this
    command ends, no file of the store holds them. It names the places that it cannot reach. Erase backups
    yourself.

    Examples:
      knnstore erase
    """
    with knnstore.open(home, "a") as store, Bar() as bar:
        erased = store.erase(progress=bar)
    for line in erased.unreached:
        print_message(escape_unprintable(f"not reached: {line}"))
    sentence = f"erased the removed documents in {erased.seconds:.1f} s; {erased.records:,} records remain"
    print_result(asdict(erased), sentence, as_json=as_json)


def move(
    to: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="NAME", help="The engine to move to; `knnstore adapters` lists them."
        ),
    ] = None,
    location: LocationOption = None,
    params: ParamsOption = None,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Drop the unfinished copy of a move that was interrupted.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Move the keys to another engine.

    The keys are copied without the model, and both sides are compared. Then the store switches to the new
    engine, and the old keys are removed. If the command is interrupted before the switch, the store is
    unchanged: run the same command to continue, or --abandon to delete the copy. Prints the recall of the new
    engine: the share of the true nearest neighbors of some stored keys that it finds.

    Examples:
      knnstore move --store faiss --location keys-2 --param index=exact
      knnstore move --abandon
    """
    if (to is None) != abandon:
        raise typer.BadParameter("give one of --store NAME and --abandon")
    settings = read_params(params)
    with knnstore.open(home, "a", copied=True) as store, Bar() as bar:
        if to is None:
            dropped = store.abandon_move()
            sentence = "there is no unfinished move"
            if dropped:
                sentence = f"dropped the copy for {dropped.adapter} at {dropped.location}"
            print_result({"abandoned": dropped and asdict(dropped)}, sentence, as_json=as_json)
            return
        moved = store.move(to, location or f"keys-{to}", params=settings, progress=bar)
    result = {"store": moved.after.adapter, "location": moved.after.location, **asdict(moved)}
    sentence = f"moved {moved.records:,} records to {moved.after.adapter} at {moved.after.location}"
    if moved.recall is not None:
        sentence += f"; it finds {moved.recall:.2%} of the {moved.neighbors:,} nearest neighbors"
    if moved.codes is not None:
        print_message(
            f"keys of large domains are compressed ({moved.codes}): the precision that this loses "
            "cannot be recovered"
        )
    if moved.left:
        print_message(escape_unprintable(f"the old keys are left at {moved.before.location}: {moved.left}"))
    print_result(result, sentence, as_json=as_json)


def optimize(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Build indexes and reclaim the space of removed records.

    `add` also does this. The command is useful after many documents were removed.

    Examples:
      knnstore optimize
    """
    with knnstore.open(home, "a") as store:
        started = time.perf_counter()
        store.optimize()
        seconds, records = time.perf_counter() - started, store.datastore.count()
    sentence = f"optimized {records:,} records in {seconds:.1f} s"
    print_result({"records": records, "seconds": seconds}, sentence, as_json=as_json)


def verify(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Read and check everything that is stored.

    Prints one line for each problem. If there is a problem, the exit status is 1. Damaged keys are named with
    their documents: remove these documents and add them again. While another process writes, its uncommitted
    documents are reported too. Names, tags, metadata and settings have no checksum, so a change in them is
    not found.

    Examples:
      knnstore verify
    """
    with knnstore.open(home) as store:
        records, problems = store.datastore.count(), store.verify()
    _print_check_result(records, problems, f"problems found in {home}", as_json=as_json)


def repair(
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Let this folder write the keys, after the store was moved or restored. The folder that "
            "wrote the keys before can no longer write.",
        ),
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Clean up after an interrupted writer, and verify the store.

    Documents that were added or removed only partly are removed; every command that writes does this first.
    Records without a document are removed too. Damaged indexes and other data derived from the keys are built
    again.

    Examples:
      knnstore repair
      knnstore repair --take-over
    """
    with knnstore.open(home, "a", copied=take_over) as store:
        problems, records = store.repair(take_over=take_over), store.datastore.count()
    _print_check_result(records, problems, f"problems cannot be repaired in {home}", as_json=as_json)


def _print_check_result(records: int, problems: list[str], outcome: str, *, as_json: bool) -> None:
    """Print the result of a check of the store: the number of records, and the problems found.

    Args:
        records: number of records.
        problems: one line for each problem; empty if there are none.
        outcome: text that follows the number of problems in the error message.
        as_json: True to print JSON.

    Raises:
        KnnstoreError: there are problems. Its message is the number of problems and `outcome`.
    """
    sentence = "\n".join(problems) or f"sound: {records:,} records"
    print_result({"records": records, "problems": problems}, sentence, as_json=as_json)
    if problems:
        raise KnnstoreError(f"{len(problems)} {outcome}")


def upgrade(home: HomeOption = DEFAULT_HOME) -> None:
    """Upgrade the database to the schema of this version.

    Examples:
      knnstore db upgrade
    """
    from knnstore.catalog import upgrade_catalog
    from knnstore.store import Home

    upgrade_catalog(Home.open(home, writing=True).catalog_url)
    print_message("the catalog's schema is up to date")
