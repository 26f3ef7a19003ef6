"""Commands of other packages.

A package offers commands as an entry point of the group ``knnstore.commands``. The entry point names a
`CommandGroup`; its own name is that of the group: an entry point ``research`` with a command ``probe-keys``
gives ``knnstore research probe-keys``. The module is imported whenever `knnstore` starts, so it should import
nothing heavy outside its commands.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from knnstore.cli.output import note

GROUP = "knnstore.commands"


class CommandGroup(NamedTuple):
    """Commands that another package adds to ``knnstore``."""

    help: str
    """A sentence about the group."""
    commands: Mapping[str, Callable[..., None]]
    """The commands by name, as Typer takes them. A docstring may end in a section "Examples:"."""


def load_command_groups() -> Iterator[tuple[str, CommandGroup]]:
    """Yield the name and the commands of each installed group.

    A group that cannot be loaded is left out; a message on stderr names it.
    """
    for entry in entry_points(group=GROUP):
        try:
            group = entry.load()
        except Exception as error:
            note(f"the commands of {entry.value} cannot be loaded and are left out: {error}")
            continue
        yield entry.name, group
