"""Computing the keys of a plan's shards, with the folder of the plan and the model, but no database.

A plan divides documents that will be added to a store into shards. `encode_shards` encodes the shards of one
worker; `ShardEncoder` encodes single shards, and `ShardUploader` uploads encoded shards to the engine.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.datastore import id_ranges_from_positions, record_ids
from knnstore.distributed.plan_folder import PlanFolder, PlannedDocument, Shard
from knnstore.documents import SOURCE
from knnstore.errors import ConfigError, InvalidVectorError, ModelOutputError, PlanError
from knnstore.failpoints import failpoint
from knnstore.lm import Encoder, TextReader, check_matches, create_not_finite_error, load_model, pack_windows
from knnstore.progress import Progress

_BLOCK_RECORDS = 1 << 14  # records that are uploaded at once


@dataclass(frozen=True)
class Encoding:
    """Result of `encode_shards`."""

    encoded: tuple[int, ...]
    """Numbers of the shards that this call encoded."""
    complete: tuple[int, ...]
    """Numbers of the worker's shards whose keys were complete before the call."""
    tokens: int
    """Number of tokens of the shards that this call encoded."""
    uploaded: tuple[int, ...] = ()
    """Numbers of the shards whose keys this call uploaded to the engine."""


def encode_shards(
    folder: PlanFolder,
    *,
    worker: int = 0,
    workers: int = 1,
    model: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    upload: bool = False,
    progress: Progress | None = None,
) -> Encoding:
    """Compute the keys of the shards of one worker, and write them into the folder of the plan.

    Worker i of n encodes the shards i, i + n, i + 2n, and so on. Shards whose keys are complete and undamaged
    are skipped, so a second call continues an interrupted call. Encoding a shard twice gives the same bytes
    if the device and the number of threads are the same.

    Args:
        folder: folder of the plan.
        worker: number of this worker, from 0.
        workers: number of workers.
        model: folder or hub id of the model; default is the name with which the store was made.
        device: device of the model; default is the GPU if torch finds one, else the CPU.
        dtype: dtype of the weights; default is float32 on the CPU, and the saved dtype on a GPU.
        upload: True also uploads the keys to the engine of the store, so that the commit takes less time.
            The engine must accept uploads, as a Qdrant server does.
        progress: progress display, which receives the number of tokens of each batch.

    Raises:
        ConfigError: `worker` is not between 0 and `workers` - 1; the model cannot be loaded; or `upload` is
            True and the engine accepts no uploads.
        StoreUnavailableError: the engine cannot be reached.
        DiskFullError: the disk of the folder is full. Complete shards stay.
        PlanError: the folder has no plan, a file of the plan is damaged, or the plan was committed or
            dropped.
        FingerprintMismatchError: the model is not the model of the store.
        ModelOutputError: a key is NaN or infinite; the message names the document. Complete shards stay.
    """
    if not 0 <= worker < workers:
        raise ConfigError(f"the number of the worker must be between 0 and {workers - 1}, got {worker}")
    shown = progress or Progress()
    # 1) Find the shards that are left.
    shards = folder.plan.shards[worker::workers]
    complete = folder.find_complete_shards(shards)
    left = [shard for shard in shards if shard.number not in complete]
    uploaded: list[int] = []
    with ShardUploader(folder) if upload and shards else nullcontext() as uploader:
        # 2) Encode them, and upload each as soon as it is encoded.
        if left:
            encoder = ShardEncoder(folder, model=model, device=device, dtype=dtype)
            shown.start("encoding", total=sum(shard.records for shard in left))
            for shard in left:
                encoder.encode(shard, shown)
                if uploader is not None and uploader.upload(shard):
                    uploaded.append(shard.number)
            shown.finish()
        # 3) Upload the shards that were encoded before.
        if uploader is not None and complete:
            earlier = [shard for shard in shards if shard.number in complete]
            shown.start("uploading", total=sum(shard.records for shard in earlier))
            for shard in earlier:
                if uploader.upload(shard):
                    uploaded.append(shard.number)
                shown.advance(shard.records)
            shown.finish()
    numbers = tuple(shard.number for shard in left)
    return Encoding(
        numbers, tuple(sorted(complete)), sum(shard.tokens for shard in left), tuple(sorted(uploaded))
    )


class ShardEncoder:
    """A loaded model that computes the keys of shards. The constructor loads the model.

    Args:
        folder: folder of the plan.
        model: folder or hub id of the model; default is the name with which the store was made.
        device: device of the model; default is the GPU if torch finds one, else the CPU.
        dtype: dtype of the weights; default is float32 on the CPU, and the saved dtype on a GPU.

    Raises:
        ConfigError: the model cannot be loaded.
        PlanError: the folder has no plan, or its file is damaged.
        FingerprintMismatchError: the model is not the model of the store; or, for an encoder-decoder model,
            the tokenizer or its languages differ from those of the store.
    """

    def __init__(
        self,
        folder: PlanFolder,
        *,
        model: str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        identity = folder.identity
        base, tokenizer = load_model(model or identity.model, device=device, dtype=dtype)
        check_matches(base, tokenizer if identity.is_paired else None, identity)
        self._encoder = Encoder.for_store(base, folder)
        self._reader = TextReader(self._encoder, tokenizer, identity.max_length, identity.stride)
        self._folder = folder

    def encode(self, shard: Shard, progress: Progress) -> None:
        """Compute the keys of a shard, and write them into the folder of the plan.

        Args:
            shard: the shard.
            progress: progress display, which receives the number of tokens of each batch.

        Raises:
            PlanError: a file of the plan is damaged, or the plan was committed or dropped.
            ModelOutputError: a key is NaN or infinite; the message names the document.
            InvalidVectorError: a key does not fit into the plan's dtype; the message names the document.
            DiskFullError: the disk of the folder is full.
        """
        documents = self._folder.read_documents(shard)
        self._folder.write_keys(shard, self._compute_keys(documents, progress))

    def _compute_keys(self, documents: list[PlannedDocument], progress: Progress) -> NDArray[Any]:
        """Compute a key for each record of some documents.

        Args:
            documents: all documents of one shard.
            progress: progress display, which receives the number of encoded tokens of each batch.

        Returns:
            Keys in the plan's dtype, shape (records, dim), in the order of the documents and their tokens.

        Raises:
            ModelOutputError: a key is NaN or infinite.
            InvalidVectorError: a key is too large for the plan's dtype.
        """
        plan = self._folder.plan
        counts = self._folder.count_records(documents)
        origins = np.cumsum(counts) - counts - plan.first  # row of token 0 of each document
        keys = np.empty((int(counts.sum()), plan.identity.dim), plan.dtype)
        sources = None
        if plan.identity.is_paired:
            sources = self._reader.document_tokenizer.tokenize_sources(
                [planned.document.metadata[SOURCE] for planned in documents]
            )
        batches = pack_windows(
            [planned.document.tokens for planned in documents],
            prefix=plan.prefix,
            max_length=plan.identity.max_length,
            stride=plan.identity.stride,
            batch_tokens=plan.batch_tokens,
            sources=sources,
        )
        for batch in batches:
            computed = self._encoder.compute_keys(batch.input_ids, batch.at, batch.source).cpu().numpy()
            self._encoder.check_once(batch.input_ids, batch.source)
            with np.errstate(over="ignore"):
                rounded = computed.astype(plan.dtype)
            is_finite = np.isfinite(rounded).all(1)
            if not is_finite.all():
                row = int(np.argmin(is_finite))
                id = documents[int(batch.documents[row])].document.id
                if np.isfinite(computed[row]).all():
                    raise InvalidVectorError(f"document {id!r}: a key is out of the range of {plan.dtype}")
                error = create_not_finite_error(self._encoder.model, "states")
                raise ModelOutputError(f"document {id!r}: {error}")
            keys[origins[batch.documents] + batch.positions] = rounded
            progress.advance(len(batch.at))
        return keys


class ShardUploader:
    """Uploads the keys of encoded shards to the engine of the store, before the documents are committed.

    An upload only makes the commit faster: the folder of the plan also keeps the keys. The name of an upload
    contains the plan, the shard, and the SHA-256 of the keys. By this name the commit recognizes that the
    engine has exactly these keys.

    The constructor connects to the engine. As a context manager, the object closes the connection.

    Args:
        folder: folder of the plan.

    Raises:
        ConfigError: the engine of the store accepts no uploads.
        DatastoreNotFoundError: the location that the plan names has no keys any more.
        NotOwnerError: the keys at this location belong to another store.
        StoreUnavailableError: the engine cannot be reached.
    """

    def __init__(self, folder: PlanFolder) -> None:
        target = folder.plan.target
        if target is None:
            raise ConfigError(
                "the engine of the plan's store accepts no uploads: encode without uploading; the commit "
                "then adds the keys from the folder"
            )
        self._folder = folder
        self._group = target.group
        self._datastore = target.open(folder.identity, folder.plan.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._datastore.close()

    def upload(self, shard: Shard) -> bool:
        """Upload the keys of an encoded shard, and note in the folder of the plan that they are uploaded.

        Returns True if keys were uploaded, and False if the engine has all keys of the shard already.

        Args:
            shard: the shard.

        Raises:
            PlanError: the shard is not encoded or is damaged, or the plan was committed or dropped.
            StoreUnavailableError: the engine cannot be reached.
        """
        folder = self._folder
        if not folder.has_documents():
            raise PlanError(f"the plan in {folder.path} was committed or dropped meanwhile")
        documents, digest = folder.read_documents(shard), folder.read_digest(shard)
        keys, name = folder.open_keys(shard), folder.name_upload(shard, digest)
        start = folder.plan.start + shard.start
        positions = id_ranges_from_positions(np.array([start]), np.array([start + shard.tokens]))
        if self._datastore.count_uploaded(positions, name, self._group) == shard.records:
            folder.note_upload(shard, digest)
            return False
        owner, offsets, tokens = folder.list_records(documents)
        ids = record_ids(folder.compute_starts(shard, documents)[owner] + offsets, tokens)
        for begin in range(0, len(ids), _BLOCK_RECORDS):
            rows = slice(begin, begin + _BLOCK_RECORDS)
            groups = np.full(len(ids[rows]), self._group, np.int32)
            self._datastore.upload(ids[rows], keys[rows].astype(np.float32, copy=False), groups, name)
            failpoint("plan.uploading")
        self._datastore.flush()
        folder.note_upload(shard, digest)
        return True
