"""Mailboxes (mbox): each message is a document."""

import re
from collections.abc import Iterator
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial

from knnstore.documents.document import Entry, Fields, Reason, RefusedError, TextDocument
from knnstore.documents.files import MAX_DOCUMENT_BYTES, Source, too_large
from knnstore.documents.markup import html_text
from knnstore.errors import InputError

_DATED = re.compile(rb"From .*\d\d?:\d\d.*\d{4}")
_HEADER = re.compile(rb"[!-9;-~]+:|>From ")
_QUOTED = re.compile(rb"^>(>*From )", re.MULTILINE)
_LONGEST_HEADER = 20_000
"""Characters of a header that are read: the time to decode its words grows with their square."""
_METADATA = {"subject": "Subject", "from": "From", "date": "Date"}


def read_mailbox(source: Source, _: Fields) -> Iterator[Entry]:
    """Yield the messages of a mailbox.

    A message is known by its Message-ID, else by a hash of its text. Subject, sender and date are metadata.
    """
    for number, (line, data) in enumerate(_messages(source), start=1):
        yield Entry(
            f"{source.name} message {number} (line {line})", partial(_from_message, data, source.encoding)
        )


def _messages(source: Source) -> Iterator[tuple[int, bytes]]:
    """Divide a mailbox. Yields the number of the line that each message begins in, and its bytes.

    A line "From ..." begins a message after an empty line, where it has a date or a header follows it.
    """
    message: list[bytes] = []
    begin, size, number, is_open, is_after_empty = 0, 0, 0, False, True
    with source.open() as stream:
        held: bytes | None = None  # a line that may begin a message, which the next line decides
        while True:
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            number += 1
            if held is not None:
                if _DATED.match(held) or _HEADER.match(line):
                    if is_open:
                        yield begin, b"".join(message)
                    message, size, begin, is_open = [], 0, number - 1, True
                else:
                    message.append(held)
                held = None
            if not line:
                break
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise too_large(f"the message that begins on line {begin}")
            if is_after_empty and line.startswith(b"From "):
                held = line
            elif not is_open and line.strip():
                raise InputError("not a mailbox: it does not begin with a line 'From ...'")
            elif is_open:
                message.append(line)
            is_after_empty = not line.strip()
    if not is_open:
        if number == 1:
            raise RefusedError("the file is empty", Reason.EMPTY)
        raise InputError("not a mailbox: no line 'From ...' begins a message")
    yield begin, b"".join(message)


def _from_message(data: bytes, encoding: str) -> TextDocument:
    message = message_from_bytes(_QUOTED.sub(rb"\1", data))
    text = "\n\n".join(part for part in _texts_of(message, encoding) if part)
    if not text:
        raise RefusedError("the message has no text", Reason.EMPTY)
    metadata = {name: value for name, header in _METADATA.items() if (value := _header_of(message, header))}
    if "date" in metadata:
        metadata["date"] = _iso_date(metadata["date"])
    id = "".join(_header_of(message, "Message-ID").split()).strip("<>")
    if not id:
        id = TextDocument.from_row(text).id
    return TextDocument(id, text, metadata)


def _texts_of(message: Message, encoding: str) -> Iterator[str]:
    """Yield the text parts of a message; of alternatives the plain one, else the HTML as text."""
    if message.is_multipart():
        parts = [part for part in message.get_payload() if isinstance(part, Message)]
        if message.get_content_type() == "multipart/alternative":
            plain = [part for part in parts if part.get_content_type() == "text/plain"]
            found = [text for part in plain for text in _texts_of(part, encoding) if text]
            if found:
                yield from found
                return
        for part in parts:
            yield from _texts_of(part, encoding)
        return
    kind = message.get_content_type()
    if kind not in ("text/plain", "text/html") or message.get_content_disposition() == "attachment":
        return
    text = _decoded_payload(message, encoding)
    yield (html_text(text)[0] if kind == "text/html" else text).replace("\r\n", "\n").strip()


def _decoded_payload(message: Message, encoding: str) -> str:
    """Decode the body of a part; bytes that are not in its character set become U+FFFD."""
    payload = message.get_payload(decode=True)
    data = payload if isinstance(payload, bytes) else b""
    charset = message.get_content_charset() or ""
    for name in (charset, encoding):
        try:
            return data.decode(name)
        except (LookupError, ValueError):  # UnicodeDecodeError is a ValueError
            continue
    return data.decode("cp1252", "replace")


def _header_of(message: Message, name: str) -> str:
    """Return a header as one line, its encoded words decoded; empty where it is not there."""
    try:
        raw = message.get(name, "")
        raw = raw[:_LONGEST_HEADER] if isinstance(raw, str) else raw
        value = str(make_header(decode_header(raw)))
    except (LookupError, ValueError, IndexError):  # encoded words that are none
        value = str(message.get(name, ""))
    return " ".join(value.encode("utf-8", "replace").decode("utf-8").split())


def _iso_date(value: str) -> str:
    try:
        return parsedate_to_datetime(value).isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return value
