"""Options that several commands share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

HOME_VARIABLE = "KNNSTORE_HOME"
DEFAULT_HOME = Path(".knnstore")
LARGEST_SEED = 2**32 - 1  # that every generator of random numbers takes


def _home(context: typer.Context, given: Path) -> Path:
    """``--home`` after the command, else before it, else the environment's, else the default."""
    source = context.get_parameter_source("home")
    if source is not None and source.name == "COMMANDLINE":
        return given
    before: Path = context.find_root().params["home"]
    return before


HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        metavar="DIR",
        callback=_home,
        help=f"Where the store is; {HOME_VARIABLE} sets another default.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help=".jsonl (a row a document: id, text, metadata), .txt or .md (one document), a folder of "
        "such files, or - for standard input; each may be compressed (.gz).",
    ),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Report documents that cannot be used, and go on without them.")
]
DomainsOption = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="NAME", help="Retrieve from this domain only; repeat for several."),
]
InDomainOption = Annotated[
    str | None,
    typer.Option("--domain", metavar="NAME", help="The document's domain, where several have its id."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        show_default="a GPU if there is one",
        help="Where the model runs: cpu, cuda:1.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        show_default="float32 on a CPU, else as the model was saved",
        help="Numbers the model runs in: float32, bfloat16 or float16.",
    ),
]
LocationOption = Annotated[
    str | None, typer.Option("--location", metavar="URL_OR_DIR", help="Where the engine keeps the keys.")
]
ParamsOption = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the engine; repeatable."),
]


def read_params(given: Sequence[str] | None) -> dict[str, Any]:
    """Read ``NAME=VALUE`` options; values are JSON where they can be, else text.

    Raises:
        typer.BadParameter: one has no ``=``.
    """
    params: dict[str, Any] = {}
    for option in given or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="'--param'")
        try:
            params[name] = json.loads(value)
        except ValueError:
            params[name] = value
    return params
