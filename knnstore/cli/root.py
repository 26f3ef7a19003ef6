"""The root of the command line: registers all commands with Typer, and `run` runs them.

Commands that need no model import neither torch nor transformers. So each heavy module is imported inside the
commands that need it.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import knnstore
from knnstore.cli.command_groups import load_command_groups
from knnstore.cli.commands import COMMANDS, DATABASE_COMMANDS, KEY_COMMANDS
from knnstore.cli.interrupts import (
    INTERRUPTED,
    INTERRUPTED_MESSAGE,
    enable_keyboard_interrupt,
    was_interrupted,
)
from knnstore.cli.logs import LOG, Form, LogFormatOption, VerboseOption
from knnstore.cli.options import DEFAULT_HOME, HOME_VARIABLE
from knnstore.cli.output import MessageHandler, echo, format_error, print_message
from knnstore.errors import KnnstoreError

_OTHER_NAMES = {
    **dict.fromkeys(("list", "ls"), "'domains' or 'documents'"),
    **dict.fromkeys(("delete", "rm", "del"), "'remove'"),
    **dict.fromkeys(("ingest", "import", "insert", "index", "load", "store"), "'add'"),
    **dict.fromkeys(("evaluate", "score", "ppl", "perplexity", "test"), "'eval'"),
    **dict.fromkeys(("query", "find", "grep"), "'search'"),
    **dict.fromkeys(("create", "new"), "'init'"),
    **dict.fromkeys(("status", "stats"), "'info'"),
    **dict.fromkeys(("complete", "write", "run"), "'generate'"),
    **dict.fromkeys(("tune", "fit", "train"), "'calibrate'"),
    **dict.fromkeys(("compact", "vacuum"), "'optimize' or 'erase'"),
    **dict.fromkeys(("check",), "'verify'"),
}
"""Names of commands in other programs, and the name of the same command here."""


class _CommandGroup(TyperGroup):
    """Command group that prints an error as one line on stderr, and suggests the name of a wrong command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _OTHER_NAMES and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. It is {_OTHER_NAMES[args[0]]} here.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with enable_keyboard_interrupt():
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # the reader of stdout, for example `head`, has exited
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(1) from None
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt) or was_interrupted():
                    print_message(INTERRUPTED_MESSAGE)
                    raise typer.Exit(INTERRUPTED) from None
                if not isinstance(error, KnnstoreError | OSError | MemoryError):
                    raise
                print_message(f"error: {format_error(error)}")
                raise typer.Exit(1) from error


_MESSAGE_OPTIONS = [
    inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VerboseOption),
    inspect.Parameter("log_format", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogFormatOption),
]
"""Message options that each command gets."""


def _register_command(group: typer.Typer, command: Callable[..., None], name: str) -> None:
    """Add a function as a command. The command's help is the function's docstring.

    The section "Examples:" of the docstring comes last.

    Args:
        group: the command group that gets the command.
        command: the function.
        name: the name of the command.
    """
    text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    verbatim = f"\b\nExamples:\n{examples}"  # \b: lines are not joined
    group.command(name, help=text, epilog=verbatim)(_expand_dataclasses(command))


def _expand_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command function so that each field of a dataclass parameter becomes a separate option.

    The returned function also has the options ``--verbose`` and ``--log-format``, and applies them to `LOG`.
    """
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if is_dataclass(parameter.annotation)
    }
    options = {name: inspect.signature(group).parameters for name, group in groups.items()}
    flat_options = [
        option.replace(kind=option.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        for option in options.get(name, {name: parameter}).values()
    ]

    def run_command(verbose: bool, log_format: Form | None, **values: Any) -> None:
        """Apply the message options, build the dataclass instances, and call the command."""
        LOG.apply_options(verbose, log_format)
        for name, group in groups.items():
            values[name] = group(**{option: values.pop(option) for option in options[name]})
        command(**values)

    run_command.__signature__ = inspect.Signature([*flat_options, *_MESSAGE_OPTIONS])  # type: ignore[attr-defined]
    return run_command


app = typer.Typer(
    cls=_CommandGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
database = typer.Typer(help="Maintain the catalog's database.", no_args_is_help=True)
keys = typer.Typer(help="Manage the API keys of the store's server.", no_args_is_help=True)

for _name, _command in COMMANDS.items():
    _register_command(app, _command, _name)
for _name, _command in DATABASE_COMMANDS.items():
    _register_command(database, _command, _name)
for _name, _command in KEY_COMMANDS.items():
    _register_command(keys, _command, _name)
app.add_typer(keys, name="key")
app.add_typer(database, name="db")


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted` is True. Callback of the option ``--version``."""
    if wanted:
        echo(f"knnstore {knnstore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    home: Annotated[
        Path, typer.Option("--home", envvar=HOME_VARIABLE, metavar="DIR", help="Folder of the store.")
    ] = DEFAULT_HOME,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    verbose: VerboseOption = False,
    log_format: LogFormatOption = None,
) -> None:
    """Give any Hugging Face language model a memory that you can edit.

    Make a store for a model with `init`, add documents to a domain with `add`; then `eval`,
    `generate` and `explain` use them. Nothing is trained, and a removed document is gone.
    """
    LOG.reset()
    LOG.apply_options(verbose, log_format)


def add_installed_groups() -> None:
    """Add the command groups of other installed packages to `app`."""
    for name, (text, commands) in load_command_groups():
        group = typer.Typer(help=text, no_args_is_help=True)
        for command_name, command in commands.items():
            _register_command(group, command, command_name)
        app.add_typer(group, name=name)


def run() -> None:
    """Run the command line. `knnstore.cli.main` handles Ctrl-C before it imports this module."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for terminals whose encoding lacks λ
    logging.getLogger("knnstore").addHandler(MessageHandler())
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # hides a warning for each failed connection
    add_installed_groups()
    try:
        app(prog_name="knnstore")
    except OSError as error:  # help and version are printed before any command runs, perhaps to a full disk
        print_message(f"error: {format_error(error)}")
        sys.exit(1)
