"""What the product computes is what it computed when the records were written.

Another processor rounds differently: log-probabilities differed by up to 1.6e-5 between the instruction sets
of one machine, and a fitted gate by up to .05 in a token's probability. So the tolerance is wide by default.
On the machine that wrote the records, before and after a rebuild, run

    KNNSTORE_RECORD=exact pytest tests/record
"""

import json
import os
from typing import Any

import pytest

from tests.record.behaviour import CASES, make_store, path_of, record_calibration, record_given_settings

IS_EXACT = os.environ.get("KNNSTORE_RECORD") == "exact"
TOLERANCE = 1e-6 if IS_EXACT else 5e-5
FIGURES_TOLERANCE = 1e-4 if IS_EXACT else 2e-3
IN_CI = [("joined", "cells"), ("ngrams", "none")]
"""Cases whose calibration CI compares, which takes half a minute each; predictions are compared in all."""


def find_differences(expected: Any, found: Any, tolerance: float, at: str = "") -> list[str]:
    """Compare JSON values; numbers may differ by the tolerance, absolute below 1 and relative above."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [f"{at}/{name} is there on one side only" for name in expected.keys() ^ found.keys()]
        common = expected.keys() & found.keys()
        return missing + [
            line
            for name in sorted(common)
            for line in find_differences(expected[name], found[name], tolerance, f"{at}/{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [
            line
            for number, (one, other) in pairs
            for line in find_differences(one, other, tolerance, f"{at}/{number}")
        ]
    if isinstance(expected, float) and isinstance(found, float):
        is_near = abs(expected - found) <= tolerance * max(1.0, abs(expected))
        return [] if is_near else [f"{at}: {expected} became {found}"]
    return [] if expected == found else [f"{at}: {expected} became {found}"]


QUICK = [("joined", "cells"), ("keys", "faiss"), ("ngrams", "none")]
"""Cases whose predictions the quick run compares: each kind of keys and each engine once."""


@pytest.fixture(
    params=[
        pytest.param(case, id="-".join(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
    ]
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_predictions_are_as_recorded(case, tmp_path):
    expected = json.loads(path_of(*case).read_text())["given"]
    with make_store(*case, tmp_path / "home") as lm:
        found = as_json(record_given_settings(case[0], lm))
    assert not find_differences(expected, found, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case if case in IN_CI else pytest.param(case, marks=pytest.mark.exhaustive, id="-".join(case))
        for case in CASES
    ],
    indirect=True,
    ids="-".join,
)
def test_calibration_is_as_recorded(case, tmp_path):
    expected = json.loads(path_of(*case).read_text())["calibration"]
    with make_store(*case, tmp_path / "home") as lm:
        found = as_json(record_calibration(lm))
    if not IS_EXACT:
        del expected["calibrated"], found["calibrated"]
    assert not find_differences(expected, found, FIGURES_TOLERANCE)
