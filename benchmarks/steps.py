"""What is kept between runs: of each step its values as JSON, and log p of each test token beside them."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Step(NamedTuple):
    """What a step found."""

    values: dict[str, Any]
    log_probs: Mapping[str, NDArray[Any]]
    """By the name of a side: of each test token, shape (n,). Other arrays may stand beside them."""


def step(folder: Path, name: str, make: Callable[[], Step]) -> Step:
    """Run a step once, and keep its result."""
    known, arrays = folder / f"{name}.json", folder / f"{name}.npz"
    if not known.is_file():
        made = make()
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(arrays, **made.log_probs)
        part = known.with_suffix(".part")
        part.write_text(json.dumps(made.values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, known)
    return read_step(folder, name)


def read_step(folder: Path, name: str) -> Step:
    """Read the result of a step that was run."""
    with np.load(folder / f"{name}.npz") as opened:
        return Step(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), dict(opened))
