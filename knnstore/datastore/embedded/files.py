"""Writing, publishing and removing the files of a datastore's directory. Only one process may write."""

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
from knnstore.durable import FileWriter, StoredFile, remove_durably, sync_directory, write_atomically
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreError,
    DatastoreExistsError,
    DatastoreNotFoundError,
)
from knnstore.failpoints import failpoint
from knnstore.space import choose_write_error


class SegmentFiles:
    """Writes and removes the files of a datastore's directory, and publishes its manifest.

    The manifest is the small file that lists all files in use. A *segment* is a set of immutable files with
    records of one group (a numbered set of records, such as a domain). The caller holds the writer's lock.

    Args:
        root: the datastore's directory.
        manifest: the manifest that is on disk now.
        coding: rules for compressing the keys of large groups to codes. With None, no further group is
            compressed; new keys of a group that is compressed already are still compressed.
    """

    def __init__(self, root: Path, manifest: Manifest, coding: Coding | None) -> None:
        self.on_disk = manifest.file_names()
        """Paths of all files that may exist on disk, in use or not, relative to the directory."""
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
        """Read the manifest of a directory, and return an object that writes the directory's files.

        The manifest is the list of all files in use. If the directory has no datastore, an empty manifest is
        published.

        Args:
            root: the datastore's directory, which exists.
            dim: number of components of a key; used only in a new manifest.
            metric: metric of the distances; used only in a new manifest.
            coding: rules for compressing the keys of large groups; None compresses no further group.
            create_only: True to raise an error if the directory has a manifest already.

        Raises:
            DatastoreExistsError: a manifest exists and `create_only` is True.
            CorruptDatastoreError: the manifest is damaged, or missing although the directory has files of a
                datastore.
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
        """Create the missing folders of the directory, and remove files that a crash of a writer left behind.

        Files that the manifest (the list of all files in use) lists are not removed.
        """
        make_folders(self._root)
        remove_strays(self._root, self.on_disk)

    def write_segment(
        self,
        segments: Sequence[Segment],
        group_segments: Sequence[Segment],
        dim: int,
        damaged_segments: dict[StoredFile, int],
    ) -> Segment:
        """Write the live records of some segments as the files of one new segment, and return this segment.

        A segment is an immutable set of records. Live records are neither deleted nor replaced. Keys are
        compressed to codes in two cases. First, a segment of the group has codes: then its codec (compressor)
        is used. Second, the group is large enough: then a codec is fitted and written to a file too. The
        manifest does not list the new files yet.

        Args:
            segments: the segments to rewrite, all of one group.
            group_segments: all segments of the group.
            dim: number of components of a key.
            damaged_segments: group number of each damaged segment, by the file of its keys. A segment that
                turns out to be damaged is added.

        Raises:
            DiskFullError, OSError: the disk is full or failed.
            CorruptDatastoreError: a segment is damaged.
        """
        codec = find_readable_codec(group_segments)
        if codec is None and self._is_codec_due(
            group_segments, rewriting=all(segment.entry for segment in segments)
        ):
            codec = self._fit_codec(group_segments, dim)
        name = self._take_number()
        self._remember_unnamed(*file_names(name))  # if writing fails, the next successful change removes them
        return write_segment(self._root, name, segments, dim, damaged_segments, codec)

    def are_coded(self, group: Sequence[Segment]) -> bool:
        """Check whether the keys of a group's segment are compressed to codes when the segment is rewritten.

        A segment is an immutable set of records.

        Args:
            group: all segments of the group.

        Returns:
            True if a segment of the group is compressed by a readable codec (compressor of keys), or if the
            group is large enough for a new codec; else False.
        """
        return find_readable_codec(group) is not None or self._is_codec_due(group, rewriting=True)

    def write_index(self, write: Callable[[Path], None]) -> StoredFile:
        """Create the file of an index, durably, and return the file's name, size and hash.

        The manifest does not list the file yet.

        Args:
            write: function that is called with a path, and must create the file at this path.
        """
        name = f"indexes/{self._take_number()}.index"
        stored = _write_index(self._root, name, write)
        self._remember_unnamed(name)
        return stored

    def publish(self, groups: Mapping[int, Sequence[SegmentEntry]]) -> Manifest:
        """Publish a manifest with changed segments of some groups, durably and atomically, and return it.

        The manifest is the list of all files in use, and a segment is a set of files with records. The new
        manifest replaces the manifest on disk. The segments of groups that are not in `groups` do not change.

        Args:
            groups: for each changed group the entries of all its segments, by group number. An empty list
                removes the group.
        """
        old_entries = {entry.name: entry for group in groups for entry in self._entries.get(group, ())}
        current_entries = {entry.name: entry for entries in groups.values() for entry in entries}
        removed_names = {name for name, entry in old_entries.items() if current_entries.get(name) != entry}
        new_entries = [entry for name, entry in current_entries.items() if old_entries.get(name) != entry]
        manifest = self.manifest.replace_segments(removed_names, new_entries, self._write_part)
        manifest = replace(manifest, next_number=self._next_number)
        failpoint("segments.publish")
        manifest.write(self._root)
        self._unnamed |= _collect_file_names(old_entries.values(), self.manifest)
        self._unnamed -= _collect_file_names(current_entries.values(), manifest)
        self.manifest = manifest
        self._entries |= {group: list(entries) for group, entries in groups.items()}
        return manifest

    def remove_unnamed(self) -> None:
        """Remove the files that this object wrote or replaced, and that the manifest does not list.

        The manifest is the list of all files in use. If a file cannot be removed, OSError is raised; the next
        call tries again to remove this file and the remaining files.
        """
        for name in sorted(self._unnamed):
            remove_durably(self._root / name)
            self.on_disk.discard(name)
            self._unnamed.discard(name)

    def _take_number(self) -> str:
        """Return a file number that was never used, as text with at least 8 digits."""
        number, self._next_number = self._next_number, self._next_number + 1
        return f"{number:08d}"

    def _remember_unnamed(self, *names: str) -> None:
        """Remember new files that the manifest (the list of all files in use) does not list yet.

        If no later manifest lists a file, `remove_unnamed` removes the file.

        Args:
            *names: paths of the files, relative to the directory.
        """
        self.on_disk.update(names)
        self._unnamed.update(names)

    def _is_codec_due(self, group: Sequence[Segment], *, rewriting: bool) -> bool:
        """Check whether a group of uncompressed keys is so large that a codec must be fitted now.

        A codec is a compressor of keys.

        Args:
            group: all segments (immutable sets of records) of the group.
            rewriting: True if stored segments are rewritten; then the group must have at least `Coding.least`
                records. False if records are added; then it must have at least `Coding.most` records.

        Returns:
            True if the group is large enough. False if it is smaller, or if no keys are to be compressed.
        """
        coding = self._coding
        least = math.inf if coding is None else coding.least if rewriting else coding.most
        return sum(segment.live for segment in group) >= least

    def _fit_codec(self, segments: Sequence[Segment], dim: int) -> CodecFile | None:
        """Fit a codec (a compressor of keys) to a sample of keys from all segments, and write it to a file.

        A segment is an immutable set of records. Damaged segments are left out. Returns None if every segment
        is damaged.

        Args:
            segments: all segments of a group.
            dim: number of components of a key.
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
        """Write the content of a part of the manifest to a new file, durably.

        A part is a file that lists some of the segments (immutable sets of records), so that the manifest
        itself stays small.

        Args:
            text: content of the file.

        Returns:
            Name, size and hash of the file.
        """
        name = f"segments/{self._take_number()}.part"
        self._remember_unnamed(name)
        with FileWriter(self._root, name) as writer:
            writer.write(text)
            stored = writer.finish()
        sync_directory(self._root / "segments")
        return stored


def find_readable_codec(segments: Iterable[Segment]) -> CodecFile | None:
    """Return the codec (compressor of keys) of a group, if a segment has compressed keys.

    Args:
        segments: segments (sets of files with records) of one group.

    Returns:
        The first codec that can be read. None if no segment has compressed keys, or if the files of all
        codecs are missing or damaged.
    """
    for codec in {segment.columns.codec_file for segment in segments if segment.columns.codec_file}:
        with suppress(FileNotFoundError, CorruptDatastoreError):
            if codec.codec:
                return codec
    return None


def write_digests(root: Path, segment: Segment) -> None:
    """Write the file with the checksums of a segment's keys, durably, if this file is missing or damaged.

    The file holds the SHA-256 digest of each block of the file of keys. Before it is written, all keys are
    compared with the SHA-256 in the manifest (the list of all files in use).

    Args:
        root: the datastore's directory.
        segment: segment (set of files with records). For a segment in memory, nothing is written.

    Raises:
        OSError: the disk is full or broken.
        CorruptDatastoreError: the keys are damaged.
    """
    columns = segment.columns
    if segment.entry and isinstance(columns, MappedColumns) and columns.keys_file.lacks_digests:
        write_atomically(root / segment.entry.digests, columns.compute_block_digests(), "digests")
        columns.keys_file.lacks_digests = False


@contextmanager
def translate_write_errors(root: Path) -> Iterator[None]:
    """Convert an OSError that the ``with`` block raises to a DatastoreError that says what the user can do.

    An error that is already a DatastoreError is not converted, although it may also be an OSError.

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
    """Return the paths of all files of some segments, and of all parts of a manifest.

    A segment is a set of files with records. A part of a manifest is a file that lists segments.

    Args:
        entries: entries of the segments in a manifest.
        manifest: the manifest whose parts are included.

    Returns:
        Paths relative to the datastore's directory.
    """
    names = {name for entry in entries for name in entry.file_names()}
    return names.union(part.file.name for part in manifest.parts)


def _write_index(root: Path, name: str, write: Callable[[Path], None]) -> StoredFile:
    """Create the file of an index, durably, and return the file's name, size and hash.

    The content is first written to a temporary file, and then copied to the new file and hashed.

    Args:
        root: the datastore's directory.
        name: path of the new file, relative to the directory.
        write: function that is called with the path of a temporary file, and must write the index to this
            path.

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
