import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_trials.py")
AT_LEAST = {"ingest": 40, "replace": 50, "remove-document": 20, "remove-domain": 20, "compact": 40}
"""How often each operation must be killed, so that the trials cannot quietly become none."""


@pytest.mark.slow
@pytest.mark.parametrize("operation", AT_LEAST)
def test_nothing_is_lost_or_half_there_wherever_a_writer_is_killed(tmp_path: Path, operation: str) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, operation],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["problems"] == [], run.stderr[-3000:]
    assert len(report["places"]) >= AT_LEAST[operation]
