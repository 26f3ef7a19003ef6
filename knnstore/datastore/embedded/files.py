"""The files of a datastore's directory: how its one writer creates, publishes and removes them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded.codecs import CodecFile, CodesEntry, Coding, fit_codec, sample_size
from knnstore.datastore.embedded.directory import make_folders, remove_strays
from knnstore.datastore.embedded.manifest import Manifest, SegmentEntry
from knnstore.datastore.embedded.merging import CHUNK_SIZE, file_names, write_segment
from knnstore.datastore.embedded.segment import MappedColumns, Segment
from knnstore.durable import FileWriter, StoredFile, publish, remove, sync_directory
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreError,
    DatastoreExistsError,
    DatastoreNotFoundError,
)
from knnstore.failpoints import failpoint
from knnstore.space import choose_write_error


class SegmentFiles:
    """Writes and removes the files of a datastore's directory, and publishes manifests that name them.

    The caller holds the writer's lock.

    Args:
        root: the datastore's directory.
        manifest: the manifest that is published now.
        coding: how large groups are coded; None codes no further group.
    """

    def __init__(self, root: Path, manifest: Manifest, coding: Coding | None) -> None:
        self.on_disk = manifest.file_names()
        """Paths of all files that may exist, relative to the directory."""
        self.manifest = manifest
        """The manifest that was published last."""
        self._root = root
        self._coding = coding
        self._next_number = manifest.next_number
        self._unnamed: set[str] = set()
        self._entries: dict[int, list[SegmentEntry]] = {}  # of each group
        for entry in manifest.segments:
            self._entries.setdefault(entry.group, []).append(entry)

    @classmethod
    def open(cls, root: Path, dim: int, metric: Metric, coding: Coding | None, *, create_only: bool) -> Self:
        """Read the manifest, or publish an empty manifest if the directory has none.

        Args:
            root: the datastore's directory, which exists.
            dim: number of components of a key; used only in a new manifest.
            metric: metric of the distances; used only in a new manifest.
            coding: how large groups are coded.
            create_only: refuse an existing manifest.

        Raises:
            DatastoreExistsError: a manifest exists and `create_only` is True.
            CorruptDatastoreError: the manifest is missing or damaged.
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

    def prepare_folders(self) -> None:
        """Create the missing folders of the directory, and remove files that a crash left behind."""
        make_folders(self._root)
        remove_strays(self._root, self.on_disk)

    def write_segment(
        self,
        segments: Sequence[Segment],
        among: Sequence[Segment],
        dim: int,
        damaged_segments: dict[StoredFile, int],
    ) -> Segment:
        """Write the live rows of some segments of a group as one new segment; see `merging.write_segment`.

        Keys are coded if other segments of the group are coded, or if the group is large enough for a codec.
        In the latter case a codec is fitted and written too. No manifest names the new files yet.

        Args:
            segments: the segments to rewrite.
            among: all segments of the group.
            dim: number of components of a key.
            damaged_segments: damaged segments of the datastore; see `MappedColumns`.
        """
        codec = find_readable_codec(among)
        if codec is None and self._is_codec_due(among, rewriting=all(segment.entry for segment in segments)):
            codec = self._fit_codec(among, dim)
        name = self._take_number()
        self._remember_unnamed(*file_names(name))  # if writing fails, the next successful change removes them
        return write_segment(self._root, name, segments, dim, damaged_segments, codec)

    def are_coded(self, group: Sequence[Segment]) -> bool:
        """Check whether keys of a group would be coded if a segment were rewritten. Pass all its segments."""
        return find_readable_codec(group) is not None or self._is_codec_due(group, rewriting=True)

    def write_index(self, write: Callable[[Path], None]) -> StoredFile:
        """Write the file of an index, durably, and return its name, size and hash.

        Args:
            write: called with the path at which it must create the file.
        """
        name = f"indexes/{self._take_number()}.index"
        stored = _write_index(self._root, name, write)
        self._remember_unnamed(name)
        return stored

    def publish(self, groups: Mapping[int, Sequence[SegmentEntry]]) -> Manifest:
        """Publish, durably and atomically, a manifest with new lists of segments for some groups.

        The segments of all other groups stay. Returns the new manifest.

        Args:
            groups: all segments of each changed group; an empty list removes the group.
        """
        old_entries = {entry.name: entry for group in groups for entry in self._entries.get(group, ())}
        current_entries = {entry.name: entry for entries in groups.values() for entry in entries}
        removed_names = {name for name, entry in old_entries.items() if current_entries.get(name) != entry}
        new_entries = [entry for name, entry in current_entries.items() if old_entries.get(name) != entry]
        manifest = self.manifest.changed(removed_names, new_entries, self._write_part)
        manifest = replace(manifest, next_number=self._next_number)
        failpoint("segments.publish")
        manifest.write(self._root)
        self._unnamed |= _collect_file_names(old_entries.values(), self.manifest)
        self._unnamed -= _collect_file_names(current_entries.values(), manifest)
        self.manifest = manifest
        self._entries |= {group: list(entries) for group, entries in groups.items()}
        return manifest

    def remove_unnamed(self) -> None:
        """Remove the files that were written or replaced and that the manifest does not name.

        If removing a file raises OSError, the next call tries again to remove this file and the rest.
        """
        for name in sorted(self._unnamed):
            remove(self._root / name)
            self.on_disk.discard(name)
            self._unnamed.discard(name)

    def _take_number(self) -> str:
        """Return a file number that was never used, as text with at least 8 digits."""
        number, self._next_number = self._next_number, self._next_number + 1
        return f"{number:08d}"

    def _remember_unnamed(self, *names: str) -> None:
        """Remember the names of files that no manifest names yet, so that they can be removed later."""
        self.on_disk.update(names)
        self._unnamed.update(names)

    def _is_codec_due(self, group: Sequence[Segment], *, rewriting: bool) -> bool:
        """Check whether a group without a codec is large enough to fit a codec now.

        Args:
            group: all segments of the group.
            rewriting: True if stored segments are rewritten (`Coding.least` applies), False if records are
                added (`Coding.most` applies).
        """
        coding = self._coding
        least = math.inf if coding is None else coding.least if rewriting else coding.most
        return sum(segment.live for segment in group) >= least

    def _fit_codec(self, segments: Sequence[Segment], dim: int) -> CodecFile | None:
        """Fit a codec to a sample of rows from all segments, and write it to a file.

        Damaged segments are left out. Returns None if no segment can be read.
        """
        assert self._coding is not None
        kind, keys = self._coding.kind, []
        step = -(-sum(segment.live for segment in segments) // sample_size(dim))
        for segment in segments:
            with suppress(CorruptDatastoreError):  # the segment is now marked as damaged
                keys.append(segment.columns.keys_at(segment.live_rows().ids()[::step]).astype(np.float32))
        if not keys:
            return None
        codec = fit_codec(kind, np.concatenate(keys))
        name = f"segments/{self._take_number()}.codec"
        self._remember_unnamed(name)
        with FileWriter(self._root, name) as writer:
            writer.write(codec.to_bytes())
            entry = CodesEntry(kind, writer.finish())
        return CodecFile(self._root, entry, dim, codec)

    def _write_part(self, text: bytes) -> StoredFile:
        """Write a part of the manifest, durably; see `ManifestPart`. Returns its name, size and hash."""
        name = f"segments/{self._take_number()}.part"
        self._remember_unnamed(name)
        with FileWriter(self._root, name) as writer:
            writer.write(text)
            stored = writer.finish()
        sync_directory(self._root / "segments")
        return stored


def find_readable_codec(segments: Iterable[Segment]) -> CodecFile | None:
    """Return a codec of some segments of a group that can be read; None if no segment has such a codec."""
    for codec in {segment.columns.codec_file for segment in segments if segment.columns.codec_file}:
        with suppress(FileNotFoundError, CorruptDatastoreError):
            if codec.codec:
                return codec
    return None


def write_digests(root: Path, segment: Segment) -> None:
    """Write the file with the digests of a segment's keys, durably, if this file is missing or damaged.

    Before that, all keys are compared with their SHA-256. Segments in memory are ignored.

    Raises:
        OSError: the disk is full or broken.
        CorruptDatastoreError: the keys are damaged.
    """
    columns = segment.columns
    if segment.entry and isinstance(columns, MappedColumns) and columns.keys_file.lacks_digests:
        publish(root / segment.entry.digests, columns.digests(), "digests")
        columns.keys_file.lacks_digests = False


@contextmanager
def translate_write_errors(root: Path) -> Iterator[None]:
    """Convert an OSError in the block to a DatastoreError that says what to do.

    An OSError that is a DatastoreError already passes unchanged.

    Args:
        root: directory that the message names if the OSError has no file name.

    Raises:
        DiskFullError: in place of an OSError that reports a full disk.
        DatastoreError: in place of any other OSError.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, DatastoreError):  # some are both
            raise
        raise choose_write_error(error)(
            f"cannot write {error.filename or root}: {error.strerror}; what was flushed is safe: "
            "free space or repair the disk, then try again"
        ) from error


def _collect_file_names(entries: Iterable[SegmentEntry], manifest: Manifest) -> set[str]:
    """Return the names of all files of some segments, and of the files of the manifest's parts."""
    names = {name for entry in entries for name in entry.file_names()}
    return names.union(part.file.name for part in manifest.parts)


def _write_index(root: Path, name: str, write: Callable[[Path], None]) -> StoredFile:
    """Write the file of an index, durably, and return its entry.

    Args:
        root: the datastore's directory.
        name: path of the new file, relative to the directory.
        write: called with the path of a temporary file, which it must create.

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
