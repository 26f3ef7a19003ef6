"""Commands that change what is in a store or look after it; none needs the model."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

import knnstore
from knnstore.cli.inputs import ParamsOption, read_params
from knnstore.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    InDomainOption,
    JsonOption,
    LocationOption,
    WhereOption,
)
from knnstore.cli.output import Bar, note, print_result, printable, row_of
from knnstore.errors import KnnstoreError


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
      knnstore tag letters/first.txt --add draft --remove final
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
        print_result({"documents": changed}, f"tags of {changed:,} documents changed", as_json=as_json)
        return
    with knnstore.open(home, "a") as store:
        store.retag(document, domain=domain, add=add or (), remove=remove or ())
        found = store.document(document, domain=domain)
    sentence = f"tags of {found.id} in {found.domain}: {', '.join(found.tags) or 'none'}"
    print_result(row_of(found), printable(sentence), as_json=as_json)


def remove(
    document: Annotated[str | None, typer.Option(metavar="ID", help="Remove this document.")] = None,
    domain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove this domain, documents and all.")
    ] = None,
    within: Annotated[
        str | None,
        typer.Option("--in", metavar="NAME", help="The document's domain, where several have its id."),
    ] = None,
    where: WhereOption = None,
    erase: Annotated[
        bool, typer.Option("--erase", help="Erase its bytes too, as `knnstore erase` does.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove a document, a domain with all its documents, or documents whose metadata meet a condition.

    When the command ends, nothing of it is retrieved by any process. Its tokens and keys stay readable in
    the files of the engine and of the database, for whoever reads these, until `knnstore erase`.

    Examples:
      knnstore remove --document letters/second.txt
      knnstore remove --document n-17 --in news
      knnstore remove --where "year < 2020" --domain news
      knnstore remove --domain news --json
    """
    if document is not None and (domain is not None or where is not None):
        raise typer.BadParameter("--document goes with none of --domain and --where; --in names its domain")
    if document is None and domain is None and where is None:
        raise typer.BadParameter("give one of --document ID, --domain NAME and --where CONDITION")
    chosen = knnstore.Selection(None if domain is None else (domain,), where=where)
    with knnstore.open(home, "a") as store:
        if where is not None:
            several = store.remove_selected(chosen)
            tokens = sum(one.tokens for one in several)
            result = {"documents": len(several), "tokens": tokens}
            sentence = f"removed {len(several):,} documents: {tokens:,} tokens"
        elif document is not None:
            gone = store.remove_document(document, domain=within)
            result, sentence = row_of(gone), f"removed {gone.id} of {gone.domain}: {gone.tokens:,} tokens"
        else:
            assert domain is not None
            whole = store.remove_domain(domain)
            result = asdict(whole)
            sentence = f"removed {whole.name}: {whole.documents:,} documents, {whole.tokens:,} tokens"
        try:
            erased = store.erase() if erase else None
        except KnnstoreError:
            note(printable(f"{sentence}; not erased, `knnstore erase` does that"))
            raise
    for line in erased.unreached if erased else ():
        note(printable(f"not reached: {line}"))
    found = {"removed": result} if erased is None else {"removed": result, "erased": asdict(erased)}
    print_result(found, printable(sentence) + (", and erased" if erased else ""), as_json=as_json)


def erase(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Rewrite whatever still holds text or keys that were removed.

    `remove` takes documents away from every reader at once, but leaves bytes of them: in the engine's files,
    where the ids of the records are the text, and in the database's free pages and log. When this command
    ends, no file of the store holds any. It names what it cannot reach; backups are yours to erase.

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

    They are copied without the model and both sides are compared, then the store switches and the old
    keys are removed. Interrupted before that, nothing has changed: the same command goes on where it
    stopped, and --abandon drops what was copied. Prints how many of the true nearest neighbors of some
    stored keys the new engine finds.

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
    """Build indexes and reclaim the space of what was removed.

    `add` does this by itself; it is worth a call after much was removed.

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

    Prints what is wrong, a line each; the exit status is 1 then. Damaged keys are named with their
    documents: remove these and add them again. Beside a writer at work, the documents that it has not
    committed yet are reported too. Names, tags, metadata and settings have no checksum, so that another
    one in their place is not found.

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
    """Settle what an interrupted writer left, and verify.

    Documents that were half added or half removed go; every command that writes does this first.
    Records that belong to no document go as well. Indexes and whatever else is derived from the keys are
    made anew where they are damaged.

    Examples:
      knnstore repair
      knnstore repair --take-over
    """
    with knnstore.open(home, "a", copied=take_over) as store:
        problems, records = store.repair(take_over=take_over), store.datastore.count()
    _report(records, problems, f"cannot be repaired in {home}", as_json=as_json)


def _report(records: int, problems: list[str], which: str, *, as_json: bool) -> None:
    """Print what was found; problems are an error."""
    sentence = "\n".join(problems) or f"sound: {records:,} records"
    print_result({"records": records, "problems": problems}, sentence, as_json=as_json)
    if problems:
        raise KnnstoreError(f"{len(problems)} {which}")


def upgrade(home: HomeOption = DEFAULT_HOME) -> None:
    """Bring the database to the schema of this package.

    Examples:
      knnstore db upgrade
    """
    from knnstore.catalog import upgrade_catalog
    from knnstore.store import Home

    upgrade_catalog(Home.open(home, writing=True).catalog_url)
    note("the catalog has the newest schema")
