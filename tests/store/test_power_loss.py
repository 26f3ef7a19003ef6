"""The power fails; see `power_trials`.

What Qdrant's engine writes through maps is not recorded, nor what PostgreSQL writes.
"""

import os
import shutil
import sys

import pytest

IMAGES = 324
AT_LEAST = {
    "create": 5,
    "add": 40,
    "replace": 30,
    "remove": 40,
    "optimize": 40,
    "move": 30,
    "erase": 15,
    "fit": 15,
}
"""Images that the power leaves during each operation."""


@pytest.mark.slow
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_what_was_acknowledged_survives_a_power_loss_and_the_rest_is_whole_or_not_there(
    trials, record_property, share: int
) -> None:
    pytest.importorskip("faiss")
    pytest.importorskip("hnswlib")
    if sys.platform != "linux" or shutil.which("cc") is None:
        reason = "what a process writes is recorded by a C library on Linux (Debian: apt-get install gcc)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    count = IMAGES // share
    report = trials("power_trials.py", count, -100)
    images = report["images"]
    assert sum(images.values()) == count
    assert {name: n for name, n in AT_LEAST.items() if images.get(name, 0) < n // share} == {}, images
    record_property("images", count)
    # The images are able to tell: each is a store that does not sync something.
    assert {mutant: bool(caught) for mutant, caught in report["caught"].items()} == {
        "files": True,
        "folders": True,
        "catalog": True,
    }
