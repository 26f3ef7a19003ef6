"""Quick check that the name of a model leads to a model, before torch is loaded."""

from pathlib import Path

from knnstore.errors import ConfigError

PATIENCE = 2.0
"""Seconds that the hub has to answer. Its client would try for half a minute, at each of a model's files."""
_CONFIG = "config.json"
_GGUF = ".gguf"


def add_gguf_file(name: str, gguf_file: str | None) -> str:
    """Return the name of a model in a GGUF file of a folder or hub repository: ``NAME/FILE.gguf``."""
    if not gguf_file or name.endswith(f"/{gguf_file}"):
        return name
    return f"{name.rstrip('/')}/{gguf_file}"


def split_gguf_file(name: str) -> tuple[str, str | None]:
    """Divide a model's name into folder or hub id, and the GGUF file in it; None if it names no such file.

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
    """Find whether a model is there; a path never goes to the hub.

    Args:
        name: a folder or a hub id, or a GGUF file in one.
        revision: revision of a model on the hub; default ``main``.

    Returns:
        Whether it has to come from the hub's cache, because the hub does not give it.

    Raises:
        ConfigError: no such folder, and neither the hub nor its cache has such a model.
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

    reason = _refused_by_hub(place, file, revision)
    if reason is not None and not isinstance(try_to_load_from_cache(place, file, revision=revision), str):
        raise ConfigError(
            f"the model {name!r} cannot be loaded: no such folder here, and {reason}: "
            "give the path of a model's folder, or the name of a model on the hub"
        )
    return reason is not None


def _refused_by_hub(name: str, file: str, revision: str | None) -> str | None:
    """Why the hub does not give such a file of a model; None where it does."""
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
        raise ConfigError(f"the model {name!r} cannot be loaded: no such folder, nor a hub name") from error
    except OfflineModeIsEnabled:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return "the hub has none of this name, or none for you (HF_TOKEN)"
    except Exception as error:  # of its HTTP client; which one that is depends on its version
        return f"the hub cannot be reached ({str(error).strip() or type(error).__name__})"
    return None
