"""The files of a directory as its one writer makes, names and removes them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded.erasing import make_folders, remove_strays
from knnstore.datastore.embedded.manifest import Manifest, SegmentEntry
from knnstore.datastore.embedded.merging import CHUNK_SIZE, file_names, write_segment
from knnstore.datastore.embedded.packing import CodecFile, CodesEntry, Coding, fit_codec, sample_size
from knnstore.datastore.embedded.segment import MappedColumns, Segment
from knnstore.durable import FileWriter, StoredFile, publish, remove, sync_directory
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreError,
    DatastoreExistsError,
    DatastoreNotFoundError,
)
from knnstore.failpoints import failpoint
from knnstore.space import kind_of


class SegmentFiles:
    """The manifest that is published, and the files that it does not name.

    Args:
        root: the datastore's directory.
        manifest: as it was read.
        coding: of groups with many records; None leaves them as they are.
    """

    def __init__(self, root: Path, manifest: Manifest, coding: Coding | None) -> None:
        self.on_disk = manifest.file_names()
        """Every file that may be there, by its path below the directory."""
        self.manifest = manifest
        """As it was published last."""
        self._root = root
        self._coding = coding
        self._next_number = manifest.next_number
        self._unnamed: set[str] = set()
        self._entries: dict[int, list[SegmentEntry]] = {}  # of each group
        for entry in manifest.segments:
            self._entries.setdefault(entry.group, []).append(entry)

    @classmethod
    def open(cls, root: Path, dim: int, metric: Metric, coding: Coding | None, *, create_only: bool) -> Self:
        """Read the manifest, or publish the first one; with `create_only` there must be none.

        Raises:
            DatastoreExistsError: there is one.
            CorruptDatastoreError: it is lost or damaged.
        """
        try:
            manifest = Manifest.read(root)
        except DatastoreNotFoundError:
            manifest = Manifest(dim, metric)
            manifest.write(root)
            sync_directory(root.parent)
        else:
            if create_only:
                raise DatastoreExistsError(f"a datastore is already at {root}")
        return cls(root, manifest, coding)

    def settle(self) -> None:
        """Make the folders, and remove what a crash left."""
        make_folders(self._root)
        remove_strays(self._root, self.on_disk)

    def write_segment(
        self, segments: Sequence[Segment], among: Sequence[Segment], dim: int, aside: dict[StoredFile, int]
    ) -> Segment:
        """Write the live rows of some segments of a group as a new one; see `merging.write_segment`.

        They are coded as others in the group are, `among` which they are, or where a codec is due.
        """
        codec = codec_among(among)
        if codec is None and self._is_due(among, rewriting=all(one.entry for one in segments)):
            codec = self._fit_codec(among, dim)
        name = self._number()
        self._made(*file_names(name))  # should this fail, the next success removes them
        return write_segment(self._root, name, segments, dim, aside, codec)

    def are_coded(self, group: Sequence[Segment]) -> bool:
        """Whether the segments of a group are to be coded when they are rewritten."""
        return codec_among(group) is not None or self._is_due(group, rewriting=True)

    def write_index(self, write: Callable[[Path], None]) -> StoredFile:
        """Make the file of an index durable, which `write` creates at the path that it is given."""
        name = f"indexes/{self._number()}.index"
        stored = _write_index(self._root, name, write)
        self._made(name)
        return stored

    def publish(self, groups: Mapping[int, Sequence[SegmentEntry]]) -> Manifest:
        """Publish a manifest in which some groups have these segments: durable, and real at once."""
        before = {entry.name: entry for group in groups for entry in self._entries.get(group, ())}
        after = {entry.name: entry for found in groups.values() for entry in found}
        gone = {name for name, entry in before.items() if after.get(name) != entry}
        fresh = [entry for name, entry in after.items() if before.get(name) != entry]
        manifest = self.manifest.changed(gone, fresh, self._write_part)
        manifest = replace(manifest, next_number=self._next_number)
        failpoint("segments.publish")
        manifest.write(self._root)
        self._unnamed |= _names(before.values(), self.manifest)
        self._unnamed -= _names(after.values(), manifest)
        self.manifest = manifest
        self._entries |= {group: list(found) for group, found in groups.items()}
        return manifest

    def remove_unnamed(self) -> None:
        """Remove what the manifest does not name; what fails is tried again the next time."""
        for name in sorted(self._unnamed):
            remove(self._root / name)
            self.on_disk.discard(name)
            self._unnamed.discard(name)

    def _number(self) -> str:
        """A number that no file has had."""
        number, self._next_number = self._next_number, self._next_number + 1
        return f"{number:08d}"

    def _made(self, *names: str) -> None:
        """Note files that no manifest names yet."""
        self.on_disk.update(names)
        self._unnamed.update(names)

    def _is_due(self, group: Sequence[Segment], *, rewriting: bool) -> bool:
        """Whether a codec is to be fitted to a group that has none."""
        coding = self._coding
        least = math.inf if coding is None else coding.least if rewriting else coding.most
        return sum(one.live for one in group) >= least

    def _fit_codec(self, segments: Sequence[Segment], dim: int) -> CodecFile | None:
        """Write a codec that is fitted to rows from all over some segments; None if none can be read."""
        assert self._coding is not None
        kind, keys = self._coding.kind, []
        step = -(-sum(one.live for one in segments) // sample_size(dim))
        for one in segments:
            with suppress(CorruptDatastoreError):  # it is set aside
                keys.append(one.columns.keys_at(one.live_rows().ids()[::step]).astype(np.float32))
        if not keys:
            return None
        codec = fit_codec(kind, np.concatenate(keys))
        name = f"segments/{self._number()}.codec"
        self._made(name)
        with FileWriter(self._root, name) as writer:
            writer.write(codec.to_bytes())
            entry = CodesEntry(kind, writer.finish())
        return CodecFile(self._root, entry, dim, codec)

    def _write_part(self, text: bytes) -> StoredFile:
        name = f"segments/{self._number()}.part"
        self._made(name)
        with FileWriter(self._root, name) as writer:
            writer.write(text)
            stored = writer.finish()
        sync_directory(self._root / "segments")
        return stored


def codec_among(segments: Iterable[Segment]) -> CodecFile | None:
    """The codec of some segments of a group, if there is one that can be read."""
    for codec in {one.columns.codec_file for one in segments if one.columns.codec_file}:
        with suppress(FileNotFoundError, CorruptDatastoreError):
            if codec.codec:
                return codec
    return None


def write_digests(root: Path, segment: Segment) -> None:
    """Make the file with the digests of a segment's keys anew, durably, if it is lost.

    Raises:
        OSError: the disk is full or broken.
        CorruptDatastoreError: the keys are damaged.
    """
    columns = segment.columns
    if segment.entry and isinstance(columns, MappedColumns) and columns.keys_file.lacks_digests:
        publish(root / segment.entry.digests, columns.digests(), "digests")
        columns.keys_file.lacks_digests = False


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Say what could not be written to a directory, and what to do.

    Raises:
        DatastoreError: in place of an OSError that is not one already.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, DatastoreError):  # some are both
            raise
        raise kind_of(error)(
            f"cannot write {error.filename or root}: {error.strerror}; what was flushed is safe: "
            "free space or repair the disk, then try again"
        ) from error


def _names(entries: Iterable[SegmentEntry], manifest: Manifest) -> set[str]:
    """The files of some segments, and of the manifest's parts."""
    names = {name for entry in entries for name in entry.file_names()}
    return names.union(part.file.name for part in manifest.parts)


def _write_index(root: Path, name: str, write: Callable[[Path], None]) -> StoredFile:
    """Write the file of an index durably; `write` must create it at the path it is given.

    Raises:
        OSError: the disk is full or broken.
    """
    temporary = root / f"{name}.tmp"
    try:
        write(temporary)
        # Native writers neither sync nor hash: read back what they wrote.
        with temporary.open("rb") as file, FileWriter(root, name) as writer:
            while chunk := file.read(CHUNK_SIZE):
                writer.write(chunk)
            stored = writer.finish()
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(root / "indexes")
    return stored
