"""Commands that create a store and fill it: `init`, `add` and `sync`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from knnstore.checks import printable
from knnstore.cli.inputs import Documents, ParamsOption, read_params
from knnstore.cli.logs import LOG
from knnstore.cli.models import Runtime, StoreRuntime, quiet_transformers
from knnstore.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    JsonOption,
    LocationOption,
    MaxLengthOption,
    YesOption,
    confirm,
)
from knnstore.cli.output import Bar, note, pairs, print_result, working
from knnstore.documents import STDIN, size_of
from knnstore.errors import InputError, LockedError, ReadOnlyError
from knnstore.model_names import check_model

_NO_KEYS = "none"


def init(
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            help="The causal language model to make the store for; also a GGUF file.",
        ),
    ],
    *,
    store: Annotated[
        str, typer.Option(metavar="NAME", help="The vector engine; `knnstore adapters` lists them.")
    ] = "cells",
    location: LocationOption = None,
    params: ParamsOption = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="SQLALCHEMY_URL", show_default="SQLite in the home", help="The catalog's database."
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where the keys are taken: ffn_input or attention_input of the last layer (@2: of layer 2), "
            "final_hidden, each also with _before_norm behind the name; or a module's path. auto is "
            "ffn_input, or final_hidden in a model without such a part. none keeps no keys: adding takes no "
            "pass of the model, and n-grams are all that is retrieved.",
        ),
    ] = "auto",
    states: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Make a key of N states: that of its token, and those of the N-1 tokens before it. It is "
            "no wider than one.",
        ),
    ] = 3,
    discounts: Annotated[
        list[float] | None,
        typer.Option(
            "--discount",
            metavar="A",
            show_default="0.5, 0.35, ...",
            help="With --states: how much the state before counts, then the one before that; repeatable, "
            "N-1 times.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Distance: l2 (squared Euclidean) or ip (inner product).")
    ] = "l2",
    dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="all",
            help="Project the keys to so many components, the principal ones of a sample's keys (PCA).",
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Text of the kind to be stored, for --dim: 30 tokens for each component at least; as `add` "
            "reads it; repeatable.",
        ),
    ] = None,
    codes: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            show_default="by the model's width",
            help="With cells: what the keys of large domains are kept as: pq32 or pq64 (about so many "
            "bytes a token), int8, or none (half precision).",
        ),
    ] = None,
    max_length: MaxLengthOption = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", show_default="half a window", help="How far a window moves on."
        ),
    ] = None,
    runtime: Runtime,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Make an empty store for a model.

    The store saves which model and tokenizer it is for, and refuses any other.

    Examples:
      knnstore init --model examples/tiny-lm
      knnstore --home other.knn init --model examples/tiny-lm --store hnswlib
      knnstore --home small.knn init --model examples/tiny-lm --dim 16 --sample articles.jsonl
      knnstore --home ngrams.knn init --model examples/tiny-lm --key none
    """
    from knnstore.store import check_new

    check_new(home, store, codes)
    check_model(model)
    samples = Documents(sample or [])
    samples.check()
    with working("loading transformers"):
        quiet_transformers()
        import knnstore
    with (
        Bar() as bar,
        knnstore.create(
            home,
            model,
            store=store,
            location=location,
            params=read_params(params) | ({} if codes is None else {"codes": codes}),
            catalog=catalog,
            key=None if key == _NO_KEYS else key,
            states=states,
            discounts=discounts,
            metric=metric,
            dim=dim,
            sample=samples.read(bar) if sample else None,
            on_bad=samples.skipping(bar),
            max_length=max_length,
            stride=stride,
            device=runtime.device,
            dtype=runtime.dtype,
            progress=bar,
        ).store as made,
    ):
        found = made.info()
        if made.is_keyless:
            note("no keys are kept: of the text that is added its n-grams are all that is retrieved")
        if found["codes"] is not None:
            note(
                f"keys are kept as codes ({found['codes']}) in domains of {found['coded_from']:,} tokens; "
                "--codes none keeps them in half precision"
            )
        if made.identity.projection is not None:
            fitted = made.load_weights(made.identity.projection).metadata
            kept, of = f"{fitted['kept']:.1%}", f"{fitted['keys']:,} keys"
            note(f"{found['dim']} components keep {kept} of the variance of {of}")
    shown = {name: found[name] for name in ("home", "model", "key", "dim", "metric", "store")}
    print_result(found, pairs(shown), as_json=as_json)
    if not as_json:
        note("next: `knnstore add FOLDER --domain NAME` stores text")


_MOST_NAMED = 10
"""Number of documents of each kind that `sync` lists without ``-v``."""


def add(
    domain: Annotated[str, typer.Option(metavar="NAME", help="The domain; made when it is new.")],
    *,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Tag every document; repeatable.")
    ] = None,
    documents: Documents,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Add documents to a domain.

    One pass of the model, no training. A document that is there already is left alone when its
    text is the same, else replaced. The command may be interrupted and run again: it goes on where
    it was.

    Examples:
      knnstore add letters news.jsonl --domain letters --tag final
      cat news.jsonl | knnstore add - --domain news --skip-bad
    """
    documents.check()
    with Bar() as bar, runtime.open_for_adding() as lm:
        is_first = not lm.store.domains()
        total_bytes = size_of(documents.files)
        added = lm.add(
            documents.read(bar),
            domain=domain,
            tags=tags or (),
            on_bad=documents.skipping(bar),
            total_bytes=total_bytes,
            progress=bar,
        )
    documents.report()
    done = {**asdict(added), "tokens_per_s": added.tokens_per_s, **documents.left_out}
    print_result(done, pairs(_without_names(done)), as_json=as_json)
    if documents.skipped and not (added.added + added.replaced + added.described + added.unchanged):
        raise InputError("no document could be used")
    if is_first and not as_json:
        note("next: `knnstore eval FILE`, of text that is not stored, measures what that is worth")


def sync(
    domain: Annotated[str, typer.Option(metavar="NAME", help="The domain; made when it is new.")],
    *,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Tag every document; repeatable.")
    ] = None,
    documents: Documents,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    yes: YesOption = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Make a domain equal to a folder: add new documents, replace changed ones, remove missing ones.

    A document's path in the folder is its id. A moved file keeps its records. A document that cannot be read
    stays stored as it is. The model is loaded only if text must be stored. Removing more than half of the
    domain asks for confirmation.

    Examples:
      knnstore sync letters --domain letters --dry-run
      knnstore sync letters --domain letters --yes
    """
    if STDIN in documents.files:
        raise typer.BadParameter("what is to be compared first is read twice: give files or a folder")
    documents.check()
    import knnstore

    with Bar() as bar:
        with knnstore.open(runtime.home) as store:
            found = store.difference(domain, documents.read(bar), tags or ())
            is_settled = not store.has_unsettled_documents()
        documents.report()
        if not found.added + found.replaced + found.described + found.unchanged:
            raise InputError(f"no document could be used: {domain} stays as it is")
        gone = [] if documents.unknown else [id for id in found.removed if id not in documents.kept]
        moved = {id: found.renamed[id] for id in gone if id in found.renamed}
        gone = [id for id in gone if id not in moved]
        places = {*moved.values()}
        is_there = [*found.replaced, *found.described, *found.unchanged, *moved]
        plan = {
            "added": [id for id in found.added if id not in places],
            "renamed": [f"{old} to {new}" for old, new in moved.items()],
            "replaced": found.replaced,
            "described": found.described,
            "removed": gone,
        }
        result = {
            "domain": domain,
            **{name: len(ids) for name, ids in plan.items()},
            "unchanged": len(found.unchanged),
            **documents.left_out,
        }
        if documents.unknown and found.removed:
            note(
                f"warning: nothing is removed: {documents.unknown:,} rows cannot be read, and any of "
                f"{len(found.removed):,} documents may be theirs"
            )
        if dry_run:
            lines = [f"{name} {id}" for name, ids in plan.items() for id in _some(ids)]
            differ = [f"{count:,} {name}" for name, count in result.items() if name in plan and count]
            lines.append(", ".join(differ) or f"{result['unchanged']:,} unchanged")
            print_result(
                {**result, "dry_run": True, "ids": plan}, "\n".join(map(printable, lines)), as_json=as_json
            )
            return
        if len(gone) > len(is_there):
            confirm(f"{len(gone):,} of {len(gone) + len(is_there):,} documents of {domain} go", yes)
        if moved:
            with knnstore.open(runtime.home, "a") as store:
                store.rename(domain, moved)
                found = store.difference(domain, replace(documents).read(bar), tags or ())
        tokens = 0
        if found.added or found.replaced or found.described:
            with runtime.open_for_adding() as lm:
                again = replace(documents)
                done = lm.add(
                    again.read(bar), domain=domain, tags=tags or (), on_bad=again.skipping(bar), progress=bar
                )
            tokens = done.tokens
            result |= {"added": done.added, "replaced": done.replaced, **again.left_out}
            if again.skipped > documents.skipped:  # texts with tokens that the model lacks
                again.report()
        if gone:
            with knnstore.open(runtime.home, "a") as store:
                store.remove_selected(knnstore.Selection((domain,), documents=tuple(gone)))
        elif not is_settled:  # opening for writing completes the changes of a killed writer
            with suppress(LockedError, ReadOnlyError):  # a running writer completes its changes itself
                knnstore.open(runtime.home, "a").close()
    result |= {"tokens": tokens}
    print_result(result, pairs(_without_names(result)), as_json=as_json)


def _without_names(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without the names of left-out documents, which `Documents.report` prints."""
    return {name: value for name, value in result.items() if name != "left_out"}


def _some(ids: Sequence[str]) -> list[str]:
    """Return the ids to print: the first `_MOST_NAMED` and the number of the others; all with ``-v``."""
    most = len(ids) if LOG.verbose else _MOST_NAMED
    return [*ids[:most], *([f"{len(ids) - most:,} more (-v names them)"] if len(ids) > most else [])]
