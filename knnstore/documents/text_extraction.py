"""Extraction of the text from HTML pages, Jupyter notebooks and mailboxes."""

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
    """Read an HTML file, and return a document with the visible text, and with the title as metadata.

    The page is decoded with `source.encoding`. If this encoding is UTF-8 and the page is not UTF-8, the
    encoding that the page itself names is used. A page without a title gives a document without metadata.

    Args:
        source: the file.

    Raises:
        OSError: the file cannot be read.
        InputError: the page cannot be decoded, or has no text.
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
    """Extract the visible text and the title from an HTML page.

    Each block element starts a new line. Empty lines, and spaces at the ends of lines, are removed. Outside
    of ``<pre>``, each series of white space becomes one space.

    Args:
        page: the HTML.

    Returns:
        The text and the title. The text is empty if the page has no visible text; the title is empty if the
        page has no title.

    Raises:
        InputError: Python's parser cannot parse the page.
    """
    parser = _TextParser()
    try:
        parser.feed(page)
        parser.finish()
    except AssertionError as error:  # Python's parser raises it for some broken declarations
        raise InputError(f"not HTML: {error}") from error
    return parser.get_text(), " ".join("".join(parser.title).split())


class _TextParser(HTMLParser):
    """HTML parser that collects the visible text and the title of a page.

    Call `feed` with the page, then `finish`, then `text`; the attribute `title` has the parts of the title.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self._parts: list[str] = []
        self._unseen: list[str] = []  # names of the open elements whose content is not visible
        self._in_title = False
        self._in_pre = 0

    def finish(self) -> None:
        """End the page. If the last tag or comment is not closed, all text after its beginning is dropped.

        Browsers drop this text too. Python's parser would search the text for the end of each tag in it,
        which can take hours.
        """
        if self.rawdata.startswith("<"):
            self.rawdata = ""
        self.close()

    def parse_starttag(self, i: int) -> int:
        """Parse the start tag at index `i` of the page.

        The attributes of a tag longer than `_LONGEST_TAG` are skipped, because each attribute would take
        hundreds of bytes of memory.

        Returns:
            The index after the end of the tag; -1 if the tag does not end.
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
        """Handle a start tag: begin an invisible element or the title, or append a line break or a tab.

        Args:
            tag: name of the tag in lower case.
            attrs: ignored.
        """
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
        """Handle a tag without content, such as ``<br/>``, like a start tag.

        A tag of an invisible element, such as ``<script/>``, is ignored.
        """
        if tag not in _UNSEEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        """Handle an end tag: end an invisible element, the title or a block.

        Args:
            tag: name of the tag in lower case.
        """
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
        """Handle text between tags: append it to the title or to the visible text, or drop invisible text."""
        if self._unseen:
            return
        if self._in_title:
            self.title.append(data)
        elif self._in_pre:
            self._parts.append(data.replace("\t", "    "))
        else:
            self._parts.append(re.sub(r"\s+", " ", data))

    def get_text(self) -> str:
        """Return the visible text that was collected, without empty lines.

        Spaces at the ends of lines are removed. All other spaces in ``<pre>`` are kept. Outside of ``<pre>``,
        each series of white space becomes one space.
        """
        lines = re.sub(r" *\t[ \t]*", "\t", "".join(self._parts)).split("\n")
        return "\n".join(line.rstrip().strip("\t") for line in lines if line.strip())


_KINDS = ("markdown", "code", "heading")


def read_notebook_document(source: Source) -> TextDocument:
    """Read a Jupyter notebook, and return a document with its markdown and code.

    Args:
        source: the file.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not a notebook, or has no text; the message says why.
    """
    return TextDocument(source.id, extract_notebook_text(source.read_text()))


def extract_notebook_text(content: str) -> str:
    """Return the markdown and code cells of a Jupyter notebook in order, separated by empty lines.

    Outputs of cells are left out.

    Args:
        content: content of the notebook's file, JSON.

    Raises:
        InputError: the content is not a notebook, or has no text; the message says why.
    """
    try:
        notebook = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a notebook: not JSON: {error}") from error
    texts = [text for cell in _list_cells(notebook) if (text := _read_cell_source(cell)).strip()]
    if not texts:
        raise RefusedError("the notebook has no markdown and no code", Reason.EMPTY)
    return "\n\n".join(texts)


def _list_cells(notebook: Any) -> list[Any]:
    """Return the cells of a notebook. Before version 4 of the format, the cells are in worksheets.

    Args:
        notebook: JSON value of the notebook's file.

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
    """Return the text of a markdown, code or heading cell of a notebook; empty for any other cell.

    Args:
        cell: JSON value of the cell.
    """
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
"""Number of characters of a header that are read, because decoding takes time quadratic in the length."""
_METADATA = {"subject": "Subject", "from": "From", "date": "Date"}


def read_mailbox(source: Source, _: Fields) -> Iterator[Entry]:
    """Yield an entry (a document that is not read yet) for each message of a mailbox file (mbox).

    The id of the document is the message's Message-ID. If the message has no Message-ID, the id is a hash of
    the text. Subject, sender and date are metadata.

    Args:
        source: the file.
        _: ignored.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is empty or not a mailbox, or a message is too large.
    """
    for number, (line, data) in enumerate(_split_mailbox(source), start=1):
        yield Entry(
            f"{source.name} message {number} (line {line})", partial(_parse_message, data, source.encoding)
        )


def _split_mailbox(source: Source) -> Iterator[tuple[int, bytes]]:
    """Divide a mailbox file into messages.

    A message begins with a line "From ...", at the beginning of the file or after an empty line. This line
    must have a date, or the next line must be a mail header.

    Args:
        source: the file.

    Yields:
        For each message the number of its first line in the file, and its bytes without this line.

    Raises:
        InputError: the file is empty or not a mailbox, or a message is too large.
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

    The document's text consists of the texts of the message's parts. The metadata are subject, sender and
    date, as far as the message has them. The id is the Message-ID. If the message has no Message-ID, the id
    is a hash of the text.

    Args:
        data: bytes of the message, headers included.
        encoding: encoding of parts that name no character set.

    Raises:
        RefusedError: the message has no text.
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
    """Yield the texts of a message's parts, without attachments. A text may be empty.

    HTML parts are converted to text. If a message has the same content in alternative forms, and one of the
    forms is plain text that is not empty, only the plain text is yielded.

    Args:
        message: a message, or a part of a message.
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
    """Decode the body of a part of a message, and return its text.

    The character set that the part names is tried first, then `encoding`. If both fail, the body is decoded
    as Windows-1252, and bytes that this character set lacks become U+FFFD.

    Args:
        message: the part.
        encoding: encoding to try if the part names no character set, or a wrong one.
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
    """Return a header of a message as one line of text, with encoded words decoded.

    Returns an empty text if the message has no header with this name.
    """
    try:
        raw = message.get(name, "")
        raw = raw[:_LONGEST_HEADER] if isinstance(raw, str) else raw
        value = str(make_header(decode_header(raw)))
    except (LookupError, ValueError, IndexError):  # malformed encoded words
        value = str(message.get(name, ""))
    return " ".join(value.encode("utf-8", "replace").decode("utf-8").split())


def _convert_date(value: str) -> str:
    """Convert the date of a mail header to ISO 8601. A text that is not a date is returned unchanged."""
    try:
        return parsedate_to_datetime(value).isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return value
