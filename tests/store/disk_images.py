"""What a disk may hold after a power loss: images made from a record of what a process did to its files.

A record comes from `disk_recorder.c`. A `Disk` replays it event by event; between two events `after_loss`
gives what may be left. Nothing but what was synced is sure to be there:

- Of a file, what was written since its last sync is lost, there, or there in part, in any order, by sectors.
- Of a folder, there are two kinds of disk. A `strict` one promises what POSIX does: names that were made,
  replaced or removed since the last sync of their folder are there or not, each for itself. An `ordered` one
  does as ext4: changes of names reach it in order, and any sync brings those before it.
"""

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

_HEADER = struct.Struct("<cIIQQ")

Share = Literal["all", "none", "some"]
"""What is lost of that which was not synced."""

Image = dict[str, bytes | None]
"""The content of each file, by its path below the folder; None for a folder. Sorted."""


class Event(NamedTuple):
    """Something that a process did: ``c``reate, ``t``runcate, ``w``rite, ``s``ync, ``r``ename, ``l``ink,
    ``u``nlink or remove a folder, ``m``ake a folder; ``!`` is a mark of its own, ``?`` not understood."""

    kind: str
    path: str
    path2: str = ""
    offset: int = 0
    data: bytes = b""


class Recorder:
    """A library that records what a process does below a folder.

    Args:
        folder: where the library and the record go, outside of what is recorded.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        assert compiler is not None, "no C compiler: install gcc"
        self._library, self._log = folder / "disk_recorder.so", folder / "record"
        source = Path(__file__).with_name("disk_recorder.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True)

    def run(self, command: list[str | Path], root: Path) -> list[Event]:
        """Run a program; returns what it did below a folder, and its own marks, see `mark`."""
        environment = os.environ | {
            "LD_PRELOAD": str(self._library),
            "KNNSTORE_RECORD_ROOT": str(root.resolve()),
            "KNNSTORE_RECORD_LOG": str(self._log),
        }
        subprocess.run(command, env=environment, check=True)
        events = list(_read(self._log.read_bytes(), str(root.resolve())))
        for event in events:
            if event.kind == "?":
                raise ValueError(f"{event.path} is changed in a way that the recorder does not understand")
        return events


def mark(text: str) -> None:
    """Note something in the record of this process."""
    with open(os.environ["KNNSTORE_RECORD_LOG"], "ab", buffering=0) as log:
        log.write(_HEADER.pack(b"!", len(text.encode()), 0, 0, 0) + text.encode())


def _read(record: bytes, root: str) -> Iterator[Event]:
    at = 0
    while at < len(record):
        kind, length, length2, offset, size = _HEADER.unpack_from(record, at)
        at += _HEADER.size
        path, path2 = (
            record[at : at + length].decode(),
            record[at + length : at + length + length2].decode(),
        )
        at += length + length2
        data = record[at : at + size] if kind == b"w" else b""
        at += len(data)
        path, path2 = (p.removeprefix(root).removeprefix("/") for p in (path, path2))
        yield Event(kind.decode(), path, path2, offset, data)


@dataclass(eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, data); None cuts there

    def change(self, offset: int, data: bytes | None) -> None:
        _apply(self.now, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        self.synced = bytearray(self.now)
        self.pending.clear()

    def after_loss(self, loss: Share, chance: random.Random) -> bytes:
        if loss == "some" and self.pending:
            return self._torn(chance)
        return bytes(self.synced if loss == "all" else self.now)

    def _torn(self, chance: random.Random) -> bytes:
        content = bytearray(self.synced)
        sector, share = chance.choice((512, 4096)), chance.choice((0.1, 0.5, 0.9))
        for offset, data in self.pending:
            if data is None:
                if chance.random() < share:
                    _apply(content, offset, None)
                continue
            first = offset
            while first < offset + len(data):
                last = min(offset + len(data), (first // sector + 1) * sector)
                if chance.random() < share:
                    _apply(content, first, data[first - offset : last - offset])
                first = last
        return bytes(content)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


@dataclass(eq=False)
class _Folder:
    now: "Names" = field(default_factory=dict)
    synced: "Names" = field(default_factory=dict)


Names = dict[str, _File | _Folder]


class _NameChange(NamedTuple):
    """A change of names: something leaves one, gets one, or both at once."""

    node: _File | _Folder
    leaves: tuple[_Folder, str] | None
    gets: tuple[_Folder, str] | None

    @property
    def folders(self) -> list[_Folder]:
        return [place[0] for place in (self.leaves, self.gets) if place]


class Disk:
    """The files below one folder, as a process sees them and as the disk is sure to have them."""

    def __init__(self, kind: Literal["strict", "ordered"]) -> None:
        self.kind = kind
        self._root = _Folder()
        self._pending: list[_NameChange] = []

    def replay(self, event: Event) -> None:
        """Do what the process did."""
        kind, path = event.kind, event.path
        node = self._find(path)
        if kind == "!":
            return
        if kind in "cwt" and node is None:  # a file that stdio has made is not seen before it is written
            node = _File()
            self._rename(_NameChange(node, None, self._place(path)))
        if kind == "w":
            assert isinstance(node, _File)
            node.change(event.offset, event.data)
        elif kind == "t" and isinstance(node, _File) and (node.now or event.offset):
            node.change(event.offset, None)
        elif kind == "s":
            self._sync(node)
        elif kind == "m":
            self._rename(_NameChange(_Folder(), None, self._place(path)))
        elif kind in "rl":
            assert node is not None, f"{path} was never made"
            leaves = self._place(path) if kind == "r" else None
            self._rename(_NameChange(node, leaves, self._place(event.path2)))
        elif kind == "u" and node is not None:
            self._rename(_NameChange(node, self._place(path), None))

    def now(self) -> Image:
        """What the process sees."""
        return _image(self._root, lambda folder: folder.now, lambda file: bytes(file.now))

    def after_loss(self, names: Share, data: Share, chance: random.Random) -> Image:
        """What may be there when the power fails now.

        Args:
            names: what is lost of the changes of names.
            data: what is lost of the changes of files.
            chance: decides what is lost where it is some.
        """
        pending = self._pending if names != "all" else []
        if names == "some" and self.kind == "ordered":
            pending = pending[: chance.randint(0, len(pending))]
        elif names == "some":
            share = chance.choice((0.2, 0.5, 0.8))
            pending = [change for change in pending if chance.random() < share]
        left: dict[_Folder, Names] = {}

        def names_of(folder: _Folder) -> Names:
            return left.setdefault(folder, dict(folder.synced))

        for change in pending:
            _do(change, names_of)
        return _image(self._root, names_of, lambda file: file.after_loss(data, chance))

    def _rename(self, change: _NameChange) -> None:
        _do(change, lambda folder: folder.now)
        self._pending.append(change)

    def _sync(self, node: "_File | _Folder | None") -> None:
        if isinstance(node, _File):
            node.sync()
        if node is None or (self.kind == "strict" and isinstance(node, _File)):
            return
        done = [c for c in self._pending if self.kind == "ordered" or node in c.folders]
        for change in done:
            _do(change, lambda folder: folder.synced)
        self._pending = [change for change in self._pending if change not in done]

    def _find(self, path: str) -> "_File | _Folder | None":
        node: _File | _Folder | None = self._root
        for name in path.split("/") if path else ():
            node = node.now.get(name) if isinstance(node, _Folder) else None
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        assert isinstance(folder, _Folder), f"{above} was never made"
        return folder, name


def _do(change: _NameChange, names_of: Callable[[_Folder], Names]) -> None:
    if change.leaves is not None:
        folder, name = change.leaves
        if names_of(folder).get(name) is change.node:
            del names_of(folder)[name]
    if change.gets is not None:
        folder, name = change.gets
        names_of(folder)[name] = change.node


def _image(
    root: _Folder, names_of: Callable[[_Folder], Names], content_of: Callable[[_File], bytes]
) -> Image:
    image: Image = {}
    waiting: list[tuple[str, _Folder]] = [("", root)]
    while waiting:
        above, folder = waiting.pop()
        for name, node in names_of(folder).items():
            path = f"{above}{name}"
            if isinstance(node, _Folder):
                image[path] = None
                waiting.append((f"{path}/", node))
            else:
                image[path] = content_of(node)
    return dict(sorted(image.items()))


def write(image: Image, folder: Path) -> None:
    """Write an image into a new folder."""
    folder.mkdir()
    for path, content in image.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def read(folder: Path) -> Image:
    """The image of what is in a folder."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in found}
