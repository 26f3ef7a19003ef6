"""Git repositories for tests."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


class Repository:
    """A new git repository in a folder, with a working copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """Run git in the repository, and return what it prints."""
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *settings, "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, files: Mapping[str, str | bytes] | None = None) -> None:
        """Write some files, and commit everything that the working copy has."""
        for name, content in (files or {}).items():
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=a change")
