"""Every command explains itself, with examples that run, and the reference page is up to date."""

import inspect
import shlex
from pathlib import Path

import pytest

from knnstore import KNNLMForCausalLM, create
from knnstore.cli import commands
from knnstore.cli.reference import format_reference_page, iterate_help_texts

COMMANDS = {
    name: text
    for name, text in iterate_help_texts()
    if name not in ("knnstore", "knnstore db", "knnstore key")
}
OWN_TESTS = ("knnstore demo", "knnstore serve", "knnstore key revoke", "knnstore sync --git")
OWN_TESTS += ("knnstore encode", "knnstore commit", "knnstore plan", "knnstore translate", "eval pairs.jsonl")
EXAMPLES = [
    line.strip()
    for text in COMMANDS.values()
    for line in text.partition("\n  Examples:\n")[2].splitlines()
    if not any(command in line for command in OWN_TESTS)
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_of_itself(name):
    usage, _, examples = COMMANDS[name].partition("\n  Examples:\n")
    assert usage.startswith(f"Usage: {name} ")
    assert name.removeprefix("knnstore ") in examples


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("init", create),
        ("calibrate", KNNLMForCausalLM.calibrate),
        ("generate", KNNLMForCausalLM.generate_text),
    ],
)
def test_defaults_are_those_of_the_library(command, function):
    ours, theirs = map(defaults, (commands.COMMANDS[command], function))
    assert ours.keys() & theirs
    assert {**theirs, **ours} == {**ours, **theirs}


def defaults(function):
    """Those that are more than "not given"."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default not in (None, one.empty, ())}


def test_the_reference_page_is_up_to_date():
    file = Path(__file__).parents[2] / "docs" / "cli.md"
    assert file.read_text() == format_reference_page(), "run: python -m knnstore.cli.reference > docs/cli.md"


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(knnstore, workplace):
    assert len(EXAMPLES) > len(COMMANDS)
    for example in EXAMPLES:
        source, _, command = example.rpartition(" | ")
        stdin = Path(source.removeprefix("cat ")).read_bytes() if source else None
        done = knnstore(*shlex.split(command)[1:], stdin=stdin)
        assert done.status == 0, f"{example}: {done.err}"
