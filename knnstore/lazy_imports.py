"""Packages whose names are imported when they are first used (PEP 562).

The ``__init__`` of a package imports its names under ``if TYPE_CHECKING``, where type checkers and readers
find them. At run time `attach_lazy_imports` reads the same lines and imports a name when it is first used::

    if TYPE_CHECKING:
        from knnstore.store.reader_protocol import Reader
    else:
        __getattr__, __dir__ = attach_lazy_imports(__name__)

So a module that needs one name of a package loads only the module of this name. For example, the arithmetic
of the mixture imports `Selection` from `knnstore.store`, and this loads no SQL.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attach_lazy_imports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create ``__getattr__`` and ``__dir__`` of a package that imports names at their first use.

    The package calls this function while it is imported; nothing else is imported then.

    Args:
        package: the package's ``__name__``. Its source imports the names in a block ``if TYPE_CHECKING``,
            each in the form ``from full.module.path import name``.

    Returns:
        Two functions. ``__getattr__`` imports a name or a module of the package at its first use, and keeps
        it as an attribute of the package; it raises `AttributeError` for other names. ``__dir__`` lists
        these names and the present attributes of the package; it imports nothing.
    """
    module = sys.modules[package]
    loader: Any = getattr(module.__spec__, "loader", None)
    places = find_type_checking_imports(loader.get_source(package))

    def import_name(name: str) -> Any:
        home, attribute = places.get(name, (package, name))
        if home != package:
            value = getattr(import_module(home), attribute)
            setattr(module, name, value)
            return value
        if find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    def list_names() -> list[str]:
        return sorted({*vars(module), *places})

    return import_name, list_names


def find_type_checking_imports(source: str) -> dict[str, tuple[str, str]]:
    """Return the names that a module imports with ``from`` under ``if TYPE_CHECKING``.

    Args:
        source: source text of the module.

    Returns:
        For each name the module that it is imported from, and its name in that module.
    """
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
