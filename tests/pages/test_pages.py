"""The documentation is true: its Python and commands run, its links lead somewhere."""

import re
import shlex
import shutil

import pytest
import typer

from knnstore.cli import app
from knnstore.cli.root import add_installed_groups
from knnstore.lm.components import registry as components
from knnstore.lm.mixing import registry as mixers
from tests.forked import forking_program
from tests.pages.transcripts import ROOT, differences, run, steps

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    said = re.findall(r"^```python\n.*?^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shutil.copytree(ROOT / "examples" / "tiny-lm", tmp_path / "examples" / "tiny-lm")
    monkeypatch.chdir(tmp_path)
    for registry in (components, mixers):  # what the page registers is not there for other tests
        monkeypatch.setattr(registry, "_registered", {**registry._registered})
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert list(tmp_path.glob("*.knn"))
    printed = capsys.readouterr().out.splitlines()
    assert not differences("".join(said).splitlines() or ["..."], printed), printed


def assert_commands_print_what_the_page_says(page, folder, programs=None):
    found = steps((ROOT / page).read_text())
    assert found
    for step, got in zip(found, run([step.command for step in found], folder, programs), strict=True):
        assert not differences(step.printed, got), f"{step.command}\n" + "\n".join(got)


@pytest.mark.slow
def test_the_commands_of_the_readme_print_what_it_says(tmp_path):
    assert_commands_print_what_the_page_says("README.md", tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_tutorial_print_what_it_says(tmp_path, tmp_path_factory):
    with forking_program(tmp_path_factory.mktemp("programs")) as programs:
        assert_commands_print_what_the_page_says("docs/tutorial.md", tmp_path, programs)


def commands(text):
    """The knnstore commands in the examples of a page: what follows the name."""
    starts = r"^ *(?:\$ )?(?:docker compose run --rm (?:-T )?)?knnstore (.*)"
    for line in re.findall(starts, text.replace("\\\n", " "), re.MULTILINE):
        words = shlex.split(line, comments=True)
        ends = [at for at, word in enumerate(words) if word in ("|", "<", ">", "2>", "&&", "&")]
        yield words[: min(ends, default=len(words))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_can_be_given(page, monkeypatch):
    monkeypatch.setattr(app, "registered_groups", [*app.registered_groups])
    add_installed_groups()  # those of knnstore-research, which the pages name
    for words in commands(page.read_text()):
        command, name, rest, context = typer.main.get_command(app), "knnstore", list(words), None
        try:
            while below := getattr(command, "commands", {}):
                at = next((at for at, word in enumerate(rest) if word in below), len(rest))
                context = command.make_context(name, rest[: at + 1], parent=context)
                command, name, rest = below[rest[at]], rest[at], rest[at + 1 :]
            command.make_context(name, rest, parent=context)
        except Exception as error:
            pytest.fail(f"knnstore {shlex.join(words)}: {error!r}")


def slugs(page):
    """Names of a page's headings in links, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_the_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not link.startswith("https://"):
                name, _, anchor = link.partition("#")
                target = page.parent / name if name else page
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in slugs(target), f"{page.name}: {link}"


@pytest.mark.parametrize(
    ("wanted", "got", "wrong"),
    [
        (["a 1.00", "b"], ["a 1.01", "b"], []),
        (["a 1.00", "b"], ["a 1.10", "b"], ["a 1.00"]),
        (["a 10"], ["a 11"], ["a 10"]),
        (["a", "..."], ["a", "b"], []),
        (["a", "...", "c"], ["a", "b", "c"], []),
        (["a", "...", "d"], ["a", "b", "c"], ["d"]),
        (["a"], ["a", "b"], ["(not on the page) b"]),
        (["b"], ["a", "b"], ["b"]),
        (["speed  10 tokens/s"], ["speed      99 tokens/s"], []),
    ],
)
def test_what_counts_as_printed(wanted, got, wrong):
    assert [line for line in differences(wanted, got) if line in wrong or not wrong] == wrong
