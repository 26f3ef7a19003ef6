"""Whether the name of a model leads to one: found out in a moment, before torch is loaded."""

from pathlib import Path

from knnstore.errors import ConfigError

PATIENCE = 2.0
"""Seconds that the hub has to answer. Its client would try for half a minute, at each of a model's files."""
_CONFIG = "config.json"


def check_model(name: str, revision: str | None = None) -> bool:
    """Find whether a model is there; a path never goes to the hub.

    Args:
        name: a folder or a hub id.
        revision: of a hub id; default ``main``.

    Returns:
        Whether it has to come from the hub's cache, because the hub does not give it.

    Raises:
        ConfigError: no such folder, and neither the hub nor its cache has such a model.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise ConfigError(f"the model {name!r} cannot be loaded: this folder has no {_CONFIG}")
        return False
    if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
        raise ConfigError(f"the model {name!r} cannot be loaded: no such folder")
    from huggingface_hub import try_to_load_from_cache

    reason = _refused_by_hub(name, revision)
    if reason is not None and not isinstance(try_to_load_from_cache(name, _CONFIG, revision=revision), str):
        raise ConfigError(
            f"the model {name!r} cannot be loaded: no such folder here, and {reason}: "
            "give the path of a model's folder, or the name of a model on the hub"
        )
    return reason is not None


def _refused_by_hub(name: str, revision: str | None) -> str | None:
    """Why the hub does not give such a model; None where it does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG, revision=revision), timeout=PATIENCE)
    except HFValidationError as error:
        raise ConfigError(f"the model {name!r} cannot be loaded: no such folder, nor a hub name") from error
    except OfflineModeIsEnabled:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return "the hub has none of this name, or none for you (HF_TOKEN)"
    except Exception as error:  # of its HTTP client; which one that is depends on its version
        return f"the hub cannot be reached ({str(error).strip() or type(error).__name__})"
    return None
