"""Quick check that a model exists under a name (`check_model`), before torch is loaded."""

from pathlib import Path

from knnstore.errors import ConfigError

PATIENCE = 2.0
"""Time limit for an answer of the hub in seconds. By default, its client tries for half a minute per file."""
_CONFIG = "config.json"
_GGUF = ".gguf"


def add_gguf_file(name: str, gguf_file: str | None) -> str:
    """Append the name of a GGUF file to the name of its folder or hub repository: ``NAME/FILE.gguf``.

    The name is returned unchanged if it already ends in the file's name, or if `gguf_file` is None or "".
    """
    if not gguf_file or name.endswith(f"/{gguf_file}"):
        return name
    return f"{name.rstrip('/')}/{gguf_file}"


def split_gguf_file(name: str) -> tuple[str, str | None]:
    """Divide a model's name into the folder or hub id and the GGUF file in it.

    If the name does not end in ``.gguf`` or is a folder, the unchanged name and None are returned. A name
    without an existing file is divided by its form: the first two parts are the hub id.

    Example:
        >>> split_gguf_file("models/small.gguf"), split_gguf_file("org/repo/q4/a.gguf")
        (('models', 'small.gguf'), ('org/repo', 'q4/a.gguf'))
    """
    path = Path(name)
    if path.suffix.lower() != _GGUF or path.is_dir():
        return name, None
    parts = path.parts
    if (
        path.is_file()
        or path.parent.is_dir()
        or path.is_absolute()
        or len(parts) < 3
        or parts[0] in (".", "..", "~")
    ):
        return str(path.parent), path.name
    return "/".join(parts[:2]), "/".join(parts[2:])


def check_model(name: str, revision: str | None = None) -> bool:
    """Check that a model exists in a folder, on the Hugging Face hub or in the hub's cache.

    Asks the hub over the network, except for a path.

    Args:
        name: a folder or a hub id, or a GGUF file in a folder or hub repository.
        revision: revision of a model on the hub; None is ``main``.

    Returns:
        True if the model must be loaded from the hub's cache, because the hub cannot be reached or refuses
        the model; False otherwise.

    Raises:
        ConfigError: neither a folder nor the hub nor its cache has the model; or the folder has no
            ``config.json``, or lacks the GGUF file; or `name` is not a valid hub id.
    """
    place, gguf_file = split_gguf_file(name)
    file, folder = gguf_file or _CONFIG, Path(place)
    if folder.is_dir():
        if not (folder / file).is_file():
            raise ConfigError(f"the model {name!r} cannot be loaded: this folder has no {file}")
        return False
    if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
        raise ConfigError(f"the model {name!r} cannot be loaded: no such folder")
    from huggingface_hub import try_to_load_from_cache

    reason = _ask_hub_why_refused(place, file, revision)
    if reason is not None and not isinstance(try_to_load_from_cache(place, file, revision=revision), str):
        raise ConfigError(
            f"the model {name!r} cannot be loaded: no such folder here, and {reason}: "
            "give the path of a model's folder, or the name of a model on the hub"
        )
    return reason is not None


def _ask_hub_why_refused(name: str, file: str, revision: str | None) -> str | None:
    """Ask the hub for a file of a model; return the reason of a refusal, or None if the hub has it.

    Args:
        name: hub id of the model.
        file: path of the file in the repository.
        revision: revision of the model; None means ``main``.

    Raises:
        ConfigError: `name` is no valid hub id.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=PATIENCE)
    except HFValidationError as error:
        raise ConfigError(
            f"the model {name!r} cannot be loaded: it is neither a folder nor a valid name on the hub"
        ) from error
    except OfflineModeIsEnabled:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return "the hub has no such model, or it needs a token that may read the model (HF_TOKEN)"
    except Exception as error:  # of its HTTP client; which one that is depends on its version
        return f"the hub cannot be reached ({str(error).strip() or type(error).__name__})"
    return None
