"""What a user does when a file of the keys is damaged, and after an `add` that was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KNNSTORE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_a_damaged_store_is_mended_by_removing_and_adding(knnstore, store, how, capfd, caplog) -> None:
    whole = knnstore("eval held-out.jsonl --domain news --json").json
    kind = "*.ids" if how == "flipped" else "*.keys"
    path = sorted((store / "keys" / "segments").glob(kind))[0]  # of letters, added first
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.unlink()
    if how != "missing":
        path.write_bytes(content if how == "flipped" else content[:-1])

    assert knnstore("domains").status == 0
    assert knnstore("eval held-out.jsonl --domain news --json").json["knn_ppl"] == whole["knn_ppl"]
    assert knnstore("eval held-out.jsonl --json").status == 0
    assert path.name in caplog.text
    failed = knnstore("eval held-out.jsonl --domain letters")
    assert failed.status == 1
    assert path.name in failed.err
    for command in ("verify", "repair"):
        found = knnstore(f"{command} --json")
        assert found.status == 1
        first, *others = found.json["problems"]
        assert path.name in first
        assert [name for line in others for name in ("first.txt", "second.txt") if name in line] == [
            "first.txt",
            "second.txt",
        ]
    refused = knnstore("move --store hnswlib")
    assert refused.status == 1
    assert "first.txt" in refused.err
    assert knnstore("remove first.txt").status == 0
    assert knnstore("verify").status == 1
    erased = knnstore("erase")
    assert erased.status == 0
    assert "not reached: a damaged file of keys: " in erased.err
    assert path.name in erased.err
    assert knnstore("optimize").status == 0
    assert knnstore("remove --domain letters --yes").status == 0
    assert knnstore("verify").status == 0
    assert knnstore("add letters --domain letters").status == 0
    assert knnstore("verify").status == 0
    assert knnstore("move --store hnswlib").status == 0
    assert knnstore("verify").status == 0


@pytest.mark.slow
def test_an_add_killed_before_its_index_is_built_builds_it_the_next_time(workplace: Path, knnstore) -> None:
    line = "--home killed add letters --domain letters"
    made = "--home killed init --model examples/tiny-lm --store hnswlib --param exact_up_to=0"
    assert knnstore(made).status == 0
    killed = subprocess.run(
        [*KNNSTORE, *line.split()],
        env={**os.environ, "KNNSTORE_FAILPOINT": "catalog.publish.after"},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9
    indexes = Path("killed/keys/indexes")
    assert list(indexes.iterdir()) == []
    assert knnstore(f"{line} --json").json["unchanged"] == 2
    assert len(list(indexes.glob("*.index"))) == 1
    assert knnstore("--home killed eval held-out.jsonl").status == 0
