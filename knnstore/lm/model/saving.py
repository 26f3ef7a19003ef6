"""Writing and reading ``knn_config.json``: the base model, the folder of the store, and the settings."""

import json
from pathlib import Path
from typing import Any

from knnstore.errors import ConfigError
from knnstore.lm.settings import (
    KNNSettings,
    collect_weights,
    create_weights_loader,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.store import KNNStore, save_weights

CONFIG_NAME = "knn_config.json"
_FORMAT = 1


def write_config(directory: Path, base: Any, store: KNNStore, knn: KNNSettings) -> None:
    """Write ``knn_config.json`` and the weights that the settings use to a folder.

    Creates the folder if needed, and replaces an existing ``knn_config.json``. The base model and the store
    are saved as names only: a folder as its absolute path, or a hub id with its revision.

    Args:
        directory: the folder.
        base: the base model.
        store: the store; its folder is saved as an absolute path.
        knn: the settings to save.

    Raises:
        ConfigError: the base model has no path or hub id.
    """
    name = base.name_or_path
    if not name:
        raise ConfigError("the base model has no path or hub id; save it and load it from there first")
    config = {
        "format": _FORMAT,
        "base": str(Path(name).resolve()) if Path(name).is_dir() else name,
        "revision": getattr(base.config, "_commit_hash", None) or "main",
        "store": str(Path(store.home.path).resolve()),
        "knn": settings_to_dict(knn),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for weights in collect_weights(knn):
        save_weights(directory, weights)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(
    directory: Path, store: KNNStore | None, knn: KNNSettings | None
) -> tuple[str, str, KNNStore, KNNSettings]:
    """Read a folder that `write_config` wrote, and open its store for reading unless `store` is given.

    Args:
        directory: the folder.
        store: an open store, returned instead of the saved store; None opens the saved store.
        knn: settings that are returned instead of the saved settings; None reads the saved settings and the
            weights that they use.

    Returns:
        The base model's name and revision, the store and the settings.

    Raises:
        ConfigError: ``knn_config.json`` is missing, or a newer version of knnstore wrote it.
        StoreNotFoundError: the saved store does not exist.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; save_pretrained writes it")
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["format"] > _FORMAT:
        raise ConfigError(
            f"{path} has format {config['format']}, this version knows {_FORMAT}; upgrade knnstore"
        )
    store = store or KNNStore.open(config["store"])
    knn = knn or settings_from_dict(config["knn"], create_weights_loader(store, directory))
    return config["base"], config["revision"], store, knn
