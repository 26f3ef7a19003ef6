"""scripts/compose-smoke itself, with a stand-in for Docker: what it takes for well, and for ill."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Answers as Docker and the containers do; `eval` with the next of the answers that the test prepared.
DOCKER = f"""#!{sys.executable} -IS
import os, sys
from pathlib import Path

here, words = Path(__file__).parent, sys.argv[1:]
with (here / "calls").open("a") as calls:
    print(*words, file=calls)
if "--entrypoint" in words:
    program = words[words.index("--entrypoint") + 1]
    os.execv(sys.executable, [program, *words[words.index("knnstore") + 1:]])
if "eval" in words:
    answer = sorted(here.glob("eval-*"))[0]
    print(answer.read_text())
    if len(list(here.glob("eval-*"))) > 1:
        answer.unlink()
if words[0] in ("ps", "network", "volume"):
    print((here / f"left-{{words[0]}}").read_text() if (here / f"left-{{words[0]}}").exists() else "", end="")
"""


def evaluation(knn_ppl: float) -> str:
    """As `eval` writes it: the name stands there more than once."""
    parts = [{"low": 1, "high": 9, "tokens": 25, "knn_ppl": 7.5}, {"low": 10, "high": 99, "knn_ppl": 3.25}]
    return json.dumps({"base_ppl": 213.7, "knn_ppl": knn_ppl, "by_frequency": parts}, indent=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "perplexities", "left", "end"),
    [
        ("", [1.5], None, "all well"),
        ("cluster", [1.5, 1.50001], None, "all well"),
        ("", [1.5, 1.5, 1.6], None, "the perplexity changed"),
        ("", [1.5, 1.5, None], None, "Error"),
        ("", [1.5], "ps", "down left something"),
        ("", [1.5], "volume", "down left something"),
    ],
)
def test_the_script_sees(
    kind: str, perplexities: list[float | None], left: str | None, end: str, tmp_path: Path
) -> None:
    """And takes its containers and volumes away at the end, whatever it saw."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"docker": DOCKER, "curl": "#!/bin/sh\necho 401\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for number, perplexity in enumerate(perplexities):
        answer = "no JSON" if perplexity is None else evaluation(perplexity)
        (tools / f"eval-{number}").write_text(answer)
    if left:
        (tools / f"left-{left}").write_text("0123456789ab\n")
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    done = subprocess.run(
        [tmp_path / "scripts" / "compose-smoke", *kind.split()],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert end in said.splitlines()[-1], said
    assert (done.returncode == 0) is (end == "all well"), said
    calls = (tools / "calls").read_text().splitlines()
    assert calls[-1].startswith("compose down --volumes")
    assert ("shards=3" in str(calls)) is (kind == "cluster")
