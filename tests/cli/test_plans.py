"""`add --plan`, `encode`, `commit`, `plan` and `add --workers`, as a user types them."""

import shutil
from pathlib import Path

import pytest

from knnstore import failpoints


def count_documents(knnstore, home=".knnstore"):
    return {row["name"]: row["documents"] for row in knnstore(f"--home {home} domains --json").json}


def test_plan_encode_commit(knnstore, store, monkeypatch):
    planned = knnstore("add articles.jsonl --domain articles --plan plan --shard-tokens 200")
    assert planned.status == 0, planned.err
    assert "next: `knnstore encode plan`" in planned.err
    shards = knnstore("plan plan --json").json["shards"]
    assert shards > 2
    assert "tokens  open" in knnstore("plan").out
    refused = knnstore("commit plan")
    assert refused.status == 1
    assert "shard 0 of" in refused.err
    refused = knnstore("encode plan --upload")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "accepts no uploads" in refused.err
    # Workers find their share in the variables of torchrun or of Slurm.
    shutil.move(store, "elsewhere")  # encoding needs no store
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = knnstore("encode plan --json").json
    assert first["encoded"] == (shards + 1) // 2
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert knnstore("encode plan --json").json["encoded"] == shards // 2
    monkeypatch.delenv("SLURM_PROCID")
    assert knnstore("encode plan --json").json == {**first, "encoded": 0, "complete": shards, "tokens": 0}
    shutil.move("elsewhere", store)
    assert "articles" not in count_documents(knnstore)
    committed = knnstore("commit plan --json").json
    assert count_documents(knnstore)["articles"] == committed["documents"] > 0
    assert "this plan was already committed: nothing is changed" in knnstore("commit plan").err
    again = knnstore("add articles.jsonl --domain articles --plan other")
    assert (again.status, "nothing to encode" in again.err, Path("other").exists()) == (0, True, False)
    assert knnstore("verify").status == 0
    knnstore("plan plan --drop")
    assert not Path("plan").exists()
    assert knnstore("plan").out == "no plans\n"
    assert count_documents(knnstore)["articles"] == committed["documents"]


def test_workers_clean_up_after_a_commit_that_was_interrupted_at_its_end(knnstore, store):
    knnstore("add articles.jsonl --domain articles --plan .knnstore/plan")
    knnstore("encode .knnstore/plan")
    failpoints.arm("commit.after=eio")
    try:
        assert knnstore("commit .knnstore/plan").status == 1
    finally:
        failpoints.arm(None)
    assert list(Path(".knnstore/plan").rglob("*.keys"))
    done = knnstore("add articles.jsonl --domain articles --workers 2")
    assert (done.status, "nothing to encode" in done.err) == (0, True)
    assert not Path(".knnstore/plan").exists()
    assert (knnstore("plan").out, knnstore("verify").status) == ("no plans\n", 0)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("encode nowhere", "nowhere has no plan"),
        ("commit nowhere", "nowhere has no plan"),
        ("plan nowhere", "nowhere has no plan"),
        ("plan --drop", "--drop needs the folder"),
        ("encode plan --shard 8", "--shard must be two numbers"),
        ("encode plan --shard 2/2", "must be below 2"),
        ("add letters --domain letters --plan plan --workers 2", "choose one of"),
        ("add letters --domain letters --shard-tokens 10", "needs --plan"),
    ],
)
def test_bad_input_is_one_line(knnstore, store, line, problem):
    done = knnstore(line)
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert problem in done.err


@pytest.mark.slow
def test_workers_make_the_same_store_as_one_process(knnstore, store):
    shutil.copytree(store, "one")
    many = knnstore("add articles.jsonl --domain articles --workers 2 --json")
    assert many.status == 0, many.err
    one = knnstore("--home one add articles.jsonl --domain articles --json").json
    assert [many.json[name] for name in ("added", "replaced", "tokens")] == [
        one[name] for name in ("added", "replaced", "tokens")
    ]
    assert count_documents(knnstore) == count_documents(knnstore, "one")
    evaluated = [knnstore(f"--home {home} eval dev.jsonl --json").json for home in (store, "one")]
    assert evaluated[0]["knn_ppl"] == pytest.approx(evaluated[1]["knn_ppl"], rel=1e-4)
    assert knnstore("verify").status == 0
    assert knnstore("plan").out == "no plans\n"


@pytest.mark.slow
def test_a_worker_that_fails_is_one_line_and_the_same_command_continues(knnstore, store):
    refused = knnstore("add articles.jsonl --domain articles --workers 2 --device nonsense")
    assert refused.status == 1
    assert "nonsense" in refused.err.splitlines()[-1]
    assert "articles" not in count_documents(knnstore)
    assert knnstore("add articles.jsonl --domain articles --workers 1").status == 0
    assert "articles" in count_documents(knnstore)
