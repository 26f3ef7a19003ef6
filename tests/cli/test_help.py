"""Every command explains itself, with examples that run, and the reference page is up to date."""

import shlex
from pathlib import Path

import pytest

from knnstore.cli.reference import helps, page

COMMANDS = {name: text for name, text in helps() if name not in ("knnstore", "knnstore db")}
EXAMPLES = [
    line.strip()
    for text in COMMANDS.values()
    for line in text.partition("\n  Examples:\n")[2].splitlines()
    if line.strip() != "knnstore demo"  # has a test of its own
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_of_itself(name):
    usage, _, examples = COMMANDS[name].partition("\n  Examples:\n")
    assert usage.startswith(f"Usage: {name} ")
    assert name.removeprefix("knnstore ") in examples


def test_the_reference_page_is_up_to_date():
    file = Path(__file__).parents[2] / "docs" / "cli.md"
    assert file.read_text() == page(), "run: python -m knnstore.cli.reference > docs/cli.md"


def test_the_examples_run_one_after_the_other(knnstore, workplace):
    assert len(EXAMPLES) > len(COMMANDS)
    for example in EXAMPLES:
        source, _, command = example.rpartition(" | ")
        stdin = Path(source.removeprefix("cat ")).read_bytes() if source else None
        done = knnstore(*shlex.split(command)[1:], stdin=stdin)
        assert done.status == 0, f"{example}: {done.err}"
