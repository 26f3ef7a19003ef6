"""Damaged homes end in one line or in answers that `verify` does not let stand; the program says how."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "fuzz_home.py"


def outcomes(*options: str) -> int:
    """Run the program, which must find nothing; returns how many homes were damaged."""
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sum(json.loads(done.stdout)["outcomes"].values())


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_damaged_homes(count: int) -> None:
    assert outcomes("--mutations", str(count)) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["exact", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("faiss", "hnswlib"))]
)
def test_every_damage_to_every_kind_of_file(engine: str) -> None:
    assert outcomes("--grid", "--engine", engine) >= 7
