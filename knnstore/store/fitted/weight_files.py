"""Fitted weights, and the files that hold them because they are too large for SQL.

::

    HOME/weights/<SHA-256 of the file>.safetensors

`Weights` are tensors with JSON metadata. Saved settings name the files that they need. A file is written and
fsynced before the settings that name it are saved. It is removed when settings are saved and none of them
names it, so a crash leaves at most one unused file.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from knnstore.durable import publish, read_file, remove, sync_directory
from knnstore.errors import ConfigError, CorruptWeightsError
from knnstore.space import medium_errors

_METADATA = "knnstore"  # one entry, since the order of several would not be the same each time


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Weights:
    """Tensors with JSON metadata. Two objects with the same content are equal."""

    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any]
    """JSON values, e.g. the fingerprint of the model that they were fitted for."""

    def __repr__(self) -> str:
        return f"Weights({', '.join(f'{name} {tensor.shape}' for name, tensor in self.tensors.items())})"

    def encode(self) -> bytes:
        """Return the weights as the bytes of a safetensors file. Equal weights give equal bytes."""
        dense = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        described = json.dumps(dict(self.metadata), sort_keys=True, ensure_ascii=False)
        return save(dense, {_METADATA: described})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read weights from a file that has the bytes of `encode`.

        Raises:
            ValueError: if the file is no file of weights.
        """
        try:
            with safe_open(path, framework="np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return cls(tensors, json.loads(file.metadata()[_METADATA]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"not a file of weights: {error}") from error

    @property
    def name(self) -> str:
        """Name of the file of these weights: the SHA-256 of its content."""
        return name_file(self.encode())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Weights) and self.encode() == other.encode())

    def __hash__(self) -> int:
        return hash(self.name)


def name_file(content: bytes) -> str:
    """Return the name of a file of weights with this content: its SHA-256, with the ending .safetensors."""
    return f"{hashlib.sha256(content).hexdigest()}.safetensors"


_FILE_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def save_weights(folder: Path, weights: Weights) -> str:
    """Write weights durably; create the folder if it is missing. Nothing is written if the file exists.

    Returns:
        The name to save in settings.
    """
    content = weights.encode()
    name = name_file(content)
    with medium_errors(folder):
        _write_if_missing(folder, name, content)
    return name


def _write_if_missing(folder: Path, name: str, content: bytes) -> None:
    """Write a file of weights durably, unless a sound file has this name. Creates the folder if missing."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(folder.parent)
    if find_file_problem(folder, name) is not None:
        publish(folder / name, content, "weights")


def load_weights(folder: Path, name: str) -> Weights:
    """Read a file of weights, and check that its content has the SHA-256 in its name.

    Raises:
        ConfigError: if `name` is not the name of a file of weights.
        CorruptWeightsError: if the file is missing or damaged.
    """
    problem = find_file_problem(folder, name)
    if problem is not None:
        raise CorruptWeightsError(problem)
    return Weights.read(folder / name)


def find_file_problem(folder: Path, name: str) -> str | None:
    """Return the problem with a file of weights as one line; None if the file is sound.

    Raises:
        ConfigError: if `name` is not the name of a file of weights.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a file of weights: <SHA-256>.safetensors")
    reason = "is damaged"
    try:
        if name_file(read_file(folder / name)) == name:
            return None
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    return (
        f"{folder / name} {reason}: restore it from a backup, or fit again what needs it (knnstore calibrate)"
    )


def remove_unused_files(folder: Path, named: Iterable[str]) -> None:
    """Delete files of weights that are not in `named`, and files that a crash left half written.

    Other files stay. A missing folder is accepted.
    """
    used_names = set(named)
    paths = list(folder.iterdir()) if folder.is_dir() else []
    unused = [
        p for p in paths if _FILE_NAME.fullmatch(p.name.removesuffix(".tmp")) and p.name not in used_names
    ]
    for path in unused:
        remove(path)
    if unused:  # else a power loss brings them back
        sync_directory(folder)
