"""Text of HTML pages, Jupyter notebooks and mailboxes."""

import json
import re
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import partial
from html.parser import HTMLParser
from typing import Any

from knnstore.documents.document import Entry, Fields, Reason, RefusedError, TextDocument
from knnstore.documents.source_files import (
    MAX_DOCUMENT_BYTES,
    UTF8,
    Source,
    check_encoding,
    decode_text,
    is_utf8,
    make_too_large_error,
)
from knnstore.errors import InputError

_UNSEEN = frozenset(("script", "style", "template", "noscript", "svg", "iframe", "object", "canvas"))
_BLOCKS = frozenset(
    (  # noqa: SIM905  # a list would take a line for each name
        "address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset "
        "figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol "
        "option p pre search section select summary table tbody textarea tfoot thead title tr ul"
    ).split()
)
_CELLS = frozenset(("td", "th"))
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_LONGEST_TAG = 1 << 16  # of which attributes are read
_TAG_NAME = re.compile(r"[^\s/>]+")
_TAG = re.compile(r"""<(?:[^>"']|"[^"]*"|'[^']*')*+>""")
_CHARSET_WITHIN = 4096
"""Number of bytes at the beginning of a page that are searched for the name of its encoding."""


def read_html_document(source: Source) -> TextDocument:
    """Read an HTML page: its visible text becomes the document's text, its title becomes metadata.

    The page is decoded with `source.encoding`. If that is UTF-8 and does not fit, the encoding that the page
    itself names is used.

    Raises:
        InputError: the page is in another encoding, or has no text.
    """
    data = source.read_bytes()
    try:
        page = decode_text(data, source.encoding)
    except InputError:
        match = _CHARSET.search(data[:_CHARSET_WITHIN])
        if match is None or not is_utf8(source.encoding):
            raise
        charset = match[1].decode("ascii")
        try:
            # Browsers read Latin-1 as Windows-1252, which has more characters.
            is_latin = charset.lower() in ("iso-8859-1", "latin1", "latin-1", "us-ascii")
            encoding = "cp1252" if is_latin else check_encoding(charset)
        except InputError:
            encoding = UTF8
        page = decode_text(data, encoding)
    text, title = extract_html_text(page)
    if not text:
        raise RefusedError("the page has no text", Reason.EMPTY)
    return TextDocument(source.id, text, {"title": title} if title else {})


def extract_html_text(page: str) -> tuple[str, str]:
    """Return the text and the title of an HTML page; either may be empty.

    Each block element starts a new line. A run of white space becomes one space, except in ``<pre>``.

    Raises:
        InputError: Python's parser cannot parse the page.
    """
    parser = _TextParser()
    try:
        parser.feed(page)
        parser.finish()
    except AssertionError as error:  # Python's parser raises it for some broken declarations
        raise InputError(f"not HTML: {error}") from error
    return parser.text(), " ".join("".join(parser.title).split())


class _TextParser(HTMLParser):
    """Parser that collects the visible text and the title of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self._parts: list[str] = []
        self._unseen: list[str] = []  # names of the open elements whose content is not visible
        self._in_title = False
        self._in_pre = 0

    def finish(self) -> None:
        """End the page. If a tag or comment is not closed, the text after it is dropped, as in browsers.

        Python's parser would search that text for the end of each tag in it, which can take hours.
        """
        if self.rawdata.startswith("<"):
            self.rawdata = ""
        self.close()

    def parse_starttag(self, i: int) -> int:
        """Parse the start tag at index `i` of the page; returns the index after its end, or -1 if it is open.

        The attributes of a tag longer than `_LONGEST_TAG` are skipped: each would take hundreds of bytes of
        memory.
        """
        if self.rawdata.find(">", i, i + _LONGEST_TAG) >= 0 or len(self.rawdata) - i <= _LONGEST_TAG:
            return super().parse_starttag(i)
        whole = _TAG.match(self.rawdata, i)
        end = whole.end() if whole is not None else self.rawdata.find(">", i) + 1
        if end <= 0:  # the tag does not end
            return -1
        name = _TAG_NAME.match(self.rawdata, i + 1)
        if name is not None:
            self.handle_starttag(name[0].lower(), [])
        return end

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Begin an invisible element, the title, or a new line or cell of the text."""
        if tag in _UNSEEN:
            if tag not in self._unseen:  # the first end tag closes all nested elements of this name
                self._unseen.append(tag)
        elif self._unseen:
            return
        elif tag == "title":
            self._in_title = True
        elif tag in _BLOCKS:
            self._in_pre += tag == "pre"
            self._parts.append("\n")
        elif tag in _CELLS:
            self._parts.append("\t")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Handle a tag without content, such as ``<br/>``, as a start tag; ignore invisible elements."""
        if tag not in _UNSEEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        """End an invisible element, the title or a block."""
        if tag in self._unseen:
            del self._unseen[self._unseen.index(tag) :]
        elif tag == "body":
            self._unseen.clear()
        if tag == "title":
            self._in_title = False
        elif tag in _BLOCKS and not self._unseen:
            self._in_pre = max(0, self._in_pre - (tag == "pre"))
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        """Append text to the title or to the visible text; drop the text of invisible elements."""
        if self._unseen:
            return
        if self._in_title:
            self.title.append(data)
        elif self._in_pre:
            self._parts.append(data.replace("\t", "    "))
        else:
            self._parts.append(re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Return the collected text, without empty lines; spaces in ``<pre>`` stay."""
        lines = re.sub(r" *\t[ \t]*", "\t", "".join(self._parts)).split("\n")
        return "\n".join(line.rstrip().strip("\t") for line in lines if line.strip())


_KINDS = ("markdown", "code", "heading")


def read_notebook_document(source: Source) -> TextDocument:
    """Read a notebook: its markdown and code cells in order, separated by empty lines, without outputs.

    Raises:
        InputError: the file is not a notebook, or has no text; says why.
    """
    try:
        notebook = json.loads(source.read_text())
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not a notebook: not JSON: {error}") from error
    texts = [text for cell in _list_cells(notebook) if (text := _read_cell_source(cell)).strip()]
    if not texts:
        raise RefusedError("the notebook has no markdown and no code", Reason.EMPTY)
    return TextDocument(source.id, "\n\n".join(texts))


def _list_cells(notebook: Any) -> list[Any]:
    """Return the cells of a notebook; before version 4 of the format they are in worksheets.

    Raises:
        InputError: the notebook has no list of cells.
    """
    if isinstance(notebook, Mapping):
        worksheets = notebook.get("worksheets")
        if isinstance(worksheets, list):
            cell_lists = [sheet.get("cells") for sheet in worksheets if isinstance(sheet, Mapping)]
            return [cell for cells in cell_lists if isinstance(cells, list) for cell in cells]
        if isinstance(notebook.get("cells"), list):
            return list(notebook["cells"])
    raise InputError("not a notebook: there is no list of 'cells'")


def _read_cell_source(cell: Any) -> str:
    """Return the source of a markdown, code or heading cell; empty for any other cell."""
    if not isinstance(cell, Mapping) or cell.get("cell_type") not in _KINDS:
        return ""
    lines = cell.get("source", cell.get("input", ""))
    if isinstance(lines, list):
        lines = "".join(line for line in lines if isinstance(line, str))
    return lines.rstrip("\n") if isinstance(lines, str) else ""


_DATED = re.compile(rb"From .*\d\d?:\d\d.*\d{4}")
_HEADER = re.compile(rb"[!-9;-~]+:|>From ")
_QUOTED = re.compile(rb"^>(>*From )", re.MULTILINE)
_LONGEST_HEADER = 20_000
"""Number of characters of a header that are read: the time to decode a header is quadratic in its length."""
_METADATA = {"subject": "Subject", "from": "From", "date": "Date"}


def read_mailbox(source: Source, _: Fields) -> Iterator[Entry]:
    """Yield an entry for each message of a mailbox (mbox).

    The id of a message is its Message-ID, or a hash of its text. Subject, sender and date are metadata.

    Raises:
        InputError: the file is empty or not a mailbox, or a message is too large.
    """
    for number, (line, data) in enumerate(_split_mailbox(source), start=1):
        yield Entry(
            f"{source.name} message {number} (line {line})", partial(_parse_message, data, source.encoding)
        )


def _split_mailbox(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield the number of the first line and the bytes of each message of a mailbox.

    A message begins at a line "From ..." after an empty line, if the line has a date or a header follows it.
    """
    message: list[bytes] = []
    first_line, size, number, is_open, is_after_empty = 0, 0, 0, False, True
    with source.open() as stream:
        held_line: bytes | None = None  # a line "From ..." that begins a message if the next line is a header
        while True:
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            number += 1
            if held_line is not None:
                if _DATED.match(held_line) or _HEADER.match(line):
                    if is_open:
                        yield first_line, b"".join(message)
                    message, size, first_line, is_open = [], 0, number - 1, True
                else:
                    message.append(held_line)
                held_line = None
            if not line:
                break
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise make_too_large_error(f"the message that begins on line {first_line}")
            if is_after_empty and line.startswith(b"From "):
                held_line = line
            elif not is_open and line.strip():
                raise InputError("not a mailbox: it does not begin with a line 'From ...'")
            elif is_open:
                message.append(line)
            is_after_empty = not line.strip()
    if not is_open:
        if number == 1:
            raise RefusedError("the file is empty", Reason.EMPTY)
        raise InputError("not a mailbox: no line 'From ...' begins a message")
    yield first_line, b"".join(message)


def _parse_message(data: bytes, encoding: str) -> TextDocument:
    """Convert an e-mail to a document.

    The document's text consists of the texts of the message's parts. Its metadata are subject, sender and
    date. Its id is the Message-ID, or a hash of the text without a Message-ID. Raises RefusedError if the
    message has no text.

    Args:
        data: bytes of the message, headers included.
        encoding: encoding of parts that name no character set.
    """
    message = message_from_bytes(_QUOTED.sub(rb"\1", data))
    text = "\n\n".join(text for text in _iterate_text_parts(message, encoding) if text)
    if not text:
        raise RefusedError("the message has no text", Reason.EMPTY)
    metadata = {name: value for name, header in _METADATA.items() if (value := _read_header(message, header))}
    if "date" in metadata:
        metadata["date"] = _convert_date(metadata["date"])
    id = "".join(_read_header(message, "Message-ID").split()).strip("<>")
    if not id:
        id = TextDocument.from_row(text).id
    return TextDocument(id, text, metadata)


def _iterate_text_parts(message: Message, encoding: str) -> Iterator[str]:
    """Yield the texts of a message's parts, without attachments; a text may be empty.

    HTML is converted to text. Among alternative parts, only plain texts are used if one is not empty.

    Args:
        message: a message or a part of it.
        encoding: encoding of parts that name no character set.
    """
    if message.is_multipart():
        parts = [part for part in message.get_payload() if isinstance(part, Message)]
        if message.get_content_type() == "multipart/alternative":
            plain = [part for part in parts if part.get_content_type() == "text/plain"]
            texts = [text for part in plain for text in _iterate_text_parts(part, encoding) if text]
            if texts:
                yield from texts
                return
        for part in parts:
            yield from _iterate_text_parts(part, encoding)
        return
    kind = message.get_content_type()
    if kind not in ("text/plain", "text/html") or message.get_content_disposition() == "attachment":
        return
    text = _decode_payload(message, encoding)
    yield (extract_html_text(text)[0] if kind == "text/html" else text).replace("\r\n", "\n").strip()


def _decode_payload(message: Message, encoding: str) -> str:
    """Decode the body of a part: with the character set that the part names, else with `encoding`.

    If both fail, the body is decoded as Windows-1252, and bytes that this character set lacks become U+FFFD.
    """
    payload = message.get_payload(decode=True)
    data = payload if isinstance(payload, bytes) else b""
    charset = message.get_content_charset() or ""
    for name in (charset, encoding):
        try:
            return data.decode(name)
        except (LookupError, ValueError):  # UnicodeDecodeError is a ValueError
            continue
    return data.decode("cp1252", "replace")


def _read_header(message: Message, name: str) -> str:
    """Return a header as one line, with encoded words decoded; empty if the message has no such header."""
    try:
        raw = message.get(name, "")
        raw = raw[:_LONGEST_HEADER] if isinstance(raw, str) else raw
        value = str(make_header(decode_header(raw)))
    except (LookupError, ValueError, IndexError):  # malformed encoded words
        value = str(message.get(name, ""))
    return " ".join(value.encode("utf-8", "replace").decode("utf-8").split())


def _convert_date(value: str) -> str:
    """Convert a date of a mail header to ISO 8601; any other text is returned unchanged."""
    try:
        return parsedate_to_datetime(value).isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return value
