"""The command line: data on stdout, progress and messages on stderr; exit 0 done, 1 error, 2 usage."""

from knnstore.cli.root import app, main

__all__ = ["app", "main"]
