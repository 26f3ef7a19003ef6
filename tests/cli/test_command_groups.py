"""Commands of other packages, found by their entry points."""

from importlib.metadata import EntryPoint

import pytest

from knnstore.cli import command_groups
from knnstore.cli.command_groups import CommandGroup, load_command_groups

GREETING = CommandGroup("Greet.", {"hello": lambda: None})


def test_a_group_that_cannot_be_loaded_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        EntryPoint("broken", "no_such_package:GROUP", command_groups.GROUP),
        EntryPoint("greet", f"{__name__}:GREETING", command_groups.GROUP),
    ]
    monkeypatch.setattr(command_groups, "entry_points", lambda group: entries)
    assert dict(load_command_groups()) == {"greet": GREETING}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no_such_package:GROUP cannot be loaded" in said
