"""Options for messages on stderr: how many, and in which form. `LOG` holds the options of the current run."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer

Form = Literal["text", "json"]

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more: what is left out and why, what takes time.")
]
LogFormatOption = Annotated[
    Form | None,
    typer.Option(
        show_default="text", help="Messages on stderr: lines for people (text), or an object a line (json)."
    ),
]


class Log:
    """Message options of the current run of the command line."""

    def __init__(self) -> None:
        self.verbose = False
        """True if details are printed too."""
        self.as_json = False
        """True if each message is printed as a JSON object."""

    def begin(self) -> None:
        """Reset the options, because a process can run the command line several times."""
        self.verbose = self.as_json = False

    def ask(self, verbose: bool, form: Form | None) -> None:
        """Apply options that were given before or after the command. None leaves the form unchanged."""
        self.verbose = self.verbose or verbose
        self.as_json = self.as_json if form is None else form == "json"


LOG = Log()


def as_object(level: str, message: str, **more: Any) -> str:
    """Return a message as one line of JSON, with the current time in UTC and the fields `more`."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **more}, ensure_ascii=False)


def level_of(message: str) -> tuple[str, str]:
    """Split a message into its level and its text. Without a prefix "warning: " or "error: " it is info."""
    for level in ("warning", "error"):
        if message.startswith(f"{level}: "):
            return level, message.removeprefix(f"{level}: ")
    return "info", message
