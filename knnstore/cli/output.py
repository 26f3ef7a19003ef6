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

from knnstore.checks import escape_unprintable
from knnstore.cli.logs import LOG, format_json_message, split_level
from knnstore.progress import Progress

_TERMINAL_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tabs and line breaks
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, zero width, breaks
    "\ud800-\udfff\U000e0000-\U000e007f]"  # surrogates, invisible copies of ASCII
)
_MAX_JSON_DEPTH = 100
"""Largest depth of nested JSON that is printed."""
_MIN_COLUMN_WIDTH = 12
"""Smallest width in characters to which a text column of a table is cut."""
_CLEAR_LINE = "\r\x1b[K"
"""Escape code that clears the terminal line."""
SECONDS_BETWEEN_LINES = 15.0
"""Seconds between two progress lines, if stderr is not a terminal."""


class Verbatim(str):
    """Text from a document or a model, in which `echo` escapes control characters on a terminal only."""


def print_result(result: Any, text: str | Sequence[str], *, as_json: bool) -> None:
    """Print a result on stdout, as one line of JSON or as text for people.

    Args:
        result: a value that JSON can hold. Infinite numbers and NaN become null.
        text: the same result for people, as one text or as parts that are joined. An empty text prints
            nothing.
        as_json: True to print `result`, False to print `text`.
    """
    parts = [_format_json(result)] if as_json else [text] if isinstance(text, str) else text
    if any(parts):
        echo(*parts)


def echo(*parts: str, to_stderr: bool = False, end: str = "\n") -> None:
    """Print a text on stdout, with characters that control a terminal escaped.

    Args:
        *parts: the parts of the text, which are joined. A `Verbatim` part is printed unchanged if the stream
            is not a terminal.
        to_stderr: True to print on stderr.
        end: text that is printed after the parts.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    keeps_verbatim = not stream.isatty()
    escaped = (
        part if keeps_verbatim and isinstance(part, Verbatim) else escape_controls(part) for part in parts
    )
    print(*escaped, sep="", end=end, file=stream, flush=True)


def escape_controls(text: str) -> str:
    r"""Replace each character that is invisible or controls a terminal with a Python escape such as ``\x1b``.

    Characters that change the direction of text, halves of surrogate pairs, and line breaks such as ``\r``
    are replaced too. Tabs and ``\n`` stay.
    """
    return _TERMINAL_CONTROLS.sub(lambda char: repr(char[0])[1:-1], text)


def get_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as a dict. Nested dataclasses are not converted."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def convert_to_dict(result: Any) -> dict[str, Any]:
    """Convert a dataclass instance, with its nested dataclasses, to a dict.

    The field ``lam`` is renamed to ``lambda``, but not in nested dataclasses.
    """
    return {"lambda" if name == "lam" else name: value for name, value in asdict(result).items()}


def _format_json(value: Any) -> str:
    """Return a value as one line of JSON, with terminal controls escaped and unknown types as text."""
    text = json.dumps(_replace_unprintable(value), ensure_ascii=False, allow_nan=False, default=str)
    return _TERMINAL_CONTROLS.sub(lambda char: json.dumps(char[0])[1:-1], text)


def _replace_unprintable(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value with None for infinite numbers and NaN, and "…" for values nested too deeply.

    Args:
        value: any value for JSON.
        depth: depth of the value in the whole value; callers leave it out.
    """
    if isinstance(value, Mapping | list | tuple) and depth == _MAX_JSON_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {key: _replace_unprintable(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_unprintable(part, depth + 1) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, width: int | None = None
) -> str:
    """Format rows as a table with headings. Numbers are right-aligned. No rows give only headings.

    Args:
        rows: the values of each row, by column.
        columns: the columns, in their order.
        width: largest number of characters of a line. The widest text columns are cut to fit. None means the
            width of the terminal, or no limit if stdout is not a terminal.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    cells = [[column, *(_format_cell(row[column]) for row in rows)] for column in columns]
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    widths = [max(map(len, column)) for column in cells]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(
            (position for position, numbers in enumerate(numeric) if not numbers),
            key=widths.__getitem__,
            default=None,
        )
        if widest is None or widths[widest] <= _MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
    padded = [
        [cell.rjust(size) if numbers else _cut_text(cell, size).ljust(size) for cell in column]
        for column, size, numbers in zip(cells, widths, numeric, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _cut_text(text: str, size: int) -> str:
    """Return a text of at most `size` characters; a longer text is cut and ends with "…"."""
    return text if len(text) <= size else f"{text[: size - 1]}…"


def format_pairs(values: Mapping[str, Any]) -> str:
    """Format a mapping as lines of a name and its value, with the values aligned.

    Args:
        values: at least one pair.
    """
    width = max(len(name) for name in values)
    return "\n".join(f"{name:<{width}}  {_format_cell(value)}".rstrip() for name, value in values.items())


def print_message(message: str) -> None:
    """Print a message on stderr, as text or JSON (``--log-format``).

    The prefix "warning: " or "error: " gives the level of a JSON message.
    """
    if LOG.as_json:
        message = format_json_message(*split_level(message))
    echo(message, to_stderr=True)


def print_detail(message: str) -> None:
    """Print a message on stderr if ``--verbose`` was given."""
    if LOG.verbose:
        print_message(message)


class MessageHandler(logging.Handler):
    """Logging handler that prints records on stderr, in the form of ``--log-format``.

    Args:
        timed: True if text lines begin with time and level, as the log of a server does.
    """

    def __init__(self, *, timed: bool = False) -> None:
        super().__init__()
        self._timed = timed

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, with the traceback if it has an exception."""
        traceback_text = ""
        if record.exc_info and record.exc_info[1]:
            traceback_text = "".join(traceback.format_exception(record.exc_info[1]))
        level, message = record.levelname.lower(), escape_unprintable(record.getMessage())
        if LOG.as_json:
            fields = getattr(record, "request", {}) | (
                {"traceback": traceback_text} if traceback_text else {}
            )
            echo(format_json_message(level, message, **fields), to_stderr=True)
            return
        if self._timed:
            moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            message = f"{moment} {level} {message}"
        echo(message + (f"\n{traceback_text.rstrip()}" if traceback_text else ""), to_stderr=True)


def format_error(error: BaseException) -> str:
    """Return the message of an exception in one line; the name of its class if the message is empty."""
    message = "out of memory " * isinstance(error, MemoryError) + str(error)
    return escape_unprintable(" ".join(message.split()) or type(error).__name__)


def _format_cell(value: Any) -> str:
    """Format a value for a table: numbers with separators, booleans as yes or no, None as empty text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, str):
        return escape_unprintable(value)
    if isinstance(value, tuple | list) and all(isinstance(item, str) for item in value):
        return escape_unprintable(", ".join(value))
    return _format_json(value)


@contextmanager
def show_activity(title: str) -> Iterator[None]:
    """Show "TITLE ..." on stderr while the context is open, if stderr is a terminal.

    With ``--verbose``, the duration is printed if the context ends without an error.
    """
    is_terminal = sys.stderr.isatty() and not LOG.as_json
    started_at = time.perf_counter()
    if is_terminal:
        print(f"{escape_unprintable(title)} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
    print_detail(f"{title}: {time.perf_counter() - started_at:.1f} s")


class Bar(Progress, AbstractContextManager["Bar"]):
    """Shows progress on stderr: the amount done, the rate and the remaining time.

    On a terminal it is a bar, otherwise a line every `SECONDS_BETWEEN_LINES` seconds.
    """

    def __init__(self) -> None:
        from tqdm import tqdm  # imported here, because many commands need no bar

        self._make_bar = tqdm
        self._bar: Any = tqdm(disable=True)
        self._title, self._unit = "", ""
        self._done, self._total = 0, None  # type: int, int | None
        self._started_at = self._last_line_at = time.monotonic()

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """Close the current bar, if there is one, and show a new bar.

        Args:
            title: text before the bar.
            total: expected amount of work; None if it is not known.
            unit: name of a unit of work.
        """
        self.finish()
        self._title, self._unit, self._done, self._total = title, unit, 0, total
        self._started_at = self._last_line_at = time.monotonic()
        self._bar = self._make_bar(
            desc=escape_unprintable(title),
            total=total,
            unit=unit,
            unit_scale=True,
            disable=LOG.as_json or None,  # None disables the bar if stderr is not a terminal
            file=sys.stderr,
            leave=False,
        )

    def expect(self, total: int) -> None:
        """Change the expected total; a total below the amount already done is raised to this amount."""
        self._total = max(total, self._done)
        self._bar.total = self._total

    def advance(self, amount: int) -> None:
        """Add `amount` to the progress."""
        self._done += amount
        self._bar.update(amount)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line_at >= SECONDS_BETWEEN_LINES:
            self._last_line_at = now
            self._print_progress_line(now - self._started_at)

    def finish(self) -> None:
        """Close and remove the bar."""
        self._bar.close()

    def print_above(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.clear()
        print_message(escape_unprintable(message))

    def _print_progress_line(self, seconds: float) -> None:
        """Print a line with the amount done, the rate and the remaining time.

        Args:
            seconds: time since the start of the work.
        """
        done, total, rate = self._done, self._total, self._done / seconds
        parts = [
            f"{done:,}{'' if total is None else f' of {total:,}'} {self._unit}",
            f"{rate:,.0f} {self._unit}/s",
        ]
        if total is not None and rate:
            parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        message = escape_unprintable(f"{self._title}: {', '.join(parts)}")
        if LOG.as_json:
            message = format_json_message("info", message, done=done, total=total, unit=self._unit)
        echo(message, to_stderr=True)

    def __exit__(self, *_: object) -> None:
        self.finish()
