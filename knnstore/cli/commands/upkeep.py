"""Commands that change, move, check or repair a store. They need no model."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import knnstore
from knnstore.checks import printable
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
from knnstore.cli.output import Bar, note, print_result, row_of
from knnstore.cli.retrieval_options import say_if_nothing, why_nothing
from knnstore.errors import DocumentNotFoundError, KnnstoreError

if TYPE_CHECKING:
    from knnstore import KNNStore, Selection


def tag(
    document: Annotated[
        str | None, typer.Argument(metavar="DOCUMENT", help="The document's id.", show_default=False)
    ] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Add this tag; repeatable.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Take this tag away; repeatable.")
    ] = None,
    domain: InDomainOption = None,
    where: WhereOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Change the tags of a document, or of all whose metadata meet a condition.

    Examples:
      knnstore tag first.txt --add draft --remove final
      knnstore tag --where "year < 2020" --domain news --add old
    """
    if not add and not remove:
        raise typer.BadParameter("give --add TAG or --remove TAG")
    if (document is None) == (where is None):
        raise typer.BadParameter("give one of DOCUMENT and --where CONDITION")
    if document is None:
        chosen = knnstore.Selection(None if domain is None else (domain,), where=where)
        with knnstore.open(home, "a") as store:
            changed = store.retag_selected(chosen, add=add or (), remove=remove or ())
            say_if_nothing(store, chosen)
        print_result({"documents": changed}, f"tags of {changed:,} documents changed", as_json=as_json)
        return
    with knnstore.open(home, "a") as store:
        store.retag(document, domain=domain, add=add or (), remove=remove or ())
        found = store.document(document, domain=domain)
    sentence = f"tags of {found.id} in {found.domain}: {', '.join(found.tags) or 'none'}"
    print_result(row_of(found), printable(sentence), as_json=as_json)


def remove(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Documents to remove.")] = None,
    domain: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where they are; without IDs and tag the whole domain is removed."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Remove documents with this tag.")] = None,
    where: WhereOption = None,
    document: Annotated[str | None, typer.Option(hidden=True)] = None,
    within: Annotated[str | None, typer.Option("--in", hidden=True)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
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
        chosen = _chosen(store, ids, domain, tag, where)
        gone = store.select(chosen) if ids or by_kind else []
        if ids or by_kind:
            tokens = sum(one.tokens for one in gone)
            result = {"documents": len(gone), "tokens": tokens, "ids": [one.id for one in gone]}
            which = f"{gone[0].id} of {gone[0].domain}" if len(gone) == 1 else f"{len(gone):,} documents"
            sentence = f"{which}: {tokens:,} tokens"
            if document and len(gone) == 1:
                result = row_of(gone[0])
        else:
            result = asdict(next(one for one in store.domains() if one.name == domain))
            sentence = f"{domain}: {result['documents']:,} documents, {result['tokens']:,} tokens"
        if dry_run:
            lines = [f"{one.id} of {one.domain}" for one in gone if len(gone) > 1]
            text = "\n".join(map(printable, [*lines, f"would remove {sentence}"]))
            print_result({"would_remove": result}, text, as_json=as_json)
            return
        if ids or by_kind:
            store.remove_selected(chosen)
        else:
            confirm(f"all of {domain} goes, {result['documents']:,} documents", yes)
            store.remove_domain(str(domain))
        sentence = f"removed {sentence}"
        try:
            erased = store.erase() if erase else None
        except KnnstoreError:
            note(printable(f"{sentence}; not erased, `knnstore erase` does that"))
            raise
    for line in erased.unreached if erased else ():
        note(printable(f"not reached: {line}"))
    found = {"removed": result} if erased is None else {"removed": result, "erased": asdict(erased)}
    print_result(found, printable(sentence) + (", and erased" if erased else ""), as_json=as_json)


def _chosen(
    store: "KNNStore", ids: Sequence[str], domain: str | None, tag: str | None, where: str | None
) -> "Selection":
    """Return the selection of documents to remove.

    A condition that no document meets prints a note.

    Raises:
        DocumentNotFoundError, DomainNotFoundError: if an id, a tag or a domain does not exist.
    """
    if ids:
        found = [store.document(id, domain=domain) for id in ids]
        return knnstore.Selection(tuple({one.domain for one in found}), documents=tuple(ids))
    domains, tags = (None if one is None else (one,) for one in (domain, tag))
    chosen = knnstore.Selection(domains, tags=tags, where=where)
    if where is not None:
        say_if_nothing(store, chosen)  # no error: a condition on dates may often meet no document
    elif not store.lengths(chosen):
        raise DocumentNotFoundError(why_nothing(store, chosen))
    return chosen


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
        note(printable(f"not reached: {line}"))
    sentence = f"erased what was removed in {erased.seconds:.1f} s; {erased.records:,} records are there"
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
            sentence = "no move is unfinished"
            if dropped:
                sentence = f"dropped the copy for {dropped.adapter} at {dropped.location}"
            print_result({"abandoned": dropped and asdict(dropped)}, sentence, as_json=as_json)
            return
        moved = store.move(to, location or f"keys-{to}", params=settings, progress=bar)
    result = {"store": moved.after.adapter, "location": moved.after.location, **asdict(moved)}
    sentence = f"moved {moved.records:,} records to {moved.after.adapter} at {moved.after.location}"
    if moved.recall is not None:
        sentence += f"; it finds {moved.recall:.2%} of the {moved.neighbors:,} nearest"
    if moved.codes is not None:
        note(
            f"keys are kept as codes ({moved.codes}) where there are many: what these lose does not come back"
        )
    if moved.left:
        note(printable(f"the old keys are left at {moved.before.location}: {moved.left}"))
    print_result(result, sentence, as_json=as_json)


def optimize(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Build indexes and reclaim the space of removed records.

    `add` does this by itself. It is useful after many documents were removed.

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

    Prints one line for each problem; the exit status is 1 then. Damaged keys are named with their documents:
    remove these documents and add them again. While another process writes, its uncommitted documents are
    reported too. Names, tags, metadata and settings have no checksum, so a change in them is not found.

    Examples:
      knnstore verify
    """
    with knnstore.open(home) as store:
        records, problems = store.datastore.count(), store.verify()
    _report(records, problems, f"found wrong in {home}", as_json=as_json)


def repair(
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Make the keys this home's, after it was moved or restored. The home that wrote them "
            "before can write no more.",
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
    _report(records, problems, f"cannot be repaired in {home}", as_json=as_json)


def _report(records: int, problems: list[str], which: str, *, as_json: bool) -> None:
    """Print the result of a check.

    Raises:
        KnnstoreError: if there are problems; `which` says in the message which problems.
    """
    sentence = "\n".join(problems) or f"sound: {records:,} records"
    print_result({"records": records, "problems": problems}, sentence, as_json=as_json)
    if problems:
        raise KnnstoreError(f"{len(problems)} {which}")


def upgrade(home: HomeOption = DEFAULT_HOME) -> None:
    """Upgrade the database to the schema of this version.

    Examples:
      knnstore db upgrade
    """
    from knnstore.catalog import upgrade_catalog
    from knnstore.store import Home

    upgrade_catalog(Home.open(home, writing=True).catalog_url)
    note("the catalog has the newest schema")
