import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_trials.py")
AT_LEAST = {"ingest": 40, "replace": 50, "remove-document": 20, "remove-domain": 20, "compact": 40}
"""How often each operation must be killed, so that the trials cannot quietly become none."""


def trials(tmp_path: Path, how: str, operation: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, how, operation],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["problems"] == [], run.stderr[-3000:]
    return list(report["trials"])


@pytest.mark.slow
@pytest.mark.parametrize("operation", AT_LEAST)
def test_nothing_is_lost_or_half_there_wherever_a_writer_is_killed(tmp_path: Path, operation: str) -> None:
    assert len(trials(tmp_path, "kill", operation)) >= AT_LEAST[operation]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["replace", "compact"])
def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(tmp_path: Path, operation: str) -> None:
    assert len(trials(tmp_path, "disk-full", operation)) == 10
