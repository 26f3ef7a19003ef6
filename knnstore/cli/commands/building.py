"""Commands that make a store and fill it."""

from dataclasses import asdict
from typing import Annotated

import typer

from knnstore.cli.inputs import Documents, ParamsOption, read_params
from knnstore.cli.models import Runtime, StoreRuntime, quiet_transformers
from knnstore.cli.options import DEFAULT_HOME, HomeOption, JsonOption, LocationOption, MaxLengthOption
from knnstore.cli.output import Bar, note, pairs, print_result
from knnstore.documents import read_documents, size_of
from knnstore.errors import InputError


def init(
    model: Annotated[
        str, typer.Option(metavar="PATH_OR_HUB_ID", help="The causal language model to make the store for.")
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
            "final_hidden, each also with _before_norm behind the name; or a module's path.",
        ),
    ] = "ffn_input",
    states: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Make a key of N states: that of its token, and those of the N-1 tokens before it. With "
            "--sample it is no wider than one.",
        ),
    ] = 1,
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
            show_default="all, or with --states and --sample as many as one state has",
            help="Project the keys to so many components, the principal ones of a sample's keys (PCA).",
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Text of the kind to be stored, for --dim and --states: 30 tokens for each component at "
            "least; as `add` reads it; repeatable.",
        ),
    ] = None,
    codes: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            show_default="by the model's width",
            help="With cells: what the keys of domains with 8,192 tokens are kept as: pq32 or "
            "pq64 (about so many bytes a token), int8, or none (half precision).",
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

    The store remembers the model and its tokenizer, and refuses another.

    Examples:
      knnstore init --model examples/tiny-lm
      knnstore --home other.knn init --model examples/tiny-lm --store hnswlib
      knnstore --home small.knn init --model examples/tiny-lm --dim 16 --sample articles.jsonl
      knnstore --home joined.knn init --model examples/tiny-lm --states 3 --dim 16 --sample articles.jsonl
    """
    import knnstore

    quiet_transformers()
    with (
        Bar() as bar,
        knnstore.create(
            home,
            model,
            store=store,
            location=location,
            params=read_params(params) | ({} if codes is None else {"codes": codes}),
            catalog=catalog,
            key=key,
            states=states,
            discounts=discounts,
            metric=metric,
            dim=dim,
            sample=read_documents(sample) if sample else None,
            max_length=max_length,
            stride=stride,
            device=runtime.device,
            dtype=runtime.dtype,
            progress=bar,
        ).store as made,
    ):
        found = made.info()
        kept_as = made.datastore.capabilities.codes
        if kept_as is not None:
            note(
                f"keys are kept as codes ({kept_as}) in domains of 8,192 tokens; --codes none keeps "
                "them in half precision"
            )
        if made.identity.projection is not None:
            fitted = made.load_weights(made.identity.projection).metadata
            kept, of = f"{fitted['kept']:.1%}", f"{fitted['keys']:,} keys"
            note(f"{found['dim']} components keep {kept} of the variance of {of}")
    shown = {name: found[name] for name in ("home", "model", "key", "dim", "metric", "store")}
    print_result(found, pairs(shown), as_json=as_json)


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
    with Bar() as bar, runtime.open_model("a") as lm:
        total_bytes = size_of(documents.files)
        added = lm.add(
            documents.read(bar), domain=domain, tags=tags or (), total_bytes=total_bytes, progress=bar
        )
    if documents.skipped:
        note(f"skipped {documents.skipped:,} in all")
    done = {**asdict(added), "tokens_per_s": added.tokens_per_s, "skipped": documents.skipped}
    print_result(done, pairs(done), as_json=as_json)
    if documents.skipped and not (added.added + added.replaced + added.described + added.unchanged):
        raise InputError("no document could be used")
