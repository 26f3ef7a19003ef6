"""Transcripts of pages (```console): run, compared, and written anew.

    python -m tests.pages.transcripts PAGE

writes what the commands print today into a page. Commands run one after another in one shell, in a folder of
their own with the `examples` of the repository. `...` on a line of its own stands for any lines.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.05
"""Of numbers with a fraction: other versions of torch round otherwise."""

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_END = "-- the end of a command --"
_VOLATILE = re.compile(
    r"^(seconds|tokens_per_s|speed) .*|\d{4}-\d\d-\d\d( \d\d:\d\d)?|\b\d+ s (?=scoring|fitting)"
)
_PROGRESS = re.compile(r"^.*: [\d,]+(?: of [\d,]+)? tok, .*\n", re.MULTILINE)  # on a slow machine
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


class Step:
    """A command of a page, and what the page says that it prints."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        length = 1
        while lines[length - 1].endswith("\\"):
            length += 1
        self.command = "\n".join(lines[:length])
        self.printed = lines[length:]


def steps(page: str) -> list[Step]:
    """The commands of a page, in their order."""
    return [
        Step(part)
        for block in _BLOCK.findall(page)
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


def run(commands: list[str], folder: Path, programs: Path | None = None) -> list[list[str]]:
    """Run commands in one shell, and return the lines that each prints, standard error included.

    Programs in the folder `programs` are found before all others.
    """
    shutil.copytree(ROOT / "examples", folder / "examples")
    script = "".join(f"{command}\necho; echo '{_END}'\n" for command in commands)
    places = [*([programs] if programs else []), Path(sys.executable).parent, os.environ["PATH"]]
    path = os.pathsep.join(map(str, places))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KNNSTORE_")}
    done = subprocess.run(
        ["bash", "-s"], input=script, cwd=folder, env=environment | {"PATH": path, "COLUMNS": "110"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=900,
    )  # fmt: skip
    printed = _PROGRESS.sub("", done.stdout).replace(str(folder.resolve()), "/home/you/knnstore")
    return [part.strip("\n").splitlines() for part in printed.split(f"\n{_END}\n")[:-1]]


def differences(wanted: list[str], got: list[str]) -> list[str]:
    """The lines of a page that are printed otherwise; those that no `...` stands for have their order."""
    missing, at = [], 0
    anywhere = False
    for line in wanted:
        if line == "...":
            anywhere = True
            continue
        found = next((n for n in range(at, len(got)) if _same(line, got[n])), None) if anywhere else at
        if found is None or found >= len(got) or not _same(line, got[found]):
            missing.append(line)
            at += not anywhere
        else:
            at = found + 1
        anywhere = False
    if at < len(got) and not anywhere:
        missing += [f"(not on the page) {line}" for line in got[at:]]
    return missing


def _same(wanted: str, got: str) -> bool:
    wanted, got = (_VOLATILE.sub("#", line) for line in (wanted, got))
    if _NUMBER.sub("#", wanted).split() != _NUMBER.sub("#", got).split():
        return False
    pairs = zip(_NUMBER.findall(wanted), _NUMBER.findall(got), strict=True)
    return all(a == b or ("." in a + b and _near(a, b)) for a, b in pairs)


def _near(one: str, other: str) -> bool:
    a, b = (float(number.replace(",", "")) for number in (one, other))
    return abs(a - b) <= max(TOLERANCE * max(a, b), 0.02)


def written_anew(page: str, folder: Path) -> str:
    """A page with what its commands print today; where it has `...`, its lines stay and are looked for."""
    found, done = steps(page), 0
    for step, got in zip(found, run([step.command for step in found], folder), strict=True):
        old = f"$ {step.command}\n" + "".join(f"{line}\n" for line in step.printed)
        done = page.index(old, done)
        new = old
        if "..." not in step.printed:
            new = f"$ {step.command}\n" + "".join(f"{line}\n" for line in got)
        elif missing := differences(step.printed, got):
            print(step.command, *(f"not printed: {line}" for line in missing), *got, sep="\n")
        page = page[:done] + new + page[done + len(old) :]
        done += len(new)
    return page


if __name__ == "__main__":
    file = Path(sys.argv[1])
    with TemporaryDirectory() as folder:
        file.write_text(written_anew(file.read_text(), Path(folder)))
