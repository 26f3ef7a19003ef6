"""The reference page of the command line: ``python -m knnstore.cli.reference > docs/cli.md``."""

from collections.abc import Iterator
from typing import Any

import typer

from knnstore.cli import app

_WIDTH = 100

_OPENING = """\
# The command line

Made from the commands' own help by `python -m knnstore.cli.reference > docs/cli.md`; a test keeps it
up to date.

Results are printed on stdout, progress and messages on stderr; `--json` prints a result as JSON. The exit
status is 0 when the command did what it was asked, 1 after an error (one line on stderr), 2 when it was
called wrongly and 130 after Ctrl-C.
"""


def iterate_help_texts(command: Any = None, name: str = "knnstore") -> Iterator[tuple[str, str]]:
    """Yield the full name and the help text of a command, then of all its subcommands.

    Args:
        command: the command to begin with; None begins with `knnstore` itself.
        name: the command's full name, with the names of its groups.
    """
    command = command or typer.main.get_command(app)
    context = typer.Context(
        command, info_name=name, terminal_width=_WIDTH, help_option_names=["-h", "--help"]
    )
    lines = command.get_help(context).splitlines()
    yield name, "\n".join(line.rstrip() for line in lines)
    for subcommand in getattr(command, "commands", {}).values():
        yield from iterate_help_texts(subcommand, f"{name} {subcommand.name}")


def format_reference_page() -> str:
    """Return the reference page as Markdown: one section with the help text for each command."""
    sections = [f"## {name}\n\n```text\n{text}\n```\n" for name, text in iterate_help_texts()]
    return "\n".join([_OPENING, *sections])


if __name__ == "__main__":
    print(format_reference_page(), end="")
