"""How much is said on stderr, and in which form: lines for people, or a JSON object a line."""

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
    """What the options of this run of the command line ask for."""

    def __init__(self) -> None:
        self.verbose = False
        self.as_json = False

    def begin(self) -> None:
        """Forget what an earlier run in this process asked for."""
        self.verbose = self.as_json = False

    def ask(self, verbose: bool, form: Form | None) -> None:
        """Take options, which stand before the command or after it."""
        self.verbose = self.verbose or verbose
        self.as_json = self.as_json if form is None else form == "json"


LOG = Log()


def as_object(level: str, message: str, **more: Any) -> str:
    """Write a message as one line of JSON, with the time in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **more}, ensure_ascii=False)


def level_of(message: str) -> tuple[str, str]:
    """The level of a message that begins with it, and the rest; info where it does not."""
    for level in ("warning", "error"):
        if message.startswith(f"{level}: "):
            return level, message.removeprefix(f"{level}: ")
    return "info", message
