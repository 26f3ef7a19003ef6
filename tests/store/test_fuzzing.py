"""Damaged homes end in one line or in answers that `verify` does not let stand; the program says how."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "fuzz_home.py"


def test_three_hundred_damaged_homes() -> None:
    command = [sys.executable, str(PROGRAM), "--mutations", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["outcomes"].values()) == 300
