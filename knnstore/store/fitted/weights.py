"""Fitted weights: tensors and what is known about them, as the content of a file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

_METADATA = "knnstore"  # one entry, since the order of several would not be the same each time


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Weights:
    """Tensors and metadata. Weights with the same content are equal."""

    tensors: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any]
    """JSON values, e.g. the fingerprint of the model that they were fitted for."""

    def __repr__(self) -> str:
        return f"Weights({', '.join(f'{name} {tensor.shape}' for name, tensor in self.tensors.items())})"

    def encode(self) -> bytes:
        """Return the content of their file; the same weights give the same bytes."""
        dense = {name: np.ascontiguousarray(tensor) for name, tensor in self.tensors.items()}
        described = json.dumps(dict(self.metadata), sort_keys=True, ensure_ascii=False)
        return save(dense, {_METADATA: described})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file with the content that `encode` returned.

        Raises:
            ValueError: the file has other content.
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
        return name_file(self.encode())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Weights) and self.encode() == other.encode())

    def __hash__(self) -> int:
        return hash(self.name)


def name_file(content: bytes) -> str:
    """Return the name of the file with this content."""
    return f"{hashlib.sha256(content).hexdigest()}.safetensors"
