"""Commands that add documents with several processes or machines: `encode`, `commit` and `plan`."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.cli.models import Runtime, silence_transformers
from knnstore.cli.options import DEFAULT_HOME, HomeOption, JsonOption, ModelAtOption
from knnstore.cli.output import Bar, format_pairs, print_message, print_result, show_activity
from knnstore.errors import ConfigError
from knnstore.model_names import check_model

PlanArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the plan, which `knnstore add --plan DIR` made.")
]
_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Environment variables of `torchrun` and of Slurm: number of this process, and number of processes."""


def encode(
    folder: PlanArgument,
    *,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            show_default="RANK/WORLD_SIZE, else SLURM_PROCID/SLURM_NTASKS, else 0/1",
            help="Encode every N-th shard, beginning with shard I; the first shard has number 0.",
        ),
    ] = None,
    upload: Annotated[
        bool,
        typer.Option(
            "--upload",
            help="Also upload the keys to the server of the store (Qdrant), so that the commit need not.",
        ),
    ] = False,
    model_at: ModelAtOption = None,
    runtime: Runtime,
    as_json: JsonOption = False,
) -> None:
    """Compute the keys of a plan's shards; needs the folder of the plan and the model, but no store.

    Run it once, or N times in parallel with I from 0 to N-1, on one machine or on several. Shards that are
    complete are left out, so an interrupted command continues when it is run again.

    Examples:
      knnstore encode plan
      knnstore encode plan --shard 3/8
      knnstore encode plan --upload
    """
    worker, workers = _parse_share(shard)
    with show_activity("loading transformers"):
        silence_transformers()
        from knnstore.distributed import PlanFolder, encode_shards

    plan_folder = PlanFolder(folder)
    model = model_at or plan_folder.plan.identity.model
    try:
        check_model(model)
    except ConfigError as error:
        raise ConfigError(f"{error}; give its new location with --model-at") from error
    with Bar() as bar:
        encoding = encode_shards(
            plan_folder,
            worker=worker,
            workers=workers,
            model=model,
            device=runtime.device,
            dtype=runtime.dtype,
            upload=upload,
            progress=bar,
        )
    result = {
        "encoded": len(encoding.encoded),
        "complete": len(encoding.complete),
        "uploaded": len(encoding.uploaded),
        "shards": len(plan_folder.plan.shards),
        "tokens": encoding.tokens,
    }
    print_result(result, format_pairs(result), as_json=as_json)
    if not as_json:
        print_message(f"next, when all shards are encoded: `knnstore commit {folder}`")


def commit(folder: PlanArgument, *, home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Add the documents of a plan to the store, in one transaction, when all of its shards are encoded.

    Before the commit, none of the documents is in the store. A document is left out if it was added,
    replaced, removed or renamed in the store after the plan was made. A second commit changes nothing.

    Examples:
      knnstore commit plan
    """
    with show_activity("loading transformers"):
        silence_transformers()
        from knnstore.distributed import PlanFolder, commit_plan
        from knnstore.store import KNNStore

    with Bar() as bar, KNNStore.open(home, "a") as store:
        committed = commit_plan(store, PlanFolder(folder), progress=bar)
    if committed.skipped:
        print_message(describe_skipped(committed.skipped))
    if committed.was_committed:
        print_message("this plan was already committed: nothing is changed")
    result = {**asdict(committed), "skipped": len(committed.skipped)}
    print_result({**result, "skipped_ids": list(committed.skipped)}, format_pairs(result), as_json=as_json)


def plan(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Folder of a plan; without it all plans are listed.")
    ] = None,
    *,
    drop: Annotated[
        bool,
        typer.Option("--drop", help="Give up the plan, and delete its files."),
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
) -> None:
    """Show a plan and how many of its shards are encoded, or list the plans of the store.

    Examples:
      knnstore plan
      knnstore plan plan
      knnstore plan plan --drop
    """
    from knnstore.store import KNNStore

    if folder is None:
        if drop:
            raise ConfigError("--drop needs the folder of the plan")
        with KNNStore.open(home) as store:
            rows = [
                {
                    "folder": lease.folder,
                    "tokens": lease.stop - lease.start,
                    "state": "committed" if lease.is_committed else "open",
                }
                for lease in store.leases()
            ]
        lines = [f"{row['folder']}  {row['tokens']:,} tokens  {row['state']}" for row in rows]
        print_result(rows, "\n".join(lines) or "no plans", as_json=as_json)
        return
    with show_activity("loading transformers"):
        silence_transformers()
        from knnstore.distributed import PlanFolder, drop_plan

    plan_folder = PlanFolder(folder)
    if drop:
        with KNNStore.open(home, "a") as store:
            drop_plan(store, plan_folder)
        print_result({"dropped": str(folder)}, f"{folder} is dropped", as_json=as_json)
        return
    result = describe_plan(plan_folder)
    print_result(result, format_pairs(result), as_json=as_json)


def describe_skipped(ids: Sequence[str]) -> str:
    """Return a message about documents that a commit has left out.

    Args:
        ids: ids of the documents, at least one.
    """
    return (
        f"{len(ids):,} documents were left out, because versions of them were stored, replaced, removed or "
        f"renamed after the plan was made: {escape_unprintable(', '.join(ids[:5]))}"
    )


def describe_plan(folder: Any) -> dict[str, Any]:
    """Return a description of a plan, JSON values by name.

    Args:
        folder: the `PlanFolder`.

    Raises:
        PlanError: the folder has no plan.
    """
    content = folder.plan
    return {
        "added": content.added,
        "replaced": content.replaced,
        "tokens": content.tokens,
        "shards": len(content.shards),
        "encoded": len(folder.find_complete_shards(content.shards)),
        "uploaded": sum(map(folder.is_uploaded, content.shards)),
        "state": "open" if folder.has_documents() else "committed",
        "model": content.identity.model,
    }


def _parse_share(shard: str | None) -> tuple[int, int]:
    """Return the number of this worker, from 0, and the number of workers.

    Args:
        shard: the option ``--shard``, I/N; None reads the environment variables of `torchrun` or Slurm.

    Raises:
        ConfigError: the option or the variables are not two numbers with 0 <= I < N.
    """
    name, text = "--shard", shard
    if text is None:
        for rank, size in _RANKS:
            if rank in os.environ and size in os.environ:
                name, text = f"{rank} and {size}", f"{os.environ[rank]}/{os.environ[size]}"
                break
        else:
            return 0, 1
    worker, _, workers = text.partition("/")
    if not (worker.isascii() and worker.isdigit() and workers.isascii() and workers.isdigit()):
        raise ConfigError(f"{name} must be two numbers I/N, such as 0/8, got {text!r}")
    if int(worker) >= int(workers):
        raise ConfigError(f"{name}: the number of the worker must be below {workers}, got {worker}")
    return int(worker), int(workers)
