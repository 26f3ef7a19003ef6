"""Pages of HTML as documents: the text that a reader sees."""

import re
from html.parser import HTMLParser

from knnstore.documents.document import Reason, RefusedError, TextDocument
from knnstore.documents.files import UTF8, Source, check_encoding, decoded, is_utf8
from knnstore.errors import InputError

_UNSEEN = frozenset(("script", "style", "template", "noscript", "svg", "iframe", "object", "canvas"))
_BLOCKS = frozenset(
    (
        "address", "article", "aside", "blockquote", "body", "br", "caption", "center", "dd", "details",
        "dialog", "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1",
        "h2", "h3", "h4", "h5", "h6", "head", "header", "hr", "html", "legend", "li", "main", "menu", "nav",
        "ol", "option", "p", "pre", "search", "section", "select", "summary", "table", "tbody", "textarea",
        "tfoot", "thead", "title", "tr", "ul",
    )
)  # fmt: skip
_CELLS = frozenset(("td", "th"))
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_LONGEST_TAG = 1 << 16  # of which attributes are read
_TAG_NAME = re.compile(r"[^\s/>]+")
_TAG = re.compile(r"""<(?:[^>"']|"[^"]*"|'[^']*')*+>""")
_CHARSET_WITHIN = 4096
"""A page names its encoding in its first bytes."""


def html_document(source: Source) -> TextDocument:
    """Read a page: its text without scripts and styles, and its title as metadata.

    Its encoding is the one asked for. By default that is UTF-8, else what the page itself names.

    Raises:
        InputError: it is in another encoding, or has no text.
    """
    data = source.data()
    try:
        page = decoded(data, source.encoding)
    except InputError:
        named = _CHARSET.search(data[:_CHARSET_WITHIN])
        if named is None or not is_utf8(source.encoding):
            raise
        charset = named[1].decode("ascii")
        try:
            # Browsers read Latin-1 as Windows-1252, which has more characters.
            is_latin = charset.lower() in ("iso-8859-1", "latin1", "latin-1", "us-ascii")
            encoding = "cp1252" if is_latin else check_encoding(charset)
        except InputError:
            encoding = UTF8
        page = decoded(data, encoding)
    text, title = html_text(page)
    if not text:
        raise RefusedError("the page has no text", Reason.EMPTY)
    return TextDocument(source.id, text, {"title": title} if title else {})


def html_text(page: str) -> tuple[str, str]:
    """Return the text of a page and its title, either may be empty.

    Blocks stand on lines of their own. White space is one space, but in ``<pre>``.
    """
    parser = _TextParser()
    try:
        parser.feed(page)
        parser.finish()
    except AssertionError as error:  # how Python's parser ends at some broken declarations
        raise InputError(f"not HTML: {error}") from error
    return parser.text(), " ".join("".join(parser.title).split())


class _TextParser(HTMLParser):
    """Collects the text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self._parts: list[str] = []
        self._unseen: list[str] = []  # the elements around that are not seen
        self._in_title = False
        self._in_pre = 0

    def finish(self) -> None:
        """End the page. A tag or comment that never ends takes the rest of it with it, as in browsers.

        Python's parser would look for an end of each one that stands in that rest, which takes hours.
        """
        if self.rawdata.startswith("<"):
            self.rawdata = ""
        self.close()

    def parse_starttag(self, i: int) -> int:
        """Read a tag; of a very long one no attributes, each of which takes hundreds of bytes of memory."""
        if self.rawdata.find(">", i, i + _LONGEST_TAG) >= 0 or len(self.rawdata) - i <= _LONGEST_TAG:
            return super().parse_starttag(i)
        whole = _TAG.match(self.rawdata, i)
        end = whole.end() if whole is not None else self.rawdata.find(">", i) + 1
        if end <= 0:  # it never ends
            return -1
        name = _TAG_NAME.match(self.rawdata, i + 1)
        if name is not None:
            self.handle_starttag(name[0].lower(), [])
        return end

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _UNSEEN:
            if tag not in self._unseen:  # its first end ends all
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
        if tag not in _UNSEEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
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
        if self._unseen:
            return
        if self._in_title:
            self.title.append(data)
        elif self._in_pre:
            self._parts.append(data.replace("\t", "    "))
        else:
            self._parts.append(re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Return the text; empty lines are left out, spaces in ``<pre>`` stay."""
        lines = re.sub(r" *\t[ \t]*", "\t", "".join(self._parts)).split("\n")
        return "\n".join(line.rstrip().strip("\t") for line in lines if line.strip())
