"""Stores with synthetic documents: the keys are known, so every answer can be worked out."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnstore.catalog import Identity, NewDocument
from knnstore.store import KNNStore

DIM = 8
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)


class Writer:
    """Adds documents with random tokens and keys to a store, and remembers them."""

    def __init__(self, store: KNNStore) -> None:
        self.store = store
        self.rng = np.random.default_rng(0)
        self.keys: dict[tuple[str, str], np.ndarray] = {}
        self.tokens: dict[tuple[str, str], np.ndarray] = {}

    def add(self, domain: str, *ids: str, n: int = 20, **options: object) -> None:
        new = [self._new(domain, id, n, **options) for id in ids]
        with self.store.ingest(new) as group:
            for at, document in enumerate(new):
                self.put(group, at, document)

    def _new(self, domain: str, id: str, n: int, **options: object) -> NewDocument:
        tokens = self.rng.integers(0, 1000, n).astype(np.uint32)
        self.tokens[domain, id] = tokens
        # Representable in half precision, so that stored and given keys are equal.
        self.keys[domain, id] = self.rng.standard_normal((n, DIM)).astype(np.float16).astype(np.float32)
        return NewDocument(id, domain, f"{self.rng.integers(2**60):064x}", tokens, **options)  # type: ignore[arg-type]

    def put(self, group, at: int, document: NewDocument) -> None:
        n = len(document.tokens)
        group.add(
            np.full(n, at),
            np.arange(n),
            document.tokens.astype(np.int64),
            self.keys[document.domain, document.id],
        )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[KNNStore]:
    with KNNStore.create(home, IDENTITY) as made:
        yield made


@pytest.fixture
def writer(store: KNNStore) -> Writer:
    return Writer(store)


@pytest.fixture
def writer_of() -> Callable[[KNNStore], Writer]:
    return Writer


@pytest.fixture
def trials(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., dict[str, Any]]:
    """Runs a program of this folder that forks and kills; returns its report, which must name no problem."""

    def run(program: str, *arguments: object) -> dict[str, Any]:
        command = [sys.executable, Path(__file__).with_name(program), tmp_path, *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["problems"] == [], done.stderr[-3000:]
        for name in {"killed", "recoveries_killed"} & report.keys():
            record_property(name, report[name])
        return report

    return run


@pytest.fixture
def identity() -> Identity:
    return IDENTITY
