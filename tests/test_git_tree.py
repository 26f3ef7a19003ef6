"""Documents of a commit, from real repositories."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from knnstore.documents import GitTree
from knnstore.errors import GitError
from tests.repositories import Repository


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "repository")


def texts(repository: Repository, *arguments: object, paths: list[str] | None = None) -> list[str]:
    return [one.text for one in GitTree(repository.folder, *arguments).read_documents(paths)]


def test_a_commit_has_its_text_files_whatever_the_working_copy_has(repository) -> None:
    folder = repository.folder
    notebook = {"cells": [{"cell_type": "code", "source": ["a = 1\n", "b"], "outputs": ["x" * 99]}]}
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    Path(os.fsdecode(bytes(folder) + b"/\xff.py")).write_text("a name that is not UTF-8")
    repository.commit(
        {
            "src/é a.py": "x = 1\n",
            "n.ipynb": json.dumps(notebook),
            "secret.log": "not in git",
            ".gitignore": "*.log\n",
            "image.png": b"\x89PNG\0\0",
            "latin.txt": "é".encode("latin-1"),
            "empty.py": "",
        }
    )
    (folder / "src/é a.py").write_text("changed and not committed")
    (folder / "new.py").write_text("not committed")
    left_out: dict[str | None, str] = {}
    tree = GitTree(folder)
    documents = [*tree.read_documents(on_bad=lambda error: left_out.update({error.id: error.reason}))]
    assert {document.id: document.text for document in documents} == {
        ".gitignore": "*.log\n",
        "n.ipynb": "a = 1\nb",
        "run.sh": "#!/bin/sh\n",
        "src/é a.py": "x = 1\n",
    }
    assert left_out == {
        "image.png": "binary",
        "latin.txt": "not UTF-8",
        "empty.py": "empty",
        "\udcff.py": "unusable",
    }
    for document in documents:
        assert document.metadata == {"git_blob": repository.git("rev-parse", f"HEAD:{document.id}")}
    assert tree.commit == repository.git("rev-parse", "HEAD")


def test_a_ref_patterns_and_paths_choose_files(repository) -> None:
    repository.commit({"a.py": "one", "docs/b.md": "two", "docs/c.py": "three"})
    repository.git("tag", "first")
    repository.git("checkout", "--quiet", "-b", "other")
    repository.commit({"a.py": "four", "d.py": "five"})
    assert texts(repository, "first") == texts(repository, "main") == ["one", "two", "three"]
    assert texts(repository, "other") == texts(repository) == ["four", "five", "two", "three"]
    assert texts(repository, "HEAD", ["*.py"]) == ["four", "five", "three"]
    assert texts(repository, "HEAD", ["docs/*", "d.py"]) == ["five", "two", "three"]
    assert texts(repository, paths=["docs/c.py", "a.py"]) == ["three", "four"]


def test_a_file_that_is_too_large_is_left_out_and_the_next_one_is_read(repository, monkeypatch) -> None:
    repository.commit({"a.txt": "x" * 3000, "b.txt": "y" * 2000})
    monkeypatch.setattr("knnstore.documents.git_tree.MAX_DOCUMENT_BYTES", 2000)
    assert texts(repository) == ["y" * 2000]


def test_the_variables_of_a_hook_do_not_lead_to_its_repository(repository, tmp_path, monkeypatch) -> None:
    repository.commit({"a.py": "one"})
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "--quiet", "--bare", repository.folder, other], check=True)
    repository.commit({"a.py": "two"})
    monkeypatch.setenv("GIT_DIR", str(repository.folder / ".git"))
    assert [one.text for one in GitTree(other).read_documents()] == ["one"]


def test_what_git_cannot_read_is_one_line_and_no_missing_document(repository, tmp_path, monkeypatch) -> None:
    folder = repository.folder
    for place, ref, reason in (
        (tmp_path / "nothing", "HEAD", "nothing: .*cannot change to"),
        (tmp_path, "HEAD", "not a git repository"),
        (folder, "HEAD", "Needed a single revision"),
        (folder, "--all", "Needed a single revision"),
    ):
        with pytest.raises(GitError, match=reason):
            GitTree(place, ref)
    repository.commit({"a.py": "one", "b.py": "two"})
    with pytest.raises(GitError, match=r"has no file that matches '\*\.rs'"):
        GitTree(folder, "main", ["*.rs"])
    blob = repository.git("rev-parse", "HEAD:b.py")
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(GitError, match="missing"):
        texts(repository)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(GitError, match="git cannot be started"):
        GitTree(folder)
