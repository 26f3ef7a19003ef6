"""`knnstore sync --git`: a domain is what a commit is."""

import os
import random
import shutil
from pathlib import Path

import pytest

import knnstore as knnstore_package
from tests.repositories import Repository

COUNTS = ("added", "renamed", "replaced", "removed", "unchanged")


@pytest.fixture
def repository(workplace) -> Repository:
    return Repository(Path("code").absolute())


def count(done) -> dict[str, int]:
    return {name: done.json[name] for name in COUNTS if done.json[name]}


def test_only_changed_files_are_read_and_what_the_commit_lacks_is_removed(
    knnstore, store, repository, monkeypatch
):
    repository.commit(
        {"a.py": "The harbour.", "b.py": "The winter.", "c/d.py": "The storm.", "e.py": "Grain."}
    )
    sync = "sync --git code --domain code"
    first = knnstore(f"{sync} --json")
    assert count(first) == {"added": 4}
    assert first.json["commit"] == repository.git("rev-parse", "main")
    # 1) Nothing has changed: no file is read, and no model is needed.
    with monkeypatch.context() as patch:
        patch.setattr("knnstore.documents.git_tree.GitTree._read_document", lambda *_: pytest.fail("read"))
        assert count(knnstore(f"{sync} --device nonsense --json")) == {"unchanged": 4}
    # 2) Files are changed, moved, copied, emptied and deleted.
    repository.git("mv", "b.py", "moved.py")
    repository.git("rm", "--quiet", "e.py")
    repository.commit({"a.py": "The harbour is closed.", "copy.py": "The storm."})
    assert knnstore(f"{sync} --dry-run").out.splitlines() == [
        "added copy.py", "renamed b.py to moved.py", "replaced a.py", "removed e.py",
        "1 added, 1 renamed, 1 replaced, 1 removed",
    ]  # fmt: skip
    assert count(knnstore(f"{sync} --json")) == {
        "added": 1, "renamed": 1, "replaced": 1, "removed": 1, "unchanged": 1,
    }  # fmt: skip
    # 3) A file that is text no more leaves. An earlier commit brings it back.
    repository.commit({"a.py": b"\0", "copy.py": ""})
    done = knnstore(f"{sync} --json")
    assert count(done) == {"removed": 2, "unchanged": 2}
    assert done.json["left_out"] == {"binary": ["a.py"], "empty": ["copy.py"]}
    assert count(knnstore(f"{sync} --ref main~2 --json")) == {"added": 2, "renamed": 1, "unchanged": 1}
    # 4) A new tag is given to unchanged files too.
    assert knnstore(f"{sync} --ref main~2 --tag old --json").json["tokens"] == 0
    rows = knnstore("documents --domain code --json").json
    assert {row["id"] for row in rows} == {"a.py", "b.py", "c/d.py", "e.py"}
    assert {row["id"] for row in rows if "old" in row["tags"]} == {"a.py", "b.py", "c/d.py", "e.py"}


def test_what_changes_around_unchanged_files(knnstore, store, repository):
    sync = "sync --git code --domain code"
    odd = {"a" * 200 + "/" + "b" * 200 + "/" + "c" * 200: "too long a name"}
    repository.commit(
        {"a/LICENSE": "The harbour.", "b/LICENSE": "The harbour.", "latin.txt": "caf\xe9"} | odd
    )
    (repository.folder / "bad").write_text("The wall.")
    os.rename(repository.folder / "bad", os.fsencode(repository.folder) + b"/\xff.py")
    repository.commit()
    assert count(knnstore(f"{sync} --json --encoding latin-1")) == {"added": 3}
    # 1) A file that was moved keeps its records, also if another file has its text.
    repository.git("mv", "b/LICENSE", "moved")
    repository.commit()
    assert count(knnstore(f"{sync} --json --encoding latin-1")) == {"renamed": 1, "unchanged": 2}
    # 2) A wrong encoding can be corrected.
    done = knnstore(f"{sync} --json")
    assert (done.json["replaced"], done.json["described"], done.json["tokens"] > 0) == (1, 2, True)
    # 3) What is deleted last leaves, too.
    repository.git("rm", "-r", "--quiet", ".")
    repository.commit()
    assert knnstore(sync).status != 0  # it asks, and nobody answers
    assert count(knnstore(f"{sync} --yes --json")) == {"removed": 3}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sync --domain code", "give files or a folder, or a repository with --git"),
        ("sync letters --git code --domain code", "give files or a folder, or a repository with --git"),
        ("sync letters --ref main --domain letters", "--ref and --only need --git"),
        ("sync --git letters --domain code", "letters: not a git repository"),
        (
            "sync --git code --text-field body --domain code",
            "--text-field and --id-field are for the rows of files",
        ),
        ("sync --git code --ref '' --domain code", "code: Needed a single revision"),
        ("sync --git code --ref nothing --domain code", "code: Needed a single revision"),
        ("sync --git code --only *.rs --domain code", "has no file that matches '*.rs'"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_changes_nothing(knnstore, store, repository, line, reason):
    repository.commit({"a.py": "The harbour."})
    refused = knnstore(line)
    assert refused.status != 0
    assert reason in " ".join(refused.err.split())
    assert {row["name"] for row in knnstore("domains --json").json} == {"letters", "news"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [25, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_after_many_changes_the_store_is_what_a_new_one_is(knnstore, workplace, model, repository, changes):
    drawn = random.Random(1)
    names = [f"{folder}{name}" for folder in ("", "a/", "b/") for name in ("x.py", "y.md", "z")]
    texts = ["The harbour.", "The winter wall.", "Two boats were lost.", "", "\0"]
    for home in ("old", "new"):
        assert knnstore(f"--home {home} init --model {model} --key none").status == 0
    repository.commit({"kept.py": "Prices of grain rose again."})
    for number in range(changes):
        file = repository.folder / drawn.choice(names)
        if file.exists() and drawn.random() < 0.3:
            file.unlink()
        elif file.exists() and drawn.random() < 0.3:
            target = repository.folder / drawn.choice(names)
            target.parent.mkdir(exist_ok=True)
            shutil.move(file, target)
        else:
            file.parent.mkdir(exist_ok=True)
            text = drawn.choice(texts)
            file.write_text(text and f"{text} {drawn.randint(0, number)}")
        repository.commit()
        assert knnstore("--home old sync --git code --domain code --yes").status == 0
    assert knnstore("--home new sync --git code --domain code").status == 0
    contents = []
    for home in ("old", "new"):
        with knnstore_package.open(home) as opened:
            assert not opened.verify()
            versions = opened.stored_versions("code", [row.id for row in opened.documents()])
            contents.append(
                {
                    id: (version.content_hash, version.metadata, version.tags)
                    for id, version in versions.items()
                }
            )
            contents.append(opened.token_counts().tolist())
    assert contents[:2] == contents[2:]
