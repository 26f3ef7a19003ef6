"""The command line of the product's own tests, with the commands of ``knnstore research``."""

import pytest

from knnstore.cli.root import add_installed_groups, app
from tests.cli.conftest import *  # noqa: F403


@pytest.fixture(autouse=True)
def research_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``knnstore research`` be a command in these tests, and in no others."""
    monkeypatch.setattr(app, "registered_groups", [*app.registered_groups])
    add_installed_groups()
