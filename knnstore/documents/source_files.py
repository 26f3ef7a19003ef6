"""Opening files safely, reading them with a size limit, and decoding their text."""

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
"""Largest size in bytes, after decompression, of a document, a row or a file that is read as a whole."""

UTF8 = "utf-8"

UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors that reading a file may raise; reading a damaged ``.gz`` file may raise all of them."""

_FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_SAMPLE = 1024
"""Number of bytes from which an encoding is guessed."""
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
    """A file from which documents are read, with the information that is needed to open and decode it."""

    name: str
    """Path of the file as the caller gave it; used to open the file, and in messages."""
    id: str
    """Id of the document, if the file is one document."""
    is_compressed: bool = False
    """True if the file is compressed with gzip."""
    root: Path | None = None
    """Folder in which the file was found; the path must not lead out of this folder. None if the caller named
    the file; then the path may lead anywhere."""
    encoding: str = UTF8
    """Encoding of the text."""

    def open(self) -> IO[bytes]:
        """Open the file for reading, and return a stream of its decompressed bytes.

        Raises:
            OSError: the file cannot be opened.
            RefusedError: the file is not a regular file, or leads out of `root`.
        """
        file = open_regular(self.name, self.root)
        return _OwningGzipFile(file) if self.is_compressed else file  # type: ignore[return-value]

    def read_bytes(self) -> bytes:
        """Read the whole file, and return its decompressed bytes.

        Raises:
            OSError: the file cannot be opened.
            RefusedError: the file is not a regular file, leads out of `root`, or has more than
                `MAX_DOCUMENT_BYTES` bytes.
        """
        with self.open() as stream:
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise make_too_large_error("the file")
        return data

    def read_text(self) -> str:
        """Read and decode the whole file, and return its text.

        Raises:
            OSError: the file cannot be opened.
            RefusedError: the file is not a regular file, leads out of `root`, is too large, is empty, or is
                not text in `encoding`.
        """
        return decode_text(self.read_bytes(), self.encoding)


class _OwningGzipFile(gzip.GzipFile):
    """Gzip file whose `close` also closes the compressed file; `GzipFile` would leave this file open."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file)
        self.myfileobj = file  # type: ignore[assignment]


def open_regular(path: str | Path, root: Path | None = None) -> IO[bytes]:
    """Open a regular file for reading, and return its stream of bytes.

    A pipe, a device, a socket or a folder is not opened; an error is raised.

    Args:
        path: path of the file. Links are followed.
        root: folder in which the file must be. If a link leads out of the folder, an error is raised, even if
            the link is created during this call. None allows every place.

    Raises:
        OSError: the file cannot be opened.
        RefusedError: the file is not a regular file, or leads out of `root`.
    """
    _check_regular(os.stat(path))
    descriptor = os.open(path, _FILE_FLAGS) if root is None else _open_inside(path, root)
    try:
        _check_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    """Raise `RefusedError` unless a status (result of `os.stat`) describes a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "of a special kind")
        raise RefusedError(f"not a regular file: it is {kind}", Reason.SPECIAL)


def is_outside(path: str | Path, root: str | Path) -> bool:
    """Return True if a path leads out of a folder when all links are followed, else False.

    Args:
        path: the path, which need not exist.
        root: the folder; links in its path are followed too.
    """
    real_path, real_root = os.path.realpath(path), os.path.realpath(root)
    return os.path.commonpath([real_path, real_root]) != real_root


def make_link_error(path: str | Path) -> RefusedError:
    """Return, without raising it, the error for a link that leads out of the folder that is read."""
    return RefusedError(
        f"a link to {os.path.realpath(path)}, outside the folder: to read it, give that path",
        Reason.LINK,
    )


def _open_inside(path: str | Path, root: Path) -> int:
    """Open a file below a folder for reading, and return its file descriptor.

    First all links are resolved. Then each folder of the resolved path is opened relative to its parent
    folder with `O_NOFOLLOW`. So if somebody replaces a folder by a link during the call, `OSError` is raised.

    Args:
        path: path of the file.
        root: the folder.

    Raises:
        RefusedError: the path leads out of the folder.
        OSError: the file cannot be opened.
    """
    if is_outside(path, root):
        raise make_link_error(path)
    real_root = os.path.realpath(root)
    *folders, name = os.path.relpath(os.path.realpath(path), real_root).split(os.sep)
    descriptor = os.open(real_root, _FOLDER_FLAGS)
    try:
        for folder in folders:
            descriptor, parent = os.open(folder, _FOLDER_FLAGS, dir_fd=descriptor), descriptor
            os.close(parent)
        return os.open(name, _FILE_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def make_too_large_error(subject: str) -> RefusedError:
    """Return, without raising it, the error for something that is larger than `MAX_DOCUMENT_BYTES`.

    Args:
        subject: name of the thing that is too large, with which the message begins, such as "the line".
    """
    return RefusedError(
        f"{subject} has more than {MAX_DOCUMENT_BYTES >> 20} MiB, the limit for one document: divide it, or "
        "write many documents into a .jsonl file",
        Reason.TOO_LARGE,
    )


def read_utf8_lines(stream: IO[bytes], encoding: str = UTF8) -> Iterator[bytes]:
    """Yield the lines of a stream as bytes in UTF-8, each line with its line break.

    Lines of a UTF-8 stream are not decoded, so a yielded line may contain bytes that are not UTF-8. Of a line
    that is longer than `MAX_DOCUMENT_BYTES`, only the first `MAX_DOCUMENT_BYTES` + 1 bytes are yielded. The
    caller can recognize both kinds of lines, and continue with the next line.

    Args:
        stream: stream of bytes; it is not closed.
        encoding: encoding of the stream. Lines in another encoding than UTF-8 are converted.

    Raises:
        RefusedError: `encoding` is UTF-8, and the stream begins like UTF-16 or UTF-32.
        RefusedError: `encoding` is not UTF-8, and a line cannot be decoded with it. The message names the
            last good line.
    """
    number, limit = 0, MAX_DOCUMENT_BYTES + 1
    if is_utf8(encoding):
        while line := stream.readline(limit):
            number += 1
            if number == 1:
                _refuse_utf16_and_utf32(line)
                if b"\0" in line and _guess_wide_encoding(line):
                    decode_text(line)  # raises an error that names the likely encoding
            yield line
            _skip_rest_of_line(stream, line, b"\n", limit)
        return
    texts = io.TextIOWrapper(stream, encoding, newline="\n")
    try:
        while text := texts.readline(limit):
            number += 1
            yield text.encode(UTF8, "surrogatepass")[:limit]
            _skip_rest_of_line(texts, text, "\n", limit)
    except UnicodeError as error:
        raise RefusedError(
            f"not {encoding}, after line {number}: {_describe_decoding_error(error)}", Reason.ENCODING
        ) from error
    finally:
        with suppress(ValueError):  # raised if the stream is closed; else the caller's stream stays open
            texts.detach()


def _skip_rest_of_line(stream: IO[AnyStr], line: AnyStr, line_end: AnyStr, limit: int) -> None:
    """Skip the rest of a line of a stream, if only the beginning of the line was read.

    The beginning was read with ``stream.readline(limit)``. If the whole line was read, nothing is done.

    Args:
        stream: stream of bytes or text, positioned after `line`.
        line: the beginning of the line, or the whole line.
        line_end: the line break.
        limit: largest number of bytes or characters that one read returns.
    """
    while len(line) == limit and not line.endswith(line_end):
        line = stream.readline(limit)


def decode_text(data: bytes, encoding: str = UTF8, suffix: str = "") -> str:
    """Decode bytes to text, and remove a byte order mark at the beginning.

    Args:
        data: the bytes of a file or of a line.
        encoding: encoding of the bytes.
        suffix: words that follow the position of a bad byte in messages, such as `` of the line``. Empty if
            `data` is a whole file.

    Raises:
        RefusedError: `data` is empty, contains a NUL, or is not text in this encoding; the message names the
            first bad byte.
    """
    if not data:
        raise RefusedError("the file is empty", Reason.EMPTY)
    if not is_utf8(encoding):
        try:
            text = data.decode(encoding)
        except UnicodeError as error:
            raise RefusedError(
                f"not {encoding}: {_describe_decoding_error(error)}", Reason.ENCODING
            ) from error
        if "\0" in text:
            raise RefusedError(
                f"binary data (a NUL at character {text.index(chr(0))}), not text", Reason.BINARY
            )
        return text.removeprefix("\ufeff")
    _refuse_utf16_and_utf32(data)
    if b"\0" in data:
        guess = _guess_wide_encoding(data)
        hint = f"; it looks like {guess.upper()}: give --encoding {guess}" if guess else ""
        place = f"{data.index(0)}{suffix.replace(' of the line', '')}"
        raise RefusedError(
            f"binary data (a NUL byte at {place}), not text{hint}",
            Reason.ENCODING if guess else Reason.BINARY,
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data.startswith(codecs.BOM_UTF8) else 0)
        line = "" if suffix else f" (line {data.count(10, 0, start) + 1})"
        raise RefusedError(
            f"not UTF-8: byte {data[start]:#04x} at {start}{suffix}{line}; save it as UTF-8, or give "
            "--encoding cp1252 if it is in Latin-1 or Windows-1252",
            Reason.ENCODING,
        ) from error


def check_encoding(name: str) -> str:
    """Check that Python knows an encoding of text, and return the encoding's name in lower case.

    Args:
        name: name of the encoding, for example "cp1252".

    Raises:
        InputError: the encoding is unknown.
    """
    try:
        b"a".decode(name)
    except UnicodeError:  # a known encoding in which one byte is not a character, such as UTF-16
        pass
    except (LookupError, ValueError) as error:
        raise InputError(
            f"there is no encoding {name!r}; examples are utf-8, cp1252, utf-16, shift_jis"
        ) from error
    return name.lower()


def is_utf8(encoding: str) -> bool:
    """Return True if an encoding is UTF-8, with or without a byte order mark, else False.

    Args:
        encoding: Python's name of the encoding, for example "utf8" or "utf-8-sig".
    """
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def make_unreadable_error(error: Exception) -> RefusedError:
    """Return, without raising it, the error for a file that cannot be read.

    Args:
        error: the exception that reading the file raised.
    """
    message = getattr(error, "strerror", None) or str(error)
    if isinstance(error, EOFError):
        message += ": the end of the file is missing, copy it again"
    return RefusedError(f"cannot be read: {message}", Reason.UNREADABLE)


def _refuse_utf16_and_utf32(data: bytes) -> None:
    """Raise `RefusedError` if the bytes begin with a byte order mark of UTF-16 or UTF-32."""
    for mark, name in _BOMS:
        if data.startswith(mark):
            raise RefusedError(
                f"its first bytes mark it as {name}: save it as UTF-8, or give --encoding {name.lower()}",
                Reason.ENCODING,
            )


def _guess_wide_encoding(data: bytes) -> str | None:
    """Guess whether bytes are UTF-16 or UTF-32, from the positions of their NUL bytes.

    Args:
        data: beginning of the bytes; at most `_SAMPLE` bytes are used.

    Returns:
        Python's name of the encoding, such as "utf-16-le"; None if the bytes do not look like UTF-16 or
        UTF-32.
    """
    sample = data[: min(len(data), _SAMPLE) // 4 * 4]
    if len(sample) < 4:
        return None
    shares = [sample[offset::4].count(0) * 4 / len(sample) for offset in range(4)]
    if min(shares[2], shares[3]) > 0.9:  # the scripts in use have code points below 2**16
        return "utf-32-le"
    if min(shares[0], shares[1]) > 0.9:
        return "utf-32-be"
    even, odd = (shares[0] + shares[2]) / 2, (shares[1] + shares[3]) / 2
    if odd > 0.5 and even < 0.1:
        return "utf-16-le"
    return "utf-16-be" if even > 0.5 and odd < 0.1 else None


def _describe_decoding_error(error: UnicodeError) -> str:
    """Return a description of a decoding error for messages: the bad byte, its position and the reason."""
    if isinstance(error, UnicodeDecodeError) and error.start < len(error.object):
        return f"byte {error.object[error.start]:#04x} at {error.start}, {error.reason}"
    return str(error)
