"""Writing what is derived from the keys of a segment, and can be made anew."""

from collections.abc import Callable
from pathlib import Path

from knnstore.datastore.embedded.merging import CHUNK_SIZE
from knnstore.datastore.embedded.segment import MappedColumns, Segment
from knnstore.durable import FileWriter, StoredFile, publish, sync_directory


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


def write_index(root: Path, name: str, write: Callable[[Path], None]) -> StoredFile:
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
