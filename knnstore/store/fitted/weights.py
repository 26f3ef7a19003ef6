"""Fitted weights that are too large for SQL, in files of their own.

::

    HOME/weights/<SHA-256 of the file>.safetensors

Saved settings name the files that they need. A file is durable before the settings that name it are
saved, and removed when settings are saved and none names it any more, so a crash leaves at most a
file too many.
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

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")

_METADATA = "knnstore"  # one entry, since the order of several would not be the same each time


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Weights:
    """Tensors, and what is to be known about them."""

    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any]
    """JSON values, e.g. the fingerprint of the model that they were fitted for."""

    def __repr__(self) -> str:
        return f"Weights({', '.join(f'{name} {tensor.shape}' for name, tensor in self.tensors.items())})"

    def encode(self) -> bytes:
        """The content of their file; the same weights give the same bytes."""
        dense = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        described = json.dumps(dict(self.metadata), sort_keys=True, ensure_ascii=False)
        return save(dense, {_METADATA: described})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file with the content that `encode` returned.

        Raises:
            ValueError: it has another.
        """
        try:
            with safe_open(path, framework="np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return cls(tensors, json.loads(file.metadata()[_METADATA]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"not a file of weights: {error}") from error

    @property
    def name(self) -> str:
        """The name of their file."""
        return name_of(self.encode())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Weights) and self.encode() == other.encode())

    def __hash__(self) -> int:
        return hash(self.name)


def name_of(content: bytes) -> str:
    """The name of the file with this content."""
    return f"{hashlib.sha256(content).hexdigest()}.safetensors"


def save_weights(folder: Path, weights: Weights) -> str:
    """Write weights durably, making the folder; nothing is done when they are there already.

    Returns:
        The name to save in settings.
    """
    content = weights.encode()
    name = name_of(content)
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
    """Say in one line what is wrong with a file; None when it is sound.

    Raises:
        ConfigError: this is not the name of a file of weights.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a file of weights: <SHA-256>.safetensors")
    why = "is damaged"
    try:
        if name_of(read_file(folder / name)) == name:
            return None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    return f"{folder / name} {why}: restore it from a backup, or fit again what needs it (knnstore calibrate)"


def sweep(folder: Path, named: Iterable[str]) -> None:
    """Remove the files that no settings name, and what a crash left half written."""
    kept = set(named)
    there = list(folder.iterdir()) if folder.is_dir() else []
    gone = [p for p in there if _NAME.fullmatch(p.name.removesuffix(".tmp")) and p.name not in kept]
    for path in gone:
        remove(path)
    if gone:  # else a power loss brings them back
        sync_directory(folder)
