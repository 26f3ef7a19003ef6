"""The fixtures of the product's own tests: small models and stores. Tests of research are slow ones."""

from pathlib import Path

import pytest

from tests.conftest import *  # noqa: F403
from tests.lm.conftest import *  # noqa: F403


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slow")
