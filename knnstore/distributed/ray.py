"""Adding a Ray dataset to a store: the actors of a Ray cluster compute the keys.

`add` divides the documents into shards (a plan), lets the actors encode the shards, and adds the documents to
the store (the commit). With GPUs, each actor has one GPU. Ray replaces an actor that dies, and repeats its
shard. All machines must see the folder of the plan at the same path.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from numpy.typing import NDArray
from transformers.utils import logging

from knnstore.distributed.committing import Committed, commit_plan, drop_plan
from knnstore.distributed.encoding import ShardEncoder, ShardUploader
from knnstore.distributed.plan_folder import PlanFolder
from knnstore.distributed.planning import SHARD_TOKENS, make_plan
from knnstore.documents import OnBad
from knnstore.errors import ConfigError, KnnstoreError, PlanError
from knnstore.lm import BATCH_TOKENS, load_text_parts
from knnstore.progress import Progress
from knnstore.store import KNNStore


def add(
    dataset: ray.data.Dataset,
    home: str | os.PathLike[str],
    *,
    domain: str,
    tags: Iterable[str] = (),
    folder: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    cpus_per_worker: int = 1,
    model: str | None = None,
    dtype: str | None = None,
    upload: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    batch_tokens: int = BATCH_TOKENS,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Committed:
    """Add the rows of a Ray dataset to a store; the actors of the Ray cluster compute the keys.

    Only this process opens the store: it reads the rows, tokenizes them, and adds the documents at the end.
    The documents become visible together, after all keys are computed. Then the folder of the plan is
    removed. If the call is interrupted, the same call continues the work.

    Args:
        dataset: dataset with the columns ``id`` and ``text``, and ``source`` for an encoder-decoder model;
            other columns become metadata.
        home: folder of the store, on a disk of this machine.
        domain: the domain's name; it is created if it does not exist.
        tags: tags that are added to every document.
        folder: folder of the plan, which all machines of the cluster see at the same path; default is the
            folder ``plan`` in `home`, which is enough if the cluster is this machine.
        workers: largest number of actors; default is the number of GPUs of the cluster, or without GPUs the
            number of its CPUs divided by `cpus_per_worker`. Each actor reserves a GPU if the cluster has any.
        cpus_per_worker: number of CPUs that Ray reserves for an actor, and number of its threads.
        model: folder or hub id of the model on the machines of the cluster; default is the name with which
            the store was made.
        dtype: dtype of the weights; see `encode_shards`.
        upload: True lets the actors upload the keys to the engine of the store; see `encode_shards`.
        shard_tokens: number of tokens from which a shard is complete. An actor encodes one shard at a time.
        batch_tokens: number of tokens in one forward pass, padding included.
        on_bad: called with the error of each document that cannot be used; the document is skipped. None
            raises the first error, and nothing is added.
        progress: progress display, which receives numbers of tokens. Ray shows its own display too.

    Returns:
        The numbers of documents and tokens that were added, and the ids of skipped documents. The numbers are
        0 if all documents are stored already.

    Raises:
        InputError: a row has no ``id`` or ``text``, or cannot be used and `on_bad` is None.
        PlanError: an actor reported an error, which the message repeats. Complete shards stay, and the same
            call continues.
        ConfigError: `workers` or `cpus_per_worker` is below 1, the cluster has fewer CPUs than
            `cpus_per_worker`, or the store keeps no keys.
    """
    if cpus_per_worker < 1 or (workers is not None and workers < 1):
        raise ConfigError(f"workers and cpus_per_worker must be at least 1, got {workers}, {cpus_per_worker}")
    # 1) Divide the documents into shards.
    with KNNStore.open(home, "a") as store:
        plan_folder = PlanFolder(Path(folder or store.home.path / "plan").absolute())
        plan = make_plan(
            store,
            load_text_parts(model or store.identity.model).tokenizer,
            dataset,
            plan_folder,
            domain=domain,
            tags=tags,
            model=model,
            shard_tokens=shard_tokens,
            batch_tokens=batch_tokens,
            on_bad=on_bad,
            progress=progress,
        )
    # 2) Encode the shards on the cluster. The store is closed meanwhile, so other processes may write to it.
    if plan is not None:
        encoder = (str(plan_folder.path), model, dtype, cpus_per_worker, upload)
        _encode_on_cluster(plan_folder, encoder, workers, cpus_per_worker, progress or Progress())
    # 3) Commit. If `plan` is None, the folder may still have a plan whose commit was interrupted at its end.
    if not plan_folder.exists:
        return Committed(0, 0, (), was_committed=False)
    with KNNStore.open(home, "a") as store:
        committed = commit_plan(store, plan_folder, progress=progress)
        drop_plan(store, plan_folder)
    return committed


def _encode_on_cluster(
    folder: PlanFolder,
    encoder: tuple[str, str | None, str | None, int, bool],
    workers: int | None,
    cpus_per_worker: int,
    shown: Progress,
) -> None:
    """Encode the unfinished shards of a plan on a Ray cluster, and wait until all shards are finished.

    A shard is finished if its keys are complete and, if uploads are requested, uploaded. Each actor encodes
    one shard at a time. Starts Ray if it is not running.

    Args:
        folder: folder of the plan.
        encoder: arguments of `_ActorEncoder`, in its order; the last says whether keys are uploaded.
        workers: largest number of actors; None chooses it by the cluster's GPUs or CPUs.
        cpus_per_worker: number of CPUs that Ray reserves for an actor.
        shown: progress display, which receives numbers of encoded tokens.

    Raises:
        ConfigError: the cluster has too few CPUs for one worker.
        PlanError: an actor reported an error.
    """
    shards = folder.plan.shards
    complete, upload = folder.find_complete_shards(shards), encoder[-1]
    left = [
        shard
        for shard in shards
        if shard.number not in complete or (upload and not folder.is_uploaded(shard))
    ]
    if not left:
        return
    # 1) Choose the number of actors.
    if not ray.is_initialized():
        ray.init()
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if cpus < cpus_per_worker:
        raise ConfigError(f"the Ray cluster has {cpus} CPUs, and a worker needs {cpus_per_worker}")
    possible = min(cpus // cpus_per_worker, gpus or cpus, len(left))
    workers = min(workers or possible, len(left))
    # 2) Encode. Ray replaces an actor that dies, and repeats its shard.
    rows = ray.data.from_items([{"shard": shard.number} for shard in left], override_num_blocks=len(left))
    results = rows.map_batches(
        _ActorEncoder,
        fn_constructor_args=encoder,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            initial_size=min(workers, possible),
            max_size=workers,
            max_tasks_in_flight_per_actor=1,
        ),
        num_cpus=cpus_per_worker,
        num_gpus=1 if gpus else None,
    )
    shown.start("encoding", total=sum(shard.records for shard in left))
    for result in results.iter_rows():
        if result["error"]:
            raise PlanError(f"{result['error']}; run the same call again to continue")
        shown.advance(shards[result["shard"]].records)
    shown.finish()


class _ActorEncoder:
    """Encodes shards in an actor of Ray. The model is loaded for the first shard that is not complete.

    Args:
        folder: folder of the plan.
        model: folder or hub id of the model; None means the name with which the store was made.
        dtype: dtype of the weights; see `encode_shards`.
        threads: number of threads that torch uses.
        upload: True also uploads the keys to the engine of the store.
    """

    def __init__(self, folder: str, model: str | None, dtype: str | None, threads: int, upload: bool) -> None:
        self._folder = PlanFolder(folder)
        self._model = model
        self._dtype = dtype
        self._threads = threads
        self._upload = upload
        self._encoder: ShardEncoder | None = None
        self._uploader: ShardUploader | None = None

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Encode the shards of a batch; Ray calls this method.

        Args:
            batch: the column ``shard``, with the numbers of the shards, int64, shape (n,).

        Returns:
            The same column, and the column ``error``: for each shard an error message, or an empty string if
            the shard is complete.
        """
        torch.set_num_threads(self._threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        errors = [self._encode(int(number)) for number in batch["shard"]]
        return {"shard": batch["shard"], "error": np.array(errors)}

    def _encode(self, number: int) -> str:
        """Encode a shard unless it is complete, and upload its keys if uploads were requested.

        Returns the message of an error, which is not raised, or an empty string.

        Args:
            number: number of the shard.
        """
        shard = self._folder.plan.shards[number]
        try:
            if self._upload and self._uploader is None:
                self._uploader = ShardUploader(self._folder)
            if not self._folder.find_complete_shards([shard]):
                if self._encoder is None:
                    self._encoder = ShardEncoder(self._folder, model=self._model, dtype=self._dtype)
                self._encoder.encode(shard, Progress())
            if self._uploader is not None:
                self._uploader.upload(shard)
        except (KnnstoreError, OSError, RuntimeError) as error:
            return f"{error}".partition("\n")[0] or type(error).__name__
        return ""
