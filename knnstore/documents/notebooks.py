"""Jupyter notebooks as documents: what was written into their cells, without what came out of them."""

import json
from collections.abc import Mapping
from typing import Any

from knnstore.documents.document import Reason, RefusedError, TextDocument
from knnstore.documents.files import Source
from knnstore.errors import InputError

_KINDS = ("markdown", "code", "heading")


def notebook_document(source: Source) -> TextDocument:
    """Read a notebook: its markdown and code cells, in order, with an empty line between them.

    Raises:
        InputError: it is no notebook; says what is wrong with it.
    """
    try:
        notebook = json.loads(source.text())
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not a notebook: not JSON: {error}") from error
    texts = [text for cell in _cells_of(notebook) if (text := _text_of(cell)).strip()]
    if not texts:
        raise RefusedError("the notebook has no markdown and no code", Reason.EMPTY)
    return TextDocument(source.id, "\n\n".join(texts))


def _cells_of(notebook: Any) -> list[Any]:
    """Return the cells of a notebook; before version 4 of the format they are in worksheets."""
    if isinstance(notebook, Mapping):
        worksheets = notebook.get("worksheets")
        if isinstance(worksheets, list):
            parts = [sheet.get("cells") for sheet in worksheets if isinstance(sheet, Mapping)]
            return [cell for part in parts if isinstance(part, list) for cell in part]
        if isinstance(notebook.get("cells"), list):
            return list(notebook["cells"])
    raise InputError("not a notebook: there is no list of 'cells'")


def _text_of(cell: Any) -> str:
    if not isinstance(cell, Mapping) or cell.get("cell_type") not in _KINDS:
        return ""
    lines = cell.get("source", cell.get("input", ""))
    if isinstance(lines, list):
        lines = "".join(line for line in lines if isinstance(line, str))
    return lines.rstrip("\n") if isinstance(lines, str) else ""
