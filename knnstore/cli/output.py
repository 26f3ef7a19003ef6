"""Output of commands: tables and JSON on stdout, progress and messages on stderr.

All output goes through this module. It can contain untrusted text, and some characters control a terminal:
they write to the clipboard, clear lines, or reverse the direction of text. These characters are escaped.
"""

import json
import logging
import math
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from knnstore.checks import printable
from knnstore.cli.logs import LOG, as_object, level_of
from knnstore.progress import Progress

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tabs and line breaks
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, zero width, breaks
    "\ud800-\udfff\U000e0000-\U000e007f]"  # surrogates, invisible copies of ASCII
)
_DEEPEST = 100
"""Largest depth of nested JSON that is printed."""
_NARROWEST = 12
"""Smallest width in characters to which a text column of a table is cut."""
_ERASED = "\r\x1b[K"
"""Escape code that clears the terminal line."""
SECONDS_BETWEEN_LINES = 15.0
"""Seconds between two progress lines, if stderr is not a terminal."""


class Verbatim(str):
    """Text of a document or a model. `echo` escapes it on a terminal only, not in files and pipes."""


def print_result(result: Any, text: str | Sequence[str], *, as_json: bool) -> None:
    """Print a result on stdout, as one line of JSON or as text. An empty text prints nothing.

    Args:
        result: a value that JSON can hold. Infinite numbers and NaN become null.
        text: the same result for people, or the parts of this text.
        as_json: True prints `result`, False prints `text`.
    """
    parts = [_json(result)] if as_json else [text] if isinstance(text, str) else text
    if any(parts):
        echo(*parts)


def echo(*parts: str, to_stderr: bool = False, end: str = "\n") -> None:
    """Print the joined parts of a text and `end`, with terminal controls escaped; see `Verbatim`."""
    stream = sys.stderr if to_stderr else sys.stdout
    exact = not stream.isatty()
    shown = (part if exact and isinstance(part, Verbatim) else visible(part) for part in parts)
    print(*shown, sep="", end=end, file=stream, flush=True)


def visible(text: str) -> str:
    r"""Escape characters that control a terminal as in Python, ``\x1b``. Tabs and line breaks stay."""
    return _STEERING.sub(lambda char: repr(char[0])[1:-1], text)


def row_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Nested values are not converted."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def plain(result: Any) -> dict[str, Any]:
    """Return a dataclass as a dict, nested ones too. The outer field ``lam`` is renamed to ``lambda``."""
    return {"lambda" if name == "lam" else name: value for name, value in asdict(result).items()}


def json_lines(pairs: Mapping[str, Any]) -> str:
    """Format an object as JSON with one value a line. A list of objects gets one line for each object.

    Numbers in these lists are rounded to six digits, so that their lines stay readable.
    """
    lines = []
    for name, value in pairs.items():
        rows = value if isinstance(value, list | tuple) else ()
        if rows and all(isinstance(row, Mapping) for row in rows):
            written = "[\n" + ",\n".join(f"    {_json(_short(row))}" for row in rows) + "\n  ]"
        else:
            written = _json(value)
        lines.append(f"  {_json(name)}: {written}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(f"{part:.6g}") if isinstance(part, float) else part for name, part in row.items()}


def _json(value: Any) -> str:
    written = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
    return _STEERING.sub(lambda char: json.dumps(char[0])[1:-1], written)


def _finite(value: Any, depth: int = 0) -> Any:
    """Replace infinite numbers and NaN by None, and values nested too deeply by "…"."""
    if isinstance(value, Mapping | list | tuple) and depth == _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return {key: _finite(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part, depth + 1) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, width: int | None = None) -> str:
    """Format rows as a table with headings. Numbers are right-aligned. Without rows it has headings only.

    Args:
        rows: the values of each row, by column.
        columns: the columns, in their order.
        width: largest number of characters of a line. The widest text columns are cut to fit. Default is the
            width of the terminal; no limit if stdout is not a terminal.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    cells = [[column, *(_cell(row[column]) for row in rows)] for column in columns]
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    widths = [max(map(len, column)) for column in cells]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(
            (at for at, numbers in enumerate(numeric) if not numbers), key=widths.__getitem__, default=None
        )
        if widest is None or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    padded = [
        [cell.rjust(size) if numbers else _cut(cell, size).ljust(size) for cell in column]
        for column, size, numbers in zip(cells, widths, numeric, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _cut(text: str, size: int) -> str:
    """Return a text cut to `size` characters, with "…" at the cut."""
    return text if len(text) <= size else f"{text[: size - 1]}…"


def pairs(values: Mapping[str, Any]) -> str:
    """Format values one a line, each after its name."""
    width = max(len(name) for name in values)
    return "\n".join(f"{name:<{width}}  {_cell(value)}".rstrip() for name, value in values.items())


def note(message: str) -> None:
    """Print a message on stderr, in the form of ``--log-format``."""
    if LOG.as_json:
        message = as_object(*level_of(message))
    echo(message, to_stderr=True)


def detail(message: str) -> None:
    """Print a message on stderr if ``--verbose`` was given."""
    if LOG.verbose:
        note(message)


class Lines(logging.Handler):
    """Logging handler that prints records on stderr, in the form of ``--log-format``.

    Args:
        timed: True if text lines begin with time and level, as the log of a server does.
    """

    def __init__(self, *, timed: bool = False) -> None:
        super().__init__()
        self._timed = timed

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, with the traceback if it has an exception."""
        way = ""
        if record.exc_info and record.exc_info[1]:
            way = "".join(traceback.format_exception(record.exc_info[1]))
        level, message = record.levelname.lower(), printable(record.getMessage())
        if LOG.as_json:
            more = getattr(record, "request", {}) | ({"traceback": way} if way else {})
            echo(as_object(level, message, **more), to_stderr=True)
            return
        if self._timed:
            moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            message = f"{moment} {level} {message}"
        echo(message + (f"\n{way.rstrip()}" if way else ""), to_stderr=True)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line; the name of its class if the message is empty."""
    said = "out of memory " * isinstance(error, MemoryError) + str(error)
    return printable(" ".join(said.split()) or type(error).__name__)


def _cell(value: Any) -> str:
    """Format a value for a table: numbers with separators, booleans as yes or no, None as empty text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple | list) and all(isinstance(item, str) for item in value):
        return printable(", ".join(value))
    return _json(value)


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show a title on the terminal while the context is open.

    After a success it prints the duration with ``--verbose``.
    """
    shown = sys.stderr.isatty() and not LOG.as_json
    began = time.perf_counter()
    if shown:
        print(f"{printable(title)} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(_ERASED, end="", file=sys.stderr, flush=True)
    detail(f"{title}: {time.perf_counter() - began:.1f} s")


class Bar(Progress, AbstractContextManager["Bar"]):
    """Progress on stderr with amount, rate and remaining time.

    On a terminal it is a bar, otherwise a line every `SECONDS_BETWEEN_LINES` seconds.
    """

    def __init__(self) -> None:
        from tqdm import tqdm  # imported here, because many commands need no bar

        self._new = tqdm
        self._bar: Any = tqdm(disable=True)
        self._title, self._unit = "", ""
        self._done, self._total = 0, None  # type: int, int | None
        self._began = self._said = time.monotonic()

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """Close the current bar and show a new one."""
        self.finish()
        self._title, self._unit, self._done, self._total = title, unit, 0, total
        self._began = self._said = time.monotonic()
        self._bar = self._new(
            desc=printable(title),
            total=total,
            unit=unit,
            unit_scale=True,
            disable=LOG.as_json or None,  # None disables the bar if stderr is not a terminal
            file=sys.stderr,
            leave=False,
        )

    def expect(self, total: int) -> None:
        """Change the expected total; at least the amount already done."""
        self._total = max(total, self._done)
        self._bar.total = self._total

    def advance(self, amount: int) -> None:
        """Add `amount` to the progress."""
        self._done += amount
        self._bar.update(amount)
        now = time.monotonic()
        if self._bar.disable and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self._say_how_far(now - self._began)

    def finish(self) -> None:
        """Close and remove the bar."""
        self._bar.close()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.clear()
        note(printable(message))

    def _say_how_far(self, seconds: float) -> None:
        """Print a line with the progress after `seconds` of work."""
        done, total, rate = self._done, self._total, self._done / seconds
        parts = [
            f"{done:,}{'' if total is None else f' of {total:,}'} {self._unit}",
            f"{rate:,.0f} {self._unit}/s",
        ]
        if total is not None and rate:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        message = printable(f"{self._title}: {', '.join(parts)}")
        if LOG.as_json:
            message = as_object("info", message, done=done, total=total, unit=self._unit)
        echo(message, to_stderr=True)

    def __exit__(self, *_: object) -> None:
        self.finish()
