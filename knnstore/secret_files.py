"""Secrets of the user: passwords and API keys from an environment variable or from a file.

Other processes of the user can read a process's environment, and every program that the process starts
inherits it. So for each variable NAME with a secret, the variable NAME_FILE can name a file that holds the
secret instead. Docker, Kubernetes and systemd pass secrets in this way.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from knnstore.errors import ConfigError

FILE_SUFFIX = "_FILE"
"""Suffix that makes the name of a secret's variable the name of the variable with the secret's file."""

MAX_BYTES = 65_536
"""Largest size of a secret's file in bytes. A larger file, such as a model, is named by mistake."""


def read_secret(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the secret in a variable NAME, or in the file that a variable NAME_FILE names.

    Returns None if neither variable is set. A variable with an empty value counts as not set. The file is
    read at each call, so the next connection uses a changed secret. One line break at the end of the file is
    left out.

    Args:
        name: name of the variable, such as "KNNSTORE_QDRANT_API_KEY".
        environment: environment variables; None is the environment of this process.

    Raises:
        ConfigError: both variables are set, or the file cannot be read, is no regular file, is empty, larger
            than 64 KiB, or no text. The message names the variable and the path, never the secret.
    """
    environment = os.environ if environment is None else environment
    value, file = environment.get(name), environment.get(name + FILE_SUFFIX)
    if not file:
        return value or None
    if value:
        raise ConfigError(f"{name} and {name + FILE_SUFFIX} are both set: unset one of them")
    where = f"{name + FILE_SUFFIX} names {file}"
    try:
        content = _read_file(Path(file))
    except OSError as error:
        raise ConfigError(f"{where}, which cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{where}, which is larger than {MAX_BYTES // 1024} KiB: name a file that contains only the "
            "secret"
        )
    try:
        secret = content.decode()
    except UnicodeDecodeError:  # would quote the bytes: not chained
        raise ConfigError(f"{where}, which is not text in UTF-8") from None
    if "\0" in secret:  # libpq would use what stands before it
        raise ConfigError(f"{where}, which contains a NUL byte: name a file that contains only the secret")
    secret = secret.removesuffix("\r\n") if secret.endswith("\r\n") else secret.removesuffix("\n")
    if not secret:
        raise ConfigError(f"{where}, which is empty: write the secret there, or unset the variable")
    return secret


def find_secret_variable(name: str, environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that gives a secret, NAME or NAME_FILE; None if neither is set.

    A variable with an empty value counts as not set. No file is read.

    Args:
        name: NAME, the name of the variable with the secret itself.
        environment: the environment variables.
    """
    return next((variable for variable in (name, name + FILE_SUFFIX) if environment.get(variable)), None)


def _read_file(path: Path) -> bytes:
    """Read a file, but at most `MAX_BYTES` + 1 bytes.

    Raises:
        OSError: the path is not a regular file, or cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device never end
        raise OSError(0, "it is not a regular file")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
