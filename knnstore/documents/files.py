"""Opening files safely, with bounds on their size, and decoding what they hold."""

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr

from knnstore.documents.document import Reason, RefusedError
from knnstore.errors import InputError

MAX_DOCUMENT_BYTES = 256 << 20
"""A document, a row, or a file that is read as a whole may have so many bytes after decompression."""

UTF8 = "utf-8"

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise, a damaged .gz included."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_SAMPLE = 1024
"""Bytes that are looked at to guess an encoding."""
_BOMS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_SPECIAL = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A file that documents are read from."""

    name: str
    """Its path as it was given, for messages and to open it."""
    id: str
    """The id of its document, where the file is one document."""
    is_compressed: bool = False
    root: Path | None = None
    """The folder that it was found in, and that it must not lead out of; None where it was named."""
    encoding: str = UTF8

    def open(self) -> IO[bytes]:
        """Open the file for reading, decompressed.

        Raises:
            OSError: it cannot be opened.
            RefusedError: it is no regular file, or leads out of the folder.
        """
        file = open_regular(self.name, self.root)
        return _OwningGzipFile(file) if self.is_compressed else file  # type: ignore[return-value]

    def data(self) -> bytes:
        """Read the whole file.

        Raises:
            RefusedError: it is longer than `MAX_DOCUMENT_BYTES`; no more than that is read.
        """
        with self.open() as stream:
            return read_bounded(stream)

    def text(self) -> str:
        """Read the whole file as text; see `decoded`."""
        return decoded(self.data(), self.encoding)


class _OwningGzipFile(gzip.GzipFile):
    """A compressed file that closes the file that it was given; `GzipFile` alone leaves it open."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file)
        self.myfileobj = file  # type: ignore[assignment]


def open_regular(path: str | Path, root: Path | None = None) -> IO[bytes]:
    """Open a regular file for reading; a pipe, a device or a socket is refused before it is opened.

    Args:
        path: the file. A link is followed.
        root: a folder. A link that leads out of it is refused, also where it is put there meanwhile.

    Raises:
        OSError: it cannot be opened.
        RefusedError: it is no regular file, or leads out of `root`.
    """
    _check_regular(os.stat(path))
    descriptor = os.open(path, _FLAGS) if root is None else _open_inside(path, root)
    try:
        _check_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "of a special kind")
        raise RefusedError(f"not a regular file: it is {kind}", Reason.SPECIAL)


def leads_out(path: str | Path, root: str | Path) -> bool:
    """Return whether a path, its links followed, is outside of a folder."""
    real, inside = os.path.realpath(path), os.path.realpath(root)
    return os.path.commonpath([real, inside]) != inside


def link_out(path: str | Path) -> RefusedError:
    """Return the error for a link that leads out of the folder that was given."""
    return RefusedError(
        f"a link out of the folder, to {os.path.realpath(path)}: give that by its own name if it is meant",
        Reason.LINK,
    )


def _open_inside(path: str | Path, root: Path) -> int:
    """Open a file below a folder, one folder after another, so that no link is followed on the way."""
    if leads_out(path, root):
        raise link_out(path)
    inside = os.path.realpath(root)
    *folders, name = os.path.relpath(os.path.realpath(path), inside).split(os.sep)
    folder = os.open(inside, _FOLDER)
    try:
        for one in folders:
            folder, parent = os.open(one, _FOLDER, dir_fd=folder), folder
            os.close(parent)
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def read_bounded(stream: IO[bytes]) -> bytes:
    """Read all of a stream.

    Raises:
        RefusedError: it has more than `MAX_DOCUMENT_BYTES`.
    """
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise too_large("the file")
    return data


def too_large(what: str) -> RefusedError:
    """Return the error for something longer than `MAX_DOCUMENT_BYTES`."""
    return RefusedError(
        f"{what} has more than {MAX_DOCUMENT_BYTES >> 20} MiB, the most that a document may have: divide it, "
        "or write many documents into a .jsonl",
        Reason.TOO_LARGE,
    )


def utf8_lines(stream: IO[bytes], encoding: str = UTF8) -> Iterator[bytes]:
    """Read lines, each with its line break, and convert them to UTF-8 where they are in another encoding.

    Bytes of a UTF-8 stream are not checked here, so that a bad line can be refused alone. Of a line that is
    longer than `MAX_DOCUMENT_BYTES` only the beginning is yielded, one byte more than that: the caller
    refuses it, and can go on with the next line.

    Raises:
        RefusedError: the stream begins like UTF-16 or UTF-32.
        InputError: the lines are not in `encoding`; names the line after which they are not.
    """
    number, most = 0, MAX_DOCUMENT_BYTES + 1
    if is_utf8(encoding):
        while line := stream.readline(most):
            number += 1
            if number == 1:
                _check_beginning(line)
                if b"\0" in line and _guess_wide(line):
                    decoded(line)  # says which encoding it looks like
            yield line
            _skip_rest_of_line(stream, line, b"\n", most)
        return
    texts = io.TextIOWrapper(stream, encoding, newline="\n")
    try:
        while text := texts.readline(most):
            number += 1
            yield text.encode(UTF8, "surrogatepass")[:most]
            _skip_rest_of_line(texts, text, "\n", most)
    except UnicodeError as error:
        raise RefusedError(
            f"not {encoding}, after line {number}: {_reason(error)}", Reason.ENCODING
        ) from error
    finally:
        with suppress(ValueError):  # the stream was closed; else it stays open, for whoever opened it
            texts.detach()


def _skip_rest_of_line(stream: IO[AnyStr], line: AnyStr, line_end: AnyStr, most: int) -> None:
    """Read to the end of a line of which only the first `most` characters were read."""
    while len(line) == most and not line.endswith(line_end):
        line = stream.readline(most)


def decoded(data: bytes, encoding: str = UTF8, of: str = "") -> str:
    """Return the text of some bytes, without a byte order mark.

    Args:
        data: the bytes.
        encoding: their encoding.
        of: what positions in messages are counted in, such as `` of the line``.

    Raises:
        RefusedError: there are none, or they are not text in this encoding; names the first bad byte.
    """
    if not data:
        raise RefusedError("the file is empty", Reason.EMPTY)
    if not is_utf8(encoding):
        try:
            text = data.decode(encoding)
        except UnicodeError as error:
            raise RefusedError(f"not {encoding}: {_reason(error)}", Reason.ENCODING) from error
        if "\0" in text:
            raise RefusedError(
                f"binary data (a NUL at character {text.index(chr(0))}), not text", Reason.BINARY
            )
        return text.removeprefix("\ufeff")
    _check_beginning(data)
    if b"\0" in data:
        guess = _guess_wide(data)
        hint = f"; it looks like {guess.upper()}: give --encoding {guess}" if guess else ""
        raise RefusedError(
            f"binary data (a NUL byte at {data.index(0)}{of.replace(' of the line', '')}), not text{hint}",
            Reason.ENCODING if guess else Reason.BINARY,
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data.startswith(codecs.BOM_UTF8) else 0)
        line = "" if of else f" (line {data.count(10, 0, start) + 1})"
        raise not_utf8(data[start], f"{start}{of}{line}") from error


def not_utf8(byte: int, place: str) -> RefusedError:
    """Return the error for a byte that is no part of a character in UTF-8."""
    return RefusedError(
        f"not UTF-8: byte {byte:#04x} at {place}; save it as UTF-8, or give --encoding cp1252 if it is in "
        "Latin-1 or Windows-1252",
        Reason.ENCODING,
    )


def check_encoding(name: str) -> str:
    """Return the name of an encoding in small letters.

    Raises:
        InputError: Python knows no such encoding of text.
    """
    try:
        b"a".decode(name)
    except UnicodeError:  # one byte is no character in it
        pass
    except (LookupError, ValueError) as error:
        raise InputError(
            f"there is no encoding {name!r}; examples are utf-8, cp1252, utf-16, shift_jis"
        ) from error
    return name.lower()


def is_utf8(encoding: str) -> bool:
    """Return whether a name is one of UTF-8's."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def unreadable(error: Exception) -> RefusedError:
    """Return the error for a file that cannot be read."""
    said = getattr(error, "strerror", None) or str(error)
    if isinstance(error, EOFError):
        said += ": the file is cut off, fetch it again"
    return RefusedError(f"cannot be read: {said}", Reason.UNREADABLE)


def _check_beginning(data: bytes) -> None:
    for mark, name in _BOMS:
        if data.startswith(mark):
            raise RefusedError(
                f"{name} by its first bytes: save it as UTF-8, or give --encoding {name.lower()}",
                Reason.ENCODING,
            )


def _guess_wide(data: bytes) -> str | None:
    """Return the encoding that bytes with many NULs seem to have, by where these stand."""
    sample = data[: min(len(data), _SAMPLE) // 4 * 4]
    if len(sample) < 4:
        return None
    shares = [sample[at::4].count(0) * 4 / len(sample) for at in range(4)]
    if min(shares[2], shares[3]) > 0.9:  # no character of a living script is beyond 2**16
        return "utf-32-le"
    if min(shares[0], shares[1]) > 0.9:
        return "utf-32-be"
    even, odd = (shares[0] + shares[2]) / 2, (shares[1] + shares[3]) / 2
    if odd > 0.5 and even < 0.1:
        return "utf-16-le"
    return "utf-16-be" if even > 0.5 and odd < 0.1 else None


def _reason(error: UnicodeError) -> str:
    if isinstance(error, UnicodeDecodeError) and error.start < len(error.object):
        return f"byte {error.object[error.start]:#04x} at {error.start}, {error.reason}"
    return str(error)
