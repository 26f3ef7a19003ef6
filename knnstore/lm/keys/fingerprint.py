"""Telling whether a model and a tokenizer are those that a store was made with."""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from knnstore.errors import CatalogError

_VALUES_A_TENSOR = 16

_SAYS_NOTHING = frozenset(
    (
        "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "eos_token_id", "experts_implementation", "id2label",
        "gradient_checkpointing", "is_decoder", "name_or_path", "output_attentions", "pad_token_id",
        "output_hidden_states", "problem_type", "quantization_config", "return_dict", "sep_token_id",
        "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    )
)  # fmt: skip
"""Of a configuration: names, what counts in training or for an output alone, how the same is computed."""
_IN_TRAINING = ("drop", "initializer", "_loss", "loss_", "summary_", "label")

_PROBES = (
    "The quick brown fox jumps over 12,345.67 lazy dogs.",
    "  indented\n\ttabs\r\nand  runs   of spaces ",
    "naïve façade – 東京 🙂 ½ ﬁ",
    "def f(x): return x**2  # comment",
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Describe a model by a few evenly spaced values of each weight, as they are in its precision.

    Returns:
        SHA-256 of the values, hexadecimal; the values themselves, little-endian float32; what of the
        configuration changes a forward pass, as JSON. Both in base64, with colons between. `same_model`
        compares two.
    """
    values = []
    for _, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        count = min(len(flat), _VALUES_A_TENSOR)
        at = torch.arange(count) * (len(flat) - 1) // max(1, count - 1)
        values.append(flat[at.to(flat.device)].to("cpu", torch.float32).numpy())
    sample = np.concatenate(values).astype("<f4").tobytes()
    config = json.dumps(_forward_pass(model.config.to_dict()), sort_keys=True, default=str).encode()
    parts = (base64.b64encode(part).decode() for part in (sample, config))
    return ":".join((hashlib.sha256(sample).hexdigest(), *parts))


def same_model(one: str, other: str) -> bool:
    """Whether two fingerprints are of one checkpoint, opened in float32, float16 or bfloat16 each.

    Of the configuration what both know must be equal: versions of transformers add fields, and fingerprints
    of earlier versions of knnstore have none.

    Raises:
        CatalogError: one is not a fingerprint.
    """
    if one == other:
        return True
    try:
        return _same_sample(one, other)
    except (ValueError, IndexError, TypeError, RecursionError) as error:  # binascii.Error is a ValueError
        raise CatalogError(
            "the catalog is damaged: the fingerprint of the model is none; restore it from a backup"
        ) from error


def _same_sample(one: str, other: str) -> bool:
    (_, *first), (_, *second) = (text.split(":") for text in (one, other))
    configs = [json.loads(base64.b64decode(of[1])) for of in (first, second) if len(of) > 1]
    if len(configs) == 2 and not _agree(*configs):
        return False
    a, b = (
        torch.from_numpy(np.frombuffer(base64.b64decode(of[0]), "<f4").astype(np.float32))
        for of in (first, second)
    )
    return a.shape == b.shape and len(a) > 0 and bool((_may_be_rounded(a, b) | _may_be_rounded(b, a)).all())


def _forward_pass(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration changes the states of a forward pass."""
    return {
        name: _forward_pass(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _SAYS_NOTHING and value is not None and not any(one in name for one in _IN_TRAINING)
    }


def _agree(one: Any, other: Any) -> bool:
    """Whether all that two configurations both have is equal."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return bool(one == other)
    return all(_agree(one[name], other[name]) for name in one.keys() & other.keys())


def _may_be_rounded(fine: Tensor, coarse: Tensor) -> Tensor:
    """Where `coarse` is `fine` in another precision, or both may be one number in two precisions."""
    half, brain = fine.half().float(), fine.bfloat16().float()
    rounded = (coarse == fine) | (coarse == half) | (coarse == brain)
    # What a float16 was rounded from, and a bfloat16 too, lies within half a step of the float16.
    step = fine.abs() * 2**-11 + 2**-25
    between = ((fine - step).bfloat16() <= coarse) & (coarse <= (fine + step).bfloat16())
    return rounded | ((fine == half) & (coarse == coarse.bfloat16()) & between)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash the vocabulary, the special tokens and what becomes of some difficult texts.

    Returns:
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256()
    for token, id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{id} {token!r}\n".encode())
    digest.update(repr((tokenizer.bos_token_id, tokenizer.eos_token_id)).encode())
    for probe in _PROBES:
        digest.update(repr(tokenizer(probe, add_special_tokens=False)["input_ids"]).encode())
    return digest.hexdigest()
