"""Options for messages on stderr: how many, and in which form. `LOG` holds the options of the current run."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer

Form = Literal["text", "json"]

VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Print more: which documents are left out and why, and what takes time."
    ),
]
LogFormatOption = Annotated[
    Form | None,
    typer.Option(
        show_default="text",
        help="Form of messages on stderr: text for people, or one JSON object a line (json).",
    ),
]


class Log:
    """Message options of the current run of the command line."""

    def __init__(self) -> None:
        self.verbose = False
        """True if details are printed too."""
        self.as_json = False
        """True if each message is printed as a JSON object."""

    def reset(self) -> None:
        """Set both options to False, because a process can run the command line several times."""
        self.verbose = self.as_json = False

    def apply_options(self, verbose: bool, form: Form | None) -> None:
        """Apply the options ``--verbose`` and ``--log-format``, given before or after the command's name.

        Args:
            verbose: True to print details; False changes nothing.
            form: form of the messages; None changes nothing.
        """
        self.verbose = self.verbose or verbose
        self.as_json = self.as_json if form is None else form == "json"


LOG = Log()


def format_json_message(level: str, message: str, **more: Any) -> str:
    """Return a message as one line of JSON.

    Args:
        level: value of the field ``level``, e.g. ``warning``.
        message: the message.
        **more: further fields. The field ``time`` is the current time in UTC.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **more}, ensure_ascii=False)


def split_level(message: str) -> tuple[str, str]:
    """Split a message into its level and its text.

    Returns:
        The level ``warning`` or ``error`` if the message has this prefix with a colon, else ``info``; and the
        text without the prefix.
    """
    for level in ("warning", "error"):
        if message.startswith(f"{level}: "):
            return level, message.removeprefix(f"{level}: ")
    return "info", message
