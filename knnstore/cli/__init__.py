"""The command line: data on stdout, progress and messages on stderr.

The exit status is 0 after success, 1 after an error, 2 after wrong usage, and 130 after Ctrl-C.
"""

from typing import TYPE_CHECKING, Any

from knnstore.cli.interrupts import exit_on_interrupt
from knnstore.threads import configure_threads

if TYPE_CHECKING:
    from knnstore.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line with the arguments of this process, and exit with the status of the command."""
    exit_on_interrupt()
    configure_threads()
    from knnstore.cli.root import run  # slow, so `exit_on_interrupt` handles Ctrl-C before

    run()


def __getattr__(name: str) -> Any:
    if name == "app":  # imported on first use, because the import is slow
        from knnstore.cli.root import app

        return app
    raise AttributeError(f"module 'knnstore.cli' has no attribute {name!r}")
