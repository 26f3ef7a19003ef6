"""The folder of a plan: its documents in shards, and the keys of the shards that are encoded.

    DIR/plan/plan.json        the plan; the folder ``plan`` gets its name when all its files are written
    DIR/plan/00000.jsonl      documents of shard 0: id, hash, metadata, tags, number of tokens
    DIR/plan/00000.tokens     token ids of these documents, uint32, little-endian
    DIR/plan/<hash>.safetensors   the projection of the keys, if the store has one
    DIR/keys/00000-<hash>.keys    keys of shard 0, float16 or float32, little-endian, shape (n, dim)
    DIR/keys/00000.json       number and SHA-256 of the keys, and whether they are uploaded; written last

A shard is a part of the plan's documents. Each file has a SHA-256: of documents and tokens in `plan.json`, of
keys in the JSON file of the shard, of the projection in its name. The folder may be on a network file system
if renaming a file is atomic there and fsync is durable.
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
from knnstore.space import convert_disk_errors
from knnstore.store import PLAN_FILES, Identity, NewDocument, UploadTarget, Weights, load_weights

_FORMAT = 1
_BLOCK_BYTES = 1 << 22
_DIGEST = re.compile("[0-9a-f]{64}")
_BAD_CONTENT = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions that parsing a damaged JSON file may raise."""


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
    """Number of tokens in earlier shards of the plan."""
    sha256: str
    """SHA-256 of the file of documents followed by the file of tokens, hexadecimal."""


@dataclass(frozen=True)
class Plan:
    """A description of documents that will be added to a store together.

    The plan's lease is the range of positions (numbers of tokens in the store) that the store has reserved.
    """

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
    """Ids of the tokens that the model gets before every document; empty for no prefix."""
    batch_tokens: int
    """Number of tokens in one forward pass, padding included."""
    added: int
    """Number of documents whose ids were new in the domain when the plan was made."""
    replaced: int
    """Number of documents that replace a stored version."""
    content: str
    """SHA-256 over the rows of all documents (id, SHA-256 of the text, metadata, tags), hexadecimal."""
    start: int
    """First position of the plan's lease."""
    target: UploadTarget | None
    """Engine to which workers may upload keys; None if the engine accepts no uploads."""
    shards: tuple[Shard, ...]
    """The shards by number. Their documents are in the order in which the caller gave them."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def first(self) -> int:
        """Index in a document of the first token that gets a key: 1 if `prefix` is empty, else 0."""
        return 0 if self.prefix else 1


@dataclass(frozen=True)
class PlannedDocument:
    """A document of a shard."""

    document: NewDocument
    """The document with its tokens. The commit adds the tags of the stored version."""
    replaces: int | None
    """Position in the store of the first token of the stored version that the document replaces; None for a
    new document."""


class PlanFolder:
    """Reads and writes the folder of a plan: the plan, its documents, and the keys of its shards.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.plan_files = self.path / PLAN_FILES
        self.key_files = self.path / "keys"

    @cached_property
    def plan(self) -> Plan:
        """The plan, read from ``plan.json`` at the first access.

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
        """True if the folder has a plan, also a committed plan."""
        return self.plan_files.exists()

    def load_weights(self, name: str) -> Weights:
        """Read the weights that project hidden states to keys, as `KNNStore.load_weights` reads them.

        Args:
            name: name of the file in the folder of the plan, see `Identity.projection`.

        Raises:
            CorruptWeightsError: the file is missing or damaged.
        """
        return load_weights(self.plan_files, name)

    @property
    def identity(self) -> Identity:
        """Identity of the plan's store: its model and parameters."""
        return self.plan.identity

    def read_documents(self, shard: Shard) -> list[PlannedDocument]:
        """Read the documents of a shard, and check their SHA-256.

        Raises:
            PlanError: a file of the shard is missing or damaged. Files are missing, for example, after the
                commit of the plan, which deletes them.
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
        return np.array([len(planned.document.tokens) - self.plan.first for planned in documents], np.int64)

    def list_records(
        self, documents: Sequence[PlannedDocument]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """List the records (tokens with a key) of documents, in the order of the documents and tokens.

        If `documents` are all documents of a shard, this is the order of the shard's keys.

        Returns:
            For each record the index of its document, the index of its token in the document, and the
            token id; int64, each of shape (n,).
        """
        counts, first = self.count_records(documents), self.plan.first
        owner = np.repeat(np.arange(len(documents)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first
        tokens = np.concatenate([planned.document.tokens[first:] for planned in documents]).astype(np.int64)
        return owner, offsets, tokens

    def compute_starts(self, shard: Shard, documents: Sequence[PlannedDocument]) -> NDArray[np.int64]:
        """Return the position in the store of the first token of each document, int64, shape (n,).

        Args:
            shard: the shard.
            documents: all documents of the shard.
        """
        lengths = np.array([len(planned.document.tokens) for planned in documents], np.int64)
        starts: NDArray[np.int64] = self.plan.start + shard.start + np.cumsum(lengths) - lengths
        return starts

    def write_keys(self, shard: Shard, keys: NDArray[Any]) -> None:
        """Write the keys of a shard durably; with them, the shard is encoded.

        Earlier keys of the shard are no longer used. Several processes may write the same shard at the same
        time: the keys of the process that ends last are used.

        Args:
            shard: the shard.
            keys: key of each record in the plan's dtype, shape (records, dim), in the order of
                `list_records`.

        Raises:
            PlanError: the plan was committed or dropped meanwhile; nothing is written.
            DiskFullError: the disk of the folder is full; the shard counts as not encoded, unless it was
                encoded before.
        """
        if not self.has_documents():
            raise PlanError(f"the plan in {self.path} was committed or dropped meanwhile")
        content = np.ascontiguousarray(keys, np.dtype(self.plan.dtype).newbyteorder("<")).data.cast("B")
        digest = hashlib.sha256(content).hexdigest()
        with convert_disk_errors(self.key_files):
            self.key_files.mkdir(exist_ok=True)
            self._replace_file(self._name_keys(shard, digest), content)
            failpoint("plan.keys.renamed")
            self._describe_keys(shard, digest, is_uploaded=False)
        failpoint("plan.keys.published")

    def note_upload(self, shard: Shard, digest: str) -> None:
        """Save durably that the keys of a shard are uploaded to the engine of the store.

        Args:
            shard: the shard, which is encoded.
            digest: SHA-256 of the uploaded keys, hexadecimal.

        Raises:
            DiskFullError: the disk of the folder is full.
        """
        with convert_disk_errors(self.key_files):
            self._describe_keys(shard, digest, is_uploaded=True)

    def is_uploaded(self, shard: Shard) -> bool:
        """Check whether a worker has noted that the keys of a shard are uploaded.

        The engine may have lost the keys since then, so the commit also counts the records in the engine.
        """
        try:
            return self._read_description(shard)["uploaded"] is True
        except (PlanError, KeyError):
            return False

    def name_upload(self, shard: Shard, digest: str) -> str:
        """Return the name of the upload of a shard's keys: ``PLAN/SHARD/BEGINNING OF THE SHA-256``.

        Args:
            shard: the shard.
            digest: SHA-256 of the keys, hexadecimal; 16 digits are used.
        """
        return f"{self.plan.id}/{shard.number}/{digest[:16]}"

    def has_documents(self) -> bool:
        """Check whether the folder still has this plan with its documents. Reads `plan.json` again.

        Returns False if the plan was dropped or replaced by another plan, or if a commit has removed the
        documents.
        """
        try:
            is_same = PlanFolder(self.path).plan.id == self.plan.id
        except PlanError:
            return False
        return is_same and self._list_document_files(self.plan_files, 0)[0].exists()

    def find_complete_shards(self, shards: Iterable[Shard]) -> set[int]:
        """Return the numbers of the shards whose keys are complete and undamaged.

        All keys of the shards are read, to check their SHA-256.
        """
        complete = set[int]()
        for shard in shards:
            with suppress(PlanError):
                self.open_keys(shard)
                complete.add(shard.number)
        return complete

    def open_keys(self, shard: Shard) -> NDArray[Any]:
        """Check size and SHA-256 of a shard's file of keys, and map the file into memory.

        Args:
            shard: the shard.

        Returns:
            Keys in the plan's dtype, read-only, shape (records, dim), in the order of `list_records`.

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
        """Return the saved SHA-256 of a shard's keys, hexadecimal. The keys are not read.

        Raises:
            PlanError: the shard is not encoded.
        """
        digest: str = self._read_description(shard)["sha256"]
        return digest

    def remove_data(self) -> None:
        """Remove all files except `plan.json`, by which a second commit recognizes the plan."""
        shutil.rmtree(self.key_files, ignore_errors=True)
        for file in self.plan_files.glob("*"):
            if file.name != "plan.json":
                file.unlink(missing_ok=True)

    def remove_plan(self) -> None:
        """Remove the plan with its documents and keys, so that another plan can be made in the folder."""
        self.__dict__.pop("plan", None)
        shutil.rmtree(self.plan_files, ignore_errors=True)
        shutil.rmtree(self.key_files, ignore_errors=True)

    def remove(self) -> None:
        """Remove the plan, and files that an interrupted `make_plan` left.

        The folder itself is removed too if it is empty afterwards. Other files in it stay.
        """
        self.remove_plan()
        for folder in self.path.glob(".making-*"):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _name_shard(self, shard: Shard) -> str:
        """Return a name of a shard for messages, for example "shard 3 of 8"."""
        return f"shard {shard.number} of {len(self.plan.shards)}"

    def _read_description(self, shard: Shard) -> dict[str, Any]:
        """Read the JSON file that describes a shard's keys, and return its values by name.

        The values are those that `_describe_keys` writes. The keys are not read.

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
        """Write the JSON file that describes a shard's keys, durably. From then on, the shard is encoded.

        Args:
            shard: the shard.
            digest: SHA-256 of the keys; the file of these keys is in the folder already.
            is_uploaded: True if the keys are uploaded to the engine.
        """
        description = {
            "plan": self.plan.id, "records": shard.records, "sha256": digest, "uploaded": is_uploaded
        }  # fmt: skip
        self._replace_file(f"{shard.number:05}.json", json.dumps(description).encode())

    def _replace_file(self, name: str, content: bytes | memoryview) -> None:
        """Create or replace a file in the folder ``keys``, atomically and durably.

        Several processes may replace the same file at the same time.

        Args:
            name: name of the file.
            content: new content of the file.
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
        """Return the file name of a shard's keys; it contains the SHA-256 of the keys."""
        return f"{shard.number:05}-{digest}.keys"

    @staticmethod
    def _list_document_files(folder: Path, number: int) -> tuple[Path, Path]:
        """Return the paths of two files of a shard: its documents (JSON Lines), and their tokens.

        Args:
            folder: folder of both files.
            number: number of the shard.
        """
        return folder / f"{number:05}.jsonl", folder / f"{number:05}.tokens"


_AGAIN = "drop the plan, and make it again"


class ShardWriter:
    """Writes the documents of a new plan, shard by shard, into a temporary folder.

    The constructor creates the temporary folder inside the folder of the plan. `finish` renames it, and the
    plan exists. Without `finish`, the end of the ``with`` block deletes the temporary folder.

    Args:
        folder: folder of the plan; it is created if it does not exist.
        store: id of the store.
        first: index in a document of the first token that gets a key, see `Plan.first`.
    """

    def __init__(self, folder: PlanFolder, store: str, first: int) -> None:
        self._folder = folder
        self._first = first
        self._making = folder.path / f".making-{store}"
        shutil.rmtree(self._making, ignore_errors=True)
        self._making.mkdir(parents=True)
        self.shards: list[Shard] = []
        """The shards that were written, by number."""
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
        """SHA-256 over the rows of all documents so far, hexadecimal. It does not depend on the shards."""
        return self._content.hexdigest()

    def write_shard(self, documents: list[PlannedDocument]) -> None:
        """Write documents as the next shard, and append its description to `shards`.

        Args:
            documents: the documents of the shard, at least one.

        Raises:
            DiskFullError: the disk of the folder is full.
        """
        number = len(self.shards)
        rows_file, tokens_file = PlanFolder._list_document_files(self._making, number)
        lines = list(_describe_documents(documents))
        rows = "".join(f"{line}\n" for line in lines).encode()
        tokens = b"".join(planned.document.tokens.astype("<u4").tobytes() for planned in documents)
        with convert_disk_errors(self._making):
            for file, content in ((rows_file, rows), (tokens_file, tokens)):
                _write_durably(file, content)
        self._content.update(rows)
        digest, count = hashlib.sha256(rows + tokens).hexdigest(), len(tokens) // 4
        records = count - self._first * len(documents)
        self.shards.append(Shard(number, len(documents), count, records, self._tokens, digest))
        self._tokens += count

    def finish(self, plan: Plan, weights: Path | None) -> None:
        """Write `plan.json` durably, and rename the temporary folder to ``plan``. Then the plan exists.

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
    """Yield each document as one line of JSON, with the number of its tokens instead of the tokens."""
    for planned in documents:
        document = planned.document
        values = {
            "id": document.id,
            "content_hash": document.content_hash,
            "metadata": dict(document.metadata),
            "tags": sorted(document.tags),
            "tokens": len(document.tokens),
            "replaces": planned.replaces,
        }
        yield json.dumps(values)


def _parse_plan(text: bytes) -> Plan:
    """Parse the content of a file `plan.json`, and return the plan.

    Raises one of `_BAD_CONTENT` if the file is damaged, has another format, or has impossible values.
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
        raise ValueError("a number is not valid")
    if not all(isinstance(name, str) for name in names) or plan.dtype not in ("float16", "float32"):
        raise ValueError("a name is not valid")
    return plan


def _parse_documents(
    rows: bytes, tokens: NDArray[np.uint32], shard: Shard, domain: str
) -> list[PlannedDocument]:
    """Parse the content of a shard's files, and return the documents.

    Raises one of `_BAD_CONTENT` if a row lacks a field or has an unknown field, or if the numbers of
    documents and tokens are not those of the shard.

    Args:
        rows: one line of JSON for each document, as `_describe_documents` yields them.
        tokens: token ids of all documents together, shape (n,).
        shard: the shard.
        domain: domain of the documents.
    """
    position, documents = 0, []
    for row in map(json.loads, rows.splitlines()):
        count, replaces, tags = row.pop("tokens"), row.pop("replaces"), frozenset(row.pop("tags"))
        if type(count) is not int or count < 1 or not (replaces is None or type(replaces) is int):
            raise ValueError("a number is not valid")
        part = tokens[position : position + count]
        position += count
        documents.append(PlannedDocument(NewDocument(**row, domain=domain, tokens=part, tags=tags), replaces))
    if (len(documents), position, len(tokens)) != (shard.documents, shard.tokens, shard.tokens):
        raise ValueError("the number of documents or tokens is wrong")
    return documents


def _is_digest(value: object) -> bool:
    """Check whether a value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _write_durably(file: Path, content: bytes | memoryview) -> None:
    """Write a file, and make its content durable with fsync, but not its entry in the folder."""
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
