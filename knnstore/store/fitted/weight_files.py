"""Files of fitted weights, which are too large for SQL.

::

    HOME/weights/<SHA-256 of the file>.safetensors

Saved settings name the files that they need. A file is durable before the settings that name it are
saved, and removed when settings are saved and none names it any more, so a crash leaves at most a
file too many.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from knnstore.durable import publish, read_file, remove, sync_directory
from knnstore.errors import ConfigError, CorruptWeightsError
from knnstore.space import medium_errors
from knnstore.store.fitted.weights import Weights, name_file

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def save_weights(folder: Path, weights: Weights) -> str:
    """Write weights durably; create the folder if it is missing. Nothing is written if the file exists.

    Returns:
        The name to save in settings.
    """
    content = weights.encode()
    name = name_file(content)
    with medium_errors(folder):
        _write(folder, name, content)
    return name


def _write(folder: Path, name: str, content: bytes) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(folder.parent)
    if problem_of(folder, name) is not None:
        publish(folder / name, content, "weights")


def load_weights(folder: Path, name: str) -> Weights:
    """Read weights, after comparing the file with its name.

    Raises:
        ConfigError: this is not the name of a file of weights.
        CorruptWeightsError: the file is missing or damaged.
    """
    problem = problem_of(folder, name)
    if problem is not None:
        raise CorruptWeightsError(problem)
    return Weights.read(folder / name)


def problem_of(folder: Path, name: str) -> str | None:
    """Return in one line what is wrong with a file; None if it is sound.

    Raises:
        ConfigError: this is not the name of a file of weights.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a file of weights: <SHA-256>.safetensors")
    why = "is damaged"
    try:
        if name_file(read_file(folder / name)) == name:
            return None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    return f"{folder / name} {why}: restore it from a backup, or fit again what needs it (knnstore calibrate)"


def sweep(folder: Path, named: Iterable[str]) -> None:
    """Remove the files that no settings name, and files that a crash left half written."""
    kept = set(named)
    there = list(folder.iterdir()) if folder.is_dir() else []
    gone = [p for p in there if _NAME.fullmatch(p.name.removesuffix(".tmp")) and p.name not in kept]
    for path in gone:
        remove(path)
    if gone:  # else a power loss brings them back
        sync_directory(folder)
