"""Documents from the files of a commit in a git repository; the program `git` reads the repository."""

import os
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from knnstore.documents.document import Entry, OnBad, TextDocument, read_entries
from knnstore.documents.source_files import (
    MAX_DOCUMENT_BYTES,
    UTF8,
    check_encoding,
    decode_text,
    is_utf8,
    make_too_large_error,
)
from knnstore.documents.text_extraction import extract_notebook_text
from knnstore.errors import GitError

_REGULAR_MODES = ("100644", "100755")
_VARIABLES_OF_A_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
"""Environment variables that git sets in hooks; not passed on, as they may name another repository."""
_FIXED_VARIABLES = {"LC_ALL": "C", "GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1"}
"""Environment variables for git: English messages, no fetch of missing contents, no replaced contents."""


class GitTree:
    """The regular files of one commit of a git repository, which can be read as documents.

    Symbolic links and submodules are left out. Programs that the repository's configuration names are not
    run, and nothing is fetched.

    Args:
        repository: folder of the repository: a working copy or a bare repository.
        ref: branch, tag or commit.
        patterns: shell patterns such as ``*.py`` or ``docs/*``; a file is used if its path matches at least
            one pattern. ``*`` also matches ``/``. Without patterns, all files are used.

    Raises:
        GitError: `git` is not installed, the folder is not the top of a repository, the ref is unknown, or no
            file matches the patterns.
    """

    def __init__(self, repository: str | Path, ref: str = "HEAD", patterns: Collection[str] = ()) -> None:
        self.repository = Path(repository)
        if inside := self._run("rev-parse", "--show-prefix").decode(errors="replace").strip():
            raise GitError(
                f"{self.repository} is the folder {inside} of a repository: give its top folder, and "
                f"select files with --only '{inside}*'"
            )
        wanted = f"{ref}^{{commit}}"
        self.commit = self._run("rev-parse", "--verify", "--end-of-options", wanted).decode().strip()
        """Hash of the commit, hexadecimal."""
        self.blobs: dict[str, str] = {}
        """Hash of the content of each file, by the file's path in the repository; sorted by path."""
        for line in self._run("ls-tree", "-r", "-z", "--full-tree", self.commit).split(b"\0")[:-1]:
            description, _, path = line.partition(b"\t")
            mode, _, hash = description.decode().split()
            name = path.decode(errors="surrogateescape")
            if mode in _REGULAR_MODES and (
                not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
            ):
                self.blobs[name] = hash
        if patterns and not self.blobs:
            which = " or ".join(map(repr, patterns))
            raise GitError(f"commit {self.commit[:12]} of {self.repository} has no file that matches {which}")

    def read_documents(
        self, paths: Collection[str] | None = None, *, encoding: str = UTF8, on_bad: OnBad | None = None
    ) -> Iterator[TextDocument]:
        """Yield the documents of files. The id of a document is the path of its file in the repository.

        The text is the content of the file; for a Jupyter notebook, it is the text of its cells. `describe`
        returns the metadata.

        Args:
            paths: paths of the files to read; None reads all.
            encoding: encoding of the files.
            on_bad: function that is called with the error of each file that is not text, is empty or is too
                large; then the file is skipped. None skips these files without a message.

        Raises:
            GitError: `git` cannot read the content of a file.
            InputError: the encoding is unknown.
        """
        encoding = check_encoding(encoding)
        names = self.blobs if paths is None else paths
        with self._open_reader() as read:
            entries = (
                Entry(name, partial(self._read_document, read, name, encoding), in_folder=True, id=name)
                for name in names
            )
            yield from read_entries(entries, on_bad or (lambda _: None))

    def describe(self, name: str, encoding: str = UTF8) -> dict[str, str]:
        """Return the metadata of a file's document, for example ``{"git_blob": "8baef1b..."}``.

        ``git_blob`` is git's hash of the content. If the encoding is not UTF-8, ``encoding`` has its name. So
        files with equal metadata have the same text.

        Args:
            name: path of the file in the repository.
            encoding: encoding in which the file is read.
        """
        given = {} if is_utf8(encoding) else {"encoding": encoding}
        return {"git_blob": self.blobs[name], **given}

    def _read_document(self, read: Callable[[str], bytes], name: str, encoding: str) -> TextDocument:
        """Read a file of the commit, and return its document.

        Args:
            read: function that returns the content of a file by git's hash of the content.
            name: path of the file in the repository.
            encoding: encoding of the file.

        Raises:
            RefusedError: the file is not text in this encoding, is empty or is too large.
            InputError: the notebook is not valid.
            GitError: `git` cannot read the content.
        """
        text = decode_text(read(self.blobs[name]), encoding)
        if name.endswith(".ipynb"):
            text = extract_notebook_text(text)
        return TextDocument(name, text, self.describe(name, encoding))

    @contextmanager
    def _open_reader(self) -> Iterator[Callable[[str], bytes]]:
        """Run `git` as a process during the ``with`` block, to read the contents of many files.

        Yields a function that returns the content of a file by git's hash of the content. The function raises
        GitError if git cannot read the content, and RefusedError if the content is too large.
        """
        with self._start("cat-file", "--batch", errors=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            requests, answers = process.stdin, process.stdout

            def read(hash: str) -> bytes:
                """Return the content with a hash; raise RefusedError if it is too large."""
                with suppress(BrokenPipeError):  # git has ended: there is no answer
                    requests.write(f"{hash}\n".encode())
                    requests.flush()
                header = answers.readline().split()
                if len(header) != 3:
                    problem = b" ".join(header).decode(errors="replace") or "git ended without an answer"
                    raise GitError(f"git cannot read the content of the file: {problem}")
                left = int(header[2]) + 1  # with a line break
                is_too_large = left > MAX_DOCUMENT_BYTES + 1
                content = b""
                while left:
                    part = answers.read(min(left, 1 << 20) if is_too_large else left)
                    if not part:
                        raise GitError("git ended in the middle of a file: run `git fsck` in the repository")
                    left -= len(part)
                    content = b"" if is_too_large else content + part
                if is_too_large:
                    raise make_too_large_error("the file")
                return content[:-1]

            try:
                yield read
            finally:
                process.kill()
                with suppress(BrokenPipeError):  # of a request that git did not read
                    requests.close()

    def _run(self, *arguments: str) -> bytes:
        """Run `git` in the repository, wait for its end, and return its standard output.

        Raises:
            GitError: `git` is not installed, or reports an error; the message has the error's first line.
        """
        with self._start(*arguments) as process:
            output, errors = process.communicate()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
            raise GitError(f"{self.repository}: {lines[0].removeprefix('fatal: ')}")
        return output

    def _start(self, *arguments: str, errors: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
        """Start `git` in the repository, and return the running process.

        Args:
            *arguments: arguments of `git`.
            errors: argument ``stderr`` of `subprocess.Popen`.

        Raises:
            GitError: `git` is not installed.
        """
        environment = {
            name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_A_REPOSITORY
        }
        try:
            return subprocess.Popen(  # noqa: S603
                ["git", "-c", "protocol.allow=never", "-C", str(self.repository), *arguments],  # noqa: S607
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment | _FIXED_VARIABLES,
            )
        except OSError as error:
            raise GitError(
                f"git cannot be started ({error.strerror}): install it to read a repository"
            ) from error
