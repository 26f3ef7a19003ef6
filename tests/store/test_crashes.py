import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_trials.py")
NEEDS = {"exact": "faiss", "lists": "faiss", "graphs": "hnswlib", "qdrant": "qdrant_edge"}
AT_LEAST = {
    ("exact", "ingest"): (44, 30),
    ("exact", "replace"): (64, 45),
    ("exact", "remove-document"): (20, 13),
    ("exact", "remove-domain"): (20, 16),
    ("exact", "compact"): (50, 15),
    ("lists", "compact"): (16, 6),
    ("graphs", "replace"): (34, 24),
    ("graphs", "compact"): (16, 4),
    ("graphs", "erase"): (16, 2),
    ("qdrant", "replace"): (28, 20),
    ("qdrant", "remove-domain"): (15, 10),
}
"""How often a writer is killed in each operation, and again in the recovery, at least."""


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


def test_every_engine_is_killed_and_five_hundred_kills_are_survived() -> None:
    assert {NEEDS[engine] for engine, _ in AT_LEAST} == set(NEEDS.values())
    assert sum(writers + recoveries for writers, recoveries in AT_LEAST.values()) >= 500


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["replace", "compact"])
def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(tmp_path: Path, operation: str) -> None:
    assert len(trials(tmp_path, "disk-full", operation)["trials"]) == 10
