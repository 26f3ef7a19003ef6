"""What came of damage to a home: an answer, an error that knnstore means, or something that is found."""

import random
import shutil
import traceback
from pathlib import Path
from typing import Any

from fuzzing.homes import look
from fuzzing.mutations import damage, grid, mutate
from knnstore.errors import KnnstoreError
from knnstore.store import KNNStore

Answers = dict[str, Any]
"""See `look`; what the name of an answer begins with "~" for may differ, for no checksum covers it."""


def spoil(template: Path, home: Path, seed: str) -> str:
    """Make a copy of a home and damage it; returns how. A seed is ENGINE:NUMBER or ENGINE:grid:NUMBER."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(template, home)
    _, *is_grid, number = seed.split(":")
    if not is_grid:
        return mutate(home, random.Random(seed))
    path, how = grid(home, seed.partition(":")[0])[int(number)]
    return damage(home, home / path, how)


def judge(template: Path, home: Path, seed: str, sound: Answers) -> dict[str, str]:
    """Damage a copy of a home and say what came of it."""
    what = spoil(template, home, seed)
    try:
        answers, problems = look(home)
        if what.startswith("knnstore_store.params"):  # searched in another way, which is as right
            answers.pop("search", None)
        found = _wrong(answers, problems, sound)
        if not found and "grid" in seed and not repaired(home):
            found = _wrong(*look(home), sound)
            found = f"{found} after repair" if found else ""
    except BaseException as error:  # a panic of an engine is none of Exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        lines = "".join(traceback.format_exception(error)[-6:])
        return {"what": what, "found": f"{type(error).__name__} at {Path(where.filename).name}", "why": lines}
    if found:
        return {"what": what, "found": found, "why": ""}
    refused = any(isinstance(answer, KnnstoreError) for answer in answers.values())
    return {"what": what, "outcome": "refused" if refused else "contradicted" if problems else "the same"}


def repaired(home: Path) -> list[str]:
    """Return the damage that a writer cannot repair."""
    try:
        with KNNStore.open(home, "a") as store:
            return store.repair()
    except KnnstoreError as error:
        return [str(error)]


def _wrong(answers: Answers, problems: list[str], sound: Answers) -> str:
    """Return the faults of the answers."""
    errors = [str(answer) for answer in answers.values() if isinstance(answer, KnnstoreError)]
    for line in errors + problems:
        if "\n" in line or not line:
            return f"an error of several lines: {line!r}"
    compared = [] if problems else [name for name in answers if name[0] != "~"]
    for name in compared:
        if not isinstance(answers[name], KnnstoreError) and answers[name] != sound[name]:
            return f"another {name}, verify is content"
    return ""
