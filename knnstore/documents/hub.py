"""Rows of data sets, by way of the package `datasets`: of the Hugging Face hub, or of a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knnstore.documents.values import as_json
from knnstore.errors import InputError

_SPLIT = "train"


def rows_of_data_set(name: str) -> Iterator[Any]:
    """Read the rows of a data set as they come; nothing of its code is run.

    Args:
        name: ``NAME``, ``NAME:CONFIGURATION`` or ``NAME:CONFIGURATION:SPLIT``; a folder is one too.

    Raises:
        InputError: `datasets` is not installed, or there is no such data set, configuration or split.
    """
    parts = name.split(":")
    if not parts[0] or len(parts) > 3:
        raise InputError("a data set is hf:NAME, hf:NAME:CONFIGURATION or hf:NAME:CONFIGURATION:SPLIT")
    path, configuration, split = (*parts, "", "")[:3]
    try:
        import datasets
    except ImportError as error:
        raise InputError("it needs datasets: install it with pip install 'knnstore[datasets]'") from error
    datasets.disable_progress_bars()
    try:
        if Path(path, "dataset_dict.json").is_file() or Path(path, "state.json").is_file():
            saved = datasets.load_from_disk(path)
            rows = saved[split or _SPLIT] if isinstance(saved, dict) else saved
        else:
            rows = datasets.load_dataset(path, configuration or None, split=split or _SPLIT, streaming=True)
        for row in rows:
            yield as_json(row)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the data set cannot be read: {said}") from error
