"""Commands that create a store and fill it: `init`, `add` and `sync`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.commands.distributing import describe_skipped
from knnstore.cli.inputs import (
    Documents,
    ParamsOption,
    SourceFieldOption,
    SyncDocuments,
    TextFieldOption,
    read_params,
)
from knnstore.cli.logs import LOG
from knnstore.cli.models import (
    Runtime,
    StoreRuntime,
    load_tokenizer,
    resolve_model_location,
    silence_transformers,
)
from knnstore.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    JsonOption,
    LocationOption,
    MaxLengthOption,
    YesOption,
    confirm,
)
from knnstore.cli.output import Bar, format_pairs, print_message, print_result, show_activity
from knnstore.documents import FIELDS, estimate_size
from knnstore.errors import ConfigError, InputError, LockedError, ReadOnlyError
from knnstore.model_names import check_model

DomainOption = Annotated[
    str, typer.Option(metavar="NAME", help="Domain of the documents; created if it does not exist.")
]
TagsOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Tag every document; repeatable.")
]

_NO_KEYS = "none"
_STATES = 3


def init(
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            help="Model that the store is made for: a causal language model, which may be a GGUF file, or an "
            "encoder-decoder model. With --key none, any model that generates text.",
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
            metavar="SQLALCHEMY_URL",
            show_default="SQLite in the home",
            help="Database of the catalog, which lists domains and documents.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where in the model the keys are taken: ffn_input or attention_input of the last layer, "
            "final_hidden, or the path of a module. ffn_input@2 is that of layer 2; ffn_input_before_norm is "
            "taken before the layer norm. auto is ffn_input, or final_hidden if the model has no ffn_input. "
            "With none the store has no keys: adding documents does not run the model, and only n-grams "
            "are retrieved.",
        ),
    ] = "auto",
    states: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Build each key from N hidden states: the state of its token and the states of the N-1 "
            "tokens before. The key is as wide as one state.",
        ),
    ] = _STATES,
    discounts: Annotated[
        list[float] | None,
        typer.Option(
            "--discount",
            metavar="A",
            show_default="0.5, 0.35, ...",
            help="With --states: weight of the previous token's state, then of the state before, and so on; "
            "give it N-1 times.",
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
            help="Project the keys to the N principal components of a sample's keys (PCA).",
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Sample for --dim: text of the kind that will be stored, at least 30 tokens for each "
            "component; the same kinds of files as for `add`; repeatable.",
        ),
    ] = None,
    text_field: TextFieldOption = FIELDS.text,
    source_field: SourceFieldOption = None,
    codes: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            show_default="by the model's width",
            help="With cells: how the keys of large domains are compressed: pq32 or pq64 (about 32 or 64 "
            "bytes a token), int8, or none (half precision).",
        ),
    ] = None,
    max_length: MaxLengthOption = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            show_default="half a window",
            help="Number of tokens between the starts of two windows.",
        ),
    ] = None,
    runtime: Runtime,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Make an empty store for a model.

    The store saves the identity of its model and tokenizer, and refuses any other model or tokenizer.

    Examples:
      knnstore init --model examples/tiny-lm
      knnstore --home other.knn init --model examples/tiny-lm --store hnswlib
      knnstore --home small.knn init --model examples/tiny-lm --dim 16 --sample articles.jsonl
      knnstore --home ngrams.knn init --model examples/tiny-lm --key none
    """
    from knnstore.store import check_new

    check_new(home, store, codes)
    check_model(model)
    if not sample and (text_field != FIELDS.text or source_field is not None):
        raise typer.BadParameter("--text-field and --source-field are for the rows of --sample")
    samples = Documents(sample or [], text_field, source_field=source_field)
    samples.check_files()
    with show_activity("loading transformers"):
        silence_transformers()
        import knnstore
        from knnstore.lm import KeylessText, is_causal, load_text_parts
    with Bar() as bar:
        # 1) Create the store; with --key none for an encoder-decoder model, without loading the model.
        if source_field is not None:
            samples.expect_pairs(is_paired=not is_causal(load_text_parts(model).config))
        if key == _NO_KEYS and not is_causal(load_text_parts(model).config):
            no_effect = {
                "store": store != "cells", "location": location, "param": params, "codes": codes,
                "dim": dim, "sample": sample, "states": states != _STATES, "discount": discounts,
                "metric": metric != "l2", "max-length": max_length, "stride": stride,
                "device": runtime.device, "dtype": runtime.dtype,
            }  # fmt: skip
            given = next((name for name, value in no_effect.items() if value), None)
            if given is not None:
                raise ConfigError(
                    f"--{given} has no effect, because the store of this model has only n-grams: leave it out"
                )
            new_store = KeylessText.create(home, model, catalog=catalog).store
            print_message("the store keeps no keys for this model: use its n-grams with NGramLogitsProcessor")
        else:
            new_store = knnstore.create(
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
                sample=samples.read_documents(bar) if sample else None,
                on_bad=samples.make_skip_function(bar),
                max_length=max_length,
                stride=stride,
                device=runtime.device,
                dtype=runtime.dtype,
                progress=bar,
            ).store
    # 2) Describe the new store.
    with new_store:
        store_info = new_store.info()
        if new_store.is_keyless:
            print_message("the store keeps no keys: only the n-grams of added text are retrieved")
        if store_info["codes"] is not None:
            print_message(
                f"keys are compressed ({store_info['codes']}) in domains of {store_info['coded_from']:,} "
                "tokens or more; --codes none keeps them in half precision"
            )
        if new_store.identity.projection is not None:
            projection_info = new_store.load_weights(new_store.identity.projection).metadata
            kept_variance, key_count = f"{projection_info['kept']:.1%}", f"{projection_info['keys']:,} keys"
            print_message(
                f"{store_info['dim']} components keep {kept_variance} of the variance of {key_count}"
            )
    printed_info = {name: store_info[name] for name in ("home", "model", "key", "dim", "metric", "store")}
    print_result(store_info, format_pairs(printed_info), as_json=as_json)
    if not as_json:
        print_message("next: `knnstore add FOLDER --domain NAME` stores text")


_WORKER_SHARD_TOKENS = 20_000
"""Number of tokens of a shard for ``--workers``: small, so that all processes end at about the same time."""
_MAX_LISTED_IDS = 10
"""Number of documents of each kind that `sync` lists without ``-v``."""


def add(
    domain: DomainOption,
    *,
    tags: TagsOption = None,
    documents: Documents,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Only divide the documents into shards, and write these to a new folder. `knnstore encode` "
            "then computes keys, also on other machines, and `knnstore commit` adds the documents.",
        ),
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="100,000; with --workers 20,000",
            help="With --plan or --workers: number of tokens of a shard, which one process encodes.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Compute the keys with N processes, which share the cores and the GPUs. Nothing is added "
            "before all keys are computed.",
        ),
    ] = None,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Add documents to a domain.

    The model reads each text once; nothing is trained. For an encoder-decoder model, each row also has a
    source, such as the sentence that the text translates. A stored document of the same id is left unchanged
    if its text is the same, and replaced otherwise. If the command is interrupted, run it again: it continues
    where it was.

    Examples:
      knnstore add letters news.jsonl --domain letters --tag final
      cat news.jsonl | knnstore add - --domain news --skip-bad
      knnstore add letters --domain letters --workers 2
      knnstore add letters --domain letters --plan plan
    """
    documents.check_files()
    if plan is not None or workers is not None:
        _add_planned(domain, tags or (), documents, plan, shard_tokens, workers, runtime, as_json=as_json)
        return
    if shard_tokens is not None:
        raise ConfigError("--shard-tokens needs --plan or --workers")
    with Bar() as bar, runtime.open_for_adding() as lm:
        suggests_eval = not lm.store.domains() and not lm.store.is_keyless
        total_bytes = estimate_size(documents.files)
        added = lm.add(
            documents.read_documents(bar),
            domain=domain,
            tags=tags or (),
            on_bad=documents.make_skip_function(bar),
            total_bytes=total_bytes,
            progress=bar,
        )
    documents.report()
    result = {**asdict(added), "tokens_per_s": added.tokens_per_s, **documents.left_out}
    print_result(result, format_pairs(_drop_left_out_names(result)), as_json=as_json)
    if documents.skipped and not (added.added + added.replaced + added.described + added.unchanged):
        raise InputError("no document could be used")
    if suggests_eval and not as_json:
        print_message("next: `knnstore eval FILE` measures the gain on text that is not stored")


def _add_planned(
    domain: str,
    tags: Sequence[str],
    documents: Documents,
    plan: Path | None,
    shard_tokens: int | None,
    workers: int | None,
    runtime: StoreRuntime,
    *,
    as_json: bool,
) -> None:
    """Divide documents into shards (make a plan); with `workers`, also encode and commit them here.

    Args:
        domain: domain of the documents.
        tags: tags of every document.
        documents: the documents.
        plan: folder of the plan. None with `workers`: the plan is then in the folder ``plan`` of the store,
            and is deleted after the commit.
        shard_tokens: number of tokens of a shard; None for the default.
        workers: number of processes that compute keys; None only makes the plan.
        runtime: options of the model, and folder of the store.
        as_json: True prints the result as JSON.

    Raises:
        ConfigError: if both `plan` and `workers` are given.
    """
    if plan is not None and workers is not None:
        raise ConfigError("choose one of --plan and --workers")
    from knnstore.store import KNNStore

    with Bar() as bar:
        # 1) Make the plan. It has only the documents that must be encoded.
        with KNNStore.open(runtime.home, "a") as store:
            model = resolve_model_location(store, runtime.model_at)
            with show_activity("loading the tokenizer"):
                tokenizer = load_tokenizer(model)
                from knnstore.distributed import (
                    SHARD_TOKENS,
                    PlanFolder,
                    commit_plan,
                    drop_plan,
                    encode_shards_in_processes,
                    make_plan,
                )

            folder = PlanFolder(plan or store.home.path / "plan")
            made = make_plan(
                store,
                tokenizer,
                documents.read_documents(bar),
                folder,
                domain=domain,
                tags=tags,
                model=model,
                shard_tokens=shard_tokens or (SHARD_TOKENS if workers is None else _WORKER_SHARD_TOKENS),
                on_bad=documents.make_skip_function(bar),
                progress=bar,
            )
        documents.report()
        result: dict[str, Any] = {"added": 0, "replaced": 0, "tokens": 0, "shards": 0, **documents.left_out}
        if made is not None:
            result |= {"added": made.added, "replaced": made.replaced, "tokens": made.tokens}
            result["shards"] = len(made.shards)
        # 2) With workers: encode the shards, and commit the plan.
        if workers is not None and folder.exists:  # also if an earlier commit was interrupted at its end
            if made is not None:
                encode_shards_in_processes(
                    folder,
                    workers,
                    model=model,
                    device=runtime.device,
                    dtype=runtime.dtype,
                    upload=made.target is not None,
                    progress=bar,
                )
            with KNNStore.open(runtime.home, "a") as store:
                committed = commit_plan(store, folder, progress=bar)
                drop_plan(store, folder)
            result |= {"tokens": committed.tokens, "outdated": len(committed.skipped)}
            if committed.skipped:
                print_message(describe_skipped(committed.skipped))
    print_result(result, format_pairs(_drop_left_out_names(result)), as_json=as_json)
    if made is None:
        print_message("every document is stored already: there is nothing to encode")
    elif plan is not None and not as_json:
        print_message(f"next: `knnstore encode {plan}`, on one or several machines")


def sync(
    domain: DomainOption,
    *,
    tags: TagsOption = None,
    documents: SyncDocuments,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the changes, without making them.")
    ] = False,
    yes: YesOption = False,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Make a domain equal to a folder or a commit: add new documents, replace changed ones, remove others.

    A document's path in the folder or repository is its id. A moved file keeps its records. A file in a
    folder that cannot be read stays stored as it is. The model is loaded only if text must be stored.
    Removing more than half of the domain asks for confirmation.

    Examples:
      knnstore sync letters --domain letters --dry-run
      knnstore sync letters --domain letters --yes
      knnstore sync --git . --ref main --only '*.py' --domain code
    """
    documents.check_files()
    import knnstore

    with Bar() as bar:
        # 1) Compare the files with the stored documents.
        with knnstore.open(runtime.home) as store:
            documents.expect_pairs(is_paired=store.identity.is_paired)
            unread = documents.find_unchanged(store, domain, tags or ())
            difference = store.difference(domain, documents.read_documents(bar, unread), tags or (), unread)
            is_settled = not store.has_unsettled_documents()
        documents.report()
        # 2) Plan the changes. A removed document whose content an added document has was moved.
        unchanged = [*difference.unchanged, *unread]
        is_empty = not difference.added + difference.replaced + difference.described and not unchanged
        if is_empty and documents.tree is None:
            raise InputError(f"no document could be used: {domain} is not changed")
        removed_ids = (
            []
            if documents.skipped_without_id
            else [id for id in difference.removed if id not in documents.skipped_ids]
        )
        moved = {id: difference.renamed[id] for id in removed_ids if id in difference.renamed}
        removed_ids = [id for id in removed_ids if id not in moved]
        rename_targets = {*moved.values()}
        remaining_ids = [*difference.replaced, *difference.described, *unchanged, *moved]
        plan = {
            "added": [id for id in difference.added if id not in rename_targets],
            "renamed": [f"{old} to {new}" for old, new in moved.items()],
            "replaced": difference.replaced,
            "described": difference.described,
            "removed": removed_ids,
        }
        result = {
            "domain": domain,
            **{name: len(ids) for name, ids in plan.items()},
            "unchanged": len(unchanged),
            **({"commit": documents.tree.commit} if documents.tree else {}),
            **documents.left_out,
        }
        if documents.skipped_without_id and difference.removed:
            print_message(
                f"warning: nothing is removed: {documents.skipped_without_id:,} rows cannot be read, so any "
                f"of {len(difference.removed):,} stored documents may come from them"
            )
        # 3) With --dry-run print the plan and stop; otherwise let the user confirm a large removal.
        if dry_run:
            lines = [f"{name} {id}" for name, ids in plan.items() for id in _shorten_ids(ids)]
            differ = [f"{count:,} {name}" for name, count in result.items() if name in plan and count]
            lines.append(", ".join(differ) or f"{result['unchanged']:,} unchanged")
            print_result(
                {**result, "dry_run": True, "ids": plan},
                "\n".join(map(escape_unprintable, lines)),
                as_json=as_json,
            )
            return
        if len(removed_ids) > len(remaining_ids):
            confirm(
                f"{len(removed_ids):,} of {len(removed_ids) + len(remaining_ids):,} documents of "
                f"{domain} will be removed",
                yes,
            )
        # 4) Rename moved documents, add new and changed documents, and remove the others.
        if moved:
            with knnstore.open(runtime.home, "a") as store:
                store.rename(domain, moved)
                reread_documents = documents.copy_to_reread()
                difference = store.difference(
                    domain, reread_documents.read_documents(bar, unread), tags or (), unread
                )
        tokens = 0
        if difference.added or difference.replaced or difference.described:
            with runtime.open_for_adding() as lm:
                reread_documents = documents.copy_to_reread()
                added = lm.add(
                    reread_documents.read_documents(bar, unread),
                    domain=domain,
                    tags=tags or (),
                    on_bad=reread_documents.make_skip_function(bar),
                    progress=bar,
                )
            tokens = added.tokens
            result |= {"added": added.added, "replaced": added.replaced, **reread_documents.left_out}
            if reread_documents.skipped > documents.skipped:  # texts with tokens that the model lacks
                reread_documents.report()
        if removed_ids:
            with knnstore.open(runtime.home, "a") as store:
                store.remove_selected(knnstore.Selection((domain,), documents=tuple(removed_ids)))
        elif not is_settled:  # opening for writing completes the changes of a killed writer
            with suppress(LockedError, ReadOnlyError):  # a running writer completes its changes itself
                knnstore.open(runtime.home, "a").close()
    result |= {"tokens": tokens}
    print_result(result, format_pairs(_drop_left_out_names(result)), as_json=as_json)


def _drop_left_out_names(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a result without the field `left_out`, whose names `Documents.report` prints."""
    return {name: value for name, value in result.items() if name != "left_out"}


def _shorten_ids(ids: Sequence[str]) -> list[str]:
    """Return the ids to print: the first `_MAX_LISTED_IDS`, then a text with the number of all others.

    With ``--verbose`` all ids are returned.
    """
    limit = len(ids) if LOG.verbose else _MAX_LISTED_IDS
    return [*ids[:limit], *([f"{len(ids) - limit:,} more (-v names them)"] if len(ids) > limit else [])]
