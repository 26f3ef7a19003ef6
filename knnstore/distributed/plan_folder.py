"""The folder of a plan: its documents in shards, and the keys of the shards that are encoded.

    DIR/plan/plan.json        the plan; a plan exists as soon as this folder has its name
    DIR/plan/00000.jsonl      documents of shard 0: id, hash, metadata, tags, number of tokens
    DIR/plan/00000.tokens     token ids of these documents, uint32, little-endian
    DIR/plan/<hash>.safetensors   the projection of the keys, if the store has one
    DIR/keys/00000-<hash>.keys    keys of shard 0, float16 or float32, little-endian, shape (n, dim)
    DIR/keys/00000.json       number and SHA-256 of the keys, and whether they are uploaded; written last

Each file has a SHA-256, in `plan.json` or beside the keys. The folder may be on a network file system if
renaming a file is atomic there and fsync is durable.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from knnstore.durable import open_file, read_file, sync_directory
from knnstore.errors import PlanError
from knnstore.failpoints import failpoint
from knnstore.space import medium_errors
from knnstore.store import PLAN_FILES, Identity, NewDocument, UploadTarget, Weights, load_weights

_FORMAT = 1
_BLOCK_BYTES = 1 << 22
_DIGEST = re.compile("[0-9a-f]{64}")
_BAD_CONTENT = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged JSON file causes."""


@dataclass(frozen=True)
class Shard:
    """A part of a plan's documents, which one process encodes."""

    number: int
    """Number of the shard, from 0."""
    documents: int
    """Number of documents, >= 1."""
    tokens: int
    """Number of tokens."""
    records: int
    """Number of records (tokens with a key)."""
    start: int
    """Position of the first token, counted from the first position of the plan's lease."""
    sha256: str
    """SHA-256 of the file of documents followed by the file of tokens, hexadecimal."""


@dataclass(frozen=True)
class Plan:
    """A description of documents that will be added to a store together."""

    id: str
    """Random id of the plan and of its lease in the store's catalog."""
    store: str
    """Id of the store."""
    domain: str
    """Domain of all documents."""
    identity: Identity
    """Identity of the store: its model, and how keys are computed."""
    dtype: str
    """Dtype of the keys in the folder, ``float16`` or ``float32``."""
    prefix: tuple[int, ...]
    """The tokens that precede every document; empty for no prefix."""
    batch_tokens: int
    """Number of tokens in one forward pass, padding included."""
    added: int
    """Number of documents whose ids were new in the domain when the plan was made."""
    replaced: int
    """Number of documents that replace a stored version."""
    content: str
    """SHA-256 over domain, ids, texts, metadata and tags of the documents, hexadecimal."""
    start: int
    """First position of the plan's lease."""
    target: UploadTarget | None
    """Engine to which workers may upload keys; None if it takes no uploads."""
    shards: tuple[Shard, ...]
    """The shards; document for document in the order in which they were given."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def first(self) -> int:
        """Position in a document of the first token with a record: 1 without a prefix, else 0."""
        return 0 if self.prefix else 1


@dataclass(frozen=True)
class PlannedDocument:
    """A document of a shard."""

    document: NewDocument
    """The document with its tokens. Tags of the stored version are added at the commit."""
    replaces: int | None
    """Position of the stored version that the document replaces; None for a new document."""


class PlanFolder:
    """Reads and writes the folder of a plan.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan_files = self.path / PLAN_FILES
        self.key_files = self.path / "keys"

    @cached_property
    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: the folder has no plan, or its file is damaged.
        """
        file = self.plan_files / "plan.json"
        try:
            text = read_file(file)
        except OSError as error:
            raise PlanError(
                f"{self.path} has no plan: `knnstore add FILES --domain NAME --plan {self.path}` makes one"
            ) from error
        try:
            return _parse_plan(text)
        except _BAD_CONTENT as error:
            raise PlanError(
                f"{file} is damaged or of another version of knnstore: drop the plan and make it again"
            ) from error

    @property
    def exists(self) -> bool:
        """True if the folder has a plan."""
        return self.plan_files.exists()

    def load_weights(self, name: str) -> Weights:
        """Read the projection of the keys; see `KNNStore.load_weights`."""
        return load_weights(self.plan_files, name)

    @property
    def identity(self) -> Identity:
        """Identity of the plan's store."""
        return self.plan.identity

    def read_documents(self, shard: Shard) -> list[PlannedDocument]:
        """Read the documents of a shard.

        Raises:
            PlanError: a file of the shard is missing or damaged.
        """
        rows_file, tokens_file = self._list_document_files(self.plan_files, shard.number)
        try:
            rows, token_bytes = read_file(rows_file), read_file(tokens_file)
        except OSError as error:
            raise PlanError(f"a file of the plan cannot be read: {error}; {_AGAIN}") from error
        if hashlib.sha256(rows + token_bytes).hexdigest() != shard.sha256:
            raise PlanError(f"{rows_file} or {tokens_file.name} is damaged; {_AGAIN}")
        try:
            return _parse_documents(rows, np.frombuffer(token_bytes, "<u4"), shard, self.plan.domain)
        except _BAD_CONTENT as error:
            raise PlanError(f"{rows_file} is damaged; {_AGAIN}") from error

    def count_records(self, documents: Sequence[PlannedDocument]) -> NDArray[np.int64]:
        """Return the number of records (tokens with a key) of each document, int64, shape (n,)."""
        return np.array([len(of.document.tokens) - self.plan.first for of in documents], np.int64)

    def list_records(
        self, documents: Sequence[PlannedDocument]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the records of documents, in the order of the keys of a shard.

        Args:
            documents: all documents of the shard.

        Returns:
            For each record the index of its document, the position of its token in the document, and the
            token id; int64, each of shape (n,).
        """
        counts, first = self.count_records(documents), self.plan.first
        owner = np.repeat(np.arange(len(documents)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first
        tokens = np.concatenate([of.document.tokens[first:] for of in documents]).astype(np.int64)
        return owner, offsets, tokens

    def compute_starts(self, shard: Shard, documents: Sequence[PlannedDocument]) -> NDArray[np.int64]:
        """Return the position in the store of the first token of each document of a shard, int64, (n,).

        Args:
            shard: the shard.
            documents: all documents of the shard.
        """
        lengths = np.array([len(of.document.tokens) for of in documents], np.int64)
        starts: NDArray[np.int64] = self.plan.start + shard.start + np.cumsum(lengths) - lengths
        return starts

    def write_keys(self, shard: Shard, keys: NDArray[Any]) -> None:
        """Write the keys of a shard, durably. If several processes write the same shard, the last one counts.

        Args:
            shard: the shard.
            keys: keys in the plan's dtype, shape (n, dim), in the order of the tokens.

        Raises:
            PlanError: the plan was committed or dropped meanwhile; nothing is written.
            DiskFullError: the disk of the folder is full; the shard counts as not encoded, unless it was
                encoded before.
        """
        if not self.has_documents():
            raise PlanError(f"the plan in {self.path} was committed or dropped meanwhile")
        content = np.ascontiguousarray(keys, np.dtype(self.plan.dtype).newbyteorder("<")).data.cast("B")
        digest = hashlib.sha256(content).hexdigest()
        with medium_errors(self.key_files):
            self.key_files.mkdir(exist_ok=True)
            self._replace(self._name_keys(shard, digest), content)
            failpoint("plan.keys.renamed")
            self._describe_keys(shard, digest, is_uploaded=False)
        failpoint("plan.keys.published")

    def note_upload(self, shard: Shard, digest: str) -> None:
        """Note that keys of a shard are uploaded.

        Args:
            shard: the shard.
            digest: SHA-256 of the keys, whose file is in the folder.

        Raises:
            DiskFullError: the disk of the folder is full.
        """
        with medium_errors(self.key_files):
            self._describe_keys(shard, digest, is_uploaded=True)

    def is_uploaded(self, shard: Shard) -> bool:
        """Check whether the folder has the note that the keys of a shard are uploaded.

        The engine may have lost them since: the commit asks it.
        """
        try:
            return self._read_description(shard)["uploaded"] is True
        except (PlanError, KeyError):
            return False

    def name_upload(self, shard: Shard, digest: str) -> str:
        """Return the name under which keys of a shard are uploaded.

        Args:
            shard: the shard.
            digest: SHA-256 of the keys, hexadecimal.
        """
        return f"{self.plan.id}/{shard.number}/{digest[:16]}"

    def has_documents(self) -> bool:
        """Check whether the folder still has this plan with its documents: not committed, not dropped."""
        try:
            is_same = PlanFolder(self.path).plan.id == self.plan.id
        except PlanError:
            return False
        return is_same and self._list_document_files(self.plan_files, 0)[0].exists()

    def find_complete_shards(self, shards: Iterable[Shard]) -> set[int]:
        """Return the numbers of the shards whose keys are complete and undamaged. The keys are read."""
        complete = set[int]()
        for shard in shards:
            with suppress(PlanError):
                self.open_keys(shard)
                complete.add(shard.number)
        return complete

    def open_keys(self, shard: Shard) -> NDArray[Any]:
        """Map the keys of a shard into memory, after a check of size and SHA-256.

        Args:
            shard: the shard.

        Returns:
            Keys in the plan's dtype, read-only, shape (records, dim).

        Raises:
            PlanError: the shard is not encoded, or its keys are damaged.
        """
        dtype, dim = np.dtype(self.plan.dtype).newbyteorder("<"), self.identity.dim
        digest = self.read_digest(shard)
        data = self.key_files / self._name_keys(shard, digest)
        try:
            is_sound = data.stat().st_size == shard.records * dim * dtype.itemsize
            is_sound = is_sound and _hash_file(data) == digest
        except OSError:
            is_sound = False
        if not is_sound:
            raise PlanError(f"{self._name_shard(shard)} is damaged: {data}")
        if not shard.records:
            return np.zeros((0, dim), dtype)
        return np.memmap(data, dtype, "r", shape=(shard.records, dim))

    def read_digest(self, shard: Shard) -> str:
        """Return the SHA-256 that the keys of a shard must have, hexadecimal. The keys are not read.

        Raises:
            PlanError: the shard is not encoded.
        """
        digest: str = self._read_description(shard)["sha256"]
        return digest

    def remove_data(self) -> None:
        """Remove documents and keys; `plan.json` stays, so that a second commit finds the plan."""
        shutil.rmtree(self.key_files, ignore_errors=True)
        for file in self.plan_files.glob("*"):
            if file.name != "plan.json":
                file.unlink(missing_ok=True)

    def remove_plan(self) -> None:
        """Remove the plan with its keys, so that the folder can take another plan."""
        self.__dict__.pop("plan", None)
        shutil.rmtree(self.plan_files, ignore_errors=True)
        shutil.rmtree(self.key_files, ignore_errors=True)

    def remove(self) -> None:
        """Remove the plan with its keys. Other files of the folder stay; an empty folder is removed."""
        self.remove_plan()
        for folder in self.path.glob(".making-*"):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _name_shard(self, shard: Shard) -> str:
        """Return a phrase for a shard, for messages."""
        return f"shard {shard.number} of {len(self.plan.shards)}"

    def _read_description(self, shard: Shard) -> dict[str, Any]:
        """Read the description of a shard's keys, which `_describe_keys` has written.

        Raises:
            PlanError: the shard is not encoded, or its description is damaged.
        """
        try:
            description: dict[str, Any] = json.loads(read_file(self.key_files / f"{shard.number:05}.json"))
            is_sound = description["plan"] == self.plan.id and _is_digest(description["sha256"])
        except (OSError, *_BAD_CONTENT) as error:
            raise PlanError(f"{self._name_shard(shard)} is not encoded") from error
        if not is_sound:
            raise PlanError(f"{self._name_shard(shard)} is not encoded")
        return description

    def _describe_keys(self, shard: Shard, digest: str, *, is_uploaded: bool) -> None:
        """Write the description of a shard's keys, durably; with it, the shard is encoded.

        Args:
            shard: the shard.
            digest: SHA-256 of the keys, whose file is in the folder.
            is_uploaded: True if the keys are uploaded.
        """
        description = {
            "plan": self.plan.id, "records": shard.records, "sha256": digest, "uploaded": is_uploaded
        }  # fmt: skip
        self._replace(f"{shard.number:05}.json", json.dumps(description).encode())

    def _replace(self, name: str, content: bytes | memoryview) -> None:
        """Create or replace a file of the keys, atomically and durably, also beside other processes.

        Args:
            name: name of the file.
            content: its whole content.
        """
        temporary = self.key_files / f"{name}.{uuid4().hex}.tmp"
        try:
            _write_durably(temporary, content)
            failpoint("plan.keys.written")
            os.replace(temporary, self.key_files / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(self.key_files)

    @staticmethod
    def _name_keys(shard: Shard, digest: str) -> str:
        """Return the file name of a shard's keys, which contains their SHA-256, so that both always agree."""
        return f"{shard.number:05}-{digest}.keys"

    @staticmethod
    def _list_document_files(folder: Path, number: int) -> tuple[Path, Path]:
        """Return the paths of a shard's documents, and of their tokens."""
        return folder / f"{number:05}.jsonl", folder / f"{number:05}.tokens"


_AGAIN = "drop the plan, and make it again"


class ShardWriter:
    """Writes the documents of a new plan, shard by shard, into a folder that nobody reads yet.

    Args:
        folder: folder of the plan.
        store: id of the store.
        first: position in a document of the first token with a record, see `Plan.first`.
    """

    def __init__(self, folder: PlanFolder, store: str, first: int) -> None:
        self._folder = folder
        self._first = first
        self._making = folder.path / f".making-{store}"
        shutil.rmtree(self._making, ignore_errors=True)
        self._making.mkdir(parents=True)
        self.shards: list[Shard] = []
        """The shards that were written."""
        self._tokens = 0
        self._content = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._making, ignore_errors=True)
        with suppress(OSError):
            self._folder.path.rmdir()

    @property
    def content(self) -> str:
        """SHA-256 over the documents so far, hexadecimal. It does not depend on the division into shards."""
        return self._content.hexdigest()

    def write_shard(self, documents: list[PlannedDocument]) -> None:
        """Write the next shard.

        Args:
            documents: its documents, at least one.
        """
        number = len(self.shards)
        rows_file, tokens_file = PlanFolder._list_document_files(self._making, number)
        lines = list(_describe_documents(documents))
        rows = "".join(f"{line}\n" for line in lines).encode()
        tokens = b"".join(of.document.tokens.astype("<u4").tobytes() for of in documents)
        with medium_errors(self._making):
            for file, content in ((rows_file, rows), (tokens_file, tokens)):
                _write_durably(file, content)
        self._content.update(rows)
        digest, count = hashlib.sha256(rows + tokens).hexdigest(), len(tokens) // 4
        records = count - self._first * len(documents)
        self.shards.append(Shard(number, len(documents), count, records, self._tokens, digest))
        self._tokens += count

    def finish(self, plan: Plan, weights: Path | None) -> None:
        """Write the plan, and give the folder its name.

        Args:
            plan: the plan of the shards that were written.
            weights: file with the projection of the keys; None if keys are not projected.
        """
        if weights is not None:
            _write_durably(self._making / weights.name, read_file(weights))
        text = json.dumps(asdict(plan))
        digest = hashlib.sha256(text.encode()).hexdigest()
        content = json.dumps({"format": _FORMAT, "sha256": digest, "plan": text})
        _write_durably(self._making / "plan.json", content.encode())
        sync_directory(self._making)
        failpoint("plan.written")
        os.replace(self._making, self._folder.plan_files)
        failpoint("plan.renamed")
        sync_directory(self._folder.path)


def _describe_documents(documents: list[PlannedDocument]) -> Iterator[str]:
    """Yield each document as one line of JSON, with the number of its tokens but without the tokens."""
    for of in documents:
        document = of.document
        values = {
            "id": document.id,
            "content_hash": document.content_hash,
            "metadata": dict(document.metadata),
            "tags": sorted(document.tags),
            "tokens": len(document.tokens),
            "replaces": of.replaces,
        }
        yield json.dumps(values)


def _parse_plan(text: bytes) -> Plan:
    """Return the plan of a file `plan.json`.

    Raises one of `_BAD_CONTENT` if the file is damaged, of another format, or has impossible values.
    """
    content = json.loads(text)
    if content["format"] != _FORMAT:
        raise ValueError("another format")
    if hashlib.sha256(content["plan"].encode()).hexdigest() != content["sha256"]:
        raise ValueError("another hash")
    values = json.loads(content["plan"])
    values["identity"] = Identity(**values["identity"])
    values["prefix"] = tuple(values["prefix"])
    values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
    values["target"] = UploadTarget(**values["target"]) if values["target"] is not None else None
    plan = Plan(**values)
    integers = [
        plan.batch_tokens, plan.added, plan.replaced, *plan.prefix, plan.identity.dim, plan.start
    ]  # fmt: skip
    start = 0
    for number, shard in enumerate(plan.shards):  # their numbers are parts of file names
        sizes = [shard.number, shard.documents, shard.tokens, shard.records, shard.start]
        integers += sizes
        if sizes[0] != number or shard.start != start or not _is_digest(shard.sha256):
            raise ValueError("wrong shards")
        if shard.records != shard.tokens - plan.first * shard.documents:
            raise ValueError("wrong numbers")
        start += shard.tokens
    names = [plan.id, plan.store, plan.domain, plan.content]
    if plan.target is not None:
        integers.append(plan.target.group)
        names += [plan.target.adapter, plan.target.location, *plan.target.params]
    if any(type(value) is not int or value < 0 for value in integers) or not plan.shards:
        raise ValueError("a number is none")
    if not all(isinstance(name, str) for name in names) or plan.dtype not in ("float16", "float32"):
        raise ValueError("a name is none")
    return plan


def _parse_documents(
    rows: bytes, tokens: NDArray[np.uint32], shard: Shard, domain: str
) -> list[PlannedDocument]:
    """Return the documents of a shard.

    Raises one of `_BAD_CONTENT` if a row has missing or other fields, or the numbers do not match the shard.

    Args:
        rows: one line of JSON for each document.
        tokens: token ids of all documents, shape (n,).
        shard: the shard.
        domain: domain of the documents.
    """
    position, documents = 0, []
    for row in map(json.loads, rows.splitlines()):
        count, replaces, tags = row.pop("tokens"), row.pop("replaces"), frozenset(row.pop("tags"))
        if type(count) is not int or count < 1 or not (replaces is None or type(replaces) is int):
            raise ValueError("a number is none")
        part = tokens[position : position + count]
        position += count
        documents.append(PlannedDocument(NewDocument(**row, domain=domain, tokens=part, tags=tags), replaces))
    if (len(documents), position, len(tokens)) != (shard.documents, shard.tokens, shard.tokens):
        raise ValueError("another number of documents or tokens")
    return documents


def _is_digest(value: object) -> bool:
    """Check whether a value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _write_durably(file: Path, content: bytes | memoryview) -> None:
    """Write a file and make its content durable."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
