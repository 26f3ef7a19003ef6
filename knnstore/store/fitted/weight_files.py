"""Fitted weights, and the files that hold them because they are too large for SQL.

::

    HOME/weights/<SHA-256 of the file>.safetensors

`Weights` are tensors with JSON metadata. Saved settings name the files that they need. A file is written and
fsynced before the settings that name it are saved. It is removed when settings are saved and no settings name
it any more, so a crash leaves at most one unused file.
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

from knnstore.durable import read_file, remove_durably, sync_directory, write_atomically
from knnstore.errors import ConfigError, CorruptWeightsError
from knnstore.space import convert_disk_errors

_METADATA = "knnstore"  # one entry, since the order of several would not be the same each time


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Weights:
    """Fitted weights: named tensors with JSON metadata. Two objects with the same content are equal."""

    tensors: Mapping[str, NDArray[Any]]
    """Tensors by name."""
    metadata: Mapping[str, Any]
    """JSON values by name, for example the fingerprint of the model for which the weights were fitted."""

    def __repr__(self) -> str:
        return f"Weights({', '.join(f'{name} {tensor.shape}' for name, tensor in self.tensors.items())})"

    def encode(self) -> bytes:
        """Return the content of a safetensors file with these weights. Equal weights give equal bytes."""
        dense = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        described = json.dumps(dict(self.metadata), sort_keys=True, ensure_ascii=False)
        return save(dense, {_METADATA: described})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read weights from a file whose content is a result of `encode`.

        Raises:
            ValueError: if the file has another content.
        """
        try:
            with safe_open(path, framework="np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return cls(tensors, json.loads(file.metadata()[_METADATA]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"not a file of weights: {error}") from error

    @property
    def name(self) -> str:
        """Name of the file in which these weights are saved: SHA-256 of its content, then .safetensors."""
        return name_file(self.encode())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Weights) and self.encode() == other.encode())

    def __hash__(self) -> int:
        return hash(self.name)


def name_file(content: bytes) -> str:
    """Return the name under which the content of a file of weights is saved: ``<SHA-256>.safetensors``."""
    return f"{hashlib.sha256(content).hexdigest()}.safetensors"


_FILE_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def save_weights(folder: Path, weights: Weights) -> str:
    """Write weights durably to a file whose name is the SHA-256 of its content.

    A missing folder is created. If an undamaged file with these weights exists, nothing is written.

    Args:
        folder: folder of the files of weights.
        weights: weights to write.

    Returns:
        The name of the file, by which settings refer to the weights.
    """
    content = weights.encode()
    name = name_file(content)
    with convert_disk_errors(folder):
        _write_if_missing(folder, name, content)
    return name


def _write_if_missing(folder: Path, name: str, content: bytes) -> None:
    """Write a file of weights durably, unless an undamaged file with this name exists.

    A missing folder is created.

    Args:
        folder: folder of the files of weights.
        name: name of the file, which contains the SHA-256 of `content`.
        content: content of the file.
    """
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(folder.parent)
    if find_file_problem(folder, name) is not None:
        write_atomically(folder / name, content, "weights")


def load_weights(folder: Path, name: str) -> Weights:
    """Read a file of weights, and check that its content has the SHA-256 in its name.

    Args:
        folder: folder of the files of weights.
        name: name of the file: a SHA-256, then .safetensors.

    Raises:
        ConfigError: if `name` is not the name of a file of weights.
        CorruptWeightsError: if the file is missing or damaged.
    """
    problem = find_file_problem(folder, name)
    if problem is not None:
        raise CorruptWeightsError(problem)
    return Weights.read(folder / name)


def find_file_problem(folder: Path, name: str) -> str | None:
    """Check a file of weights. Returns its problem as one line; None if the file is undamaged.

    Args:
        folder: folder of the files of weights.
        name: name of the file, which contains the SHA-256 of its content.

    Raises:
        ConfigError: if `name` is not the name of a file of weights.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not the name of a file of weights, which must be <SHA-256>.safetensors"
        )
    reason = "is damaged"
    try:
        if name_file(read_file(folder / name)) == name:
            return None
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    return (
        f"{folder / name} {reason}: restore it from a backup, or fit its component again "
        "(`knnstore calibrate`)"
    )


def remove_unused_files(folder: Path, names_in_use: Iterable[str]) -> None:
    """Delete the files of weights that are not used, and temporary files that a crash left.

    Files whose names are not those of weights stay. Does nothing if the folder is missing.

    Args:
        folder: folder of the files of weights.
        names_in_use: names of the files that are used and stay.
    """
    used_names = set(names_in_use)
    paths = list(folder.iterdir()) if folder.is_dir() else []
    unused = [
        p for p in paths if _FILE_NAME.fullmatch(p.name.removesuffix(".tmp")) and p.name not in used_names
    ]
    for path in unused:
        remove_durably(path)
    if unused:  # else a power loss brings them back
        sync_directory(folder)
