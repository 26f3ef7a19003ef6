"""Checking that a store was made with a model on disk, without loading the model's weights."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from knnstore.lm.keys import compute_fingerprint, model_fingerprint
from knnstore.lm.reading.models import check_fingerprint, check_shards, check_tokenizer, load_model
from knnstore.model_names import split_gguf_file
from knnstore.store import Identity

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def check_checkpoint(
    identity: Identity, model: str, tokenizer: str | None = None, *, revision: str | None = None
) -> None:
    """Check that a store was made with a model and a tokenizer, without loading all weights if possible.

    Args:
        identity: the store's identity.
        model: folder, hub id or path of a GGUF file.
        tokenizer: folder or hub id of the tokenizer; default is the model's.
        revision: revision of the hub id.

    Raises:
        FingerprintMismatchError: the model or the tokenizer differs; the message names both.
        ConfigError: the model cannot be loaded.
    """
    revision = revision or "main"
    found = _compute_file_fingerprint(model, revision)
    if found is None:  # the weights are converted when transformers loads them
        found = model_fingerprint(load_model(model, device="cpu", dtype="auto", revision=revision).model)
    check_fingerprint(found, model, identity)
    folder, gguf_file = split_gguf_file(tokenizer or model)
    of_file = {} if gguf_file is None else {"gguf_file": gguf_file}
    check_tokenizer(AutoTokenizer.from_pretrained(folder, revision=revision, **of_file), identity)


def _compute_file_fingerprint(model: str, revision: str) -> str | None:
    """Compute the fingerprint of a model by reading 16 values of each weight from its safetensors files.

    Returns None if the files cannot be read or have another format, such as GGUF. Also returns None if a
    weight of the model in transformers is missing in the files, or has another shape.
    """
    with ExitStack() as opened:
        try:
            slices = _open_weights(model, revision, opened)
            config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
            with torch.device("meta"):
                make: Any = AutoModelForCausalLM.from_config
                empty = make(config, trust_remote_code=False)
        except (OSError, ValueError, SafetensorError):
            return None
        # 1) Find each weight in the files. Tied weights are stored once, and the weights of a base model
        # without the prefix that they have in the causal model.
        empty.tie_weights()
        weights = empty.state_dict(keep_vars=True)
        names = dict[int, list[str]]()
        for name, weight in weights.items():
            names.setdefault(id(weight), []).append(name)
        prefix = f"{empty.base_model_prefix}."
        found = dict[str, Any]()
        for name, weight in weights.items():
            aliases = [name, *names[id(weight)]]
            aliases += [alias.removeprefix(prefix) for alias in aliases]
            stored = next((slices[alias] for alias in aliases if alias in slices), None)
            if stored is None or tuple(stored.get_shape()) != tuple(weight.shape):
                return None
            found[name] = stored
        # 2) Read the values.
        sizes = {name: weight.numel() for name, weight in weights.items()}
        return compute_fingerprint(sizes, lambda name, at: _read_values(found[name], at), config)


def _open_weights(model: str, revision: str, opened: ExitStack) -> dict[str, Any]:
    """Open the safetensors files of a model.

    Args:
        model: folder or hub id.
        revision: revision of the hub id.
        opened: the context that closes the files when it ends.

    Returns:
        A dictionary from each weight's name to an object that reads slices of the weight from its file.

    Raises:
        OSError: a file does not exist or cannot be read.
        ConfigError: the index of the files is damaged, or names other files than safetensors files of the
            folder.
    """
    check_shards(model, revision=revision)
    index = cached_file(model, _INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
    names = [_SINGLE]
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    slices = dict[str, Any]()
    for name in names:
        file = opened.enter_context(safe_open(cached_file(model, name, revision=revision), "pt"))
        slices |= {weight: file.get_slice(weight) for weight in file.keys()}  # noqa: SIM118
    return slices


def _read_values(stored: Any, at: Tensor) -> Tensor:
    """Read single values of a weight from its file.

    Args:
        stored: object that reads slices of the weight.
        at: indices of the values in the flattened weight, int64, shape (m,).

    Returns:
        Shape (m,).
    """
    shape = stored.get_shape()
    if len(shape) < 2:
        whole: Tensor = stored[:] if shape else stored[...].reshape(1)
        return whole[at]
    row_size = math.prod(shape[1:])
    values = [
        stored[row : row + 1].reshape(-1)[rest]
        for row, rest in zip((at // row_size).tolist(), (at % row_size).tolist(), strict=True)
    ]
    return torch.stack(values) if values else torch.empty(0)
