"""Documents of a commit, from real repositories."""

import json
import os
import shutil
import subprocess
import sys
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


CUT_OFF = """#!{python} -IS
import os, subprocess, sys
if "cat-file" not in sys.argv:
    os.execv({git!r}, ["git", *sys.argv[1:]])
with subprocess.Popen([{git!r}, *sys.argv[1:]], stdout=subprocess.PIPE) as git:
    left = {size}
    while left and (part := os.read(git.stdout.fileno(), left)):
        left -= os.write(1, part)
    git.kill()
"""
"""A git that dies after some bytes of contents."""


@pytest.mark.parametrize("size", [50, 60, 3000])
def test_an_answer_of_git_that_is_cut_off_is_no_document(repository, tmp_path, monkeypatch, size) -> None:
    """Cut off before the second answer, after its first bytes, and in the middle of its content."""
    repository.commit({"a.txt": "x" * (1 if size < 60 else 9), "b.txt": "y" * 5000})
    monkeypatch.setattr("knnstore.documents.git_tree.MAX_DOCUMENT_BYTES", 4000 if size == 60 else 10_000)
    program = tmp_path / "git"
    program.write_text(CUT_OFF.format(python=sys.executable, git=shutil.which("git"), size=size))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(GitError, match=r"git ended|cannot read the content"):
        texts(repository)


def test_no_program_of_the_repository_is_run_and_nothing_is_replaced(repository, tmp_path) -> None:
    repository.commit({"a.txt": "one", "b.txt": "two"})
    blobs = [repository.git("rev-parse", f"HEAD:{name}") for name in ("a.txt", "b.txt")]
    repository.git("replace", blobs[0], blobs[1])
    assert texts(repository) == ["one", "two"]
    (repository.folder / ".git/objects" / blobs[1][:2] / blobs[1][2:]).unlink()
    ran = tmp_path / "ran"
    for name, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(tmp_path),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": f"touch {ran}; false",
    }.items():
        repository.git("config", name, value)
    with pytest.raises(GitError):
        texts(repository)
    assert not ran.exists()


def test_a_folder_in_a_repository_is_not_taken_for_the_repository(repository) -> None:
    repository.commit({"a.txt": "one", "docs/b.txt": "two"})
    with pytest.raises(GitError, match=r"--only 'docs/\*'"):
        GitTree(repository.folder / "docs")
