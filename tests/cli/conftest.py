"""A tiny random model, a folder with documents to work in, and the command line, called in process."""

import json
import shlex
import shutil
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from knnstore.cli import app
from knnstore.lm.calibration import scoring_only
from tests.small_gpt2 import save_gpt2

scoring_only.PROMPTS = 16  # enough for texts as short as these, and quick

LETTERS = {
    "first.txt": "The harbour was quiet when the last boat came in, and the harbour lights were lit.",
    "second.txt": "In the morning the boat went out again past the quiet harbour wall.",
}
NEWS = {
    "n-17": "The council voted to repair the harbour wall before the winter storms.",
    "n-18": "Two boats were lost in the storm, the council said in the morning.",
    "n-19": "Prices of grain rose again this winter.",
}
HELD_OUT = {
    "h-1": "The harbour wall was quiet in the winter.",
    "h-2": "The council said the boats were lost.",
}


def _rearranged(sentences: tuple[str, ...]) -> str:
    """The first halves of some sentences, then the second ones: no long run of them stays."""
    words = [sentence.split() for sentence in sentences]
    return " ".join(
        " ".join(some[part * len(some) // 2 :][: len(some) // 2]) for part in (0, 1) for some in words
    )


_ORDERS = list(permutations([*LETTERS.values(), *NEWS.values()]))[::12]
DEV = {f"dev-{at}": _rearranged(sentences) for at, sentences in enumerate(_ORDERS)}
"""Enough to calibrate on, and nothing of it is stored text."""
_MORE = list(permutations([*LETTERS.values(), *NEWS.values()]))[5::4]
ARTICLES = {f"a-{at}": " ".join(sentences) for at, sentences in enumerate(_MORE)}
"""Enough to probe on."""


class Outcome:
    """What a command printed, and its exit status."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """The result of a command called with --json."""
        return json.loads(self.out)


Knnstore = Callable[..., Outcome]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with a tokenizer of its own, saved to a folder."""
    texts = [*LETTERS.values(), *NEWS.values()]
    return save_gpt2(tmp_path_factory.mktemp("model"), texts, vocabulary=300, width=16, heads=2)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with what the examples of the commands' help name, and a filled store."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "letters").mkdir()
    for name, text in LETTERS.items():
        (folder / "letters" / name).write_text(text)
    write_rows(folder / "news.jsonl", NEWS)
    write_rows(folder / "held-out.jsonl", HELD_OUT)
    write_rows(folder / "dev.jsonl", DEV)
    write_rows(folder / "articles.jsonl", ARTICLES)
    (folder / "examples").mkdir()
    (folder / "examples" / "tiny-lm").symlink_to(model)
    with chdir(folder):
        for line in (
            f"init --model {model}",
            "add letters --domain letters --tag final",
            "add news.jsonl --domain news",
        ):
            done = call(line)
            assert done.status == 0, done.err
    return folder


@pytest.fixture
def workplace(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of `prepared`, without the store."""
    folder = tmp_path / "workplace"
    shutil.copytree(prepared, folder, symlinks=True, ignore=shutil.ignore_patterns(".knnstore"))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("KNNSTORE_HOME", raising=False)
    return folder


@pytest.fixture
def store(workplace: Path, prepared: Path) -> Path:
    """A home with the domains letters and news, at its default place."""
    shutil.copytree(prepared / ".knnstore", workplace / ".knnstore")
    return Path(".knnstore")


@cache
def _build_commands(group_ids: tuple[int, ...]) -> Any:  # the ids tell apart what tests add to the app
    """Build the objects of all commands, which takes as long as a short command does."""
    return get_command(app)


def call(*arguments: str | Path, stdin: bytes | None = None) -> Outcome:
    """Call the command line with one line as in a shell, or with its arguments."""
    line = shlex.split(str(arguments[0])) if len(arguments) == 1 else [str(part) for part in arguments]
    commands = _build_commands(tuple(map(id, app.registered_groups)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("typer.testing._get_command", lambda _: commands)
        done = CliRunner().invoke(app, line, input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def knnstore(workplace: Path) -> Knnstore:
    """The command line, in `workplace`."""
    return call


def write_rows(file: Path, texts: dict[str, str]) -> None:
    """Write documents as JSON Lines."""
    file.write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text in texts.items()))
