"""Codecs in their files."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.packing.codecs import Codec, codec_of
from knnstore.durable import StoredFile


class Coding(NamedTuple):
    """What groups of many records are kept as."""

    kind: str
    """See `checked_kind`."""

    least: int
    """Records from which on a group is coded when some of it is rewritten. Until then it waits, for its codec
    is fitted once, and the better the more of it there is."""

    most: int
    """Records from which on a group is coded as it grows: for so many there is room."""


@dataclass(frozen=True, slots=True)
class CodesEntry:
    """How the keys of a segment are coded."""

    kind: str
    """See `checked_kind`."""

    file: StoredFile
    """Of the codec. The segments of a group share it: what they hold has no meaning without."""


class CodecFile:
    """A codec in its file, read when it is first needed.

    Args:
        root: the datastore's directory.
        entry: what the manifest says about it.
        dim: number of components of a key.
        codec: what was written to it just now.
    """

    def __init__(self, root: Path, entry: CodesEntry, dim: int, codec: Codec | None = None) -> None:
        self.entry = entry
        self._root, self._dim, self._codec = root, dim, codec
        self._file: MappedFile | None = None

    def map(self) -> None:
        """Map the file, so that it can be read when a newer manifest drops it.

        Raises:
            FileNotFoundError, CorruptDatastoreError: see `MappedFile`.
        """
        if self._codec is None and self._file is None:
            self._file = MappedFile(self._root, self.entry.file)

    @property
    def codec(self) -> Codec:
        """The codec.

        Raises:
            FileNotFoundError: its file is gone.
            CorruptDatastoreError: its file is damaged.
        """
        if self._codec is None:
            self.map()
            assert self._file is not None
            self._file.check()
            self._codec = codec_of(self.entry.kind, self._dim, self._file.bytes.tobytes())
        return self._codec
