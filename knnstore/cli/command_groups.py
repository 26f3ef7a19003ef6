"""Command groups of other packages.

A package adds commands by an entry point of the group ``knnstore.commands``, which refers to a
`CommandGroup`. The name of the entry point becomes the name of the command group: the entry point
``research`` with the command ``probe-keys`` gives ``knnstore research probe-keys``. Its module is imported
whenever `knnstore` starts, so it should import heavy modules inside its commands only.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from knnstore.cli.output import print_message

GROUP = "knnstore.commands"


class CommandGroup(NamedTuple):
    """Commands that another package adds to ``knnstore``."""

    help: str
    """Help text of the group, one sentence."""
    commands: Mapping[str, Callable[..., None]]
    """Typer functions by command name. A docstring may end with a section "Examples:"."""


def load_command_groups() -> Iterator[tuple[str, CommandGroup]]:
    """Load the command groups of other installed packages, and yield the name and the group of each.

    A group that cannot be loaded is left out, with a message on stderr.
    """
    for entry in entry_points(group=GROUP):
        try:
            group = entry.load()
        except Exception as error:
            print_message(f"the commands of {entry.value} cannot be loaded and are left out: {error}")
            continue
        yield entry.name, group
