import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_trials.py")
NEEDS = {"exact": "faiss", "lists": "faiss", "graphs": "hnswlib", "qdrant": "qdrant_edge"}
AT_LEAST = {
    ("exact", "ingest"): (40, 30),
    ("exact", "replace"): (50, 40),
    ("exact", "remove-document"): (20, 12),
    ("exact", "remove-domain"): (20, 12),
    ("exact", "compact"): (40, 5),
}
"""How often each operation and its recovery must be killed, so that the trials cannot quietly become none."""
POINTS = 20
"""At how many failpoints, of each engine."""


def trials(tmp_path: Path, how: str, operation: str, engine: str = "exact") -> dict[str, list[str]]:
    pytest.importorskip(NEEDS[engine])
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, how, operation, engine],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["problems"] == [], run.stderr[-3000:]
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "operation"), AT_LEAST)
def test_nothing_is_lost_or_half_there_wherever_a_writer_is_killed(
    tmp_path: Path, engine: str, operation: str, record_property
) -> None:
    report = trials(tmp_path, "kill", operation, engine)
    killed, recoveries = AT_LEAST[engine, operation]
    assert len(report["killed"]) >= killed
    assert report["recoveries_killed"] >= recoveries
    record_property("killed", report["killed"])
    record_property("recoveries_killed", report["recoveries_killed"])


def test_an_operation_is_killed_four_hundred_times() -> None:
    assert sum(killed for killed, _ in AT_LEAST.values()) >= 400
    assert {NEEDS[engine] for engine, _ in AT_LEAST} == set(NEEDS.values())


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["replace", "compact"])
def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(tmp_path: Path, operation: str) -> None:
    assert len(trials(tmp_path, "disk-full", operation)["trials"]) == 10
