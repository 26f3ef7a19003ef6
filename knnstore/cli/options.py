"""Options that several commands share."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from knnstore.checks import escape_unprintable
from knnstore.errors import ConfigError

HOME_VARIABLE = "KNNSTORE_HOME"
DEFAULT_HOME = Path(".knnstore")


def _resolve_home(context: typer.Context, home: Path) -> Path:
    """Return the store's folder from the option ``--home``, which may be given in several places.

    Callback of the option. The order of precedence is ``--home`` after the command's name, ``--home`` before
    the command's name, the environment variable, the default.
    """
    source = context.get_parameter_source("home")
    if source is not None and source.name == "COMMANDLINE":
        return home
    root_home: Path = context.find_root().params["home"]
    return root_home


HomeOption = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        callback=_resolve_home,
        help=f"Folder of the store; {HOME_VARIABLE} sets another default.",
    ),
]
ModelAtOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        envvar="KNNSTORE_MODEL",
        show_default="where it was when the store was made",
        help="Where the store's model is now, if it was moved.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DomainsOption = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="NAME", help="Retrieve from this domain only; repeat for several."),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Only documents whose metadata meet this condition: \"year >= 2020 and author = 'Ida'\".",
    ),
]
LeaveOutOption = Annotated[
    bool,
    typer.Option("--leave-out", help="A document that is in the store does not retrieve from itself."),
]
LocationOption = Annotated[
    str | None, typer.Option(metavar="URL_OR_DIR", help="Where the vector engine keeps the keys.")
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="TOKENS",
        show_default="the model's limit",
        help="Largest number of tokens that the model reads at once.",
    ),
]
InDomainOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Domain of the document; needed if several domains have a document with this id."
    ),
]


YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(change: str, yes: bool) -> None:
    """Ask the user at the terminal to confirm a change; return if the user agrees.

    Args:
        change: the change, as a sentence without its period.
        yes: True if ``--yes`` was given; then the function returns at once.

    Raises:
        ConfigError: if the user declines, or if there is no terminal to ask at.
    """
    if yes:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        if typer.confirm(f"{escape_unprintable(change)}. Go on?", err=True):
            return
        raise ConfigError("nothing was changed")
    raise ConfigError(f"{change}: confirm with --yes, or see the changes first with --dry-run")


def declare_seed_option(help: str) -> Any:
    """Return a Typer option for a random seed from 0 to 2³² - 1, which all random number generators accept.

    Args:
        help: help text of the option.
    """
    return typer.Option(min=0, max=2**32 - 1, metavar="N", help=help)
