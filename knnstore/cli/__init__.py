"""The command line: data on stdout, progress and messages on stderr; exit 0 done, 1 error, 2 usage."""

from typing import TYPE_CHECKING, Any

from knnstore.cli.interrupts import prepare

if TYPE_CHECKING:
    from knnstore.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    prepare()
    from knnstore.cli.root import run  # takes a while, in which somebody may lose patience

    run()


def __getattr__(name: str) -> Any:
    if name == "app":  # importing it takes a while, which `main` is prepared for
        from knnstore.cli.root import app

        return app
    raise AttributeError(f"module 'knnstore.cli' has no attribute {name!r}")
